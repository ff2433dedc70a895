"""What is written about solves: a line of JSON, TensorBoard's events, a bar, a user's own observer."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Residual, randomise
from rich.console import Console
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError
from smcp_fx.pruning.observers import JsonLines, Observer, ProgressBar, TensorBoard
from smcp_fx.pruning.solve import Solve

SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.25, ramp=0.34, cooldown=0.25, every=2)


def train(*observers: Observer) -> smcp_fx.PreparedModel:
    """Solves at steps 5, 7 and 9 of 12."""
    torch.manual_seed(0)
    config = MethodConfig(multiple=2, batch_norm_scaling=True)
    model = randomise(Residual(16, 24)).train()
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), schedule=SCHEDULE, config=config)
    prepared.pruner.observers += observers
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(prepared(torch.randn(4, 3, 8, 8)), torch.arange(4)).backward()
        norm = math.sqrt(
            sum(float(p.grad.square().sum()) for p in prepared.parameters() if p.grad is not None)
        )
        before = prepared.masks
        solve = prepared.pruner.step()
        if solve is not None:
            check(solve, prepared, before, norm)
        optimizer.step()
    return prepared


def check(solve: Solve, prepared: smcp_fx.PreparedModel, before: Any, norm: float) -> None:
    """A solve's numbers, from the masks and gradients themselves."""
    after, groups = prepared.masks, [g for g in prepared.channels.groups if g.free]
    assert solve.changed == {g.name: int((before[g.name] != after[g.name]).sum()) for g in groups}
    assert solve.units == sum(g.size for g in groups)
    assert solve.returned == sum(int((after[g.name] & ~before[g.name]).sum()) for g in groups)
    assert solve.cost == pytest.approx(prepared.pruner.cost.cost(prepared.pruner.counts))
    assert solve.gradient_norm == pytest.approx(norm, rel=1e-5)
    kept = {g.name: float(after[g.name].float().mean()) for g in groups}
    assert solve.scales["bn1"] == pytest.approx(kept["stem.0"])
    assert solve.scales["bn2"] == pytest.approx(kept["conv1"])
    assert solve.seconds > 0 and solve.skipped == 0


class Notes(Observer):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int | None]] = []
        self.solves: list[Solve] = []

    def stepped(self, step: int, total: int | None) -> None:
        self.steps.append((step, total))

    def solved(self, solve: Solve) -> None:
        self.solves.append(solve)


def test_an_observer_is_told_of_steps_and_solves() -> None:
    notes = Notes()
    prepared = train(notes, Observer())
    assert notes.steps == [(step, 12) for step in range(1, 13)]
    assert notes.solves == prepared.pruner.history
    assert [solve.step for solve in notes.solves] == [5, 7, 9]
    metrics = notes.solves[0].metrics()
    assert metrics["changed/conv1"] == notes.solves[0].changed["conv1"]
    assert metrics["scale/bn1"] == notes.solves[0].scales["bn1"]
    assert metrics["changed_share"] == sum(notes.solves[0].changed.values()) / notes.solves[0].units
    assert all(isinstance(value, float) for value in metrics.values())


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pruning.jsonl"
    prepared = train(JsonLines(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [5, 7, 9]
    for record, solve in zip(records, prepared.pruner.history, strict=True):
        assert record["changed"] == solve.changed
        assert record["cost"] == solve.cost and record["target"] == solve.target
        assert record["masks"] == solve.masks
    JsonLines(path).solved(Solve(1, 1.0, math.inf, 1.0, 1.0, {}, 0, 0, 0.1, gradient_norm=math.nan))
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["cost"] is None and last["gradient_norm"] is None
    for place in ("/proc/nowhere/file", tmp_path):
        with pytest.raises(InputError, match="cannot write"):
            JsonLines(place)


def test_ranks_but_the_first_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smcp_fx.pruning.ranks.rank", lambda: 1)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    bar, lines = ProgressBar(console), JsonLines(tmp_path / "lines")
    bar.stepped(1, 12)
    lines.solved(Solve(1, 1.0, 1.0, 1.0, 1.0, {}, 0, 0, 0.1))
    bar.close()
    assert isinstance(console.file, io.StringIO) and "12" not in console.file.getvalue()
    assert (tmp_path / "lines").read_text() == ""


def test_a_bar(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    bar = ProgressBar(console)
    prepared = train(bar)
    assert bar._bar.finished
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "12/12" in shown
    assert f"cost {prepared.pruner.history[-1].cost:.4g}" in shown
    bar.close()


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    prepared = train(board)
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("pruning/cost")]
    assert found == [(solve.step, pytest.approx(solve.cost)) for solve in prepared.pruner.history]
    assert "pruning/scale/bn1" in events.Tags()["scalars"]


def test_without_tensorboard_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
