"""Prices of a run that is resumed, copied or shared between ranks: of the rows that were asked for by then."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from fake_latencies import FakeBackend, network

import smcp_fx
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.network import NetworkLatency
from smcp_fx.latency.table import LatencyTable
from smcp_fx.prepare import PreparedModel

SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=20, warmup=0.1, ramp=0.6, cooldown=0.1, every=2)
INPUTS = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def uneven(*widths: int) -> float:
    """What rows tell little of each other: every count of channels is fast or slow by itself."""
    speeds = [1 + 0.6 * math.sin(17.0 * width) for width in widths]
    return 0.01 + 1e-4 * math.prod(widths) * math.prod(speeds)


def begin(folder: Path, target: float | str = 0.4) -> tuple[PreparedModel, FakeBackend]:
    backend = FakeBackend(latency=uneven)
    rows = LatencyCost(LatencyTable(folder / "t.sqlite"), backend, progress=False)
    return smcp_fx.prepare(network(), INPUTS, target=target, cost=rows, schedule=SCHEDULE), backend


def prices(prepared: PreparedModel) -> list[float]:
    """Of all networks whose groups keep the same share."""
    cost = latency(prepared)
    shares = [
        {name: size * eighths // 8 for name, size in cost.full_counts.items()} for eighths in range(2, 9)
    ]
    return [cost.latency(counts) for counts in shares]


def train(prepared: PreparedModel, last: int) -> dict[int, tuple[dict[str, Any], list[float]]]:
    """Train up to a step; the states in which steps began, and the prices then."""
    states = {}
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-3)
    for step in range(int(prepared.smcp.steps), last):
        states[step] = copy.deepcopy(prepared.state_dict()), prices(prepared)
        optimizer.zero_grad()
        prepared(INPUTS).square().sum().backward()
        prepared.pruner.step()
        optimizer.step()
    return states


def latency(prepared: PreparedModel) -> NetworkLatency:
    found = latency_of(prepared.pruner.cost)
    assert found is not None
    return found


def test_a_resumed_run_does_not_know_what_was_measured_later(tmp_path: Path) -> None:
    prepared, backend = begin(tmp_path)
    begun = len(backend.log)
    states = train(prepared, SCHEDULE.last_step)
    whole = prepared.pruner
    assert len(backend.log) - begun > 3
    state, then = states[5]
    other, nothing = begin(tmp_path)
    assert prices(other) != then
    other.load_state_dict(state)
    assert prices(other) == then
    assert (other.pruner.full_cost, other.pruner.target) == (whole.full_cost, whole.target)
    train(other, SCHEDULE.last_step)
    assert [(s.step, s.masks, s.cost) for s in other.pruner.history] == [
        (s.step, s.masks, s.cost) for s in whole.history if s.step > 5
    ]
    assert nothing.log == []
    assert latency(other).as_of == latency(prepared).as_of == float(other.smcp.as_of)


def test_a_state_of_another_table_is_loaded_at_this_one_s_prices(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first, _ = begin(here)
    other, _ = begin(there, "0.2 ms")
    before = other.pruner.full_cost, other.pruner.target, latency(other).as_of
    state = first.state_dict() | {"smcp.full_cost": 10 * first.smcp.full_cost}
    other.load_state_dict(state)
    assert (other.pruner.full_cost, other.pruner.target, latency(other).as_of) == before
    assert float(other.smcp.full_cost) == before[0]


def test_copies_learn_by_themselves(tmp_path: Path) -> None:
    prepared, _ = begin(tmp_path)
    prepared.pruner.target *= 1.5
    early = copy.deepcopy(prepared.state_dict())
    train(prepared, 12)
    copied = copy.deepcopy(prepared)
    assert copied.pruner.target == prepared.pruner.target
    assert latency(copied).as_of == latency(prepared).as_of
    copied.load_state_dict(early)
    assert latency(copied).as_of < latency(prepared).as_of == float(prepared.smcp.as_of)
    assert copied.half().pruner.full_cost == float(copied.smcp.full_cost)
