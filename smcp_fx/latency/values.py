"""Checks of every value in a latency table, as tables and their exports come from other devices and other people.

Every function returns the value as the library uses it, or raises a `ValueError` that says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from smcp_fx.backends.base import BlockLatency, Fingerprint
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.errors import TableError
from smcp_fx.storage.files import brief, parse_json

#: The largest count, width or number of threads that is accepted.
_MOST = 2**31 - 1
#: The last moment that Python can represent as a date, in seconds since 1970.
_LAST_SECOND = 253_402_300_799.0
_MOST_WIDTHS, _LONGEST_NAME = 8, 500
#: Overheads were subtracted, so quartiles near 0 may be negative. The longest time is a day.
_LEAST_MS, _LONGEST_MS = -1000.0, 86_400_000.0


def text(value: Any, name: str, most: int = 1_000_000) -> str:
    """Return a text that can be written and printed."""
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(
            f"{name} is {brief(value)}, no text" + f" of at most {most} letters" * isinstance(value, str)
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {brief(value)}: broken characters") from None
    if "\0" in value:
        raise ValueError(f"{name} is {brief(value)}: it holds a null character")
    return value


def whole(value: Any, name: str, least: int = 1, most: int = _MOST) -> int:
    """Return a whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {brief(value)}, no whole number from {least} to {most}")
    return value


def milliseconds(value: Any, name: str, least: float = 0.0) -> float:
    """Return a latency in ms; 0 if it was too short for its clock."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= _LONGEST_MS:
        raise ValueError(f"{name} is {brief(value)}; a latency is a positive number of ms")
    return float(value)


def moment(value: Any, name: str) -> float:
    """Return seconds since 1970."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LAST_SECOND:
        raise ValueError(f"{name} is {brief(value)}, no time in seconds since 1970")
    return float(value)


def widths(value: Any) -> tuple[int, ...]:
    """Return a block's widths."""
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_WIDTHS:
        raise ValueError(f"the widths are {brief(value)}, no list of whole numbers")
    return tuple(whole(width, "a width") for width in value)


def widths_of_text(value: Any) -> tuple[int, ...]:
    """Return a block's widths from JSON, written as in a table."""
    read = widths(parse_json(text(value, "the widths")))
    if value != json.dumps(read):
        raise ValueError(f"the widths are {brief(value)}, not written as {json.dumps(read)}")
    return read


def as_many(point: tuple[int, ...], dimensions: int) -> None:
    """Refuse widths that are more or fewer than those of the block's other rows."""
    if len(point) != dimensions:
        raise ValueError(f"it has {len(point)} widths, the block's other rows {dimensions}")


def fingerprint(value: Any) -> Fingerprint:
    """Return a fingerprint from its fields."""
    try:
        read = Fingerprint.from_dict(value)
    except TableError as error:
        raise ValueError(str(error)) from error
    for name in ("backend", "device", "runtime", "version", "precision"):
        text(getattr(read, name), f"the fingerprint's {name}", _LONGEST_NAME)
    whole(read.threads, "the fingerprint's threads")
    for setting in read.settings:
        text(" ".join(setting), "the fingerprint's settings", _LONGEST_NAME)
    return read


def measurement(values: Sequence[Any], state: str) -> Measurement | None:
    """Return a state's measurement from median, quartiles, repeats and steadiness; None without a median."""
    if values[0] is None:
        return None
    median, q1, q3, repeats, stable = values
    middle = milliseconds(median, f"{state}_ms")
    low, high = (milliseconds(ms, f"{state}_{name}_ms", _LEAST_MS) for ms, name in ((q1, "q1"), (q3, "q3")))
    return Measurement(
        middle, low, high, whole(repeats, f"{state}_repeats"), bool(whole(stable, f"{state}_stable", 0, 1))
    )


def latency(values: Sequence[Any]) -> BlockLatency:
    """Return a measured row's latency: five values in cache, and five from memory or nothing."""
    hot, cold = measurement(values[:5], "hot"), measurement(values[5:], "cold")
    if hot is None:
        raise ValueError("it is measured, and has no latency")
    return BlockLatency(hot, cold)
