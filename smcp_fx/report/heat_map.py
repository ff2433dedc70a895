"""Pictures of blocks: latency over channels in and channels out, the runtime's cliffs visible."""

from __future__ import annotations

import math
from collections.abc import Sequence

from smcp_fx.report.formats import milliseconds
from smcp_fx.report.schema import Axis, SurfaceRow
from smcp_fx.report.svg import Markup, Panel, element, picture, rect, text
from smcp_fx.texts import significant

_WIDTH, _SIDE = 360.0, 260.0
#: A picture has at most this many cells a side; finer grids are thinned evenly, ends kept.
_CELLS = 32
#: Lightness of the cheapest and the dearest cell; an SVG cannot mix the colours of `style.css`.
_SCALE = ("#eef4fd", "#9cc2f5", "#4a86d8", "#1d5fc4", "#0b2f6b")


def heat_map(block: SurfaceRow) -> Markup | None:
    """Return one block's picture; None without a latency.

    Colour is the latency per pair of channels, in steps of equal ratio. Efficient regions have one colour, and a
    cliff is an edge.
    """
    axes = block.axes
    if len(axes) == 1:
        return _curve(block, axes[0])
    if len(axes) != 2 or not block.ms:
        return None
    rows, columns = (thinned(axis.values) for axis in axes)
    values = [[float(block.ms[i][j]) for j in columns] for i in rows]
    xs, ys = ([axis.values[i] for i in chosen] for axis, chosen in zip(axes, (rows, columns), strict=True))
    pair = [
        [ms / (x * y) for ms, y in zip(line, ys, strict=True)] for line, x in zip(values, xs, strict=True)
    ]
    ordered = sorted(v for line in pair for v in line)
    # A few narrow widths cost orders of magnitude more; they share the darkest colour.
    low, high = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 8]
    panel = Panel(52, 40, _SIDE, _SIDE, (0, len(xs)), (0, len(ys)))
    wide, tall = panel.width / len(xs), panel.height / len(ys)
    body: list[Markup] = [text(panel.left, panel.top - 12, axes[1].title, "axis-title")]
    for i, x in enumerate(xs):
        for j, y in enumerate(ys):
            each = significant(1e6 * pair[i][j])
            tip = f"{x} in, {y} out: {milliseconds(values[i][j])}, {each} ns per channel pair"
            body.append(
                element(
                    "rect",
                    element("title", tip),
                    x=panel.left + i * wide,
                    y=panel.bottom - (j + 1) * tall,
                    width=wide + 0.4,  # no hairlines between neighbours
                    height=tall + 0.4,
                    fill=colour(pair[i][j], low, high),
                )
            )
    for axis, marks, along in ((0, xs, True), (1, ys, False)):
        for index in _labelled(len(marks)):
            middle = (index + 0.5) * (wide if along else tall)
            if along:
                body.append(text(panel.left + middle, panel.bottom + 16, str(marks[index]), "tick", "middle"))
            else:
                body.append(text(panel.left - 8, panel.bottom - middle + 4, str(marks[index]), "tick", "end"))
        if axis == 0:
            body.append(text(panel.right, panel.bottom + 34, axes[0].title, "axis-title", "end"))
    body += _marks(block, panel, xs, ys, wide, tall)
    body += _key(panel, low, high)
    label = (
        f"{block.name}: {len(xs)} x {len(ys)} widths, {significant(1e6 * ordered[0])} to "
        f"{significant(1e6 * ordered[-1])} ns per channel pair"
    )
    return picture(_WIDTH, panel.bottom + 46, label, body)


