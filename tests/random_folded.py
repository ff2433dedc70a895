"""Channels in the batch, computed kernels, Fourier transforms, recurrent layers: steps of random networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from random_builder import SIDE, Builder, Function
from torch import Tensor, nn


def folded(b: Builder) -> None:
    """Groups in the batch, or a kernel for each channel."""
    source = b.pick(4, 4, most=24)
    c = b.channels[source]

    def groups(s: Any, x: Tensor) -> Tensor:
        inside = x.reshape(x.shape[0] * 2, -1, *x.shape[2:])
        return s.layer(inside * inside.mean((2, 3), keepdim=True).sigmoid()).view(x.shape)

    def heads(s: Any, x: Tensor) -> Tensor:
        q, k, v = (
            part.reshape(x.shape[0] * 2, -1, x.shape[2] * x.shape[3]) for part in s.layer(x).chunk(3, 1)
        )
        return torch.bmm(v, torch.bmm(q.mT, k).mul(0.5).softmax(-1).mT).view(x.shape)

    def kernels(s: Any, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        made = s.layer(F.adaptive_avg_pool2d(x, 3)).reshape(n * c, 1, 3, 3)
        return F.conv2d(x.reshape(1, n * c, h, w), made, padding=1, groups=n * c).reshape(n, c, h, w)

    def spread(s: Any, x: Tensor) -> Tensor:
        c = x.shape[1]
        return s.layer(F.conv2d(x, s.kernel.repeat(c, 1, 1, 1), padding=1, groups=c))

    options: dict[str, tuple[Function, dict[str, Any]]] = {
        "groups": (groups, {"layer": nn.Conv2d(c // 2, c // 2, 1)}),
        "heads": (heads, {"layer": nn.Conv2d(c, 3 * c, 1)}),
        "kernels": (kernels, {"layer": nn.Conv2d(c, c, 1)}),
        "spread": (spread, {"layer": nn.Conv2d(c, c, 1), "kernel": nn.Parameter(torch.rand(1, 1, 3, 3) / 9)}),
    }
    kind = b.random.choice([*options])
    function, held = options[kind]
    b.add(f"folded {kind}", c, (source,), function, **held)


def spectrum(b: Builder) -> None:
    """A Fourier unit, or a filter of the spectrum."""
    source = b.pick(2, most=16)
    c = b.channels[source]

    def unit(s: Any, x: Tensor) -> Tensor:
        made = torch.fft.rfft2(x, norm="ortho")
        real, imaginary = s.layer(torch.cat([made.real, made.imag], 1)).chunk(2, 1)
        return torch.fft.irfft2(torch.complex(real, imaginary), s=(SIDE, SIDE), norm="ortho")

    def sizes(s: Any, x: Tensor) -> Tensor:
        made = torch.fft.fft2(x, norm="ortho")
        return torch.fft.ifft2(made * s.layer(made.abs()).sigmoid(), norm="ortho").real

    wide = b.random.random() < 0.5
    layer = nn.Conv2d(2 * c, 2 * c, 1) if wide else nn.Conv2d(c, c, 1)
    b.add(f"spectrum {'unit' if wide else 'sizes'}", c, (source,), unit if wide else sizes, layer=layer)


def recurrent(b: Builder) -> None:
    """A recurrent layer along the width, of one or two layers and directions."""
    source = b.pick(2, most=16)
    c, kind, ways = b.channels[source], b.random.choice([nn.LSTM, nn.GRU, nn.RNN]), b.random.choice([1, 2])
    layer = kind(c, 6, b.random.choice([1, 2]), batch_first=True, bidirectional=ways == 2)

    def along(s: Any, x: Tensor) -> Tensor:
        read, _ = s.layer(x.mean(2).transpose(1, 2))
        return x + s.back(read).transpose(1, 2).unsqueeze(2)

    b.add(f"recurrent {kind.__name__}", c, (source,), along, layer=layer, back=nn.Linear(6 * ways, c))


OPERATIONS = [(folded, 2), (spectrum, 1), (recurrent, 1)]
