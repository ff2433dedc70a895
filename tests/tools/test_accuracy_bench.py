"""The accuracy benchmark: its statistics, the pruners it compares with, its task, and every kind of run once."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import smcp_fx
from smcp_fx.cost_model import CostTerm, NetworkCost, Width
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.report.trade_off import Point, Series, kept_shares, trade_off

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from accuracy_claims import DEFAULT, SCALED, Claim, Finding, findings, untested  # noqa: E402
from accuracy_methods import (  # noqa: E402
    Case,
    Outcome,
    UnavailableError,
    blocks,
    config_of,
    run_case,
    schedule_of,
)
from accuracy_report import pictures, write_document  # noqa: E402
from accuracy_rivals import (  # noqa: E402
    GreedyPruner,
    greedy_counts,
    magnitude_masks,
    stage_widths,
    uniform_counts,
)
from accuracy_statistics import (  # noqa: E402
    CONFIRMED,
    NOT_CONFIRMED,
    UNKNOWN,
    Interval,
    interval,
    paired,
    verdict,
)
from accuracy_task import Effort, SmallResNet, Task, dense_network  # noqa: E402

sys.path[:] = _PATH

TINY = Effort(dense_epochs=1, epochs=9, steps_per_epoch=1, batch=8, test_images=64)
values = st.lists(st.floats(-1, 1).filter(lambda v: v == 0 or abs(v) > 1e-6), min_size=2, max_size=9)


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(TINY)


@pytest.fixture(scope="module")
def dense(task: Task, tmp_path_factory: pytest.TempPathFactory) -> SmallResNet:
    return dense_network(task, 0, tmp_path_factory.mktemp("dense"))


# ---- statistics -------------------------------------------------------------------------------------------


@given(values)
@settings(max_examples=30, deadline=None)
def test_intervals_are_student_s(found: list[float]) -> None:
    ours = interval(found)
    error = scipy.stats.sem(found)
    low, high = (
        scipy.stats.t.interval(0.95, len(found) - 1, np.mean(found), error) if error else (ours.mean,) * 2
    )
    assert [ours.mean, ours.low, ours.high] == pytest.approx([np.mean(found), low, high], rel=1e-9, abs=1e-12)


def test_paired_differences_are_those_of_the_t_test() -> None:
    ours, theirs = {0: 0.91, 1: 0.93, 2: 0.9, 5: 0.97}, {0: 0.9, 1: 0.9, 2: 0.91, 5: 0.92, 7: 0.1}
    shared = [0, 1, 2, 5]
    test = scipy.stats.ttest_rel([ours[s] for s in shared], [theirs[s] for s in shared])
    expected = test.confidence_interval(0.95)
    found = paired(ours, theirs)
    assert found is not None and found.count == 4
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert math.isinf(interval([0.5]).half)


@pytest.mark.parametrize(
    ("low", "high", "better", "alike", "different"),
    [
        (0.001, 0.005, CONFIRMED, CONFIRMED, CONFIRMED),
        (0.001, 0.05, CONFIRMED, UNKNOWN, CONFIRMED),
        (0.011, 0.05, CONFIRMED, NOT_CONFIRMED, CONFIRMED),
        (-0.004, 0.005, UNKNOWN, CONFIRMED, NOT_CONFIRMED),
        (-0.02, 0.02, UNKNOWN, UNKNOWN, UNKNOWN),
        (-0.02, -0.001, NOT_CONFIRMED, UNKNOWN, CONFIRMED),
        (-0.03, -0.02, NOT_CONFIRMED, NOT_CONFIRMED, CONFIRMED),
    ],
)
def test_verdicts_follow_the_interval(
    low: float, high: float, better: str, alike: str, different: str
) -> None:
    found = Interval((low + high) / 2, (high - low) / 2, 5)
    assert verdict(found, "better") == better
    assert verdict(found, "alike") == alike
    assert verdict(found, "different") == different
    assert verdict(Interval(found.mean, found.half, 2), "better") == UNKNOWN
    assert verdict(None, "alike") == UNKNOWN


# ---- what the method is compared with ------------------------------------------------------------------------


def chain(sizes: dict[str, int], step: int = 1) -> NetworkCost:
    """A chain of layers with 2 inputs and 3 outputs that cannot go: cost is the sum of products of neighbours."""
    names = list(sizes)
    ends = [Width(2), *(Width(0, ((name, 1),)) for name in names), Width(3)]
    terms = [
        CostTerm(str(i), pair, lambda a, b: (a * b).astype(np.float64))
        for i, pair in enumerate(itertools.pairwise(ends))
    ]
    return NetworkCost(
        "products", {n: tuple(range(step, s + 1, step)) for n, s in sizes.items()}, tuple(terms)
    )


def test_greedy_by_hand() -> None:
    # a (3 units) and b (2): the cost is 2a + ab + 3b, 18 in all. One unit of a saves 4, one of b saves 6.
    cost = chain({"a": 3, "b": 2})
    kept = {"a": torch.tensor([9.0, 5.0, 2.0]), "b": torch.tensor([8.0, 3.6])}
    # Lost for saved: 2 / 4 against 3.6 / 6, a narrows first (14); then 5 / 4 against 3.6 / 5, b narrows (9).
    assert greedy_counts(kept, cost, 18) == {"a": 3, "b": 2}
    assert greedy_counts(kept, cost, 17) == {"a": 2, "b": 2}
    assert greedy_counts(kept, cost, 13) == {"a": 2, "b": 1}
    assert greedy_counts(kept, cost, 6) == {"a": 1, "b": 1}
    with pytest.raises(InfeasibleBudgetError, match="raise the target"):
        greedy_counts(kept, cost, 5)


@given(st.integers(0, 10_000), st.floats(0.3, 1.0))
@settings(max_examples=25, deadline=None)
def test_greedy_is_permitted_within_the_target_and_never_above_the_best(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = {"a": 4, "b": 6, "c": 4}
    cost = chain(sizes, step=2)
    kept = {n: torch.tensor(np.sort(rng.exponential(size=s))[::-1].copy()) for n, s in sizes.items()}
    target = max(share * cost.cost(sizes), cost.cost(cost.smallest_counts))
    counts = greedy_counts(kept, cost, target)

    def worth(chosen: dict[str, int]) -> float:
        return sum(float(kept[name][:count].sum()) for name, count in chosen.items())

    every = [dict(zip(sizes, p, strict=True)) for p in itertools.product(*cost.permitted.values())]
    best = max(worth(chosen) for chosen in every if cost.cost(chosen) <= target)
    assert all(count in cost.permitted[name] for name, count in counts.items())
    assert cost.cost(counts) <= target
    assert worth(counts) <= best + 1e-9
    # Nothing was narrowed in vain: some group's last narrowing was needed for the target.
    wider = [{**counts, name: count + 2} for name, count in counts.items() if count < sizes[name]]
    assert not wider or any(cost.cost(chosen) > target for chosen in wider)


def test_greedy_importance_and_masks(task: Task, dense: SmallResNet) -> None:
    prepared = smcp_fx.prepare(
        dense, task.example, config=smcp_fx.PruningConfig(mask="permanent", batch_norm_scaling=False)
    )
    pruner = GreedyPruner(prepared, prepared.pruner.cost, momentum=0.0)
    task.loss(prepared, task.batches(1, 3)[0]).backward()
    pruner.step()

    def taylor(path: str) -> Tensor:
        norm: Any = prepared.get_submodule(path)
        return (norm.weight * norm.weight.grad + norm.bias * norm.bias.grad).detach().abs()

    expected = {
        "stem": taylor("norm") + taylor("blocks.0.bn2"),
        "blocks.1.conv1": taylor("blocks.1.bn1"),
        "blocks.1.conv2": taylor("blocks.1.bn2") + taylor("blocks.1.downsample.1"),
    }
    for name, importance in expected.items():
        assert torch.allclose(prepared.smcp.of_group(pruner.importance, name), importance), name
    full = prepared.pruner.full_cost
    before = {name: mask.clone() for name, mask in pruner.masks.items()}
    for share in (0.6, 0.3):  # the second time nothing was gathered: whatever goes, nothing returns
        pruner.prune(share * full)
        assert prepared.pruner.cost.cost(prepared.pruner.counts) <= share * full
        assert all(bool((before[name] | ~mask).all()) for name, mask in pruner.masks.items())
        before = {name: mask.clone() for name, mask in pruner.masks.items()}
    assert any(not bool(mask.all()) for mask in before.values())


def test_magnitude_keeps_the_largest_filters(task: Task, dense: SmallResNet) -> None:
    prepared = smcp_fx.prepare(dense, task.example, config=smcp_fx.PruningConfig(multiple=1))
    masks = magnitude_masks(prepared, {"blocks.0.conv1": 5, "blocks.1.conv2": 7})
    weights = dict(dense.named_parameters())
    alone = weights["blocks.0.conv1.weight"].abs().sum((1, 2, 3))
    both = [weights[f"blocks.1.{path}.weight"].abs().sum((1, 2, 3)) for path in ("conv2", "downsample.0")]
    assert set(torch.topk(alone, 5).indices.tolist()) == set(
        masks["blocks.0.conv1"].nonzero().flatten().tolist()
    )
    assert set(torch.topk(sum(both), 7).indices.tolist()) == set(
        masks["blocks.1.conv2"].nonzero().flatten().tolist()
    )


@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
def test_uniform_width_meets_the_flops_that_torch_counts(task: Task, share: float) -> None:
    prepared = smcp_fx.prepare(SmallResNet(), task.example, config=smcp_fx.PruningConfig(multiple=1))
    cost = prepared.pruner.cost
    counts = uniform_counts(cost, cost.full_counts, share * prepared.pruner.full_cost)

    def counted(model: SmallResNet) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(task.example[:1])
        return int(counter.get_total_flops()) // 2  # two to a multiply-add

    narrow = counted(SmallResNet(stage_widths(prepared.channels, counts)))
    assert narrow == cost.cost(counts)
    assert 0.93 * share < narrow / counted(SmallResNet()) <= share


# ---- the task ---------------------------------------------------------------------------------------------------


def test_test_images_are_of_digits_that_are_not_trained_on() -> None:
    calm = Task(Effort(noise=0.0, batch=16, test_images=20))
    digits, labels = load_digits(return_X_y=True)
    digits = torch.tensor(digits, dtype=torch.float32).reshape(-1, 8, 8) / 16

    def rows_of(images: Tensor, told: Tensor) -> set[int]:
        """The digits that the images show, found by comparing every place with every digit."""
        rows = set()
        for image, label in zip(images[:, 0] * 0.35 + 0.15, told, strict=True):
            crops = image.unfold(0, 8, 1).unfold(1, 8, 1).reshape(-1, 1, 8, 8)
            whole = crops.sum((2, 3)) >= image.sum() - 1e-3
            same = ((crops - digits).abs().amax((2, 3)) < 1e-5) & whole
            (row,) = set(same.nonzero()[:, 1].tolist())
            assert labels[row] == label
            rows.add(row)
        return rows

    trained = set().union(*(rows_of(*calm.batches(1, seed)[0]) for seed in range(3)))
    tested = rows_of(*calm.test)
    assert len(trained) > 30 and len(tested) > 15
    assert not trained & tested


def test_a_dense_network_is_trained_once(task: Task, dense: SmallResNet, tmp_path: Path) -> None:
    first = dense_network(task, 0, tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), dense.state_dict().values(), strict=True)
    )
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes())
    before = path.stat().st_mtime_ns
    again = dense_network(task, 0, tmp_path)
    assert path.stat().st_mtime_ns == before
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    )


# ---- every kind of run ------------------------------------------------------------------------------------------


def test_every_case_is_run_once_and_the_schedules_are_the_papers(task: Task) -> None:
    found = [case for block in blocks() for case in block]
    assert len(found) == len(set(found))
    plain, other = schedule_of(DEFAULT, task), schedule_of("schedule (5, 20, 60)", task)
    assert (plain.warmup, plain.ramp, plain.cooldown) == (1.0, 3.0, 4.5)
    assert (other.warmup, other.ramp, other.cooldown) == (0.5, 2.0, 6.0)
    assert config_of("as published") == smcp_fx.PruningConfig(
        width_exponent=0, memory=0, tolerance=0, allocation="paper", batch_norm_scaling=True
    )


@pytest.mark.parametrize(
    "method",
    [
        DEFAULT,
        "permanent",
        "as published",
        "r × 2",
        "uniform width",
        "one-shot magnitude",
        "greedy output channels",
    ],
)
def test_a_run_of_each_kind(method: str, task: Task, dense: SmallResNet) -> None:
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    outcome = run_case(Case(method, "flops", 0.25), dense, task, 0, None)
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    _is_what_it_says(outcome, task, None if method == "as published" else 0.25)


def test_torch_pruning_or_why_not(task: Task, dense: SmallResNet) -> None:
    case = Case("Torch-Pruning Taylor", "flops", 0.25)
    if importlib.util.find_spec("torch_pruning") is None:
        with pytest.raises(UnavailableError, match="pip install torch-pruning"):
            run_case(case, dense, task, 0, None)
    else:
        _is_what_it_says(run_case(case, dense, task, 0, None), task, 0.25)


def _is_what_it_says(outcome: Outcome, task: Task, target: float | None) -> None:
    """The network has the channels that the outcome tells, by torch's count, within the target."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = outcome.model.eval()(task.example[:1])
    assert bool(torch.isfinite(logits).all())
    prepared = smcp_fx.prepare(SmallResNet(), task.example, config=smcp_fx.PruningConfig(multiple=1))
    flops = prepared.pruner.cost.cost(outcome.counts)
    assert int(counter.get_total_flops()) // 2 == flops
    assert target is None or flops <= target * prepared.pruner.full_cost
    for name, count in outcome.counts.items():
        convolution: Any = outcome.model.get_submodule(name)
        assert convolution.out_channels == count


