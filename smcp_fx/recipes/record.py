"""The record of a run: a JSON file with settings, environment and results.

`tools/reproduce.py` reads these files. Records of scaled-down or changed recipes are marked, and fill no row.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from smcp_fx.errors import InputError
from smcp_fx.storage.files import brief, read_json, write_texts
from smcp_fx.storage.versions import library_versions

FORMAT = "smcp_fx.experiment"
VERSION = 1
_LONGEST_NAME = 500


@dataclass(frozen=True)
class Record:
    """One run. ``row``: its row in the paper; ``values`` and ``dense``: the pruned and unpruned figures.

    The figures: "flops" (multiply-adds per image), "top1", "top5", "mAP" (percent), "fps" and "latency_ms"
    (measured at ``batch``), "predicted_ms" (by the table), "seconds". ``complete``: the unchanged recipe ran
    at full length, towards a latency.
    """

    row: str
    complete: bool
    values: dict[str, float]
    dense: dict[str, float] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    fraction: float = 1.0
    cost: str = ""
    weights: str = ""
    ranks: int = 1
    total_batch: int = 0
    device: str = ""
    solves: tuple[dict[str, float], ...] = ()
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_run(cls, **values: Any) -> Record:
        """Return a record with the present environment."""
        return cls(environment=environment(), **values)


def environment() -> dict[str, str]:
    """Return library versions and a description of the machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**library_versions(), "machine": platform.machine(), "gpu": gpu}


def write_record(record: Record, path: Path) -> None:
    """Write a record as JSON, completely or not at all."""
    content = {"format": FORMAT, "version": VERSION, **asdict(record)}
    write_texts({path: json.dumps(content, indent=1) + "\n"}, "the record of the run")


def read_records(folder: Path) -> list[Record]:
    """Return the records in a folder's JSON files; files of other formats are skipped.

    Raises `InputError` for a record that is damaged or of another version.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        content = read_json(path, InputError, "move it away, or run the recipe again")
        if isinstance(content, Mapping) and content.get("format") == FORMAT:
            records.append(_record(dict(content), path))
    return records


def _record(content: dict[str, Any], path: Path) -> Record:
    del content["format"]
    if content.pop("version", None) != VERSION:
        raise InputError(f"{path} is a record of another version than {VERSION}: run the recipe again")
    try:
        record = Record(**content)
        _typed(record)
        _numbers([record.values, record.dense])
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} is a damaged record: {error}") from error
    return record


def figures_of(path: Path) -> dict[str, float]:
    """Return a JSON file's figures by name; `InputError` if it holds anything else."""
    figures = read_json(path, InputError, "delete it and go on without it")
    try:
        _numbers([figures])
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}; delete it and go on without it") from error
    return dict(figures)


def _typed(record: Record) -> None:
    """Raise `ValueError` for a field of the wrong type."""
    kinds: dict[Any, tuple[str, ...]] = {
        str: ("row", "cost", "weights", "device"),
        bool: ("complete",),
        dict: ("values", "dense", "recipe", "environment"),
        (int, float): ("fraction", "seconds", "ranks", "total_batch"),
        (list, tuple): ("overrides", "solves"),
    }
    for kind, names in kinds.items():
        for name in names:
            value = getattr(record, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{name} is {brief(value)}")
    words = [record.row, record.cost, record.weights, record.device, *record.environment.values()]
    if not all(isinstance(name, str) and len(name) <= _LONGEST_NAME for name in words):
        raise ValueError(f"names are texts of at most {_LONGEST_NAME} letters")


def _numbers(parts: Sequence[Any]) -> None:
    for part in parts:
        if not isinstance(part, dict) or not all(
            type(value) in (int, float) and abs(value) < math.inf for value in part.values()
        ):
            raise ValueError(f"{brief(part)} are not numbers by name")
        if part.get("fps", 1.0) <= 0:
            raise ValueError(f"fps is {part['fps']}")