def thinned(values: Sequence[int], most: int = _CELLS) -> list[int]:
    """Return indices of at most ``most`` of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(range(len(values)))
    return sorted({round(i * (len(values) - 1) / (most - 1)) for i in range(most)})


def colour(value: float, low: float, high: float) -> str:
    """Return the colour of a latency between ``low`` and ``high``, in steps of equal ratio."""
    share = 0.0
    if high > low > 0 and value > 0:
        share = min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)
    place = share * (len(_SCALE) - 1)
    index = min(int(place), len(_SCALE) - 2)
    a, b = (_rgb(_SCALE[index]), _rgb(_SCALE[index + 1]))
    mixed = (round(p + (place - index) * (q - p)) for p, q in zip(a, b, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _rgb(text_colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(text_colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def _curve(block: SurfaceRow, axis: Axis) -> Markup | None:
    """Return the picture of a block with one free width: a bar a width, over its latency."""
    if not block.ms:
        return None
    indices = thinned(axis.values, 2 * _CELLS)
    widths, values = [axis.values[i] for i in indices], [float(block.ms[i]) for i in indices]
    panel = Panel(52, 40, _SIDE, _SIDE, (0, len(widths)), (0, max(values) * 1.05 or 1.0))
    body = [*panel.y_axis("ms")]
    wide = panel.width / len(widths)
    chosen = (block.chosen or [None])[0]
    for index, (width, ms) in enumerate(zip(widths, values, strict=True)):
        kind = "bar-pruned" if width == chosen else "bar-dense"
        top = panel.y(ms)
        tip = f"{width} channels: {milliseconds(ms)}"
        body.append(rect(panel.left + index * wide, top, max(wide - 0.6, 0.4), panel.bottom - top, kind, tip))
    for index in _labelled(len(widths)):
        at = panel.left + (index + 0.5) * wide
        body.append(text(at, panel.bottom + 16, str(widths[index]), "tick", "middle"))
    body.append(text(panel.right, panel.bottom + 34, axis.title, "axis-title", "end"))
    label = f"{block.name}: {len(widths)} widths, {milliseconds(min(values))} to {milliseconds(max(values))}"
    return picture(_WIDTH, panel.bottom + 46, label, body)


def _marks(
    block: SurfaceRow, panel: Panel, xs: Sequence[int], ys: Sequence[int], wide: float, tall: float
) -> list[Markup]:
    """Return dots at the measured widths and a frame around the chosen one."""
    drawn = []
    for x, y in block.measured:
        if x in xs and y in ys:
            at = panel.left + (xs.index(x) + 0.5) * wide, panel.bottom - (ys.index(y) + 0.5) * tall
            drawn.append(
                element("circle", cx=at[0], cy=at[1], r=min(1.6, wide / 3), fill="#ffffff", opacity=0.8)
            )
    chosen = block.chosen
    if chosen:
        i, j = _nearest(xs, chosen[0]), _nearest(ys, chosen[1])
        left, top = panel.left + i * wide, panel.bottom - (j + 1) * tall
        size = {"width": max(wide, 7.0), "height": max(tall, 7.0)}
        drawn.append(element("rect", element("title", f"chosen: {chosen[0]} in, {chosen[1]} out"), x=left, y=top,
                             fill="none", stroke="#f19a55", stroke_width=2, **size))  # fmt: skip
    return drawn


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(range(len(values)), key=lambda index: abs(values[index] - wanted))


def _key(panel: Panel, low: float, high: float) -> list[Markup]:
    """The scale, beside the map."""
    left, steps = panel.right + 10, 24
    drawn = []
    for step in range(steps):
        value = low * (high / low) ** ((step + 0.5) / steps) if low > 0 else low
        height = panel.height / steps
        drawn.append(
            element(
                "rect",
                x=left,
                y=panel.bottom - (step + 1) * height,
                width=8.0,
                height=height + 0.4,
                fill=colour(value, low, high),
            )
        )
    drawn.append(text(left + 8, panel.top - 12, "ns per pair", "axis-title", "end"))
    for at, value in ((panel.bottom, low), (panel.top + 10, high)):
        drawn.append(text(left + 11, at, significant(1e6 * value, 2), "tick"))
    return drawn


def _labelled(count: int) -> list[int]:
    return sorted({round(i * (count - 1) / 4) for i in range(5)}) if count > 1 else [0]
