"""The working directory of the command lines: a model file, and a run of before."""

from __future__ import annotations

from pathlib import Path

import pytest

FILE = """
import os, sys
import torch
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )

def frozen():
    return build().requires_grad_(False)

class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = build()

    def forward(self, x):
        sys.exit(0)

def leaves():
    sys.exit(0)

def labels():
    return [(torch.zeros(1, 8, 8), -1)] * 4, [(torch.zeros(1, 8, 8), 0)]

def nothing():
    return [], []
"""
#: The previous run that stands in the folder of every command line here.
BEFORE = {
    "out/state/settings.json": "{}",
    "out/state/dense.safetensors": "of days of training",
    "out/state/pruning.safetensors": "of days more",
    "out/state/comparisons.json": "[]",
    "out/pruned.onnx": "what came of them",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model file and a run of before."""
    for name, text in {**BEFORE, "file.py": FILE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path
