"""A picture that compares methods: accuracy over speed-up.

It is a complete SVG file: light colours are attributes, which every viewer knows; browsers follow the reader's dark
scheme.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from smcp_fx.report.svg import Panel, dot, element, line, path, picture, rect, text

_WIDTH = 760.0
_LETTER = 6.6  # a letter's mean advance, in pixels
_PITCH = 17.0  # between two lines of a key
#: Colours in light and dark scheme. Those of the methods ("s0" and on) most people can tell apart; further methods
#: repeat colours, not marks.
_COLOURS = {
    "paper": ("#fcfcfb", "#101317"),
    "ink": ("#15181d", "#e8ebef"),
    "soft": ("#59616e", "#9ba5b3"),
    "hair": ("#e3e6eb", "#2b313a"),
    "grey": ("#c5cedc", "#465062"),
    "s0": ("#1d5fc4", "#74abff"),
    "s1": ("#b4490a", "#f19a55"),
    "s2": ("#1a7f5a", "#5fd0a2"),
    "s3": ("#8b3fa8", "#d295ea"),
    "s4": ("#8a6d00", "#e0c04a"),
    "s5": ("#59616e", "#9ba5b3"),
}
_METHODS = 6
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', Arial, sans-serif"
#: Class: attributes, as in CSS. "own" is the colour that is the element's last class.
_LOOKS = {
    "paper": "fill:paper",
    "label": "fill:ink",
    "bold": "fill:ink;font-weight:650",
    "heading": "fill:ink;font-weight:650;font-size:14",
    "number": "fill:ink;font-weight:650;font-size:20",
    "grid": "stroke:hair",
    "baseline": "stroke:soft",
    "target": "stroke:ink;stroke-width:1.5;stroke-dasharray:4 3",
    "bar-dense": "fill:grey",
    "bar-pruned": "fill:s0",
    "curve": "fill:none;stroke:own;stroke-width:1.6;stroke-opacity:.75",
    "whisker": "stroke:own;stroke-width:1.3;stroke-opacity:.6",
    "mark": "fill:own;stroke:paper",
    "series": "fill:own;font-weight:650",
    "outline": "fill:none;stroke:ink;stroke-width:1.5",
}
_MARKS = ("circle", "square", "diamond")


@dataclass(frozen=True)
class Point:
    """One method at one target: mean speed-up, mean accuracy and its confidence interval, fractions of 1."""

    speed_up: float
    accuracy: float
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Series:
    """A method's points, joined by a line in the order of their speed-ups."""

    name: str
    points: tuple[Point, ...]


def trade_off(series: Sequence[Series], title: str, across: str = "measured speed-up") -> Markup | None:
    """Return accuracy over speed-up with a bar for every confidence interval; None without points.

    ``across``: what the speed-up is called.
    """
    drawn = [entry for entry in series if entry.points]
    every = [point for entry in drawn for point in entry.points]
    if not every:
        return None
    ends = [p.speed_up for p in every]
    lows, highs = (
        [100 * min(p.low, p.accuracy) for p in every],
        [100 * max(p.high, p.accuracy) for p in every],
    )
    x_pad = 0.06 * ((max(ends) - min(ends)) or 1.0)
    y_pad = 0.06 * ((max(highs) - min(lows)) or 1.0)
    span = (max(0.0, min(ends) - x_pad), max(ends) + x_pad)
    key_width = 40 + _LETTER * max(len(entry.name) for entry in drawn)
    panel = Panel(
        56, 52, _WIDTH - 72 - key_width, 360, span, (min(lows) - y_pad, min(100.5, max(highs) + y_pad))
    )
    body = [
        text(panel.left, 18, title, "heading"),
        *panel.y_axis("test accuracy, %", about=6),
        line(panel.left, panel.bottom, panel.right, panel.bottom, "baseline"),
        *panel.x_axis(across, suffix="×"),
    ]
    for index, entry in enumerate(drawn):
        points = sorted(entry.points, key=lambda point: point.speed_up)
        places = [(panel.x(point.speed_up), panel.y(100 * point.accuracy)) for point in points]
        body.append(path(places, f"curve s{index % _METHODS}"))
        for point, (x, y) in zip(points, places, strict=True):
            body.append(
                line(
                    x,
                    panel.y(100 * point.low),
                    x,
                    panel.y(100 * point.high),
                    f"whisker s{index % _METHODS}",
                )
            )
            tip = (
                f"{entry.name}, {point.label}: {100 * point.accuracy:.1f}% "
                f"({100 * point.low:.1f} to {100 * point.high:.1f}) at {point.speed_up:.2f}×"
            )
            body.append(_mark(x, y, index, tip))
    body += _key([entry.name for entry in drawn], panel.right + 22, panel.top + 4)
    words = f"{title}: accuracy over measured speed-up of {', '.join(entry.name for entry in drawn)}"
    return svg_file(
        panel.bottom + 46, max(panel.bottom + 46, panel.top + _PITCH * len(drawn) + 20), words, body
    )


def _mark(x: float, y: float, index: int, tip: str = "") -> Markup:
    """A point of series ``index``: its colour, and its shape where colours repeat."""
    class_ = f"mark s{index % _METHODS}"
    shape = _MARKS[index // _METHODS % len(_MARKS)]
    if shape == "circle":
        return dot(x, y, 4.2, class_, tip)
    if shape == "square":
        return rect(x - 4, y - 4, 8, 8, class_, tip)
    inner = [element("title", tip)] if tip else []
    return element("path", *inner, d=f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z", class_=class_)


def _key(names: Sequence[str], x: float, y: float) -> list[Markup]:
    drawn = []
    for index, name in enumerate(names):
        at = y + _PITCH * index
        drawn.append(line(x, at, x + 18, at, f"curve s{index % _METHODS}"))
        drawn.append(_mark(x + 9, at, index))
        drawn.append(text(x + 26, at + 4, name, "label"))
    return drawn


def svg_file(below: float, height: float, words: str, body: Sequence[Markup]) -> Markup:
    """A whole SVG file of a picture: its name space, colours and paper."""
    return as_file(picture(_WIDTH, max(below, height), words, body))


def as_file(drawing: Markup, letters: float = 12) -> Markup:
    """Return a whole SVG file of a picture; ``letters``: their size where their class has none."""
    dark = {"svg": f"fill:{_COLOURS['soft'][1]}"}

    def painted(found: re.Match[str]) -> str:
        *_, own = names = found[1].split()
        looks = [look.split(":") for name in names for look in _LOOKS.get(name, "").split(";") if look]
        shades = {key: _COLOURS.get(own if value == "own" else value, (value, "")) for key, value in looks}
        if changes := [f"{key}:{shade}" for key, (_, shade) in shades.items() if shade]:
            dark[f'[class="{found[1]}"]'] = ";".join(changes)
        return found[0] + "".join(f' {key}="{shade}"' for key, (shade, _) in shades.items())

    first, _, rest = str(drawing).partition("</title>")
    rest = re.sub('class="([^"]+)"', painted, str(rect(0, 0, 4000, 4000, "paper")) + rest)
    rules = "".join(f"{name}{{{changes}}}" for name, changes in dark.items())
    font = f'fill="{_COLOURS["soft"][0]}" font-family="{_FONT}" font-size="{letters:g}"'
    head = first.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" {font} ', 1)
    return Markup(f"{head}</title><style>@media (prefers-color-scheme:dark){{{rules}}}</style>{rest}")
