"""What the channels of each group are worth: the rise of the loss over the share that is kept, a panel a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smcp_fx.report.schema import WorthRow
from smcp_fx.report.svg import Markup, Panel, dot, line, path, picture, rounded_up, text

#: Panels side by side on a screen, and on a telephone.
ACROSS, NARROW_ACROSS = 6, 2
#: More panels would be a wall of them. Chosen, not measured.
PANELS = 40
_LEFT, _CELL, _WIDE, _HIGH = 44.0, 158.0, 130.0, 70.0
_LETTERS = 20


def worth_curves(groups: Sequence[WorthRow], across: int = ACROSS) -> Markup | None:
    """Return a panel for each group (the first `PANELS`), all to one scale; None without groups.

    Rises are shares of what all choices together cost. The scale ends at four times the largest that was chosen;
    steeper curves leave their panel at the top.
    """
    if not groups:
        return None
    whole = sum(_at(group) for group in groups) or max(max(group.rises) for group in groups) or 1.0
    groups = [replace(group, rises=tuple(100 * rise / whole for rise in group.rises)) for group in groups]
    shown = groups[:PANELS]
    top = rounded_up(4 * max(_at(group) for group in groups) or 100.0, 2)
    body: list[Markup] = []
    for index, group in enumerate(shown):
        row, column = divmod(index, across)
        panel = Panel(_LEFT + _CELL * column, 34 + (_HIGH + 50) * row, _WIDE, _HIGH, (0, 100), (0, top))
        body += _panel(panel, group, axis=not column)
    rows = -(-len(shown) // across)
    words = (
        f"Rise of the loss over the share of channels kept, {len(shown)} groups; the dot is what was chosen"
    )
    kind = "chart wide" if across == ACROSS else "chart narrow"
    return picture(_LEFT + _CELL * across, 34 + (_HIGH + 50) * rows, words, body, kind)


def _panel(panel: Panel, group: WorthRow, axis: bool) -> list[Markup]:
    top = panel.y_range[1]
    points = [(100 * c / group.size, r) for c, r in zip(group.counts, group.rises, strict=True)]
    drawn = [text(panel.left, panel.top - 12, _short(group.name), "label")]
    for mark in (0.0, top):
        drawn.append(
            line(panel.left, panel.y(mark), panel.right, panel.y(mark), "grid" if mark else "baseline")
        )
        if axis:
            drawn.append(text(panel.left - 6, panel.y(mark) + 4, f"{mark:g}%", "tick", "end"))
    for mark, anchor in ((0, "start"), (50, "middle"), (100, "end")):
        drawn.append(text(panel.x(mark), panel.bottom + 16, f"{mark}%", "tick", anchor))
    drawn.append(path([(panel.x(x), panel.y(y)) for x, y in _below(points, top)], "curve"))
    rise = _at(group)
    tip = f"{group.name}: {group.kept} of {group.size} kept, {rise:.1f}% of what all choices cost"
    drawn.append(dot(panel.x(100 * group.kept / group.size), panel.y(min(rise, top)), 4.0, "point", tip))
    return drawn


def _at(group: WorthRow) -> float:
    """The rise at the count that was chosen."""
    return dict(zip(group.counts, group.rises, strict=True))[group.kept]


def _below(points: Sequence[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """The falling curve from where it comes below ``top``."""
    inside = [point for point in points if point[1] <= top]
    above = [point for point in points if point[1] > top]
    if not above or not inside:
        return inside
    (x, y), (x2, y2) = above[-1], inside[0]
    return [(x + (x2 - x) * (y - top) / (y - y2), top), *inside]


def _short(name: str) -> str:
    return name if len(name) <= _LETTERS else f"\N{HORIZONTAL ELLIPSIS}{name[1 - _LETTERS :]}"
