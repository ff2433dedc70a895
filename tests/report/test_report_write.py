"""The two files of a report: what stands in them, and that they are written whole or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from smcp_fx.errors import InputError, SmcpError
from smcp_fx.report import Report, write_report
from smcp_fx.report.schema import FORMAT, BlockRow


def test_files_come_back_as_they_were_written(real: Report, tmp_path: Path) -> None:
    data, page = write_report(real, tmp_path / "new" / "folder")
    assert (data.name, page.name) == ("report.json", "report.html")
    read = json.loads(data.read_text(encoding="utf-8"))
    assert read == json.loads(json.dumps(asdict(real)))
    assert read["format"] == FORMAT == 1
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json"]
    again = page.read_bytes()
    write_report(real, page.parent)
    assert page.read_bytes() == again


def test_values_json_does_not_have(real: Report, tmp_path: Path) -> None:
    pruned = replace(real.pruned, accuracy=np.float32(0.5), latency_q1_ms=math.inf)
    report = replace(real, seed=np.int64(3), correction=math.nan, notes=("a", "b"), pruned=pruned)
    data, _ = write_report(report, tmp_path)
    read = json.loads(data.read_text(encoding="utf-8"))
    assert read["seed"] == 3
    assert read["correction"] is None
    assert read["notes"] == ["a", "b"]
    assert read["pruned"]["accuracy"] == 0.5
    assert read["pruned"]["latency_q1_ms"] is None
    before = data.read_bytes()
    with pytest.raises(InputError, match=r"report\['blocks'\]\[0\]\['name'\] is a Tensor"):
        write_report(replace(real, blocks=(BlockRow(torch.ones(1)),)), tmp_path)
    with pytest.raises(InputError, match="the key 3"):
        write_report(replace(real, versions={3: "x"}), tmp_path)
    assert data.read_bytes() == before


def test_a_failed_write_leaves_the_old_report(real: Report, tmp_path: Path) -> None:
    data, page = write_report(real, tmp_path)
    old = data.read_bytes(), page.read_bytes()
    (tmp_path / "report.html.part").mkdir()  # the second file cannot be written
    with pytest.raises(SmcpError, match="cannot write the report into"):
        write_report(replace(real, seed=99), tmp_path)
    assert (data.read_bytes(), page.read_bytes()) == old
    assert not (tmp_path / "report.json.part").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(SmcpError, match="give another directory"):
        write_report(real, tmp_path / "file")
