"""Functions of autograd: traced through where their backward is their forward's, and kept where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import between, check_slicing
from torch import Tensor, nn
from tracing_oracle import check_traced

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


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return -g


class _Shaken(torch.autograd.Function):
    """A mixture of two branches, of which backward makes another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        return share * x + (1 - share) * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return 0.3 * g, 0.7 * g, None


class _ByWidth(torch.autograd.Function):
    """Each value alone, and the number of channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign() / x.shape[1] ** 0.5

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class _ByMean(_ByWidth):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign() * x.abs().mean()


def shaken(s: Any, h: Tensor) -> Tensor:
    return _Shaken.apply(h, s.mid(h), torch.full((h.shape[0], 1, 1, 1), 0.4).to(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "wiring",
    [*(lambda s, h, f=f: f.apply(h) for f in (_Clipped, _Straight, _Reversed)), shaken],
    ids=["clipped", "straight", "reversed", "shaken"],
)
def test_what_has_another_backward_keeps_it_and_is_free_value_by_value(wiring: Any) -> None:
    prepared = check_slicing(between(wiring, mid=nn.Conv2d(8, 8, 1)), (IMAGE,))
    assert prepared.channels.free_share == 1.0
    assert any("_apply" in node.name for node in prepared.graph.nodes)


class _Reversible(torch.autograd.Function):
    """Its backward computes the inputs anew from the outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            a, b = x.chunk(2, 1)
            c = a + f(b)
            d = b + g(c)
            y = torch.cat((c, d), 1)
            c.set_()
        ctx.save_for_backward(y)
        ctx.parts = f, g
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # type: ignore[override]
        (y,), (f, g) = ctx.saved_tensors, ctx.parts
        with torch.no_grad():
            c, d = y.chunk(2, 1)
            b = d - g(c)
            a = c - f(b)
        with torch.enable_grad():
            a, b = a.requires_grad_(), b.requires_grad_()
            c = a + f(b)
            y = torch.cat((c, b + g(c)), 1)
            found = torch.autograd.grad(y, (a, b, *f.parameters(), *g.parameters()), slope)
        return torch.cat(found[:2], 1), None, None, *found[2:]


class _Damped(_Reversible):
    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # type: ignore[override]
        return _Reversible.backward(ctx, slope / 2)


class _Block(nn.Module):
    """A reversible block; it gives up its input's memory, too."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        x = x + 0
        y: Tensor = self.function.apply(x, self.f, self.g, *self.f.parameters(), *self.g.parameters())
        x.data.set_()
        return y


def test_reversible_blocks_are_traced_through() -> None:
    prepared = check_traced(between(lambda s, h: s.part(h), part=_Block(_Reversible)))
    assert prepared.channels.free_share == 1.0 and not prepared.regions
    prepared = check_slicing(between(lambda s, h: s.part(h), part=_Block(_Damped)), (IMAGE,))
    assert prepared.channels.free_share < 1.0  # another backward: it stays Python


@pytest.mark.parametrize("function", [_ByWidth, _ByMean])
def test_what_has_another_backward_and_reads_all_channels_stays(function: Any) -> None:
    prepared = smcp_fx.prepare(between(lambda s, h: function.apply(h)).eval(), IMAGE)
    assert prepared.channels.free_share == 0.0
    reason = f"operation '{function.__name__}_apply' has no channel rule"
    assert any(reason in group.pinned for group in prepared.channels.groups)


def _written(x: Tensor, slope: float = 0.1) -> Tensor:
    if slope > 0:
        x = torch.where(x > 0, x, slope * x)
    return x.reshape(x.shape[0], x.shape[1], -1).reshape(x.shape)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_functions_of_torchscript_are_traced_through() -> None:
    scripted = torch.jit.script(_written)
    prepared = check_slicing(between(lambda s, h: scripted(h)), (torch.randn(2, 3, 8, 8),))
    assert prepared.channels.free_share == 1.0