# ---- what is made of a record -----------------------------------------------------------------------------------


def line(method: str, seed: int, end: float, share: float = 0.24, target: float = 0.25) -> dict[str, Any]:
    layers = [{"path": path, "out_channels": 32, "out_kept": 8 + seed} for path in ("stem", "body", "head")]
    return {
        "method": method, "cost": "flops", "target": target, "seed": seed, "flops_share": share,
        "accuracy": {"dense": 0.9, "at_stop": None, "end": end}, "layers": layers, "changed": [0.5, 0.1],
        "latency": {"share": 0.4, "stable": True}, "ramp_solves": 1, "effort": vars(TINY), "versions": {"torch": "2"},
        "device": "a device",
    }  # fmt: skip


def test_findings_compare_equal_targets_seed_by_seed() -> None:
    lines = [line(SCALED, seed, 0.95 + 0.001 * seed) for seed in range(4)]
    lines += [line(DEFAULT, seed, 0.93 + 0.001 * seed) for seed in range(4)]
    lines += [line(DEFAULT, 0, 0.99, target=0.5)]
    lines += [{"method": "permanent", "cost": "flops", "target": 0.25, "seed": 0, "infeasible": "too little"}]
    (found,) = findings(lines)
    assert found.claim.theirs == DEFAULT and found.target == 0.25 and found.difference is not None
    assert found.difference.mean == pytest.approx(0.02)
    assert found.verdict == CONFIRMED
    assert found.claim not in untested(lines) and len(untested(lines)) > 5


