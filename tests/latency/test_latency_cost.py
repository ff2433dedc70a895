"""Latency as a cost: sums over blocks, prices around a choice, and binding to networks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_latencies import FakeBackend, network, smooth
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import MachineBusyError, TableError
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.network import SURE, NetworkLatency
from smcp_fx.latency.residency import OF_ACTIVATIONS, Residency
from smcp_fx.latency.table import LatencyTable
from smcp_fx.prepare import PreparedModel

MB = 1 << 20


def bound(tmp_path: Path, residency: Residency | None = None, share: float | None = None) -> NetworkLatency:
    table = LatencyTable(tmp_path / "t.sqlite", cold_share=share)
    cost = LatencyCost(table, FakeBackend(latency=smooth, cold=3.0), residency=residency)
    return latency(smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=cost))


def latency(prepared: PreparedModel) -> NetworkLatency:
    found = latency_of(prepared.pruner.cost)
    assert found is not None
    return found


#: In the middle of the rise for this network of about 90 kB.
RISING = Residency(60_000.0, steepness=2.0, floor=0.1)


def test_the_prediction_is_the_weighed_sum_over_blocks(tmp_path: Path) -> None:
    cost = bound(tmp_path, RISING)
    fingerprint = cost.fingerprint
    counts = {"0": 16, "2": 40, "4": 8}
    widths = {"0": (16,), "2": (16, 40), "4": (40, 8), "6": (8,), "7": (8,), "8": (8,)}
    by_name = {block.name: block for block in cost.blocks}
    hot = sum(
        float(cost.table.surface(by_name[n], fingerprint)(*map(np.array, w)))
        for n, w in widths.items()
        if n in by_name
    )
    weights = 4 * (3 * 9 * 16 + 16 + 16 * 9 * 40 + 40 + 40 * 8 + 8 + 8 * 10 + 10)
    written = 4 * 2 * (10 * 10 * 16 + 8 * 8 * 40 + 8 * 8 * 8 + 8 + 10)  # the flattened is the pooled
    share = RISING.share(weights + OF_ACTIVATIONS * written)
    assert {"0", "2", "4"} <= set(by_name) <= set(widths)
    assert cost.whole(counts).weight_bytes == weights
    assert cost.whole(counts).activation_bytes == written
    assert cost.latency(counts) == pytest.approx(hot * (1 + 2 * share))


def test_blocks_that_differ_in_their_widths_alone_are_priced_on_their_own_grids(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 16), (16, 16), (16, 32), (32, 16), (16, 16), (16, 4))
    ]
    net = nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))
    rows = LatencyCost(LatencyTable(tmp_path / "t.sqlite"), FakeBackend(latency=smooth), residency=RISING)
    cost = latency(smcp_fx.prepare(net, torch.randn(2, 3, 12, 12), cost=rows))
    assert len({block.signature for block in cost.blocks}) < len(
        {(b.signature, b.grids) for b in cost.blocks}
    )
    for counts in (cost.full_counts, dict.fromkeys(cost.full_counts, 8)):
        widths = [3, *(counts[name] for name in ("0", "2", "4", "6", "8")), 4]
        expected = sum(
            smooth(*(w for w, fixed in ((a, i == 0), (b, i == 5)) if not fixed))
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        assert cost.latency(counts) == pytest.approx(expected)


@pytest.mark.parametrize(
    "residency",
    [
        RISING,
        replace(RISING, half_ms=15.0),  # the network takes some ms
    ],
)
def test_around_is_exact_there_and_first_order_nearby(tmp_path: Path, residency: Residency) -> None:
    cost = bound(tmp_path, residency)
    at = {"0": 16, "2": 40, "4": 16}
    near = cost.around(at)
    assert near.cost(at) == pytest.approx(cost.latency(at), rel=1e-12)
    full = cost.around(cost.full_counts)
    assert full.cost(cost.full_counts) == pytest.approx(cost.latency(cost.full_counts), rel=1e-12)
    moved = {**at, "2": 48}
    change = cost.latency(moved) - cost.latency(at)
    assert near.cost(moved) - near.cost(at) == pytest.approx(change, rel=0.05)
    plain = sum(t.cost(moved) - t.cost(at) for t in near.terms if "in memory" not in t.name)
    assert abs(plain - change) > 0.1 * change  # what the weights' share adds is no rounding error


def test_blocks_make_up_the_network(tmp_path: Path) -> None:
    """But (none here) blocks without a free width."""
    cost = bound(tmp_path, replace(RISING, half_ms=15.0))
    counts = {"0": 16, "2": 40, "4": 16}
    blocks = cost.by_block(counts)
    assert set(blocks) <= {block.name for block in cost.blocks}
    assert sum(blocks.values()) == pytest.approx(cost.latency(counts))


class Moving(nn.Module):
    """A residual sum, a concatenation and a split."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.again = nn.Conv2d(16, 16, 3, padding=1)
        self.branch = nn.Conv2d(16, 8, 1)
        self.mixed = nn.Conv2d(24, 12, 1)
        self.left, self.right = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = x + self.again(x)
        mixed = self.mixed(torch.cat([x, self.branch(x)], 1))
        left, right = mixed.chunk(2, 1)
        return (self.left(left) * self.right(right)).mean((2, 3))


