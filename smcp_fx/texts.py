"""Writes amounts and tables: three digits, a letter for thousands, "multiply-adds" for FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def significant(value: float, digits: int = 3) -> str:
    """Return ``value`` with that many significant digits and never an exponent."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def short(value: float) -> str:
    """Return e.g. "11.2 M", "1.82 G"; below ten thousand the number itself."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(size, 1e4):
            return f"{significant(value / size)} {letter}"
    return f"{value:,.0f}" if value == round(value) else significant(value)


def amount(value: float, unit: str) -> str:
    """Return a cost with its unit: "4.21 ms", "2.58 M multiply-adds" (of the unit "FLOPs"), "1.20 M parameters"."""
    if unit == "ms":
        return f"{significant(value)} ms"
    return f"{short(value)} {'multiply-adds' if unit == 'FLOPs' else unit}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, the first column to the left and numbers to the right."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = [
        i > 0 and all(line[i][:1].isdigit() or not line[i] for line in lines[1:]) for i in range(len(head))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