def test_an_advantage_that_costs_more_is_no_finding() -> None:
    claim = Claim(1, "it is better", "better", "a", "b")
    ahead, behind = Interval(0.02, 0.001, 5), Interval(-0.02, 0.001, 5)
    assert Finding(claim, "flops", 0.25, ahead, 0.24, 0.25).verdict == CONFIRMED
    assert Finding(claim, "flops", 0.25, ahead, 0.3, 0.25).verdict == UNKNOWN
    assert Finding(claim, "flops", 0.25, ahead, 0.25, 0.3).verdict == CONFIRMED
    assert Finding(claim, "flops", 0.25, behind, 0.3, 0.25).verdict == NOT_CONFIRMED
    assert Finding(claim, "flops", 0.25, behind, 0.25, 0.3).verdict == UNKNOWN


def test_the_document_tells_the_record(tmp_path: Path) -> None:
    lines = [line(SCALED, seed, 0.95) for seed in range(3)] + [line(DEFAULT, seed, 0.93) for seed in range(3)]
    written = write_document(lines, tmp_path)
    text = (tmp_path / "accuracy.md").read_text()
    assert "| 1 | batch-norm scaling helps soft masks | 25% of FLOPs | +2.0 (+2.0 to +2.0) |" in text
    assert "| soft | 25% | 3 |  | 93.0 ± 0.0 % | 24.0% |" in text
    for name in pictures(lines):
        assert f"accuracy_{name}.svg" in text and tmp_path / f"accuracy_{name}.svg" in written


