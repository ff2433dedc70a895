"""Correcting the target by measured engines: what is measured when, what is kept, and what a resumed run knows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import smcp_fx
from smcp_fx.backends import CompareConfig, compare
from smcp_fx.backends.base import Backend, Engine, Fingerprint
from smcp_fx.compiler import measuring
from smcp_fx.compiler.measuring import Corrector, measured_as_predicted
from smcp_fx.compiler.pricing import asked_fraction
from smcp_fx.compiler.seeking import CLOSE, TRIES
from smcp_fx.errors import CheckpointError, TableError
from smcp_fx.prepare import PreparedModel


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that always take the same need no time to be sure of."""
    rounds = CompareConfig(seconds=0.0)
    monkeypatch.setattr(measuring, "compare", functools.partial(compare, config=rounds))


class FixedEngine(Engine):
    """Takes ``ms``, always."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def run(self, inputs):
        raise AssertionError("only timed")

    def timer(self, inputs=None):
        return lambda: self.ms

    def reload(self):
        return FixedEngine(self.ms)


class Formula(Backend):
    """Latency as a function of a network's parameters; ``compiled`` lists the parameters of what was measured."""

    name = "formula"

    def __init__(self, latency: Callable[[int, int], float]) -> None:
        self.latency = latency
        self.compiled: list[int] = []

    def fingerprint(self) -> Fingerprint:
        return Fingerprint("formula", "none", "none", "1", 1, "float32")

    def compile(self, module, example_inputs, path=None) -> Engine:
        self.compiled.append(sum(p.numel() for p in module.parameters()))
        return FixedEngine(self.latency(self.compiled[-1], len(self.compiled)))


def prepared(target: float = 0.5, multiple: int = 1) -> PreparedModel:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(),
        nn.Linear(256, 4),
    )  # fmt: skip
    schedule = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.1, ramp=0.4, cooldown=0.1, every=2)
    config = smcp_fx.PruningConfig(multiple=multiple)
    return smcp_fx.prepare(
        net, torch.randn(2, 3, 8, 8), target=target, cost="params", schedule=schedule, config=config
    )


def train(model: PreparedModel, corrector: Corrector, steps: int = 12) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while int(model.smcp.steps) < steps:
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        solve = model.pruner.step()
        if solve is not None:
            corrector.after(solve)
        optimizer.step()


def corrector_of(
    model: PreparedModel, latency: Callable[[int, int], float], state: Path, said: list[str]
) -> Corrector:
    full, target = model.pruner.full_cost, model.pruner.target
    images = (torch.randn(2, 3, 8, 8),)
    return Corrector(model, Formula(latency), FixedEngine(full), images, target / full, state, said.append)


def measured_now(model: PreparedModel) -> float:
    return sum(p.numel() for p in smcp_fx.convert(model).parameters()) / model.pruner.full_cost


@pytest.mark.slow
def test_the_target_is_met_in_what_is_measured(tmp_path: Path) -> None:
    """Engines that take twice the square root: the prediction alone would miss by far."""
    model, said = prepared(), []
    full = model.pruner.full_cost
    corrector = corrector_of(model, lambda size, _: full * (size / full) ** 0.5, tmp_path, said)
    train(model, corrector)
    assert abs(measured_now(model) ** 0.5 - 0.5) <= CLOSE
    names = [c.name for c in corrector.comparisons]
    assert names[:2] == ["first masks near the target", "last masks"]
    assert names[-1] == f"{names[-2]}, again"
    assert corrector.comparisons[-1].measured.pruned.median_ms == pytest.approx(
        full * measured_now(model) ** 0.5
    )
    assert abs(corrector.comparisons[-1].measured.fraction - 0.5) <= CLOSE
    assert len(said) == len(names)


def test_every_solve_of_the_last_masks_is_measured_and_the_nearest_kept(tmp_path: Path) -> None:
    """Engines that do not follow the prediction: no try fits; the one that came nearest stays."""
    model, said = prepared(), []
    full = model.pruner.full_cost
    answers = {1: 0.9, 2: 0.8, 3: 0.42, 4: 0.56, 5: 0.7, 6: 0.4, 7: 0.6}
    corrector = corrector_of(model, lambda _, count: full * answers[count], tmp_path, said)
    train(model, corrector)
    assert [c.measured.fraction for c in corrector.comparisons] == pytest.approx(list(answers.values()))
    assert len(corrector.comparisons) == 1 + 1 + TRIES
    assert corrector.backend.compiled[3] == round(measured_now(model) * full)  # the try that measured 0.56
    assert said[-1].endswith("the nearest is kept, at 56.0%")


