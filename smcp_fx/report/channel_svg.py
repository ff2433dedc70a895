"""Positions of the channel graph's layouts, in pixels; `templates/channel_graph.html` draws them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from smcp_fx.report.channel_map import Lane, MapLevel, MapRow, first_shown, levels
from smcp_fx.report.svg import ending

_ROW = 25.0
_LETTER = 6.8  # a letter's mean advance in the widest of the page's fonts, in pixels
_LABEL_LIMIT = 46
_Group = Mapping[str, Any]


def lay_out(groups: Sequence[_Group], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the template's layouts and the script's data; None for a network without groups."""
    maps = levels(layers, groups)
    if not maps:
        return None
    shown = first_shown(maps)
    drawn = []
    for index, level in enumerate(maps):
        every = index == len(maps) - 1
        size = sum(bool(row.layers) for row in level.rows)
        name = f"Every layer ({size})" if every else f"Depth {level.depth} ({size} modules)"
        label = f"Channel graph: {len(groups)} groups of channels over {len(level.rows)} rows of layers"
        drawn.append(
            {"name": name, "shown": index == shown, "label": label, **_level(level, groups, not every)}
        )
    pruned = any("kept" in group for group in groups)
    return {"levels": drawn, "data": _data(groups, layers), "counts": "kept/size" if pruned else "its units"}


def _data(groups: Sequence[_Group], layers: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the script's data on groups and layers: {"groups": [...], "layers": {path: {...}}}."""
    of_group = ("name", "size", "kept", "producers", "consumers", "pinned", "limits", "permitted", "channels")
    of_layer = ("kind", "weight_shape", "in_shape", "out_shape", "groups")
    data = {
        "groups": [{key: group[key] for key in of_group if key in group} for group in groups],
        "layers": {
            str(layer["path"]): {key: layer[key] for key in of_layer if key in layer} for layer in layers
        },
    }
    return Markup(json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))  # no "</script>" from a name


def _level(level: MapLevel, groups: Sequence[_Group], expandable: bool) -> dict[str, Any]:
    """Place labels at the left, then the spine of layers, groups inside folded rows, a column per lane."""
    labels = [ending(row.label, _LABEL_LIMIT) for row in level.rows]
    insides = [_inside(row, groups) for row in level.rows]
    spine = max(map(len, labels)) * _LETTER + 22
    texts = {lane: _node_text([groups[index] for index in lane.groups]) for lane in level.lanes}
    x = spine + 18 + max((len(inside) for inside in insides), default=0) * 5.3 + (16 if any(insides) else 0)
    centres, widths, reach = [], [], [spine] * len(level.rows)
    for column in range(level.columns):
        widths.append(max(len(texts[lane]) for lane in level.lanes if lane.column == column) * 5.9 + 12)
        centres.append(x + widths[-1] / 2)
        x += widths[-1] + 7
    for lane in level.lanes:
        for place in lane.marks:
            reach[place] = max(reach[place], centres[lane.column])
    rows = [
        {"y": _middle(index), "reach": reach[index], **_row(row, label, before, inside, expandable)}
        for index, (row, label, before, inside) in enumerate(
            zip(level.rows, labels, ["", *labels], insides, strict=False)
        )
    ]
    lanes = [
        {"x": centres[lane.column], "width": widths[lane.column], "text": texts[lane], **_lane(lane, groups)}
        for lane in sorted(level.lanes, key=lambda lane: lane.top)
    ]
    return {
        "width": x + 4,
        "height": _ROW * len(level.rows) + 12,
        "spine": spine,
        "rows": rows,
        "lanes": lanes,
    }


def _middle(row: int) -> float:
    return 6 + _ROW * (row + 0.5)


def _row(row: MapRow, label: str, before: str, inside: str, expandable: bool) -> dict[str, Any]:
    shared = _shared_prefix(before, label)
    return {
        "row": row,
        "repeated": label[:shared],
        "label": label[shared:],
        "tip": f"{row.label}: {len(row.layers)} layers" if row.folded else row.label,
        "inside": inside,
        "expands": row.folded and expandable,
    }


def _lane(lane: Lane, groups: Sequence[_Group]) -> dict[str, Any]:
    members = [groups[index] for index in lane.groups]
    tips = [describe_group(group) for group in members[:4]]
    if len(members) > 4:
        tips.append(f"and {len(members) - 4} more groups")
    kept, size = _totals(members)
    return {
        "lane": lane,
        "tip": "\n".join(tips),
        "label": f"{', '.join(str(group['name']) for group in members[:4])}: {_share(members)} channels",
        "y": _middle(lane.top),
        "ends": (_middle(min(lane.marks)), _middle(lane.bottom)),
        "marks": [(_middle(row), mark) for row, mark in lane.marks.items() if row != lane.top],
        "pinned": all(group.get("pinned") for group in members),
        "pruned": any("kept" in group for group in members),
        "share": kept / size if size else 1,
    }


def describe_group(group: _Group) -> str:
    """Describe a group in a few lines of plain text."""
    size = f"{group['kept']} of {group['size']} kept" if "kept" in group else f"{group['size']} units"
    lines = [f"{group['name']}: {size}"]
    for title, key in (("written by", "producers"), ("read by", "consumers")):
        if members := list(group.get(key) or []):
            more = f" and {len(members) - 8} more" if len(members) > 8 else ""
            lines.append(f"{title} {', '.join(members[:8])}{more}")
    if reasons := group.get("pinned"):
        lines.append(f"must stay: {'; '.join(reasons)}")
    if limits := group.get("limits"):
        lines.append(f"asked for: {', '.join(limits)}")
    return "\n".join(lines)


def _node_text(members: Sequence[_Group]) -> str:
    return (f"{len(members)}: " if len(members) > 1 else "") + _share(members)


def _inside(row: MapRow, groups: Sequence[_Group]) -> str:
    many, members = len(row.inside), [groups[index] for index in row.inside]
    return f"{many} group{'s' * (many > 1)}, {_share(members)}" if many else ""


def _share(members: Sequence[_Group]) -> str:
    """Return "kept/size", or only the size if nothing has been pruned yet."""
    kept, size = _totals(members)
    return f"{kept}/{size}" if any("kept" in group for group in members) else f"{size}"


def _totals(members: Sequence[_Group]) -> tuple[int, int]:
    kept = sum(int(group.get("kept", group["size"])) for group in members)
    return kept, sum(int(group["size"]) for group in members)


def _shared_prefix(before: str, label: str) -> int:
    """Return the number of letters of ``label`` that repeat the modules of the row above."""
    shared = 0
    for old, new in zip(before.split("."), label.split(".")[:-1], strict=False):
        if old != new:
            break
        shared += len(new) + 1
    return shared
