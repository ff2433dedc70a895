"""Functions of autograd: traced through where their backward is their forward's, and kept where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import between, check_slicing
from torch import Tensor

import smcp_fx


class _Norm(torch.autograd.Function):
    """A layer norm over channels that saves less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (var + eps).sqrt()
        ctx.save_for_backward(y, var)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        y, var = ctx.saved_tensors
        inner = g - y * (g * y).mean(1, keepdim=True) - g.mean(1, keepdim=True)
        return inner / (var + ctx.eps).sqrt(), None


class _Swish(torch.autograd.Function):
    """It is told of its inputs apart from its forward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class _Clipped(torch.autograd.Function):
    """Its backward is another for large gradients alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return (g * 2).clamp(-10, 10)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_what_recomputes_is_traced_through() -> None:
    prepared = check_slicing(between(lambda s, h: _Swish.apply(_Norm.apply(h, 1e-5))), (IMAGE,))
    assert prepared.channels.free_share == 1.0


@pytest.mark.parametrize("function", [_Clipped, _Straight])
def test_what_has_another_backward_is_kept(function: Any) -> None:
    model = between(lambda s, h: function.apply(h)).eval()
    prepared = smcp_fx.prepare(model, IMAGE)
    assert prepared.channels.free_share == 0.0
    reason = f"operation '{function.__name__}_apply' has no channel rule"
    assert any(reason in group.pinned for group in prepared.channels.groups)
