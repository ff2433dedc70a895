"""A tiny network for the compile command, its arguments, and comparisons of a few rounds."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from smcp_fx.backends import CompareConfig, compare
from smcp_fx.backends.timing import comparing
from smcp_fx.backends.timing import measuring as timing
from smcp_fx.compiler import measuring

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x):
        y = self.net(x)
        if y.sum() > 0:
            y = 2 * y
        return y

class NotANumber(Branching):
    def forward(self, x):
        return self.net(x) * float("nan")

class Inexpressible(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()
        self.head = Bessel()

    def forward(self, x):
        return self.head(self.net(x))

class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.i1(x)
"""


def arguments(model: str, out: Path, *more: str) -> list[str]:
    return [
        "--model",
        model,
        "--out",
        str(out),
        "--dense-epochs",
        "1",
        "--epochs",
        "2",
        "--batch",
        "4",
        "--calibration",
        "64",
        *more,
    ]


def compare_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let the compile run time three runs, in three rounds where it compares: these tests judge no latency."""
    few = functools.partial(
        timing.TimingConfig, min_repeats=3, max_repeats=3, warmup_ms=1.0, attempts=1, settle=1
    )
    patch.setattr(timing, "TimingConfig", few)
    patch.setattr(comparing, "_ROUND", few())
    brief = functools.partial(compare, config=CompareConfig(rounds=3, seconds=0.0, longest_seconds=0.0))
    patch.setattr(measuring, "compare", brief)
