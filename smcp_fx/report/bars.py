"""Pictures of bars: the latency asked for and reached, channels kept by layer, latency by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smcp_fx.report.formats import milliseconds, number, percent
from smcp_fx.report.schema import BlockRow, LayerRow, Report
from smcp_fx.report.svg import Markup, Panel, element, join, line, picture, rect, rounded_up, text
from smcp_fx.texts import significant

#: Widths of a picture: on a screen, and on a telephone, where bars must still tell their lengths.
_WIDE, NARROW = 1080.0, 364.0
_SHOWN_BLOCKS = 40
_LETTER = 6.9  # a letter's mean advance in the widest of the page's fonts, in pixels


def latency_bars(report: Report, wide: float = _WIDE) -> Markup | None:
    """Return measured latency, dense over pruned, with quartiles and the target; None if not measured."""
    sides = [report.dense, report.pruned]
    values = [number(side.latency_ms) for side in sides]
    dense, pruned = values
    if dense is None or pruned is None or dense <= 0:
        return None
    ends = [number(side.latency_q3_ms) or 0.0 for side in sides]
    panel = Panel(
        64, 8, wide - 64 - (108 if wide > NARROW else 76), 72, (0, max(dense, pruned, *ends)), (0, 1)
    )
    body: list[Markup] = []
    for index, (name, value, side) in enumerate(
        zip(("dense", "pruned"), (dense, pruned), sides, strict=True)
    ):
        y = panel.top + 8 + 34 * index
        tip = f"{name}: {milliseconds(value)}"
        body.append(rect(panel.left, y, panel.x(value) - panel.left, 24, f"bar-{name}", tip, rx=2))
        body.append(text(panel.left - 10, y + 16, name, "label", "end"))
        low, high = number(side.latency_q1_ms), number(side.latency_q3_ms)
        end = panel.x(max(value, high or 0.0))
        if low is not None and high is not None:
            body.append(line(panel.x(low), y + 12, panel.x(high), y + 12, "whisker"))
            body += [line(panel.x(at), y + 8, panel.x(at), y + 16, "whisker") for at in (low, high)]
        body.append(text(end + 10, y + 17, milliseconds(value), "value"))
    fraction = number(report.target_fraction)
    height = 92.0
    if fraction is not None and report.cost == "ms":
        at, height = panel.x(fraction * dense), 112.0
        body.append(line(at, panel.top, at, 86, "target"))
        body.append(text(at, 102, f"asked: {percent(fraction, trim=True)}", "target-label", "middle"))
    label = f"Measured latency: dense {milliseconds(dense)}, pruned {milliseconds(pruned)}"
    return picture(wide, height, label, body, _class(wide))


def channel_bars(layers: Sequence[LayerRow], wide: float = _WIDE) -> Markup | None:
    """Return each layer's output channels: all of them in grey, those kept in blue; None without layers."""
    if not layers:
        return None
    pitch = (wide - 60) / len(layers)
    named = pitch >= 13
    names = [layer.path for layer in layers]
    below = min(max(len(name) for name in names) * _LETTER, 200.0) + 12 if named else 54.0
    top = rounded_up(max(layer.out_channels for layer in layers))
    panel = Panel(52, 28, wide - 60, 230, (0, len(layers)), (0, top))
    width = min(pitch * 0.78, 34.0)
    body = panel.y_axis("output channels")
    for index, layer in enumerate(layers):
        full, kept = layer.out_channels, layer.out_kept
        x = panel.x(index + 0.5) - width / 2
        tip = (
            f"{layer.path} ({layer.kind}): {kept} of {full} output channels kept, "
            f"{layer.in_kept} of {layer.in_channels} input channels"
        )
        body.append(rect(x, panel.y(full), width, panel.bottom - panel.y(full), "bar-dense", tip))
        body.append(rect(x, panel.y(kept), width, panel.bottom - panel.y(kept), "bar-pruned", tip))
    body.append(_vertical_names(names, panel, below) if named else _brackets(names, panel))
    total = sum(layer.out_channels for layer in layers)
    kept_total = sum(layer.out_kept for layer in layers)
    label = f"Kept output channels of {len(layers)} layers: {kept_total} of {total}"
    return picture(wide, panel.bottom + below, label, body, _class(wide))


