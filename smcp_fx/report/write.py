"""Write both files of a report, or neither."""

from __future__ import annotations

import json
import math
import numbers
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smcp_fx.errors import InputError
from smcp_fx.report.page import render_page
from smcp_fx.report.schema import Report
from smcp_fx.storage.files import write_texts


def write_report(report: Report, directory: Path) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.html`` into ``directory`` and return their paths.

    The page is self-contained: it fetches nothing. Numbers that are not finite become null ("not measured").
    Both files are written under temporary names and renamed. Raises `InputError` for a value that JSON cannot
    hold, and `SmcpError` if the files cannot be written; earlier files then stay as they were.
    """
    plain = plain_values(asdict(report), "report")
    texts = {
        "report.json": json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "report.html": render_page(report),
    }
    write_texts({directory / name: content for name, content in texts.items()}, "the report")
    return directory / "report.json", directory / "report.html"


def plain_values(value: Any, where: str) -> Any:
    """Return ``value`` as plain JSON values; tuples become lists, NumPy numbers plain ones, NaN None."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}; a report's keys are strings")
        return {key: plain_values(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    raise InputError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; pass numbers, text, lists or dicts"
    )
