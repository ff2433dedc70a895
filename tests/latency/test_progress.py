"""Who waits for a table sees how far it is: a bar on a terminal, lines in a log, or what a function makes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_latencies import FakeBackend, network, smooth

import smcp_fx
from smcp_fx.latency import progress
from smcp_fx.latency.progress import MeasuringProgress, duration, row_watcher

STATE = MeasuringProgress("layer1.conv[0]", 12, 0.25, 125.0)


def test_a_function_gets_every_row_and_binding_calls_it(tmp_path: Path) -> None:
    seen: list[MeasuringProgress] = []
    backend = FakeBackend(latency=smooth)
    cost = smcp_fx.LatencyCost(smcp_fx.LatencyTable(tmp_path / "t.sqlite"), backend, progress=seen.append)
    smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=cost)
    assert [state.measured for state in seen] == list(range(1, len(backend.log) + 1))
    assert {state.block for state in seen} == {name for name, _ in backend.log}
    smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=cost)
    assert len(seen) == len(backend.log)  # a complete table measures nothing


def test_nothing_is_shown_where_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with row_watcher(False) as tell:
        assert tell is None
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_each_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with row_watcher(True) as tell:
        assert tell is not None
        for second in range(0, 150, 10):
            now[0] = float(second)
            tell(STATE)
    out, err = capsys.readouterr()
    line = "measuring the latency table: 12 rows, about 2 min 05 s left (layer1.conv[0])\n"
    assert (out, err) == ("", 2 * line)  # after 60 and after 120 s


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with row_watcher(True) as tell:
        assert tell is not None
        tell(STATE)
    out, err = capsys.readouterr()
    assert out == "" and "12 rows, about 2 min 05 s left (layer1.conv[0])" in err


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 89.4, 90.0, 3599.6)] == ["0 s", "89 s", "1 min 30 s", "60 min 00 s"]
