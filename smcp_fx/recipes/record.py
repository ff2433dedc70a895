"""The record of a run: a JSON file that says what was done, on what, and what came of it.

`smcp_fx.recipes.reproduce` reads such files; a record of a scaled-down or changed recipe says so and fills no row.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from smcp_fx.errors import InputError
from smcp_fx.files import write_texts
from smcp_fx.versions import library_versions

FORMAT = "smcp_fx.experiment"
VERSION = 1


@dataclass(frozen=True)
class Record:
    """One run. ``row``: the paper's row it is for; ``values`` and ``dense``: the pruned and the unpruned network's.

    Their names: "flops" (multiply-adds an image), "top1", "top5", "mAP" (percent), "fps" and "latency_ms"
    (measured at ``batch``), "predicted_ms" (by the table), "seconds". ``complete``: the recipe as it stands, at
    full length, towards a latency.
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
        """A record with the present environment."""
        return cls(environment=environment(), **values)


def environment() -> dict[str, str]:
    """Versions, and what the machine is."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**library_versions(), "machine": platform.machine(), "gpu": gpu}


def write_record(record: Record, path: Path) -> None:
    """Write a record as JSON, whole or not at all."""
    content = {"format": FORMAT, "version": VERSION, **asdict(record)}
    write_texts({path: json.dumps(content, indent=1) + "\n"}, "the record of the run")


def read_records(folder: Path) -> list[Record]:
    """Return the records in a folder's JSON files; files of other formats are passed over.

    Raises `InputError` for a record that is damaged or of another version.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is no JSON: {error}") from error
        if isinstance(content, Mapping) and content.get("format") == FORMAT:
            found.append(_record(dict(content), path))
    return found


def _record(content: dict[str, Any], path: Path) -> Record:
    del content["format"]
    if content.pop("version", None) != VERSION:
        raise InputError(f"{path} is a record of another version than {VERSION}: run the recipe again")
    try:
        record = Record(**content)
        _numbers([record.values, record.dense])
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} is a damaged record: {error}") from error
    return record


def _numbers(parts: Sequence[Any]) -> None:
    for part in parts:
        if not isinstance(part, dict) or not all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in part.values()
        ):
            raise ValueError(f"{part!r} are no numbers by name")
