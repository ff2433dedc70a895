"""The picture that compares methods."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from trade_off import Point, Series, trade_off  # noqa: E402

sys.path[:] = _PATH


def test_values_are_where_they_belong() -> None:
    points = (Point(2.0, 0.9, 0.88, 0.92, "50%"), Point(3.0, 0.8, 0.79, 0.81, "25%"))
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
    assert last[1] - second[1] == pytest.approx(2 * (second[1] - first[1]), abs=0.1)  # 95, 90, 80%
    assert any("90.0% (88.0 to 92.0) at 2.00×" in tip for tip in by_tip)
    assert trade_off([], "T") is None


def test_files_have_plain_colours_and_dark_ones_on_top() -> None:
    """Viewers that know no variables and no media queries show the light picture."""
    point = Point(2.0, 0.9, 0.88, 0.92, "50%")
    file = str(trade_off([Series("ours", (point,))], "T"))
    light, dark = file.split("<style>")[0] + file.split("</style>")[1], file.split("<style>")[1]
    assert "var(" not in file and 'font-size="12"' in light
    assert 'class="mark s0" fill="#1d5fc4" stroke="#fcfcfb"' in light
    assert dark.startswith("@media (prefers-color-scheme:dark){svg{fill:#9ba5b3}")
    assert '[class="mark s0"]{fill:#74abff;stroke:#101317}' in dark
    for path in Path(__file__).parents[2].glob("docs/**/*.svg"):
        assert "var(" not in path.read_text(encoding="utf-8"), path
