"""Numbers as people read them. None and numbers that are not finite become "not measured"."""

from __future__ import annotations

import math
import numbers
from typing import Any

from smcp_fx.texts import short, significant

MISSING = "not measured"
MINUS = "\N{MINUS SIGN}"


def number(value: Any) -> float | None:
    """Return a finite float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def milliseconds(value: Any) -> str:
    """Return e.g. "4.21 ms"."""
    plain = number(value)
    return MISSING if plain is None else f"{significant(plain)} ms"


def percent(fraction: Any, *, trim: bool = False) -> str:
    """Return e.g. "40.1%" of a fraction; ``trim`` drops a decimal that is 0 ("40%")."""
    plain = number(fraction)
    if plain is None:
        return MISSING
    text = f"{plain:.1%}"
    return text.replace(".0%", "%") if trim else text


def count(value: Any) -> str:
    """Return e.g. "11.2 M", "1.82 G"; numbers below ten thousand as they are."""
    plain = number(value)
    return MISSING if plain is None else short(plain)


def duration(seconds: Any) -> str:
    """Return e.g. "42 s", "3 min 20 s", "2 h 05 min"."""
    plain = number(seconds)
    if plain is None:
        return MISSING
    if plain < 10:
        return f"{significant(plain, 2)} s"
    whole = round(plain)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def relative_change(before: Any, after: Any) -> str:
    """Return e.g. "-59.9%" (with a true minus sign): how far ``after`` is from ``before``."""
    old, new = number(before), number(after)
    if old is None or new is None or old == 0:
        return ""
    return f"{signed(100 * (new - old) / old)}%"


def signed(value: float) -> str:
    """Return a number with one decimal and its sign; a number that rounds to 0 has no sign."""
    text = f"{abs(value):.1f}"
    return text if float(text) == 0 else f"{MINUS if value < 0 else '+'}{text}"
