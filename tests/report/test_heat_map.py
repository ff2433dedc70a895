"""Pictures of blocks: every cell is there, colours follow the latency, cliffs are edges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from fake_latencies import FakeBackend, network, smooth

import smcp_fx
from smcp_fx.compiler.surfaces import surfaces
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.table import LatencyTable
from smcp_fx.report import Report
from smcp_fx.report.heat_map import colour, heat_map, thinned
from smcp_fx.report.page import render_page
from smcp_fx.report.schema import Axis, SurfaceRow


def block(ms, xs=(8, 16, 24, 32), ys=(8, 16, 24), name: str = "conv", **more: Any) -> SurfaceRow:
    axes = (Axis("channels in", tuple(xs)), Axis("channels out", tuple(ys)))
    return SurfaceRow(name, axes, [[ms(x, y) for y in ys] for x in xs], **more)


def cells(drawing: str) -> dict[tuple[int, int], str]:
    """Colour by widths, as the tips tell them."""
    found = {}
    for rect in ElementTree.fromstring(drawing).iter("rect"):
        tip = rect.findtext("title") or ""
        match = re.match(r"(\d+) in, (\d+) out: ", tip)
        if match:
            found[int(match[1]), int(match[2])] = rect.get("fill") or ""
    return found


def darkness(fill: str) -> int:
    return -sum(int(fill[at : at + 2], 16) for at in (1, 3, 5))


def test_every_pair_of_widths_is_a_cell_and_dearer_is_darker() -> None:
    drawing = heat_map(block(lambda x, y: x * y * (4e-6 if x == 24 else 1e-6)))
    assert drawing is not None
    found = cells(drawing)
    assert set(found) == {(x, y) for x in (8, 16, 24, 32) for y in (8, 16, 24)}
    dear = {fill for (x, _), fill in found.items() if x == 24}
    rest = {fill for (x, _), fill in found.items() if x != 24}
    assert len(dear) == len(rest) == 1
    assert darkness(dear.pop()) > darkness(rest.pop())
    assert "ns per channel pair" in drawing


def test_colours_are_steps_of_equal_ratio_and_stay_in_range() -> None:
    scale = [darkness(colour(v, 1.0, 16.0)) for v in (1, 2, 4, 8, 16)]
    assert scale == sorted(set(scale))
    assert colour(0.1, 1.0, 16.0) == colour(1.0, 1.0, 16.0)
    assert colour(99.0, 1.0, 16.0) == colour(16.0, 1.0, 16.0)
    assert re.fullmatch("#[0-9a-f]{6}", colour(1.0, 1.0, 1.0))


def test_what_was_measured_is_dotted_and_what_was_kept_is_framed() -> None:
    drawing = heat_map(block(lambda x, y: x + y, measured=((8, 8), (32, 24), (999, 8)), chosen=(16, 24)))
    root = ElementTree.fromstring(str(drawing))
    assert len(list(root.iter("circle"))) == 2
    assert [r.findtext("title") for r in root.iter("rect") if r.get("stroke")] == ["chosen: 16 in, 24 out"]


def test_one_width_is_a_bar_each_and_none_is_no_picture() -> None:
    axes = (Axis("channels", (8, 16, 24)),)
    one = SurfaceRow("pool", axes, [1.0, 2.0, 3.0], chosen=(16,))
    root = ElementTree.fromstring(str(heat_map(one)))
    bars = [r for r in root.iter("rect") if r.get("class", "").startswith("bar-")]
    heights = [float(bar.get("height", 0)) for bar in bars]
    assert heights == pytest.approx([heights[0], 2 * heights[0], 3 * heights[0]], rel=0.02)
    assert [bar.get("class") for bar in bars] == ["bar-dense", "bar-pruned", "bar-dense"]
    assert heat_map(SurfaceRow("add", ms=1.0)) is None
    assert heat_map(SurfaceRow("add")) is None


def test_fine_grids_are_thinned_ends_kept() -> None:
    assert thinned(range(10), 32) == list(range(10))
    chosen = thinned(range(1000), 32)
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 999, 32)


def test_names_are_escaped() -> None:
    assert "<b>" not in str(heat_map(block(lambda x, y: 1.0, name="<b>&")))


def test_surfaces_of_a_network_are_its_tables_prices(tmp_path: Path) -> None:
    table = LatencyTable(tmp_path / "t.sqlite", cold_share=0.5)
    cost = LatencyCost(table, FakeBackend(latency=smooth, cold=3.0))
    latency = latency_of(smcp_fx.prepare(network(), torch.randn(2, 3, 12, 12), cost=cost).pruner.cost)
    assert latency is not None
    found = {entry.name: entry for entry in surfaces(latency, {"0": 16, "2": 40, "4": 8})}
    inner = found["2"]
    assert inner.chosen == (16, 40)
    assert inner.full == (32, 64)
    xs, ys = (axis.values for axis in inner.axes)
    block = next(block for block in latency.blocks if block.name == "2")
    prices = latency.surfaces(0.5)[block.signature, block.grids]
    assert all(
        float(prices(*map(np.array, point))) == pytest.approx(2 * smooth(*point)) for point in inner.measured
    )
    for i, x in enumerate(xs):
        for j, y in enumerate(ys):
            assert inner.ms[i][j] == pytest.approx(float(prices(np.array(x), np.array(y))))
    assert [16, 40] in [[x, y] for x in xs for y in ys]
    page = render_page(Report(model="m", surfaces=tuple(found.values())))
    assert "Latency by channels" in page
    assert page.count("16 in, 40 out") >= 1