def block_bars(blocks: Sequence[BlockRow], wide: float = _WIDE) -> Markup | None:
    """Return the latency of each block, dense in grey and pruned in blue; None without blocks.

    Of more than forty blocks, the slowest are drawn and the others summed up.
    """
    if not blocks:
        return None
    rows = [(b.name, number(b.dense_ms) or 0.0, number(b.pruned_ms) or 0.0) for b in blocks]
    others: list[tuple[str, float, float]] = []
    if len(rows) > _SHOWN_BLOCKS:
        largest = set(sorted(range(len(rows)), key=lambda i: -rows[i][1])[:_SHOWN_BLOCKS])
        others = [row for index, row in enumerate(rows) if index not in largest]
        rows = [row for index, row in enumerate(rows) if index in largest]
    longest = 0.28 * wide
    left = min(max(len(name) for name, _, _ in rows) * _LETTER, longest) + 14
    step = 22.0
    top = max(max(dense, pruned) for _, dense, pruned in rows) or 1.0
    right = max(len(_from_to(dense, pruned)) for _, dense, pruned in rows) * _LETTER + 12
    panel = Panel(left, 8, wide - left - right, step * len(rows), (0, rounded_up(top)), (0, 1))
    body = panel.x_axis("ms")
    for index, (name, dense, pruned) in enumerate(rows):
        y = panel.top + step * index
        tip = f"{name}: {milliseconds(dense)} dense, {milliseconds(pruned)} pruned"
        body.append(text(left - 10, y + 15, _ending(name, int(longest / _LETTER)), "label", "end"))
        body.append(rect(left, y + 3, panel.x(dense) - left, 16, "bar-dense", tip, rx=1))
        body.append(rect(left, y + 6, panel.x(pruned) - left, 10, "bar-pruned", tip, rx=1))
        at = panel.x(max(dense, pruned)) + 8
        body.append(text(at, y + 15, _from_to(dense, pruned), "value"))
    if others:
        dense, pruned = sum(row[1] for row in others), sum(row[2] for row in others)
        words = f"and {len(others)} smaller blocks, together {_from_to(dense, pruned)} ms"
        body.append(text(left, panel.bottom + 38, words, "note"))
    label = f"Latency of {len(blocks)} blocks, dense against pruned, in ms"
    return picture(wide, panel.bottom + 46, label, body, _class(wide))


def _class(wide: float) -> str:
    return "chart wide" if wide > NARROW else "chart narrow"


def _from_to(dense: float, pruned: float) -> str:
    return f"{significant(dense)} \N{RIGHTWARDS ARROW} {significant(pruned)}"


def _vertical_names(names: Sequence[str], panel: Panel, below: float) -> Markup:
    limit = int((below - 12) / _LETTER)
    drawn = []
    for index, name in enumerate(names):
        x, y = panel.x(index + 0.5) + 4, panel.bottom + 8
        drawn.append(
            element(
                "text",
                _ending(name, limit),
                x=x,
                y=y,
                transform=f"rotate(-90 {x:.1f} {y:.1f})",
                text_anchor="end",
                class_="label",
            )
        )
    return join(drawn)


def _brackets(names: Sequence[str], panel: Panel) -> Markup:
    """Name runs of layers by the module that holds them, where single names would not fit."""
    runs: list[list[Any]] = []
    for index, key in enumerate(_modules(names)):
        if runs and runs[-1][0] == key:
            runs[-1][2] = index + 1
        else:
            runs.append([key, index, index + 1])
    drawn = []
    for key, start, end in runs:
        left, right = panel.x(start) + 1.5, panel.x(end) - 1.5
        drawn.append(line(left, panel.bottom + 7, right, panel.bottom + 7, "bracket"))
        short = key.rsplit(".", 1)[-1]
        if right - left >= len(short) * _LETTER:
            drawn.append(text((left + right) / 2, panel.bottom + 24, short, "label", "middle"))
    return join(drawn)


def _modules(names: Sequence[str]) -> list[str]:
    """Return for each layer the module at the depth that divides the network into 4 to 24 parts, if any does."""
    keys = list(names)
    for depth in range(1, 1 + max(name.count(".") for name in names)):
        keys = [".".join(name.split(".")[:depth]) for name in names]
        if len(set(keys)) >= 4:
            break
    return keys


def _ending(name: str, limit: int) -> str:
    return name if len(name) <= limit else f"\N{HORIZONTAL ELLIPSIS}{name[1 - limit :]}"
