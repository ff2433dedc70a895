"""What a command says of going on does not contradict what it then takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from smcp_fx.compiler.folder import RunFolder, how_to_go_on
from smcp_fx.compiler.settings import CompileSettings, as_record
from smcp_fx.config import PruningConfig
from smcp_fx.errors import CheckpointError

CONFIG = PruningConfig()


def folder_of(settings: CompileSettings) -> RunFolder:
    return RunFolder(settings, as_record(settings, CONFIG))


def test_resume_is_advised_where_it_is_taken(tmp_path: Path) -> None:
    settings = CompileSettings(out=str(tmp_path / "out"), cost="flops")
    with folder_of(settings).held():
        pass
    assert how_to_go_on(settings, CONFIG) == "Nothing had begun: give the same command again."
    folder_of(settings).look()
    with folder_of(settings).held():
        folder_of(settings).begin()
    assert "--resume" in how_to_go_on(settings, CONFIG)
    folder_of(replace(settings, resume=True)).look()
    other = replace(settings, seed=1)
    assert "--resume" not in how_to_go_on(other, CONFIG)
    with pytest.raises(CheckpointError, match="other settings"):
        folder_of(replace(other, resume=True)).look()


def test_overwrite_is_advised_where_nothing_is_resumed(tmp_path: Path) -> None:
    settings = CompileSettings(out=str(tmp_path / "out"), cost="flops", epochs=0)
    with folder_of(settings).held():
        folder_of(settings).begin()
    (tmp_path / "out" / "dense.onnx").touch()
    assert "with --overwrite" in how_to_go_on(settings, CONFIG)
    with pytest.raises(CheckpointError, match=r"holds a run \(dense\.onnx\): replace it by --overwrite"):
        folder_of(settings).look()
    folder_of(replace(settings, overwrite=True)).look()
