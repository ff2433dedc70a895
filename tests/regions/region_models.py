"""Models whose top cannot be traced, and what must hold of their parts."""

from __future__ import annotations

from typing import Any

import torch
from models import random_masks, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.channels.graph import Group
from smcp_fx.config import MethodConfig

CONFIG = MethodConfig(multiple=1, batch_norm_scaling=True)


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5)).double()


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Split(nn.Module):
    """Stem, body and head, with Python between them that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 12)
        self.body = nn.Sequential(conv(12, 16), conv(16, 20))
        self.head = nn.Linear(20, 5)

    def between(self, f: Tensor) -> Tensor:
        return f

    def forward(self, x: Tensor) -> Tensor:
        f = self.between(self.stem(x))
        if f.shape[-1] < 4:
            raise ValueError("too small an image")
        y = self.body(f).mean((2, 3))
        if y.mean() > 1e6:  # no graph can hold this
            y = -y
        return self.head(y)


def prepare(model: nn.Module, inputs: Any = (IMAGES,), **options: Any) -> smcp_fx.PreparedModel:
    options.setdefault("config", CONFIG)
    return smcp_fx.prepare(randomise(model).double().eval(), inputs, **options)


def group(prepared: smcp_fx.PreparedModel, producer: str) -> Group:
    return next(g for g in prepared.channels.groups if producer in g.producers)


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return model(*inputs)


def check_exact(prepared: smcp_fx.PreparedModel, inputs: tuple[Any, ...], seed: int = 0) -> nn.Module:
    """Mask at random, slice, compare; return the sliced model."""
    prepared.eval()
    prepared.set_masks(random_masks(prepared, seed))
    masked = outputs(prepared, inputs)
    sliced = smcp_fx.convert(prepared)
    assert_close(outputs(sliced, inputs), masked, "slicing", f"seed {seed}")
    assert_close(outputs(prepared, inputs), masked, "identity", "the prepared model after convert")
    assert not [name for name in sliced.state_dict() if name.startswith("smcp")]
    return sliced
