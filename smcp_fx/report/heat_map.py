"""Heat maps of blocks: latency over channels in and channels out, with the runtime's cliffs visible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from smcp_fx.report.formats import milliseconds
from smcp_fx.report.schema import Axis, SurfaceRow
from smcp_fx.report.svg import Panel, element, picture, rect, text
from smcp_fx.texts import significant

_WIDTH, _SIDE = 360.0, 260.0
#: Most cells along a side of a picture; finer grids are thinned evenly, and their ends kept.
_CELLS = 32
#: Lightness of the cheapest and the dearest cell; an SVG cannot mix the colours of `style.css`.
_SCALE = ("#eef4fd", "#9cc2f5", "#4a86d8", "#1d5fc4", "#0b2f6b")


def heat_map(block: SurfaceRow) -> Markup | None:
    """Return one block's picture; None without a latency.

    Colour shows the latency per pair of channels, in steps of equal ratio. Efficient regions have one colour;
    a cliff shows as an edge.
    """
    if not block.ms or len(block.axes) not in (1, 2):
        return None
    if len(block.axes) == 1:
        return _columns(block, block.axes[0])
    rows, columns = (thinned(axis.values) for axis in block.axes)
    xs, ys = (
        [axis.values[i] for i in chosen] for axis, chosen in zip(block.axes, (rows, columns), strict=True)
    )
    values = [[float(block.ms[i][j]) for j in columns] for i in rows]
    pairs = [
        [ms / (x * y) for ms, y in zip(line, ys, strict=True)] for line, x in zip(values, xs, strict=True)
    ]
    ordered = sorted(pair for line in pairs for pair in line)
    # A few narrow widths cost orders of magnitude more; they share the darkest colour.
    low, high = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 8]
    panel = Panel(52, 40, _SIDE, _SIDE, (0, len(xs)), (0, len(ys)))
    wide, tall = panel.width / len(xs), panel.height / len(ys)
    body = [text(panel.left, panel.top - 12, block.axes[1].title, "axis-title")]
    for i, x in enumerate(xs):
        for j, y in enumerate(ys):
            each = significant(1e6 * pairs[i][j])
            tip = f"{x} in, {y} out: {milliseconds(values[i][j])}, {each} ns per channel pair"
            body.append(_cell(panel.x(i), panel.y(j + 1), wide, tall, colour(pairs[i][j], low, high), tip))
    body += _across(panel, xs, block.axes[0])
    for j in _labelled(len(ys)):
        body.append(text(panel.left - 8, panel.y(j + 0.5) + 4, str(ys[j]), "tick", "end"))
    body += _marks(block, panel, xs, ys, wide, tall)
    body += _scale(panel, low, high)
    label = (
        f"{block.name}: {len(xs)} x {len(ys)} widths, {significant(1e6 * ordered[0])} to "
        f"{significant(1e6 * ordered[-1])} ns per channel pair"
    )
    return picture(_WIDTH, panel.bottom + 46, label, body)


def thinned(values: Sequence[int], most: int = _CELLS) -> list[int]:
    """Return indices of at most ``most`` of the values, evenly spread, including the first and the last."""
    if len(values) <= most:
        return list(range(len(values)))
    return sorted({round(i * (len(values) - 1) / (most - 1)) for i in range(most)})


def colour(value: float, low: float, high: float) -> str:
    """Return the colour of a latency between ``low`` and ``high``, in steps of equal ratio."""
    share = 0.0
    if high > low > 0 and value > 0:
        share = min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)
    index, rest = divmod(share * (len(_SCALE) - 1), 1)
    ends = _SCALE[int(index)], _SCALE[min(int(index) + 1, len(_SCALE) - 1)]
    parts = ([int(end[at : at + 2], 16) for end in ends] for at in (1, 3, 5))
    return "#" + "".join(f"{round(light + rest * (dark - light)):02x}" for light, dark in parts)


def _columns(block: SurfaceRow, axis: Axis) -> Markup:
    """Return the picture of a block with one free width: one bar per width, as high as its latency."""
    indices = thinned(axis.values, 2 * _CELLS)
    widths, values = [axis.values[i] for i in indices], [float(block.ms[i]) for i in indices]
    panel = Panel(52, 40, _SIDE, _SIDE, (0, len(widths)), (0, max(values) * 1.05 or 1.0))
    body = panel.y_axis("ms")
    wide = panel.width / len(widths)
    for index, (width, ms) in enumerate(zip(widths, values, strict=True)):
        kind = "bar-pruned" if width in block.chosen[:1] else "bar-dense"
        tip = f"{width} channels: {milliseconds(ms)}"
        body.append(panel.column(panel.x(index), max(wide - 0.6, 0.4), ms, kind, tip))
    body += _across(panel, widths, axis)
    label = f"{block.name}: {len(widths)} widths, {milliseconds(min(values))} to {milliseconds(max(values))}"
    return picture(_WIDTH, panel.bottom + 46, label, body)


def _across(panel: Panel, values: Sequence[int], axis: Axis) -> Iterator[Markup]:
    """Yield some of the widths below the panel, and the axis title."""
    for index in _labelled(len(values)):
        yield text(panel.x(index + 0.5), panel.bottom + 16, str(values[index]), "tick", "middle")
    yield text(panel.right, panel.bottom + 34, axis.title, "axis-title", "end")


def _marks(
    block: SurfaceRow, panel: Panel, xs: Sequence[int], ys: Sequence[int], wide: float, tall: float
) -> Iterator[Markup]:
    """Yield dots at the measured widths, and a frame around the chosen one."""
    for x, y in block.measured:
        if x in xs and y in ys:
            at = {"cx": panel.x(xs.index(x) + 0.5), "cy": panel.y(ys.index(y) + 0.5)}
            yield element("circle", **at, r=min(1.6, wide / 3), fill="#ffffff", opacity=0.8)
    if block.chosen:
        x, y = block.chosen
        left, top = panel.x(_nearest(xs, x)), panel.y(_nearest(ys, y) + 1)
        tip, frame = f"chosen: {x} in, {y} out", {"fill": "none", "stroke": "#f19a55", "stroke_width": 2}
        yield rect(left, top, max(wide, 7.0), max(tall, 7.0), None, tip, **frame)


def _cell(x: float, y: float, wide: float, tall: float, fill: str, tip: str = "") -> Markup:
    """Return a filled rectangle, slightly too large to avoid hairlines between neighbours."""
    return rect(x, y, wide + 0.4, tall + 0.4, None, tip, fill=fill)


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(range(len(values)), key=lambda index: abs(values[index] - wanted))


def _scale(panel: Panel, low: float, high: float) -> Iterator[Markup]:
    """Yield the colour scale beside the map."""
    left, steps = panel.right + 10, 24
    for step in range(steps):
        value = low * (high / low) ** ((step + 0.5) / steps) if low > 0 else low
        height = panel.height / steps
        yield _cell(left, panel.bottom - (step + 1) * height, 7.6, height, colour(value, low, high))
    yield text(left + 8, panel.top - 12, "ns per pair", "axis-title", "end")
    for at, value in ((panel.bottom, low), (panel.top + 10, high)):
        yield text(left + 11, at, significant(1e6 * value, 2), "tick")


def _labelled(count: int) -> list[int]:
    return sorted({round(i * (count - 1) / 4) for i in range(5)}) if count > 1 else [0]
