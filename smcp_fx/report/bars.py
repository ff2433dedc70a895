"""Bar charts: requested and measured latency, channels kept by layer, latency by block, repaired layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from smcp_fx.report.formats import milliseconds, number, percent
from smcp_fx.report.schema import BlockRow, LayerRow, RepairRow, Report
from smcp_fx.report.svg import (
    LETTER,
    NARROW,
    WIDE,
    Panel,
    ending,
    line,
    picture,
    rect,
    rounded_up,
    text,
)
from smcp_fx.texts import significant

_SHOWN_BLOCKS = 40
#: Errors below this, as a share of the outputs' spread, would be written 0.0%.
SEEN = 5e-4
#: Name, lengths of the grey and the blue bar, tooltip, and the words at their end.
_Pair = tuple[str, float, float, str, str]


def latency_bars(report: Report, wide: float = WIDE) -> Markup | None:
    """Return measured latency, dense over pruned, with quartiles and the target; None if not measured."""
    sides = {"dense": report.dense, "pruned": report.pruned}
    dense, pruned = (number(side.latency_ms) for side in sides.values())
    if dense is None or pruned is None or dense <= 0:
        return None
    most = max(dense, pruned, *(number(side.latency_q3_ms) or 0.0 for side in sides.values()))
    panel = Panel(64, 8, wide - 64 - (108 if wide > NARROW else 76), 72, (0, most), (0, 1))
    body: list[Markup] = []
    for y, (name, side), value in zip((16, 50), sides.items(), (dense, pruned), strict=True):
        tip = f"{name}: {milliseconds(value)}"
        body.append(rect(panel.left, y, panel.x(value) - panel.left, 24, f"bar-{name}", tip, rx=2))
        body.append(text(panel.left - 10, y + 16, name, "label", "end"))
        low, high = number(side.latency_q1_ms), number(side.latency_q3_ms)
        if low is not None and high is not None:
            body.append(line(panel.x(low), y + 12, panel.x(high), y + 12, "whisker"))
            body += [line(panel.x(at), y + 8, panel.x(at), y + 16, "whisker") for at in (low, high)]
        body.append(text(panel.x(max(value, high or 0.0)) + 10, y + 17, milliseconds(value), "value"))
    fraction, height = number(report.target_fraction), 92.0
    if fraction is not None and report.cost == "ms":
        at, height = panel.x(fraction * dense), 112.0
        body.append(line(at, panel.top, at, 86, "target"))
        body.append(text(at, 102, f"asked: {percent(fraction, trim=True)}", "target-label", "middle"))
    label = f"Measured latency: dense {milliseconds(dense)}, pruned {milliseconds(pruned)}"
    return picture(wide, height, label, body)


def channel_bars(layers: Sequence[LayerRow], wide: float = WIDE) -> Markup | None:
    """Return each layer's output channels: all in grey, the kept ones in blue; None without layers."""
    if not layers:
        return None
    pitch = (wide - 60) / len(layers)
    named = pitch >= 13
    names = [layer.path for layer in layers]
    below = min(max(map(len, names)) * LETTER, 200.0) + 12 if named else 54.0
    top = rounded_up(max(layer.out_channels for layer in layers))
    panel = Panel(52, 28, wide - 60, 230, (0, len(layers)), (0, top))
    width = min(pitch * 0.78, 34.0)
    body = panel.y_axis("output channels")
    for index, layer in enumerate(layers):
        full, kept, left = layer.out_channels, layer.out_kept, panel.x(index + 0.5) - width / 2
        tip = (
            f"{layer.path} ({layer.kind}): {kept} of {full} output channels kept, "
            f"{layer.in_kept} of {layer.in_channels} input channels"
        )
        body.append(panel.column(left, width, full, "bar-dense", tip))
        body.append(panel.column(left, width, kept, "bar-pruned", tip))
    body += _vertical_names(names, panel, below) if named else _brackets(names, panel)
    total, kept = sum(layer.out_channels for layer in layers), sum(layer.out_kept for layer in layers)
    label = f"Kept output channels of {len(layers)} layers: {kept} of {total}"
    return picture(wide, panel.bottom + below, label, body)


