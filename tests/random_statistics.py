"""Random norms and statistics over channels: steps of random networks that mix channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from random_builder import Builder, Function
from torch import Tensor, nn


def channels_last(function: Function) -> Function:
    """A function of [batch, height, width, channels] on an image."""
    return lambda s, x: function(s, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def by_hand(s: nn.Module, x: Tensor) -> Tensor:
    """A layer norm over channels, spelled out."""
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * s.gain


def response(s: nn.Module, x: Tensor) -> Tensor:
    """Global response normalisation."""
    size = x.norm(p=2, dim=(2, 3), keepdim=True)
    return x + s.gain * x * size / (size.mean(1, keepdim=True) + 1e-5)


def channel_norm(b: Builder) -> None:
    """A norm over channels."""
    source = b.pick(4, 2)
    c = b.channels[source]
    groups = b.random.choice([1, 1, 2])
    options: dict[str, tuple[Function, nn.Module | None]] = {
        "layer": (channels_last(lambda s, x: s.norm(x)), nn.LayerNorm(c)),
        "bare layer": (channels_last(lambda s, x: F.layer_norm(x, x.shape[-1:])), None),
        "rms": (channels_last(lambda s, x: s.norm(x)), nn.RMSNorm(c)),
        "everything": (lambda s, x: s.norm(x), nn.LayerNorm(x_shape(c))),
        "group": (lambda s, x: s.norm(x), nn.GroupNorm(groups, c)),
        "by hand": (by_hand, None),
        "pixel": (lambda s, x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5), None),
        "global": (
            lambda s, x: (x - x.mean((1, 2, 3), True)) / (x.std((1, 2, 3), keepdim=True) + 1e-2),
            None,
        ),
        "response": (response, None),
        "length": (lambda s, x: F.normalize(x, dim=1, eps=1e-3), None),
    }
    kind = b.random.choice([*options])
    function, held = options[kind]
    gain = nn.Parameter(torch.randn(1, c, 1, 1))
    b.add(f"mixed {kind}", c, (source,), function, gain=gain, **({"norm": held} if held is not None else {}))


def x_shape(channels: int) -> tuple[int, int, int]:
    """Of an image of the random networks."""
    return channels, 8, 8


def statistic(b: Builder) -> None:
    """A value made of all channels, which gates them, or a function of all of them."""
    source = b.pick(3)
    c = b.channels[source]
    options: dict[str, Function] = {
        "mean": lambda s, x: x - x.mean(1, keepdim=True),
        "largest": lambda s, x: (
            x * torch.sigmoid(x.amax(1, keepdim=True) - x.max(1, True)[0] + x.amin(1, True))
        ),
        "sum": lambda s, x: x / (1 + x.abs().sum(dim=1, keepdim=True)),
        "deviation": lambda s, x: x * torch.var(x, 1, keepdim=True, unbiased=False),
        "softmax": lambda s, x: x + F.softmax(x, dim=1) - x.log_softmax(1),
        "logsumexp": lambda s, x: x - torch.logsumexp(x, 1, keepdim=True),
        "running": lambda s, x: x.cumsum(1) / 4,
        "attention": lambda s, x: (
            x * torch.sigmoid(s.gate(torch.cat([x.mean(1, True), x.max(1, keepdim=True).values], 1)))
        ),
        "place": lambda s, x: x + x.argmax(1, keepdim=True),
        "sorted": lambda s, x: x + x.sort(1)[0],
    }
    kind = b.random.choice([*options])
    held = {"gate": nn.Conv2d(2, 1, 3, padding=1)} if kind == "attention" else {}
    b.add(f"statistic {kind}", c, (source,), options[kind], **held)


OPERATIONS = [(channel_norm, 2), (statistic, 1)]
