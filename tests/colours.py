"""A model with images and weights that tell three colours apart, to try the compile command on."""

from __future__ import annotations

from smcp_fx.cli.compile import main

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )
"""


def run(*flags: str, workers: int | None = 0) -> int:
    """Call smcp-compile; ``workers``: processes loading images, None for the default. So few load sooner with 0."""
    given = (
        "--model mine.py:build --data imagefolder:images --input-size 32 --cost flops --target 0.8 --epochs 1"
    )
    given += " --train-batch 8 --batch 4 --out out --overwrite --multiple 4 --calibration 16"
    given += "" if workers is None else f" --workers {workers}"
    return main([*given.split(), *flags])
