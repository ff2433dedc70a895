"""The worth of each group's channels: the rise of the loss over the share kept, one panel per group."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from smcp_fx.report.schema import WorthRow
from smcp_fx.report.svg import NARROW, WIDE, Panel, ending, line, picture, rounded_up, text

#: Most panels; more would be hard to read. Chosen, not measured.
PANELS = 40
_LEFT, _CELL, _WIDE, _HIGH = 44.0, 158.0, 130.0, 70.0


def worth_curves(groups: Sequence[WorthRow], wide: float = WIDE) -> Markup | None:
    """Return a panel for each of the first `PANELS` groups, all to one scale; None without groups.

    Rises are shares of the cost of all choices together. The scale ends at four times the largest chosen
    rise; steeper curves leave their panel at the top.
    """
    if not groups:
        return None
    whole = sum(map(_chosen, groups)) or max(max(group.rises) for group in groups) or 1.0
    top = rounded_up(400 * max(map(_chosen, groups)) / whole or 100.0, 2)
    shown, across = groups[:PANELS], 2 if wide == NARROW else 6
    body: list[Markup] = []
    for index, group in enumerate(shown):
        row, column = divmod(index, across)
        panel = Panel(_LEFT + _CELL * column, 34 + (_HIGH + 50) * row, _WIDE, _HIGH, (0, 100), (0, top))
        body += _panel(panel, group, 100 / whole, axis=not column)
    words = (
        f"Rise of the loss over the share of channels kept, {len(shown)} groups; the dot is what was chosen"
    )
    width = NARROW if wide == NARROW else _LEFT + _CELL * across
    return picture(width, 34 + (_HIGH + 50) * -(-len(shown) // across), words, body)


def _panel(panel: Panel, group: WorthRow, scale: float, axis: bool) -> list[Markup]:
    top = panel.y_range[1]
    drawn = [text(panel.left, panel.top - 12, ending(group.name, 20), "label")]
    for mark, kind in ((0.0, "baseline"), (top, "grid")):
        drawn.append(line(panel.left, panel.y(mark), panel.right, panel.y(mark), kind))
        if axis:
            drawn.append(text(panel.left - 6, panel.y(mark) + 4, f"{mark:g}%", "tick", "end"))
    for mark, anchor in ((0, "start"), (50, "middle"), (100, "end")):
        drawn.append(text(panel.x(mark), panel.bottom + 16, f"{mark}%", "tick", anchor))
    points = [(100 * c / group.size, r * scale) for c, r in zip(group.counts, group.rises, strict=True)]
    drawn.append(panel.curve(_below(points, top)))
    rise = _chosen(group) * scale
    tip = f"{group.name}: {group.kept} of {group.size} kept, {rise:.1f}% of what all choices cost"
    return [*drawn, panel.point(100 * group.kept / group.size, min(rise, top), tip)]


def _chosen(group: WorthRow) -> float:
    """Return the rise at the chosen count."""
    return group.rises[group.counts.index(group.kept)]


def _below(points: Sequence[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """Return the part of a falling curve below ``top``."""
    inside = [point for point in points if point[1] <= top]
    above = [point for point in points if point[1] > top]
    if not above or not inside:
        return inside
    (x, y), (x2, y2) = above[-1], inside[0]
    return [(x + (x2 - x) * (y - top) / (y - y2), top), *inside]