def block_bars(blocks: Sequence[BlockRow], wide: float = WIDE) -> Markup | None:
    """Return the latency of each block, dense in grey and pruned in blue; None without blocks.

    With more than forty blocks, only the slowest are drawn, and the others summed up.
    """
    rows = [(b.name, number(b.dense_ms) or 0.0, number(b.pruned_ms) or 0.0) for b in blocks]
    slowest = sorted(range(len(rows)), key=lambda i: -rows[i][1])
    others = [rows[i] for i in slowest[_SHOWN_BLOCKS:]]
    pairs = []
    for name, dense, pruned in (rows[i] for i in sorted(slowest[:_SHOWN_BLOCKS])):
        tip = f"{name}: {milliseconds(dense)} dense, {milliseconds(pruned)} pruned"
        pairs.append((name, dense, pruned, tip, _from_to(dense, pruned)))
    note = ""
    if others:
        sums = _from_to(sum(row[1] for row in others), sum(row[2] for row in others))
        note = f"and {len(others)} smaller blocks, together {sums} ms"
    label = f"Latency of {len(blocks)} blocks, dense against pruned, in ms"
    return _pairs(pairs, wide, 0.28 * wide, "ms", label, note)


def repair_bars(layers: Sequence[RepairRow], wide: float = 560.0) -> Markup | None:
    """Return layers' errors before repair in grey and after it in blue, as shares of their outputs' spread.

    Layers without an error before repair are left out; None if no layer remains.
    """
    pairs = []
    for layer in layers:
        if not layer.left and layer.before >= SEEN:
            before = 100 * layer.before
            after = 100 * layer.after if layer.repaired else before
            tip = f"{layer.path}: {before:.2f}% as sliced, {after:.2f}% as repaired, on images held out"
            ends = (
                f"{before:.1f} \N{RIGHTWARDS ARROW} {after:.1f}" if layer.repaired else f"{before:.1f}, kept"
            )
            pairs.append((layer.path, before, after, tip, ends))
    label = f"Errors of {len(pairs)} layers before and after repair"
    return _pairs(pairs, wide, 0.43 * wide, "error, % of the outputs' spread", label)


def _pairs(
    rows: Sequence[_Pair], wide: float, longest: float, axis: str, label: str, note: str = ""
) -> Markup | None:
    """Return a blue bar on a grey one for each row; names take at most ``longest`` pixels. None without rows."""
    if not rows:
        return None
    step = 22.0
    left = min(max(len(row[0]) for row in rows) * LETTER, longest) + 14
    right = max(len(row[4]) for row in rows) * LETTER + 12
    top = max(max(row[1:3]) for row in rows) or 1.0
    panel = Panel(left, 8, wide - left - right, step * len(rows), (0, top), (0, 1))
    body = [*panel.x_axis(axis), line(left, panel.top, left, panel.bottom, "baseline")]
    for index, (name, before, after, tip, ends) in enumerate(rows):
        y = panel.top + step * index
        body.append(text(left - 10, y + 15, ending(name, longest / LETTER), "label", "end"))
        body.append(rect(left, y + 3, panel.x(before) - left, 16, "bar-dense", tip, rx=1))
        body.append(rect(left, y + 6, panel.x(after) - left, 10, "bar-pruned", tip, rx=1))
        body.append(text(panel.x(max(before, after)) + 8, y + 15, ends, "value"))
    if note:
        body.append(text(left, panel.bottom + 38, note, "note"))
    return picture(wide, panel.bottom + 46, label, body)


def _from_to(dense: float, pruned: float) -> str:
    return f"{significant(dense)} \N{RIGHTWARDS ARROW} {significant(pruned)}"


def _vertical_names(names: Sequence[str], panel: Panel, below: float) -> list[Markup]:
    drawn = []
    for index, name in enumerate(names):
        x, y = panel.x(index + 0.5) + 4, panel.bottom + 8
        turn = f"rotate(-90 {x:.1f} {y:.1f})"
        drawn.append(text(x, y, ending(name, (below - 12) / LETTER), "label", "end", transform=turn))
    return drawn


def _brackets(names: Sequence[str], panel: Panel) -> list[Markup]:
    """Name runs of layers by the module that holds them, if single names do not fit."""
    drawn, start = [], 0
    for key, run in groupby(_modules(names)):
        end = start + len(list(run))
        left, right = panel.x(start) + 1.5, panel.x(end) - 1.5
        drawn.append(line(left, panel.bottom + 7, right, panel.bottom + 7, "bracket"))
        short = key.rsplit(".", 1)[-1]
        if right - left >= len(short) * LETTER:
            drawn.append(text((left + right) / 2, panel.bottom + 24, short, "label", "middle"))
        start = end
    return drawn


def _modules(names: Sequence[str]) -> list[str]:
    """Return each layer's module at the first depth with four modules or more, else at the deepest."""
    keys = list(names)
    for depth in range(1, 1 + max(name.count(".") for name in names)):
        keys = [".".join(name.split(".")[:depth]) for name in names]
        if len(set(keys)) >= 4:
            break
    return keys
