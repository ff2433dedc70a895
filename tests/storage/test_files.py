"""Files are put where a file can stand, and nowhere else: as root, a rename would take the place of a device."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import smcp_fx
from smcp_fx.errors import SmcpError
from smcp_fx.latency.table import LatencyTable
from smcp_fx.storage.files import write_texts


def saved(path: Path | str) -> None:
    smcp_fx.save(smcp_fx.convert(smcp_fx.prepare(torch.nn.Conv2d(3, 4, 1), torch.randn(1, 3, 4, 4))), path)


def exported(path: Path | str) -> None:
    smcp_fx.export_onnx(torch.nn.Conv2d(3, 4, 1).eval(), torch.randn(1, 3, 4, 4), path)


def checkpoint(path: Path | str) -> None:
    smcp_fx.save_checkpoint(path, torch.nn.Linear(1, 1))


WRITERS = [LatencyTable, lambda path: write_texts({Path(path): "x"}, "the text"), saved, exported, checkpoint]


@pytest.mark.parametrize("write", WRITERS)
def test_no_file_takes_the_place_of_what_is_none(
    write: Callable[[Path | str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    for path in ("pipe", "folder", ".", "", "/", "a\0b"):
        with pytest.raises(SmcpError):
            write(path)
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    assert sorted(os.listdir()) == ["folder", "pipe"] and not os.listdir("folder")


@pytest.mark.parametrize(
    "read", [smcp_fx.load, lambda path: smcp_fx.load_checkpoint(path, torch.nn.Linear(1, 1))]
)
@pytest.mark.parametrize("path", [".", "/", "", "x" * 300])
def test_paths_that_name_no_file_are_told(read: Callable[[str], object], path: str) -> None:
    with pytest.raises(smcp_fx.errors.CheckpointError):
        read(path)