def test_a_target_between_the_choices_of_a_small_network_is_explained(tmp_path: Path) -> None:
    """Of three layers of 64 channels in steps of 32, nothing lies between half and three quarters."""
    model, said = prepared(0.62, multiple=32), []
    train(model, corrector_of(model, lambda size, _: size, tmp_path, said))
    assert "no solve came within 1% of the target" in said[-1]
    assert "channels go in multiples of 32 (--multiple)" in said[-1]


def test_what_the_corrections_made_of_the_masks_is_no_training_cut_short(tmp_path: Path, recwarn) -> None:
    """The first engine is much faster than predicted, so that much is kept; that fits best of all that follows."""
    model = prepared()
    full = model.pruner.full_cost
    answers = {1: 0.15, 2: 0.53, 3: 0.95, 4: 0.9, 5: 0.9, 6: 0.9, 7: 0.9}
    train(model, corrector_of(model, lambda _, count: full * answers[count], tmp_path, []))
    assert measured_now(model) > 1.5 * 0.5  # by the table alone the target would be missed by far
    assert model.pruner.correction < 0.7  # what these masks were solved with, not what was measured last
    assert not [str(warning.message) for warning in recwarn]


def test_engines_that_hardly_get_faster_end_with_the_fastest_masks(tmp_path: Path) -> None:
    """What the correction asks for is beyond the smallest permitted counts: they are taken, and it is said."""
    model, said = prepared(), []
    full = model.pruner.full_cost
    smallest = model.pruner.smallest_cost()
    assert smallest == model.pruner.cost.cost(model.pruner.cost.smallest_counts)
    train(model, corrector_of(model, lambda size, _: full * (0.95 + 0.05 * size / full), tmp_path, said))
    assert smallest <= measured_now(model) * full <= 3 * smallest  # the last of the tries, at most
    assert any("the fastest is sought instead" in line for line in said)


def test_a_resumed_run_knows_what_was_measured_before_its_checkpoint(tmp_path: Path) -> None:
    model = prepared()
    full = model.pruner.full_cost
    first = corrector_of(model, lambda size, _: 0.9 * size, tmp_path, [])
    train(model, first, steps=8)
    assert [c.name for c in first.comparisons] == ["first masks near the target"]
    step = first.comparisons[0].step
    saved = model.state_dict()

    again = prepared()
    again.load_state_dict(saved)
    second = corrector_of(again, lambda size, _: 0.9 * size, tmp_path, [])
    second.resume(8)
    assert second.comparisons == first.comparisons
    assert again.pruner.correction == model.pruner.correction
    train(again, second)
    assert [c.name for c in second.comparisons][:2] == ["first masks near the target", "last masks"]
    assert second.comparisons[0] == first.comparisons[0]
    once = [c for c in second.comparisons if not c.name.endswith("again")]  # loaded twice, written once
    assert len(second.backend.compiled) == len(once) - 1  # the first is of the run before

    earlier = corrector_of(prepared(), lambda size, _: full, tmp_path, [])
    earlier.resume(step - 1)
    assert earlier.comparisons == []


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "comparisons.json").write_text('[{"name": "first"}]')
    corrector = corrector_of(prepared(), lambda size, _: size, tmp_path, [])
    with pytest.raises(CheckpointError, match=r"comparisons\.json is damaged"):
        corrector.resume(5)
    (tmp_path / "comparisons.json").unlink()
    corrector.resume(5)
    assert corrector.comparisons == []


@pytest.mark.parametrize("predicted", [3.83, 78.4 / 1.51, 78.4 * 1.51, 1000.0])
def test_a_table_that_says_something_else_than_the_engine_prunes_nothing(predicted: float) -> None:
    with pytest.raises(TableError, match=r"takes 78\.4 ms.*table\.sqlite say .*try again"):
        measured_as_predicted(FixedEngine(78.4), predicted, Path("table.sqlite"))


@pytest.mark.parametrize("predicted", [78.4 / 1.49, 78.4, 78.4 * 1.49])
def test_a_table_that_is_near_the_engine_is_pruned_by(predicted: float) -> None:
    assert measured_as_predicted(FixedEngine(78.4), predicted, Path("table.sqlite")) == 78.4


def test_an_engine_is_asked_again_before_a_table_is_given_up() -> None:
    """A moment of others' work says nothing of the rows."""

    class Later(FixedEngine):
        def latency(self, inputs=None, config=None):
            self.ms /= 2
            return super().latency(inputs, config)

    assert measured_as_predicted(Later(40.0), 10.0, Path("table.sqlite")) == 10.0


@pytest.mark.filterwarnings("ignore:the target of:smcp_fx.TrainingWarning")
def test_a_target_above_the_dense_cost_asks_for_the_whole_network() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
    prepared = smcp_fx.prepare(model, torch.randn(1, 3, 8, 8), target="10 GFLOPs")
    assert asked_fraction(prepared, "10 GFLOPs", 1.0) == 1.0
