"""The latency benchmark's tables say what its records do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from latency_tables import write_tables  # noqa: E402

sys.path[:] = _PATH

from smcp_fx.latency_residency import Residency  # noqa: E402

_TABLE = {"kind": "table", "model": "a", "setting": "64x1", "blocks": 3, "measured": 40, "reused": 2,
          "seconds": 12.4, "unstable": 1, "failed": 0}  # fmt: skip


def written(tmp_path: Path, *lines: dict[str, Any]) -> str:
    fingerprint = {
        "device": "A",
        "runtime": "R",
        "version": "1",
        "threads": 1,
        "settings": {"block_timing": "7"},
    }
    machine = {"kind": "machine", "time": 0.0, "fingerprint": fingerprint, "versions": {}, "cache_bytes": 1 << 25,
               "residency": vars(Residency.of_cache(1 << 25))}  # fmt: skip
    write_tables([[machine, *lines]], tmp_path / "out.md", 0.1)
    return (tmp_path / "out.md").read_text(encoding="utf-8")


def cells(text: str, start: str) -> list[str]:
    (row,) = (line for line in text.splitlines() if line.startswith(start))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_held_out_errors_and_rows_measured_anew(tmp_path: Path) -> None:
    errors, ms = [0.01, 0.02, 0.30, 0.04], [0.02, 0.05, 0.003, 0.1]
    again = {"kind": "again", "model": "a", "setting": "64x1", "errors": [0.01, 0.02, 0.04], "ms": [0.02, 0.05, 0.1],
             "again_ms": [0.025, 0.05, 0.9], "stable": [True, True, False]}  # fmt: skip
    text = written(tmp_path, {**_TABLE, "errors": errors, "held_out_ms": ms}, again)
    found = cells(text, "| a | 64x1 | 3 | 40 |")
    expected = [*np.percentile(errors, [50, 95]), *np.percentile([0.01, 0.02, 0.04], [50, 95])]
    expected += [*np.percentile([0.25, 0.0], [50, 95])]  # the unsteady repetition does not count
    assert found[6:12] == [f"{share:.1%}" for share in expected]
    assert found[12:] == ["1", "0"]
    assert "Of 2 held-out rows" in text
    assert "100% are within 10 % of what is interpolated there" in text
    assert "50% within 10 % of themselves" in text


def test_tables_of_records_without_repetitions(tmp_path: Path) -> None:
    text = written(tmp_path, {**_TABLE, "errors": [0.01], "held_out_ms": [0.002]})
    assert cells(text, "| a | 64x1 | 3 | 40 |")[6:12] == ["1.0%", "1.0%", "", "", "", ""]
    assert "when measured anew" not in text
