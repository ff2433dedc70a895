"""The sentence and the table that a run ends with, and numbers as people read them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from html_page import Page
from printed import summary_text
from rich.table import Table

from smcp_fx.report import Report, summary_table
from smcp_fx.report.curves import dense_cost
from smcp_fx.report.formats import count, duration, milliseconds, percent, relative_change
from smcp_fx.report.page import render_page
from smcp_fx.texts import significant


def test_summary_table_and_text(real: Report) -> None:
    assert isinstance(summary_table(real), Table)
    text = summary_text(real)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "accuracy 98.6% 97.6% −1.0 points" in lines
    assert "latency, predicted by the table 10.8 ms 4.30 ms −60.3%" in lines
    assert "latency, measured 10.5 ms 4.21 ms −59.9%" in lines
    assert "quartiles 10.4 to 10.7 ms 4.19 to 4.25 ms" in lines
    assert "speed-up 1× 2.49×" in lines
    assert "parameters 11.2 M 2.84 M −74.6%" in lines
    assert "FLOPs (multiply-adds) per input 555 M 190 M −65.8%" in lines
    told = " ".join(lines)
    assert "target 40% of the dense latency, predicted 39.7%, measured 40.1%" in told
    assert "measured 40.1% ± 0.2 points (quartiles of 7 rounds: 39.9% to 40.3%); ONNX Runtime" in told
    assert "ONNX Runtime 9.8.7, float32, 1 thread, batch 32, A Processor" in told
    assert all(line == line.rstrip() and len(line) <= 100 for line in text.splitlines())


def test_summary_says_what_is_unsure(real: Report) -> None:
    assert "disturbed" not in summary_text(real)
    shaky = replace(real, pruned=replace(real.pruned, latency_stable=False), model="file.py:[red]x[/red]")
    text = " ".join(summary_text(shaky).split())
    assert "Other work disturbed the timings of pruned" in text
    assert "[red]x[/red] on digits" in text  # not taken for markup
    assert "Other work disturbed the timings of pruned" in Page(render_page(shaky)).text


def test_other_costs_have_no_row_of_predicted_latencies(real: Report) -> None:
    sides = {name: replace(getattr(real, name), predicted_ms=None) for name in ("dense", "pruned")}
    assert "predicted by the table" not in summary_text(replace(real, cost="flops", table=None, **sides))
    assert "predicted by the table not measured" in " ".join(summary_text(replace(real, **sides)).split())


def test_other_costs_have_their_own_sentence(real: Report) -> None:
    report = replace(real, cost="FLOPs")
    assert "target 40% of the dense FLOPs, predicted 39.7%, measured latency 40.1%" in " ".join(
        summary_text(report).split()
    )
    headline = "resnet18 keeps 39.7% of its FLOPs (asked: 40%) and runs in 4.21 ms instead of 10.5 ms"
    assert headline in Page(render_page(report)).text
    assert dense_cost(report) == 555e6
    assert dense_cost(replace(real, cost="parameters")) == 11_172_042
    assert dense_cost(real) == 10.83


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (significant(0.0), "0"),
        (significant(0.004213), "0.00421"),
        (significant(1234.5), "1,234"),
        (milliseconds(10.51), "10.5 ms"),
        (milliseconds(None), "not measured"),
        (milliseconds(math.nan), "not measured"),
        (percent(0.4, trim=True), "40%"),
        (percent(0.4), "40.0%"),
        (percent(True), "not measured"),
        (count(9999), "9,999"),
        (count(10_000), "10.0 k"),
        (count(1.82e9), "1.82 G"),
        (duration(3.21), "3.2 s"),
        (duration(200), "3 min 20 s"),
        (duration(7500), "2 h 05 min"),
        (relative_change(4.0, 5.0), "+25.0%"),
        (relative_change(4.0, 4.0), "0.0%"),
        (relative_change(0, 4.0), ""),
    ],
)
def test_numbers_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected
