"""Draw the channel graph's layouts, with what the page's script needs to explain and search them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from smcp_fx.report.channel_map import Lane, MapLevel, MapRow, first_shown, levels
from smcp_fx.report.svg import Markup, dot, element, line, rect, text

_ROW = 25.0
_LETTER = 6.8  # a letter's mean advance in the widest of the page's fonts, in pixels
_LABEL_LIMIT = 46
#: The zoom buttons: what each does (the script knows them by it), its sign, its keys.
_ZOOM = (
    ("zoom out", "\N{MINUS SIGN}", "- or Ctrl and the wheel"),
    ("zoom in", "+", "+ or Ctrl and the wheel"),
    ("fit", "fit", "0"),
    ("true size", "1:1", "1"),
)


def draw_channel_graph(
    groups: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]]
) -> Markup | None:
    """Return the interactive channel graph, or None for a network without groups."""
    found = levels(layers, groups)
    if not found:
        return None
    shown = first_shown(found)
    choices, drawings = [], []
    for index, level in enumerate(found):
        every = index == len(found) - 1
        size = sum(bool(row.layers) for row in level.rows)
        name = f"Every layer ({size})" if every else f"Depth {level.depth} ({size} modules)"
        checked = "checked" if index == shown else None
        choices.append(
            element(
                "label",
                element("input", type="radio", name="level", value=index, checked=checked),
                element("span", name),
            )
        )
        drawing = _draw_level(level, groups, expandable=not every)
        drawings.append(element("div", drawing, class_=f"level level-{index}"))
    bar = element("fieldset", element("legend", "Modules shown"), *choices, class_="tabs")
    body = element("div", element("div", *drawings, class_="scroll"), _panel(), class_="cg-body")
    return element(
        "div",
        element("div", bar, _zoom_buttons(), _search(), class_="cg-bar"),
        _legend(any("kept" in group for group in groups)),
        body,
        element("script", Markup(_data(groups, layers)), type="application/json", id="cg-data"),
        class_="cg",
    )


def _zoom_buttons() -> Markup:
    return element(
        "div",
        *(
            element("button", sign, type="button", data_zoom=name, aria_label=name, title=f"{name} ({keys})")
            for name, sign, keys in _ZOOM
        ),
        class_="zoom js-only",
        role="group",
        aria_label="Zoom",
    )


def _search() -> Markup:
    return element(
        "label",
        element("span", "Find a layer, a group or a reason"),
        element("input", type="search", id="cg-search", autocomplete="off", spellcheck="false"),
        element("output", "", id="cg-found", aria_live="polite"),
        class_="search js-only",
    )


def _panel() -> Markup:
    return element(
        "aside",
        element(
            "p",
            "Point at a group or a layer to see its members, its shapes and what would go with it; click to keep it. "
            "A box with a plus opens its module. Drag to move, Ctrl and the wheel to zoom.",
        ),
        id="cg-panel",
        class_="panel js-only",
        aria_live="polite",
    )


def describe_group(group: Mapping[str, Any]) -> str:
    """Return what a group is, in a few lines of plain text."""
    size = f"{group['kept']} of {group['size']} kept" if "kept" in group else f"{group['size']} units"
    lines = [f"{group['name']}: {size}"]
    for title, key in (("written by", "producers"), ("read by", "consumers")):
        members = list(group.get(key) or [])
        if members:
            more = f" and {len(members) - 8} more" if len(members) > 8 else ""
            lines.append(f"{title} {', '.join(members[:8])}{more}")
    reasons = list(group.get("pinned") or [])
    if reasons:
        lines.append(f"must stay: {'; '.join(reasons)}")
    if limits := list(group.get("limits") or []):
        lines.append(f"asked for: {', '.join(limits)}")
    return "\n".join(lines)


def _data(groups: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]]) -> str:
    """Return what the script tells of each group and layer: {"groups": [...], "layers": {path: {...}}}."""
    of_group = ("name", "size", "kept", "producers", "consumers", "pinned", "limits", "permitted", "channels")
    of_layer = ("kind", "weight_shape", "in_shape", "out_shape", "groups")
    data = {
        "groups": [{key: group[key] for key in of_group if key in group} for group in groups],
        "layers": {
            str(layer["path"]): {key: layer[key] for key in of_layer if key in layer} for layer in layers
        },
    }
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no "</script>" from a name


def _draw_level(level: MapLevel, groups: Sequence[Mapping[str, Any]], *, expandable: bool) -> Markup:
    labels = [_shortened(row.label) for row in level.rows]
    insides = [_inside(row, groups) for row in level.rows]
    label_width = max(len(label) for label in labels) * _LETTER + 14
    inside_width = max((len(inside) for inside in insides), default=0) * 5.3 + (16 if any(insides) else 0)
    spine = label_width + 8
    first = spine + 18 + inside_width
    texts = {lane: _node_text(lane, groups) for lane in level.lanes}
    widths = [
        max(len(texts[lane]) for lane in level.lanes if lane.column == c) * 5.9 + 12
        for c in range(level.columns)
    ]
    centres, x = [], first
    for width in widths:
        centres.append(x + width / 2)
        x += width + 7
    height = _ROW * len(level.rows) + 12
    reach = [spine] * len(level.rows)
    for lane in level.lanes:
        for place in lane.marks:
            reach[place] = max(reach[place], centres[lane.column])
    body: list[Markup] = []
    for index, row in enumerate(level.rows):
        before = labels[index - 1] if index else ""
        body.append(
            _draw_row(row, index, labels[index], before, spine, reach[index], insides[index], expandable)
        )
    for lane in sorted(level.lanes, key=lambda lane: lane.top):
        body.append(
            _draw_lane(lane, centres[lane.column], widths[lane.column], texts[lane], groups, level.rows)
        )
    label = f"Channel graph: {len(groups)} groups of channels over {len(level.rows)} rows of layers"
    return element(
        "svg",
        element("title", label),
        *body,
        viewBox=f"0 0 {x + 4:.0f} {height:.0f}",
        width=f"{x + 4:.0f}",
        height=f"{height:.0f}",
        class_="graph",
        role="group",
        aria_label=label,
    )


def _middle(row: int) -> float:
    return 6 + _ROW * (row + 0.5)


def _draw_row(
    row: MapRow,
    index: int,
    label: str,
    before: str,
    spine: float,
    reach: float,
    inside: str,
    expandable: bool,
) -> Markup:
    y = _middle(index)
    shared = _shared_prefix(before, label)
    name = element(
        "text",
        element("tspan", label[:shared], class_="faint") if shared else Markup(""),
        element("tspan", label[shared:]),
        x=spine - 14,
        y=y + 4,
        class_="row-label",
        text_anchor="end",
    )
    size = 11.0 if row.folded else 7.0
    tip = f"{row.label}: {len(row.layers)} layers" if row.folded else row.label
    parts = [
        element("title", tip + (f"\n{inside} inside" if inside else "")),
        rect(0, y - _ROW / 2, reach, _ROW, "row-back"),
        name,
    ]
    if reach > spine:
        parts.append(line(spine, y, reach, y, "row-line"))
    parts.append(
        rect(spine - size / 2, y - size / 2, size, size, "layer folded" if row.folded else "layer", rx=2)
    )
    if row.folded and expandable:
        parts += [line(spine - 3, y, spine + 3, y, "plus"), line(spine, y - 3, spine, y + 3, "plus")]
    if inside:
        width = len(inside) * 5.3 + 8
        parts += [
            rect(spine + 12, y - 8, width, 16, "inside-back", rx=3),
            text(spine + 16, y + 3.5, inside, "inside"),
        ]
    return element(
        "g",
        *parts,
        class_="row",
        data_row=index,
        data_inside=" ".join(map(str, row.inside)),
        data_name=row.label,
        data_layers="\n".join(row.layers),
        tabindex=0,
        role="button",
        aria_label=tip,
        data_expand=1 if row.folded and expandable else None,
    )


def _draw_lane(
    lane: Lane,
    x: float,
    width: float,
    label: str,
    groups: Sequence[Mapping[str, Any]],
    rows: Sequence[MapRow],
) -> Markup:
    members = [groups[index] for index in lane.groups]
    pinned = all(group.get("pinned") for group in members)
    tips = [describe_group(group) for group in members[:4]]
    if len(members) > 4:
        tips.append(f"and {len(members) - 4} more groups")
    kept, size = _totals(members)
    pruned = any("kept" in group for group in members)
    y = _middle(lane.top)
    parts = [
        element("title", "\n".join(tips)),
        line(x, _middle(min(lane.marks)), x, _middle(lane.bottom), "lane-line"),
    ]
    for row, mark in lane.marks.items():
        if row == lane.top:
            continue
        at = _middle(row)
        if mark == "carry":
            parts.append(rect(x - 4.5, at - 1.5, 9, 3, "mark carry"))
        else:
            parts.append(dot(x, at, 4 if mark == "write" else 3.6, f"mark {mark}"))
    parts += [
        rect(x - width / 2, y - 9, width, 18, "node", rx=5),
        text(x, y + (3 if pruned else 3.8), label, "node-text", "middle"),
    ]
    if pruned:
        share = kept / size if size else 1
        parts += [
            rect(x - width / 2 + 4, y + 5.2, width - 8, 2, "node-track", rx=1),
            rect(x - width / 2 + 4, y + 5.2, (width - 8) * share, 2, "node-share", rx=1),
        ]
    return element(
        "g",
        *parts,
        class_="lane pinned" if pinned else "lane",
        data_groups=" ".join(map(str, lane.groups)),
        data_rows=" ".join(map(str, lane.marks)),
        tabindex=0,
        role="button",
        aria_label=f"{', '.join(str(group['name']) for group in members[:4])}: {_share(members)} channels",
    )


def _node_text(lane: Lane, groups: Sequence[Mapping[str, Any]]) -> str:
    several = f"{len(lane.groups)}: " if len(lane.groups) > 1 else ""
    return several + _share([groups[index] for index in lane.groups])


def _inside(row: MapRow, groups: Sequence[Mapping[str, Any]]) -> str:
    if not row.inside:
        return ""
    share = _share([groups[index] for index in row.inside])
    return f"{len(row.inside)} group{'s' * (len(row.inside) > 1)}, {share}"


def _share(members: Sequence[Mapping[str, Any]]) -> str:
    """Return "kept/size"; the size alone where nothing was pruned yet."""
    kept, size = _totals(members)
    return f"{kept}/{size}" if any("kept" in group for group in members) else f"{size}"


def _totals(members: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    kept = sum(int(group.get("kept", group["size"])) for group in members)
    return kept, sum(int(group["size"]) for group in members)


def _shortened(label: str) -> str:
    return label if len(label) <= _LABEL_LIMIT else f"\N{HORIZONTAL ELLIPSIS}{label[1 - _LABEL_LIMIT :]}"


def _shared_prefix(before: str, label: str) -> int:
    """Return how many letters of ``label`` repeat the modules of the row before it."""
    shared = 0
    for old, new in zip(before.split("."), label.split(".")[:-1], strict=False):
        if old != new:
            break
        shared += len(new) + 1
    return shared


def _legend(pruned: bool) -> Markup:
    def sample(body: Markup, words: str) -> Markup:
        drawing = element(
            "svg", body, viewBox="0 0 22 18", width=22, height=18, class_="graph", aria_hidden="true"
        )
        return element("span", drawing, words)

    pinned = element("g", rect(1, 2, 20, 14, "node", rx=4), class_="lane pinned")
    return element(
        "p",
        sample(rect(7.5, 5.5, 7, 7, "layer", rx=2), "layer"),
        sample(
            element("g", rect(1, 2, 20, 14, "node", rx=4), class_="lane"),
            f"group of channels: {'kept/size' if pruned else 'its units'} (before a colon: how many groups)",
        ),
        sample(pinned, "must stay whole"),
        sample(element("g", dot(11, 9, 4, "mark write"), class_="lane"), "the layer writes it too"),
        sample(element("g", dot(11, 9, 3.6, "mark read"), class_="lane"), "the layer reads it"),
        sample(element("g", dot(11, 9, 3.6, "mark both"), class_="lane"), "both"),
        sample(element("g", rect(6.5, 7.5, 9, 3, "mark carry"), class_="lane"), "carries it (depthwise)"),
        class_="legend",
    )