def test_what_blocks_write_is_what_the_sliced_network_s_blocks_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 12, 12)

    def priced(name: str, module: nn.Module) -> tuple[NetworkLatency, PreparedModel]:
        cost = LatencyCost(LatencyTable(tmp_path / name), FakeBackend(latency=smooth))
        prepared = smcp_fx.prepare(module, inputs, cost=cost, config=smcp_fx.PruningConfig(multiple=1))
        return latency(prepared), prepared

    cost, prepared = priced("whole.sqlite", Moving())
    full = cost.whole(cost.full_counts).activation_bytes
    for divisor in (2, 3):
        counts = {name: max(size // divisor, 1) for name, size in cost.full_counts.items()}
        prepared.set_masks({
            name: torch.arange(size) < counts[name] for name, size in cost.full_counts.items()
        })  # fmt: skip
        sliced, _ = priced(f"{divisor}.sqlite", smcp_fx.convert(prepared))
        written = sliced.whole(sliced.full_counts).activation_bytes
        assert cost.whole(counts).activation_bytes == written < full


def test_a_share_set_by_the_user_holds_for_every_choice(tmp_path: Path) -> None:
    cost = bound(tmp_path, share=0.25)
    for counts in (cost.full_counts, {"0": 8, "2": 8, "4": 8}):
        whole = cost.whole(counts)
        expected = whole.hot_ms + 0.25 * (whole.cold_ms - whole.hot_ms)
        assert cost.latency(counts) == pytest.approx(expected)
        assert cost.around(cost.full_counts).cost(counts) == pytest.approx(expected)


def test_solving_again_around_the_answer_meets_the_true_target(tmp_path: Path) -> None:
    cost = bound(tmp_path, RISING)
    from smcp_fx.allocation import allocate

    counts = cost.full_counts
    target = 0.5 * cost.latency(counts)
    for _ in range(6):
        near = cost.around(counts)
        values = {name: np.sqrt(np.array(allowed, dtype=float)) for name, allowed in near.permitted.items()}
        counts = allocate(values, near, target).counts
    assert 0.9 * target < cost.latency(counts) <= target * 1.005


@pytest.mark.parametrize("fraction", [0.7, 0.5, 0.3])
def test_a_pruner_lands_on_the_true_latency(tmp_path: Path, fraction: float) -> None:
    """In a plain loop; what the unpruned prices say of the answer is off by more than 1%."""
    table = LatencyTable(tmp_path / "t.sqlite")
    rows = LatencyCost(table, FakeBackend(latency=smooth, cold=3.0), residency=RISING)
    config = MethodConfig(multiple=1, tolerance=0.0)
    inputs = torch.randn(2, 3, 12, 12)
    prepared = smcp_fx.prepare(network(), inputs, target=fraction, cost=rows, config=config)
    cost = latency(prepared)
    prepared(inputs).square().sum().backward()
    prepared.pruner.step()
    solve = prepared.pruner.solve()
    counts = prepared.pruner.counts
    assert solve.cost == pytest.approx(cost.latency(counts), rel=1e-12)
    assert prepared.pruner.present_cost == pytest.approx(cost.latency(counts), rel=1e-12)
    assert 0.985 <= cost.latency(counts) / prepared.pruner.target <= 1 + 1e-9
    first = cost.around(cost.full_counts)
    assert abs(first.cost(counts) / cost.latency(counts) - 1) > 0.01


def test_rows_of_another_device_are_used_only_when_asked_for(tmp_path: Path) -> None:
    there = bound(tmp_path)
    here = FakeBackend(latency=smooth, device="here")
    with pytest.raises(TableError, match="rows of: none 1"):
        smcp_fx.prepare(
            network(), torch.randn(2, 3, 12, 12), cost=LatencyCost(there.table, here, measure=False)
        )
    rows = LatencyCost(there.table, here, fingerprint=there.fingerprint)
    cost = latency(smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=rows))
    assert cost.latency(cost.full_counts) == pytest.approx(there.latency(there.full_counts))
    assert here.log == [] and cost.report is None


def test_two_models_on_one_cost_keep_their_own_prices(tmp_path: Path) -> None:
    """Whichever was prepared last: each is priced, and solved for, as by a cost of its own."""
    inputs, config = torch.randn(2, 3, 12, 12), smcp_fx.PruningConfig(multiple=1)

    def prepared(net: nn.Module, cost: LatencyCost) -> PreparedModel:
        found = smcp_fx.prepare(net, inputs, target=0.5, cost=cost, config=config)
        torch.manual_seed(3)
        found(inputs).square().sum().backward()
        found.pruner.step()
        return found

    def rows(name: str) -> LatencyCost:
        table = LatencyTable(tmp_path / name)
        return LatencyCost(table, FakeBackend(latency=smooth, cold=3.0), residency=RISING)

    wider = nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 16, 3), nn.ReLU(), nn.Flatten())
    nets, one = (network(), wider), rows("one.sqlite")
    together = [prepared(net, one) for net in nets]
    alone = [prepared(net, rows(f"{i}.sqlite")) for i, net in enumerate(nets)]
    for shared, own in zip(together, alone, strict=True):
        assert shared.pruner.full_cost == pytest.approx(own.pruner.full_cost)
        assert shared.pruner.solve().cost == pytest.approx(own.pruner.solve().cost)
        assert shared.pruner.counts == own.pruner.counts
        assert shared.pruner.present_cost == pytest.approx(own.pruner.present_cost)
        assert [b.name for b in latency(shared).blocks] == [b.name for b in latency(own).blocks]


