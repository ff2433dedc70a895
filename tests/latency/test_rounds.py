"""Rows for another device, asked for in rounds: those that prunings rest on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_latencies import FakeBackend, cliffs, network, smooth

import smcp_fx
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.network import NetworkLatency
from smcp_fx.latency.rounds import measure_for_targets, rows_for_targets
from smcp_fx.latency.table import LatencyTable

TARGETS = (0.6, 0.4, 0.25)


def bound(folder: Path, backend: FakeBackend, measure: bool = True) -> NetworkLatency:
    cost = LatencyCost(LatencyTable(folder / "t.sqlite"), backend, measure=measure)
    found = latency_of(smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=cost).pruner.cost)
    assert found is not None
    return found


def formula(*widths: int) -> float:
    return cliffs(*widths) if len(widths) == 2 else smooth(*widths)


def test_rounds_end_and_ask_for_few_rows(tmp_path: Path) -> None:
    backend = FakeBackend(latency=formula)
    latency = bound(tmp_path, backend)
    begun = len(backend.log)
    rounds = [rows_for_targets(latency, TARGETS)]
    while rounds[-1]:
        assert len(rounds) < 9
        latency.take(rounds[-1])
        rounds.append(rows_for_targets(latency, TARGETS))
    assert len(rounds) > 1
    assert 0 < len(backend.log) - begun < 45
    whole = FakeBackend(latency=formula)
    with LatencyTable(tmp_path / "whole.sqlite") as table:
        table.measure(latency.blocks, whole)
    assert len(backend.log) < len(whole.log)


def test_a_table_that_is_not_to_be_measured_is_asked_but_not_filled(tmp_path: Path) -> None:
    bound(tmp_path, FakeBackend(latency=formula))
    here = FakeBackend(latency=formula)
    latency = bound(tmp_path, here, measure=False)
    wanted = rows_for_targets(latency, TARGETS)
    assert wanted
    measure_for_targets(latency, TARGETS)
    assert here.log == [] and rows_for_targets(latency, TARGETS) == wanted


@pytest.mark.parametrize("target", [0.5, 1e-6])
def test_rows_are_of_the_network_at_the_target(tmp_path: Path, target: float) -> None:
    """The smallest one where nothing is as fast as that."""
    backend = FakeBackend(latency=formula)
    latency = bound(tmp_path, backend)
    measure_for_targets(latency, (target,))
    assert rows_for_targets(latency, (target,)) == []
    if target < 0.01:
        smallest = latency.around(latency.full_counts).smallest_counts
        assert latency.lacking(smallest, 0.002) == []
