"""Small networks that fold channels into the batch, or make the kernels of a convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import awkward, between, conv, free_parameter
from torch import Tensor, nn


@awkward(1.0)
def groups_in_the_batch() -> nn.Module:
    """Spatial group enhancement, a convolution and attention inside each group: one channel of every group goes."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images, channels, height, width = h.shape
        group = h.view(images * 2, -1, height, width)
        same = (group * F.adaptive_avg_pool2d(group, 1)).sum(1, keepdim=True)
        group = s.inside(group * same.sigmoid())
        tokens = group.flatten(2).mT
        found = torch.softmax(tokens @ tokens.mT, -1) @ tokens
        return found.mT.reshape(images, channels, height, width)

    return between(wiring, inside=conv(4, 4))


@awkward(1.0)
def one_kernel_for_every_channel() -> nn.Module:
    """Blurring: each channel of each image is an image of its own, or a depthwise kernel is spread."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        channels, height, width = h.shape[1:]
        blurred = F.conv2d(h.reshape(-1, 1, height, width), s.blur, padding=1).view(h.shape)
        return F.conv2d(blurred, s.blur.expand(channels, -1, -1, -1), padding=1, groups=channels)

    return between(wiring, blur=free_parameter(1, 1, 3, 3))


@awkward(1.0)
def kernels_from_the_image() -> nn.Module:
    """A depthwise kernel for each channel of each image."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        images, channels, height, width = h.shape
        kernels = s.kernels(F.adaptive_avg_pool2d(h, 3)).view(images * channels, 1, 3, 3)
        line = h.reshape(1, images * channels, height, width)
        return F.conv2d(line, kernels, padding=1, groups=images * channels).view(h.shape)

    return between(wiring, kernels=conv(8, 8, 1))


@awkward(0.0)
def folded_by_a_written_batch() -> nn.Module:
    """The example has two images; sixteen would be the size of that alone."""
    return between(
        lambda s, h: F.conv2d(h.reshape(16, 1, 8, 8), s.blur, padding=1).view(-1, 8, 8, 8),
        blur=free_parameter(1, 1, 3, 3),
    )


@awkward(1.0)
def kernels_that_meet_groups() -> nn.Module:
    """Involution with as many places in a kernel as there are channels in a group, and more."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        kernel = s.kernel(h).view(-1, 4, 1, 9, 8, 8)
        return (kernel * F.unfold(h, 3, padding=1).view(-1, 4, 2, 9, 8, 8)).sum(3).view(-1, 8, 8, 8)

    return between(wiring, kernel=conv(8, 36, 1))


@awkward(1.0)
def positions_picked() -> nn.Module:
    """The best positions of each channel, and those of a score that all share."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        tokens = h.flatten(2).mT
        best = s.score(tokens).squeeze(-1).topk(6, 1)[1]
        read = tokens.gather(1, best.unsqueeze(-1).repeat(1, 1, tokens.shape[-1]))
        again = tokens.gather(1, best.unsqueeze(-1).expand(-1, -1, 8)).sort(1)[0]
        return (
            h * s.mid(read + again).amax(1)[:, :, None, None] + tokens.topk(3, 1)[0].mean(1)[:, :, None, None]
        )

    return between(wiring, score=nn.Linear(8, 1), mid=nn.Linear(8, 8))


@awkward(0.0)
def channels_picked() -> nn.Module:
    return between(lambda s, h: h * (h >= h.topk(3, 1)[0][:, -1:]))


@awkward(1.0)
def heads_of_which_keys_alone_lie_in_the_batch() -> nn.Module:
    """As in MViT: a convolution of each head reads keys and values, so that equal places in all heads go."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        q, k, v = s.qkv(h).reshape(h.shape[0], 3, 2, 4, *h.shape[2:]).unbind(1)
        k, v = (s.pool(t.flatten(0, 1)).unflatten(0, (-1, 2)).flatten(3) for t in (k, v))
        scores = (q.flatten(3).mT @ k).softmax(-1)
        return (scores @ v.mT).mT.reshape(h.shape)

    pool = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4)
    return between(wiring, qkv=conv(8, 24), pool=pool)


@awkward(1.0)
def shuffle_by_way_of_the_batch() -> nn.Module:
    """ShuffleNetV2+: the channels at even places, and those at odd ones."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        b, c, height, width = h.shape
        pairs = (
            h.reshape(b * c // 2, 2, height * width).permute(1, 0, 2).reshape(2, -1, c // 2, height, width)
        )
        return torch.cat((pairs[0], s.mid(pairs[1])), 1)

    return between(wiring, 12, mid=conv(6, 6))