def pruned(tmp_path: Path, fraction: float, backend: FakeBackend, **options: object) -> PreparedModel:
    """A network pruned to a fraction of its latency, in one solve; its table began empty."""
    rows = LatencyCost(LatencyTable(tmp_path / "t.sqlite"), backend, residency=RISING, **options)  # type: ignore[arg-type]
    inputs = torch.randn(2, 3, 12, 12)
    prepared = smcp_fx.prepare(network(), inputs, target=fraction, cost=rows)
    prepared(inputs).square().sum().backward()
    prepared.pruner.step()
    prepared.pruner.solve()
    return prepared


def rows_at(cost: NetworkLatency, counts: dict[str, int]) -> list[tuple[str, tuple[int, ...]]]:
    return [(b.signature, tuple(width.channels(counts) for width in b.widths)) for b in cost.blocks]


@pytest.mark.parametrize("fraction", [0.7, 0.4, 0.25])
def test_the_chosen_network_s_rows_are_measured(tmp_path: Path, fraction: float) -> None:
    """Cliffs and all: its price is the sum of what was measured, and few rows were."""

    def latency_of_block(*widths: int) -> float:
        rounded = [-(-width // 16) * 16 for width in widths]
        return 0.002 + 1e-4 * math.prod(rounded) / (1 if len(widths) == 2 else 10)

    backend = FakeBackend(latency=latency_of_block)
    prepared = pruned(tmp_path, fraction, backend)
    cost, counts = latency(prepared), prepared.pruner.counts
    truth = sum(latency_of_block(*widths) for _, widths in rows_at(cost, counts))
    measured = {(row.signature, row.widths) for row in cost.table.rows()}
    unmeasured = [row for row in rows_at(cost, counts) if row not in measured]
    assert sum(latency_of_block(*widths) for _, widths in unmeasured) < 0.02 * truth
    assert cost.latency(counts) == pytest.approx(truth, rel=2e-3)
    assert prepared.pruner.present_cost <= (1 + 1e-9) * prepared.pruner.target
    for name, count in counts.items():  # nothing wider fits
        wider = {**counts, name: count // 16 * 16 + 16}
        true = sum(latency_of_block(*widths) for _, widths in rows_at(cost, wider))
        assert wider[name] > cost.full_counts[name] or true > prepared.pruner.target
    assert len(measured) <= 45
    assert cost.report is not None and cost.report.measured == len(measured)


def test_a_choice_that_wins_by_a_guess_has_it_measured_first(tmp_path: Path) -> None:
    """Where rows to begin with promise a straight line, counts in its middle cost four times as much."""

    def trap(*widths: int) -> float:
        between = len(widths) == 2 and widths[1] in (40, 48, 56) and widths[0] == 32
        return smooth(*widths) * (4.0 if between else 1.0)

    prepared = pruned(tmp_path, 0.6, FakeBackend(latency=trap))
    cost, counts = latency(prepared), prepared.pruner.counts
    true = sum(trap(*widths) for _, widths in rows_at(cost, counts))
    full = sum(trap(*widths) for _, widths in rows_at(cost, cost.full_counts))
    assert true <= 0.603 * full


def test_a_frozen_table_never_measures(tmp_path: Path) -> None:
    """Neither one that was told not to, nor another device's: choices rest on what is there."""
    backend = FakeBackend(latency=smooth)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        cost = LatencyCost(table, backend)
        smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=cost)
    begun = len(backend.log)
    assert len({point for _, point in backend.log}) < 40
    for options in ({"measure": False}, {"fingerprint": backend.fingerprint()}):
        here = FakeBackend(latency=smooth) if "measure" in options else FakeBackend(device="here")
        prepared = pruned(tmp_path, 0.6, here, **options)
        assert here.log == [] and latency(prepared).report is None
        assert 0.985 <= prepared.pruner.present_cost / prepared.pruner.target <= 1 + 1e-9
    with LatencyTable(tmp_path / "t.sqlite", read_only=True) as table:
        assert len(table.rows()) == begun
        cost = LatencyCost(table, FakeBackend(latency=smooth), measure=False)
        smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=cost)


def test_solves_of_a_ramp_ask_for_fewer_rows_than_the_last(tmp_path: Path) -> None:
    """What a passing choice costs may stay in doubt; the last one's may not."""
    backend = FakeBackend(latency=smooth)
    rows = LatencyCost(LatencyTable(tmp_path / "t.sqlite"), backend, residency=RISING)
    schedule = smcp_fx.Schedule.scaled(45, 1, 1)
    inputs = torch.randn(2, 3, 12, 12)
    prepared = smcp_fx.prepare(network(), inputs, target=0.6, cost=rows, schedule=schedule)
    begun = len(backend.log)
    optimiser = torch.optim.SGD(prepared.parameters(), 1e-6)
    for _ in range(schedule.last_step):
        prepared(inputs).square().sum().backward()
        prepared.pruner.step()
        optimiser.step()
        optimiser.zero_grad()
    cost, counts = latency(prepared), prepared.pruner.counts
    truth = sum(smooth(*widths) for _, widths in rows_at(cost, counts))
    assert cost.latency(counts) == pytest.approx(truth, rel=2e-3)
    assert len(backend.log) - begun < len(prepared.pruner.history)
    assert cost.lacking(counts, 0.002) == []


def test_a_machine_that_becomes_busy_stops_what_lasts_and_not_what_passes(tmp_path: Path) -> None:
    class Busy(FakeBackend):
        busy = False

        def require_quiet(self) -> None:
            if self.busy:
                raise MachineBusyError("others have the cores")

    backend = Busy(latency=lambda *widths: 0.01 + 1e-4 * math.prod(widths) ** 1.3)
    rows = LatencyCost(LatencyTable(tmp_path / "t.sqlite"), backend, residency=RISING)
    cost = latency(smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=rows))
    backend.busy, counts = True, {"0": 24, "2": 40, "4": 24}
    assert cost.lacking(counts, 0.02)
    before = cost.latency(counts)
    assert cost.learn(counts, 0.02) is False and cost.latency(counts) == before
    with pytest.raises(MachineBusyError, match="others have the cores"):
        cost.learn(counts, SURE)


def test_a_target_that_guesses_put_out_of_reach_is_measured_before_it_is_refused(tmp_path: Path) -> None:
    """The narrowest network is far faster than rows to begin with let expect."""

    def cheap(*widths: int) -> float:
        return smooth(*widths) * (0.02 if max(widths) <= 8 else 1.0)

    rows = LatencyCost(LatencyTable(tmp_path / "t.sqlite"), FakeBackend(latency=cheap), residency=RISING)
    prepared = smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), target=0.1, cost=rows)
    cost = latency(prepared)
    guessed = cost.latency(cost.around(cost.full_counts).smallest_counts) / cost.latency(cost.full_counts)
    prepared.pruner.check_target()
    known = cost.latency(cost.around(cost.full_counts).smallest_counts) / cost.latency(cost.full_counts)
    assert known < 0.1 < guessed


def test_what_a_run_costs_is_kept_with_the_table(tmp_path: Path) -> None:
    class Slow(FakeBackend):
        def run_overhead_ms(self) -> float:
            calls.append(0)
            return 0.25 * len(calls)

    calls: list[int] = []
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure([], Slow())
        table.measure([], Slow())
        assert table.run_overhead(Slow().fingerprint()) == 0.25
        assert table.run_overhead(FakeBackend(device="other").fingerprint()) == 0.0
