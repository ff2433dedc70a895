"""How far worths are trusted: candidates, judged by images that none is fitted to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from models import chain, randomise
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import smcp_fx
from smcp_fx.calibration import solve_best
from smcp_fx.calibration.batches import Batch, each_batch, number_of
from smcp_fx.calibration.candidates import drawn
from smcp_fx.calibration.objective import Objective
from smcp_fx.calibration.repair import fit, narrowed
from smcp_fx.calibration.side_by_side import Narrowed
from smcp_fx.errors import InputError
from smcp_fx.pruning.worth import Floats

SMALL = smcp_fx.PruningConfig(multiple=1)
Batches = list[tuple[Tensor, Tensor]]


def _model() -> nn.Module:
    """Of no class that is the likeliest for all images."""
    torch.manual_seed(0)
    model, images = randomise(chain(16, 24, 16)).eval(), torch.randn(64, 3, 8, 8)
    with torch.no_grad():
        model[-1].bias -= model(images).mean(0)
    return model


def _gathered(target: float) -> tuple[smcp_fx.PreparedModel, Batches]:
    model, images = _model(), torch.randn(4, 16, 3, 8, 8)
    with torch.no_grad():
        labels = [model(x).argmax(1) for x in images]
    prepared = smcp_fx.prepare(model, images[0][:2], target=target, config=SMALL)
    batches = list(zip(images, labels, strict=True))
    smcp_fx.gather_importance(prepared, batches)
    return prepared, batches


def test_compress_is_its_parts() -> None:
    prepared, batches = _gathered(0.25)
    solve_best(prepared, batches)
    assert prepared.pruner.present_cost <= 0.25 * prepared.pruner.full_cost
    smaller = smcp_fx.compress(_model(), batches, target=0.25, config=SMALL)
    expected = smcp_fx.convert(prepared)
    smcp_fx.repair(expected, prepared, batches)
    with torch.no_grad():
        assert_close(smaller(batches[0][0]), expected(batches[0][0]), "slicing")


@pytest.mark.parametrize("count", [4, 16])
def test_candidates_are_judged_by_images_that_none_is_fitted_to(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loader that shuffles, too: all three by the same."""
    prepared, batches = _gathered(0.5)
    images = torch.cat([x for x, _ in batches])
    fitted, judged = list[Tensor](), list[Tensor]()

    def fit(
        networks: Sequence[Narrowed], prepared: nn.Module, batches: Any, *others: Any, rows: float
    ) -> None:
        fitted.extend(torch.cat([batch.args[0] for batch in each_batch(batches)]) for _ in networks)

    def distance(self: Objective, outputs: Any, wanted: Any, batch: Batch) -> float:
        judged.append(batch.args[0])
        return float((outputs - wanted).square().sum())

    monkeypatch.setattr("smcp_fx.calibration.candidates.fit", fit)
    monkeypatch.setattr(Objective, "distance", distance)
    solve_best(prepared, DataLoader(images, 64 // count, shuffle=True), outputs="classes")  # type: ignore[arg-type]
    assert len(fitted) > 1 and all(torch.equal(one, fitted[0]) for one in fitted)
    seen = torch.cat(judged).flatten(1).unique(dim=0)
    assert len(fitted[0]) == len(seen) == 32
    assert float(torch.cdist(seen, fitted[0].flatten(1)).min()) > 0


def test_networks_fitted_together_become_what_each_becomes_alone() -> None:
    prepared, batches = _gathered(0.5)

    def networks() -> list[Narrowed]:
        found = []
        for share in (1.0, 0.7, 0.3):
            prepared.set_masks(
                {name: torch.arange(mask.numel()) < share * mask.numel() for name, mask in prepared.masks.items()
                 if name in prepared.smcp.free_masks()}
            )  # fmt: skip
            found.append(narrowed(prepared))
        return found

    together, alone = networks(), networks()
    reports = fit(together, prepared, batches)
    assert reports == [fit([network], prepared, batches)[0] for network in alone]
    assert any(layer.repaired for layer in reports[1].layers)
    for one, other in zip(together, alone, strict=True):
        state = other.module.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in one.module.state_dict().items())


@pytest.mark.parametrize("wrong", ["0.0", "1.0", "2.0"])
def test_worths_that_mislead_are_not_trusted(wrong: str) -> None:
    prepared, batches = _gathered(0.5)
    rises = prepared.pruner.rises
    assert rises is not None
    misleading = {name: curve * (1e-4 if name == wrong else 1) for name, curve in rises.items()}
    prepared.smcp.rises = misleading
    trust = solve_best(prepared, batches)
    assert trust < 1
    _assert_solved_by(prepared, drawn(misleading, prepared.pruner.cost, trust))


def test_worths_that_know_of_dead_channels_are_trusted() -> None:
    model, images = _model(), list(torch.randn(4, 16, 3, 8, 8))
    with torch.no_grad():
        model[1][0].weight[6:] = 0
        model[1][1].weight[6:] = model[1][1].bias[6:] = 0
    prepared = smcp_fx.prepare(model, images[0][:2], target=0.5, config=SMALL)
    smcp_fx.gather_importance(prepared, images, outputs="classes")
    before = prepared.pruner.rises
    assert before is not None
    trust = solve_best(prepared, images, outputs="classes")
    assert trust > 0
    _assert_solved_by(prepared, drawn(before, prepared.pruner.cost, trust))


_AWAY = pytest.mark.parametrize(
    ("away", "expected"),
    [
        ((1.0, 0.95, 0.92), 0.5),
        ((1.0, 0.8, 0.85), 0.0),
        ((1.0, 0.85, 0.8), 1.0),
        ((float("nan"), 0.1, 0.2), 0.5),
    ],
)


@_AWAY
def test_half_is_taken_unless_another_is_better_by_a_tenth(
    away: tuple[float, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distances of trusts of 1/2, 0 and 1."""
    prepared, batches = _gathered(0.5)
    monkeypatch.setattr("smcp_fx.calibration.candidates._same", lambda *masks: False)
    monkeypatch.setattr("smcp_fx.calibration.candidates._distances", lambda *_: list(away))
    assert solve_best(prepared, batches) == expected


@_AWAY
def test_all_are_judged_at_the_cost_that_measuring_leaves(
    away: tuple[float, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as much is measured as predicted; of the network that is kept, too."""
    prepared, batches = _gathered(0.5)
    pruner, judged, corrected = prepared.pruner, list[float](), list[float]()

    def narrowed_here(prepared: smcp_fx.PreparedModel) -> Narrowed:
        judged.append(prepared.pruner.present_cost)
        return narrowed(prepared)

    def correct() -> None:
        pruner.correction = 2.0
        pruner.solve()
        corrected.append(pruner.present_cost)

    monkeypatch.setattr("smcp_fx.calibration.candidates.narrowed", narrowed_here)
    monkeypatch.setattr("smcp_fx.calibration.candidates._same", lambda *masks: False)
    monkeypatch.setattr("smcp_fx.calibration.candidates._distances", lambda *_: list(away))
    assert solve_best(prepared, batches, correct=correct) == expected
    assert len(judged) == 3 and max(judged) <= 0.25 * pruner.full_cost
    assert len(corrected) == (1 if expected == 0.5 else 2) and corrected[-1] == pruner.present_cost
    assert pruner.present_cost == judged[(0.5, 0.0, 1.0).index(expected)]
    assert pruner.history[-1].cost == pruner.present_cost


def test_what_the_corrected_aim_puts_out_of_reach_is_no_candidate() -> None:
    prepared, batches = _gathered(0.5)
    pruner = prepared.pruner

    def correct() -> None:
        pruner.correction = 2.0
        pruner.solve()
        pruner.correction = 1e6

    assert solve_best(prepared, batches, correct=correct) == 0.5
    assert 0 < pruner.present_cost <= 0.25 * pruner.full_cost
    assert [solve.cost <= 0.25 * pruner.full_cost for solve in pruner.history] == [False, True]


def test_rises_stay_where_measuring_fails() -> None:
    prepared, batches = _gathered(0.5)
    before = prepared.pruner.rises
    assert before is not None

    def correct() -> None:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="gone"):
        solve_best(prepared, batches, correct=correct)
    after = prepared.pruner.rises
    assert after is not None and all((after[name] == curve).all() for name, curve in before.items())


def test_costs_are_measured_where_nothing_is_judged() -> None:
    prepared, batches = _gathered(0.5)
    prepared.smcp.rises = None
    measured = list[float]()
    assert solve_best(prepared, batches, correct=lambda: measured.append(prepared.pruner.present_cost)) == 1
    assert measured == [prepared.pruner.present_cost] and measured[0] <= 0.5 * prepared.pruner.full_cost


def _assert_solved_by(prepared: smcp_fx.PreparedModel, rises: dict[str, Floats]) -> None:
    """Its rises are these, its masks their best, and its history holds nothing of other tries."""
    own = prepared.pruner.rises
    assert own is not None and len(prepared.pruner.history) == 1
    for name, curve in rises.items():
        assert_close(torch.from_numpy(own[name]), torch.from_numpy(curve), "rises")
    masks = prepared.masks
    prepared.pruner.solve()
    assert all(torch.equal(mask, masks[name]) for name, mask in prepared.masks.items())


class _Unmeasured(IterableDataset[Tensor]):
    """It does not know its length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(6, 3, 8, 8))


def test_batches_are_counted_whatever_they_are() -> None:
    x = torch.randn(6, 3, 8, 8)
    unmeasured = DataLoader(_Unmeasured(), 4)
    cases = (
        (x, 1),
        ({"x": x}, 1),
        (list(x.split(2)), 3),
        (DataLoader(TensorDataset(x), 4), 2),
        (unmeasured, 2),
    )
    for batches, expected in cases:
        assert number_of(batches) == expected == sum(1 for _ in each_batch(batches))


class _Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.randn(3, 8, 8))


def test_batches_that_never_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smcp_fx.calibration.batches.MEMORY", 2**20)
    endless = DataLoader(_Endless(), 4)
    prepared, few = _gathered(0.7)
    prepared.pruner.solve()
    smaller = smcp_fx.convert(prepared)
    for verb in (
        lambda: smcp_fx.compress(_model(), endless, target=0.7),
        lambda: smcp_fx.gather_importance(prepared, endless),
        lambda: smcp_fx.repair(smaller, prepared, endless),
        lambda: smcp_fx.recalibrate(smaller, endless),
    ):
        with pytest.raises(InputError, match=r"have no length.*itertools\.islice"):
            verb()
    smcp_fx.recalibrate(smaller, iter(few * 24))  # over the limit, and it ends


class _Images(NamedTuple):
    left: Tensor
    right: Tensor


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _model()

    def forward(self, images: _Images) -> Tensor:
        return self.net(images.left) - self.net(images.right)


def test_a_named_tuple_goes_into_the_model_whole() -> None:
    batches = [(_Images(*torch.randn(2, 8, 3, 8, 8)),) for _ in range(2)]
    smaller = smcp_fx.compress(_Pair().eval(), batches, target=0.7, outputs="values", config=SMALL)
    assert smaller(*batches[0]).shape == (8, 5)
