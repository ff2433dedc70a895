"""Lays out the channel graph: layers down the page in the order they run, groups as lanes beside them.

A lane runs from the first layer that writes a group's channels to the last layer that reads them. Where it
crosses a row, a mark shows whether that layer writes, reads or carries them. A big network gets a layout for
every depth of its module tree, with deeper modules folded into one row. Groups inside a folded row vanish,
and groups that join the same rows share a lane. Positions are whole rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The page first shows the deepest level with at most this many rows.
READABLE_ROWS = 40
#: The page's style sheet has rules for this many levels.
MOST_LEVELS = 6
_INPUT = "input"


@dataclass(frozen=True)
class MapRow:
    """A layer, or a module folded with all its layers; ``inside``: the groups that lie wholly inside it."""

    label: str
    layers: tuple[str, ...]
    inside: tuple[int, ...] = ()

    @property
    def folded(self) -> bool:
        """Whether the row holds several layers."""
        return len(self.layers) > 1


@dataclass(frozen=True, eq=False)
class Lane:
    """Groups (their indices) that join the same rows: ``marks[row]`` is "write", "read", "both" or "carry"."""

    groups: tuple[int, ...]
    marks: Mapping[int, str]
    column: int = 0
    top: int = field(default=0)  # the row of its node: the first row that writes it

    @property
    def bottom(self) -> int:
        """The last row it reaches."""
        return max(self.marks)


@dataclass(frozen=True)
class MapLevel:
    """One layout: the module tree shown down to ``depth`` names."""

    depth: int
    rows: tuple[MapRow, ...]
    lanes: tuple[Lane, ...]

    @property
    def columns(self) -> int:
        """The number of columns that the lanes take."""
        return 1 + max((lane.column for lane in self.lanes), default=-1)


def levels(layers: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[MapLevel]:
    """Return the layouts, from the coarsest to one with every layer; none without groups.

    ``layers`` and ``groups`` as in the report; layers that only groups name come after the others.
    """
    if not groups:
        return []
    paths = list(dict.fromkeys(str(layer["path"]) for layer in layers))
    for group in groups:
        paths += [path for path in (*group["producers"], *group["consumers"]) if path not in paths]
    uses = _uses(layers, groups)
    pinned = [bool(group.get("pinned")) for group in groups]
    shown: list[MapLevel] = []
    deepest = max((path.count(".") + 1 for path in paths), default=1)
    for depth in range(1, deepest + 1):
        level = _level(depth, paths, uses, pinned, every=depth == deepest)
        if depth == deepest:
            coarser = [other for other in shown if len(other.rows) < len(level.rows)]
            return [*coarser[: MOST_LEVELS - 1], level]
        if len(level.rows) > (len(shown[-1].rows) if shown else 2):
            shown.append(level)
    return shown


def first_shown(maps: Sequence[MapLevel]) -> int:
    """Return the index of the deepest level that is still easy to read."""
    fits = [index for index, level in enumerate(maps) if len(level.rows) <= READABLE_ROWS]
    return max(fits, default=0)


def _uses(layers: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return each group's uses by layer: {path: mark}."""
    by_name = {str(group["name"]): index for index, group in enumerate(groups)}
    uses: list[dict[str, str]] = []
    for group in groups:
        marks: dict[str, str] = {}
        for mark, paths in (("write", group["producers"]), ("read", group["consumers"])):
            for path in paths:
                marks[path] = mark if marks.get(path, mark) == mark else "both"
        uses.append(marks)
    for layer in layers:
        for side in ("in_group", "out_group"):
            for name in _names(layer.get(side)):
                if name in by_name:
                    uses[by_name[name]].setdefault(str(layer["path"]), "carry")
    return uses


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value, *value.split(", ")]
    return [str(name) for name in value] if isinstance(value, (list, tuple)) else []


def _level(
    depth: int,
    paths: Sequence[str],
    uses: Sequence[Mapping[str, str]],
    pinned: Sequence[bool],
    *,
    every: bool,
) -> MapLevel:
    members: dict[str, list[str]] = {}
    for path in paths:
        members.setdefault(path if every else ".".join(path.split(".")[:depth]), []).append(path)
    named = [(key if len(inside) > 1 else inside[0], tuple(inside)) for key, inside in members.items()]
    orphans = any("write" not in marks.values() and "both" not in marks.values() for marks in uses)
    if orphans:
        named.insert(0, (_INPUT, ()))
    row_of = {path: row for row, (_, inside) in enumerate(named) for path in inside}
    holds: dict[int, list[int]] = {}
    lanes: dict[Any, Lane] = {}
    for index, by_path in enumerate(uses):
        marks = _marks(by_path, row_of)
        if not marks:
            continue
        if len(marks) == 1 and len(named[next(iter(marks))][1]) > 1 and "both" in marks.values():
            holds.setdefault(next(iter(marks)), []).append(index)
            continue
        key = index if every else (pinned[index], *sorted(marks.items()))
        before = lanes[key].groups if key in lanes else ()
        top = min(row for row, mark in marks.items() if mark in {"write", "both"})
        lanes[key] = Lane((*before, index), marks, top=top)
    rows = tuple(
        MapRow(label, inside, tuple(holds.get(row, ()))) for row, (label, inside) in enumerate(named)
    )
    return MapLevel(depth, rows, tuple(_columns(list(lanes.values()))))


def _marks(by_path: Mapping[str, str], row_of: Mapping[str, int]) -> dict[int, str]:
    """Return each row's use of a group; the input row, 0, writes a group that no layer writes."""
    seen: dict[int, set[str]] = {}
    for path, mark in by_path.items():
        seen.setdefault(row_of[path], set()).update({"write", "read"} if mark == "both" else {mark})
    if seen and not any("write" in marks for marks in seen.values()):
        seen[0] = {"write"}
    marks = {}
    for row, sides in sorted(seen.items()):
        sides = sides - {"carry"} or sides
        marks[row] = "both" if len(sides) > 1 else next(iter(sides))
    return marks


def _columns(lanes: list[Lane]) -> list[Lane]:
    """Give each lane the first column that is free over its whole length, long lanes first at each row."""
    busy_until: list[int] = []
    placed = []
    for lane in sorted(lanes, key=lambda lane: (min(lane.marks), -lane.bottom, lane.groups)):
        start = min(lane.marks)
        free = [column for column, last in enumerate(busy_until) if last < start]
        column = free[0] if free else len(busy_until)
        if not free:
            busy_until.append(0)
        busy_until[column] = lane.bottom
        placed.append(Lane(lane.groups, lane.marks, column, lane.top))
    return placed
