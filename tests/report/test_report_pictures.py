"""The pictures: lengths and places are the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st

from smcp_fx.report import Report
from smcp_fx.report.bars import block_bars, channel_bars, latency_bars, repair_bars
from smcp_fx.report.curves import solve_curves, training_curves, validation_scatter
from smcp_fx.report.schema import BlockRow, EngineRow, EpochRow, RepairRow, WorthRow
from smcp_fx.report.svg import NARROW, rounded_up, ticks
from smcp_fx.report.worth_curves import PANELS, worth_curves


def bars(markup: Any, class_: str) -> list[dict[str, str]]:
    assert markup is not None
    return Page(markup).having(class_)


def test_bar_lengths_are_the_numbers(real: Report) -> None:
    kept = [float(bar["height"]) for bar in bars(channel_bars(real.layers), "bar-pruned")]
    full = [float(bar["height"]) for bar in bars(channel_bars(real.layers), "bar-dense")]
    for layer, light, dark in zip(real.layers, full, kept, strict=True):
        assert dark / light == pytest.approx(layer.out_kept / layer.out_channels, abs=2e-3)
    for class_, key in (("bar-dense", "dense_ms"), ("bar-pruned", "pruned_ms")):
        first, second = (float(bar["width"]) for bar in bars(block_bars(real.blocks), class_))
        one, two = (getattr(block, key) for block in real.blocks)
        assert first / second == pytest.approx(one / two, rel=1e-3)
    (dense,), (pruned,) = (bars(latency_bars(real), name) for name in ("bar-dense", "bar-pruned"))
    assert float(pruned["width"]) / float(dense["width"]) == pytest.approx(4.213 / 10.51, rel=1e-3)
    (target,) = bars(latency_bars(real), "target")
    assert float(target["x1"]) == pytest.approx(float(dense["x"]) + 0.4 * float(dense["width"]), abs=0.02)


def test_bars_of_a_narrow_page_tell_the_same_and_fit(real: Report) -> None:
    """A telephone's 364 pixels hold both bars and their figures."""
    drawing = latency_bars(real, NARROW)
    (dense,), (pruned,) = (bars(drawing, name) for name in ("bar-dense", "bar-pruned"))
    assert float(pruned["width"]) / float(dense["width"]) == pytest.approx(4.213 / 10.51, rel=1e-3)
    for picture in (drawing, block_bars(real.blocks, NARROW)):
        (frame,) = bars(picture, "chart")
        assert frame["viewbox"].split()[2] == "364"
        letters = [float(label["x"]) for label in bars(picture, "value")]
        assert max(letters) < 364 - 50
    long = block_bars([BlockRow("1.0", 0.199, 0.0762)], NARROW)
    (label,) = bars(long, "value")
    assert "0.199 → 0.0762" in Page(long or "").text and float(label["x"]) + 6.9 * 14 <= 364


def test_blocks_beyond_forty_are_summed() -> None:
    blocks = [BlockRow(f"block {i}", 2.0 + (i % 2), 1.0) for i in range(62)]
    page = Page(block_bars(blocks) or "")
    assert len(page.having("bar-dense")) == 40
    assert (
        "and 22 smaller blocks, together 44.0 → 22.0 ms" in page.text
    )  # the 31 of 3 ms and 9 of 2 ms are drawn


def test_scatter_puts_equal_pairs_on_the_diagonal() -> None:
    pairs = [EngineRow(str(v), v, v) for v in (1.0, 2.5, 7.0)]
    page = Page(validation_scatter([*pairs, EngineRow("x", None, 1.0)]) or "")
    (diagonal,) = page.having("diagonal")
    x1, y1, x2, y2 = (float(diagonal[key]) for key in ("x1", "y1", "x2", "y2"))
    points = page.having("point")
    assert len(points) == 3
    for point in points:
        x, y = float(point["cx"]), float(point["cy"])
        assert (x - x1) / (x2 - x1) == pytest.approx((y - y1) / (y2 - y1), abs=1e-3)
    assert validation_scatter([EngineRow("x", None, 1.0)]) is None


def test_curves_have_a_point_for_each_entry(real: Report) -> None:
    assert len(bars(solve_curves(real), "bar-pruned")) == 6
    curve = Page(training_curves(real.training) or "")
    assert len(curve.having("point")) == 24  # accuracy and loss, both phases
    assert len(curve.having("phase")) == 1
    partly = [replace(entry, accuracy=None) for entry in real.training]
    assert len(bars(training_curves(partly), "point")) == 12
    assert training_curves([EpochRow(1, "dense")]) is None
    one = replace(real, solves=real.solves[:1], epochs=None)
    assert len(bars(solve_curves(one), "bar-pruned")) == 1


@given(st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_round_and_inside(high: float, about: int) -> None:
    marks = ticks(0.0, high, about)
    assert marks[0] == 0
    assert marks[-1] <= high * (1 + 1e-9)
    assert len(marks) <= about + 1
    step = marks[1] - marks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - factor) for factor in (1, 2, 5)) < 1e-6
    assert high * (1 - 1e-9) <= rounded_up(high, about) <= high + step * (1 + 1e-9)


def test_worth_is_drawn_to_one_scale() -> None:
    """Both dots stand at the same share; the second group's rise is half of the first's."""
    rises = ((9.0, 1.0, 0.25, 0.0), (0.75, 0.5, 0.125, 0.0))
    groups = [WorthRow(f"group {i}", 32, 16, (8, 16, 24, 32), found) for i, found in enumerate(rises)]
    first, second = bars(worth_curves(groups), "point")
    (base, other), (top, _) = (
        [float(mark["y1"]) for mark in bars(worth_curves(groups), kind)] for kind in ("baseline", "grid")
    )
    assert (other - float(second["cy"])) / (base - float(first["cy"])) == pytest.approx(0.5, rel=1e-2)
    steep, flat = (curve["d"].split("L") for curve in bars(worth_curves(groups), "curve"))
    assert len(steep) == len(flat) == 4
    assert float(steep[0].lstrip("M").split()[1]) == pytest.approx(
        top, abs=0.1
    )  # cut where it leaves the panel
    assert worth_curves([]) is None
    assert len(bars(worth_curves(groups * PANELS), "point")) == PANELS


def test_only_layers_that_slicing_changed_are_drawn() -> None:
    same, changed = RepairRow("a", 0.0, 0.0), RepairRow("b", 0.3, 0.1, repaired=True)
    assert len(bars(repair_bars([same, changed]), "bar-dense")) == 1
    assert repair_bars([same]) is None