def test_pictures_put_values_where_they_belong() -> None:
    points = (Point(2.0, 0.9, 0.88, 0.92, "50 %"), Point(3.0, 0.8, 0.79, 0.81, "25 %"))
    drawing = trade_off(
        [Series("ours", points), Series("<theirs>", ()), Series("dense", (Point(1, 0.95, 0.95, 0.95, ""),))],
        "T",
    )
    assert drawing is not None and "&lt;theirs&gt;" not in drawing
    svg = ElementTree.fromstring(drawing)
    space = "{http://www.w3.org/2000/svg}"
    marks = [m for m in svg.iter(f"{space}circle") if m.find(f"{space}title") is not None]
    by_tip = {m.findtext(f"{space}title", ""): (float(m.get("cx", 0)), float(m.get("cy", 0))) for m in marks}
    first, second, last = (by_tip[tip] for tip in sorted(by_tip, key=lambda tip: by_tip[tip][0]))
    assert last[0] - second[0] == pytest.approx(second[0] - first[0], abs=0.1)  # 1, 2, 3 times
    assert last[1] - second[1] == pytest.approx(2 * (second[1] - first[1]), abs=0.1)  # 95, 90, 80 %
    assert any("90.0 % (88.0 to 92.0) at 2.00×" in tip for tip in by_tip)
    assert trade_off([], "T") is None and kept_shares([], [], "T") is None
    kept = kept_shares(["a", "b"], [("ours", [1.0, 0.5])], "T")
    assert kept is not None
    tips = [title.text for title in ElementTree.fromstring(kept).iter(f"{space}title")]
    assert "ours, b: 50 % kept" in tips
