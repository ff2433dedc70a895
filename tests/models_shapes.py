"""Small networks whose Python asks about shapes: branches, loops and numbers that follow from sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv
from torch import Tensor, nn


def same_padding(x: Tensor, kernel: int, stride: int) -> Tensor:
    """TensorFlow's padding, which depends on the size."""
    height, width = x.size()[-2:]
    down = max((math.ceil(height / stride) - 1) * stride + kernel - height, 0)
    right = max((math.ceil(width / stride) - 1) * stride + kernel - width, 0)
    if down > 0 or right > 0:
        x = F.pad(x, [right // 2, right - right // 2, down // 2, down - down // 2])
    return x


@awkward(1.0, (2, 3, 9, 8))
def padded_as_by_tensorflow() -> nn.Module:
    strided = nn.Conv2d(8, 6, 3, stride=2)
    return between(lambda s, h: s.mid(same_padding(h, 3, 2)), 8, 6, mid=strided)


@awkward(1.0)
def branches_on_sizes() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        if h.shape[-1] > 4 and h.dim() == 4:
            h = F.max_pool2d(h, 2)
        assert h.shape[1] == 8, "channels"
        return s.mid(h) if h.shape[1] % 2 == 0 else h  # type: ignore[no-any-return]

    return between(wiring, mid=conv(8, 8))


@awkward(1.0)
def loops_over_sizes() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        total = h
        for _ in range(h.shape[2] // 4):
            total = total + F.relu(h)
        b, *rest = h.shape
        return total.reshape(b, *rest) + len(h.shape)

    return between(wiring)


@awkward(1.0)
def numbers_from_sizes() -> nn.Module:
    """`int()` fixes a size in the graph; on the channels it is rewritten as any literal."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        side = int(math.sqrt(h.shape[2] * h.shape[3]))
        return h.flatten(2).reshape(h.shape[0], int(h.shape[1]), side, side) * float(h.shape[-1])

    return between(wiring)


@awkward(1.0)
def factories_of_sizes() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        ramp = torch.arange(h.shape[3], device=h.device, dtype=h.dtype)
        return h + ramp + torch.ones(h.shape[0], 1, 1, 1, dtype=h.dtype)

    return between(wiring)


@awkward(1.0)
def numbers_of_another_tensor_s_type() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        h = h * torch.full((1, 1, 1, 1), 0.5).to(h) + torch.ones(1).type_as(h)
        return h + h.new_tensor([0.5])

    return between(wiring)


class Optional(nn.Module):
    """Takes a mask that the example leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = conv(3, 8), conv(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        """Logits a pixel."""
        h = self.stem(x) * scale
        return self.out(h if mask is None else h * mask)  # type: ignore[no-any-return]


@awkward(1.0)
def arguments_left_out() -> nn.Module:
    return Optional()


@awkward(1.0)
def spread_gates() -> nn.Module:
    """A value a pixel or a channel, spread over the rest by hand before it multiplies."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        pixel = torch.sigmoid(s.gate(h))
        h = pixel.expand(-1, 8, -1, -1) * h + pixel.expand_as(h)
        return h - h.mean((2, 3), keepdim=True).repeat(1, 1, 8, 8)

    return between(wiring, gate=nn.Conv2d(8, 1, 1))


@awkward(1.0)
def rows_of_a_batch() -> nn.Module:
    """Iterating over a tensor takes its length from the example."""
    return Net(
        lambda s, x: torch.stack([s.out(row[None])[0] for row in s.stem(x)]), stem=conv(3, 8), out=conv(8, 4)
    )


@awkward(1.0)
def divided_by_the_number_of_elements() -> nn.Module:
    """Channel counts used as numbers stay what they were; the sizes they are multiplied with may change."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        b, c, y, x = h.shape
        return h / (c * y * x) + h / (h.numel() / b) + h / h.shape.numel() * b + h / math.prod(h.shape[1:])

    return between(wiring)


@awkward(1.0)
def factories_of_a_whole_shape() -> nn.Module:
    return between(lambda s, h: h * torch.ones(h.shape).sum() + h * torch.arange(h.shape[1]).sum())


@awkward(1.0)
def shape_of_another_tensor() -> nn.Module:
    """The view's size is that of a tensor whose channels go on their own."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        q, k, v = s.qkv(h).flatten(2).view(h.shape[0], 3, 2, 4, -1).unbind(1)
        return s.mid(F.scaled_dot_product_attention(q, k, v).reshape(h.shape))  # type: ignore[no-any-return]

    return between(wiring, qkv=nn.Conv2d(8, 24, 1), mid=nn.Conv2d(8, 8, 1))


@awkward(1.0)
def heads_in_the_batch() -> nn.Module:
    """Attention with the heads joined with the batch, as in SAM: one size is of both, and open slices hold both."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        b, _, y, x = h.shape
        qkv = s.qkv(h).flatten(2).mT.reshape(b, y * x, 3, 4, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * 4, y * x, -1).unbind(0)
        mixed = F.scaled_dot_product_attention(q[:, :, None].squeeze(2), k, v)
        tokens = mixed.view(b, 4, y * x, -1).transpose(1, 2).reshape(b, y * x, -1)
        return s.mid(tokens.mT.reshape(b, -1, y, x))  # type: ignore[no-any-return]

    return between(wiring, qkv=nn.Conv2d(8, 24, 1), mid=nn.Conv2d(8, 8, 1))


@awkward(1.0)
def channel_count_in_the_output() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Any:
        h = s.stem(x)
        return s.out(h), h.shape[1], tuple(h.shape)

    return Net(wiring, stem=nn.Conv2d(3, 8, 3), out=nn.Conv2d(8, 4, 3))


@awkward(1.0)
def reshaped_like_a_tensor_of_other_channels() -> nn.Module:
    """The two have as many channels as each other, though nothing adds them up."""
    return between(lambda s, h: s.mid(h).flatten(2).reshape_as(h), mid=conv(8, 8))


@awkward(1.0)
def function_reshaped_to_the_shape_of_a_tensor_of_other_channels() -> nn.Module:
    """A function takes the shape as one argument, which its parts then are."""
    return between(lambda s, h: torch.reshape(s.mid(h).flatten(2), h.shape), mid=conv(8, 8))
