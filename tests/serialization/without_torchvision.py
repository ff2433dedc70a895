"""What a process does in which no import of torchvision works."""

from __future__ import annotations

import sys
from pathlib import Path

import safetensors.torch
import torch

from smcp_fx.serialization.saving import load


def run_without_torchvision(path: Path, values: Path) -> None:
    """Load a network, and print by how much its outputs are off, relative to the largest that is expected."""
    assert "torchvision" not in sys.modules
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    expected = safetensors.torch.load_file(values)
    torch.set_num_threads(1)
    found = load(path).eval()(expected["inputs"]).detach()
    print(float((found - expected["outputs"]).abs().max() / expected["outputs"].abs().max()))
