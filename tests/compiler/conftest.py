"""What the tests of the compile command share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generated_data
import pytest
import torch
from colours import MODEL
from tiny_compile import MODEL as TINY
from tiny_compile import compare_briefly


@pytest.fixture(autouse=True)
def _compared_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_briefly(monkeypatch)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny_model.py"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, its data, and weights that tell the colours of the data's classes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    generated_data.image_folder(tmp_path / "images", 8, 4)
    scope: dict[str, Any] = {}
    exec(MODEL, scope)  # noqa: S102 - it stands above
    model = scope["build"]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for layer in (0, 3):  # the three colours go through, each in its channel
            for colour in range(3):
                model[layer].weight[colour, colour, 1, 1] = 1
        for norm in (1, 4):
            model[norm].weight.fill_(1)
        model[8].weight[:3, :3] = 10 * torch.eye(3)
    torch.save({"model": model.state_dict(), "best_acc1": 100.0}, "good.pth")
    return tmp_path
