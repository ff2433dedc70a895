"""Drawing primitives: escaped elements, axes with round ticks. No charts here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

#: Widths of a picture: on a screen, and on a telephone, where bar lengths must still be legible.
WIDE, NARROW = 1080.0, 364.0
#: A letter's mean advance in the widest of the page's fonts, in pixels.
LETTER = 6.9


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return one element; text children and attribute values are escaped, `Markup` children are not.

    An underscore in an attribute's name becomes a hyphen; one at the end is dropped (``class_``). Attributes
    that are None are left out; floats are cut to hundredths.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(pixels(value) if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{''.join(map(escape, children))}</{name}>")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text(
    x: float, y: float, content: str, class_: str | None, anchor: str | None = None, **more: object
) -> Markup:
    """Return a line of text whose baseline is at ``y``."""
    return element("text", content, x=x, y=y, class_=class_, text_anchor=anchor, **more)


def rect(
    x: float, y: float, width: float, height: float, class_: str | None, tip: str = "", **more: object
) -> Markup:
    """Return a rectangle; ``tip`` is its tooltip and its text for screen readers."""
    size = {"x": x, "y": y, "width": max(width, 0.0), "height": max(height, 0.0)}
    return element("rect", *_title(tip), **size, class_=class_, **more)


def dot(x: float, y: float, radius: float, class_: str, tip: str = "") -> Markup:
    """Return a circle, with an optional tip."""
    return element("circle", *_title(tip), cx=x, cy=y, r=radius, class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str) -> Markup:
    """Return a line through the points."""
    drawn = "".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points))
    return element("path", d=drawn, class_=class_)


def picture(width: float, height: float, label: str, body: Iterable[Markup]) -> Markup:
    """Return an inline SVG that scales with its box; ``label`` describes it in words.

    The page shows pictures of width `NARROW` only on telephones; pictures wider than 720 fill their box.
    """
    kind = "chart narrow" if width == NARROW else "chart wide" if width > 720 else "chart"
    return element(
        "svg",
        *_title(label),
        *body,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        class_=kind,
        role="img",
        aria_label=label,
        style=f"--w:{width:.0f}px",
    )


def fitting(draw: Callable[[float], Markup | None], wide: float = WIDE) -> Markup | None:
    """Return the pictures for a screen and for a telephone; the page shows the one that fits."""
    drawn = [drawing for drawing in (draw(wide), draw(NARROW)) if drawing is not None]
    return element("div", *drawn, class_="fitting") if drawn else None


def ending(name: str, limit: float) -> str:
    """Return a name, or its end if it has more than ``limit`` letters."""
    return name if len(name) <= limit else f"\N{HORIZONTAL ELLIPSIS}{name[1 - int(limit) :]}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    step = next(step for step in steps if step >= raw * 0.999)
    if step > high - low:
        step = max(step for step in steps if step <= high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def rounded_up(value: float, about: int = 5) -> float:
    """Return the first tick at or above ``value`` on an axis that starts at 0."""
    if value <= 0:
        return 1.0
    marks = ticks(0, value, about)
    step = marks[1] - marks[0] if len(marks) > 1 else value
    return step * math.ceil(value / step - 1e-9)


@dataclass(frozen=True)
class Panel:
    """A rectangle of a picture with linear axes: data in, picture coordinates out."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        """Return the horizontal position of ``value``."""
        low, high = self.x_range
        return self.left + self.width * (value - low) / ((high - low) or 1.0)

    def y(self, value: float) -> float:
        """Return the vertical position of ``value``; larger values are higher up."""
        low, high = self.y_range
        return self.top + self.height * (1 - (value - low) / ((high - low) or 1.0))

    @property
    def bottom(self) -> float:
        """The y of the horizontal axis."""
        return self.top + self.height

    @property
    def right(self) -> float:
        """The x of the right edge."""
        return self.left + self.width

    def curve(self, points: Iterable[tuple[float, float]], class_: str = "curve") -> Markup:
        """Return a line through points of data."""
        return path([(self.x(x), self.y(y)) for x, y in points], class_)

    def point(self, x: float, y: float, tip: str, radius: float = 4.0) -> Markup:
        """Return a dot at a point of data."""
        return dot(self.x(x), self.y(y), radius, "point", tip)

    def column(self, left: float, width: float, value: float, class_: str, tip: str = "") -> Markup:
        """Return a bar of ``value`` that stands on the horizontal axis; ``left`` and ``width`` are in pixels."""
        return rect(left, self.y(value), width, self.bottom - self.y(value), class_, tip)

    def y_axis(self, title: str, about: int = 4) -> list[Markup]:
        """Return grid lines with their values, and the axis' title above them."""
        drawn = [text(self.left, self.top - 10, title, "axis-title")]
        marks = ticks(*self.y_range, about)
        for mark in marks:
            kind = "baseline" if mark == self.y_range[0] else "grid"
            drawn.append(line(self.left, self.y(mark), self.right, self.y(mark), kind))
            drawn.append(text(self.left - 8, self.y(mark) + 4, _tick(mark, marks), "tick", "end"))
        return drawn

    def x_axis(self, title: str, about: int = 6, suffix: str = "") -> list[Markup]:
        """Return ticks with their values, and the axis' title below them at the right."""
        marks = ticks(*self.x_range, about)
        drawn = [line(self.left, self.bottom, self.right, self.bottom, "baseline")]
        for mark in marks:
            drawn.append(text(self.x(mark), self.bottom + 18, _tick(mark, marks) + suffix, "tick", "middle"))
        drawn.append(text(self.right, self.bottom + 36, title, "axis-title", "end"))
        return drawn


def _tick(mark: float, marks: list[float]) -> str:
    step = marks[1] - marks[0] if len(marks) > 1 else abs(mark) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{mark:,.{decimals}f}"


def _title(tip: str) -> list[Markup]:
    return [element("title", tip)] if tip else []


def pixels(value: float) -> str:
    """Return a length rounded to hundredths: "12.5", "3"."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
