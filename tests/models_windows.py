"""Small networks that gather windows or points of each channel: unfold, fold, sampling, unpooling, moved points."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from models import awkward, between, conv, free_parameter
from torch import Tensor, nn


@awkward(1.0)
def windows_and_back() -> nn.Module:
    return between(
        lambda s, h: s.fold(s.unfold(h)), unfold=nn.Unfold(3, padding=1), fold=nn.Fold((8, 8), 3, padding=1)
    )


@awkward(1.0)
def convolution_by_unfold() -> nn.Module:
    return between(
        lambda s, h: (s.weight @ F.unfold(h, 3, padding=1)).view(-1, 6, 8, 8),
        8,
        6,
        weight=free_parameter(6, 72),
    )


@awkward(1.0)
def windows_weighed() -> nn.Module:
    """A kernel a position, made by another branch (involution, CARAFE); windows of one dimension after the other."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        kernel = s.kernel(h).view(-1, 2, 9, 8, 8).unsqueeze(2)
        h = (kernel * F.unfold(h, 3, padding=1).view(-1, 2, 4, 9, 8, 8)).sum(3).view(-1, 8, 8, 8)
        return h + F.pad(h, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1).amax((-1, -2))

    return between(wiring, kernel=conv(8, 18))


@awkward(1.0)
def pooled_beside_the_channels() -> nn.Module:
    """Adaptive pooling leaves the dimension for which it is given None: here that of the channels, as in EasyOCR."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        by_column = s.pool(h.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return h * by_column + F.adaptive_max_pool2d(h.transpose(1, 2), (None, 1)).transpose(1, 2)

    return between(wiring, pool=nn.AdaptiveAvgPool2d((None, 1)))


@awkward(1.0)
def pooled_by_windows_of_one_channel() -> nn.Module:
    """As SpeechBrain's CRDNN pools features of [N, H, W, C]."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        narrow = s.pool(h.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        return narrow + F.avg_pool2d(h.permute(0, 3, 2, 1), (2, 1), (2, 1)).permute(0, 3, 2, 1).mT

    return between(wiring, pool=nn.MaxPool2d((1, 2), (1, 2)))


@awkward(0.0)
def pooled_over_the_channels() -> nn.Module:
    """To as many as there were, in windows of two, and in windows of one that skip every other."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = F.adaptive_avg_pool2d(h.transpose(1, 2), (8, 1))
        return torch.cat([F.max_pool2d(h, (2, 1)), F.max_pool2d(h, 1, (2, 1))], 2).transpose(1, 2)

    return between(wiring)


@awkward(0.0)
def windows_of_channels() -> nn.Module:
    return between(lambda s, h: h.unfold(1, 4, 2).sum(-1), 8, 3)


@awkward(1.0)
def read_at_a_grid() -> nn.Module:
    """Where it is read is told by a linear layer, whose outputs stay."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        grid = F.affine_grid(s.where(h.mean((2, 3))).view(-1, 2, 3), h.size(), align_corners=False)
        return F.grid_sample(h, grid, align_corners=False) + s.shift(h)

    return between(wiring, where=nn.Linear(8, 6), shift=conv(8, 8))


@awkward(1.0)
def unpooled() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        small, where = s.pool(h)
        other, places = F.max_pool2d(small, 2, return_indices=True)
        return s.unpool(F.max_unpool2d(s.mid(other), places, 2), where)  # type: ignore[no-any-return]

    return between(
        wiring, pool=nn.MaxPool2d(2, return_indices=True), unpool=nn.MaxUnpool2d(2), mid=conv(8, 8)
    )


@awkward(1.0)
def moved_points() -> nn.Module:
    """With a weight for each point, and with groups of channels that move together; without a bias."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = s.one(h, s.where(h), s.mask(h).sigmoid())
        return s.two(h, s.two_where(h))  # type: ignore[no-any-return]

    layer = torchvision.ops.DeformConv2d
    parts = {"where": conv(8, 18), "mask": conv(8, 9), "two_where": conv(6, 36)}
    return between(
        wiring,
        8,
        4,
        one=layer(8, 6, 3, padding=1),
        two=layer(6, 4, 3, padding=1, groups=2, bias=False),
        **parts,
    )


@awkward(1.0)
def dropped_blocks() -> nn.Module:
    return between(lambda s, h: s.drop(h), drop=torchvision.ops.DropBlock2d(0.2, 3))


@awkward(1.0)
def einsum_with_an_ellipsis() -> nn.Module:
    return between(lambda s, h: torch.einsum("...chw,dc->...dhw", h, s.weight), weight=free_parameter(8, 8))


@awkward(1.0)
def cosine_of_channels() -> nn.Module:
    return between(lambda s, h: s.mid(h) * F.cosine_similarity(s.mid(h), h, dim=1)[:, None], mid=conv(8, 8))


@awkward(1.0)
def channel_attention_that_slides() -> nn.Module:
    """ECA: a convolution over the vector of channels, which stays as long as it was; zeros for what is gone."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        gate = s.slide(h.mean((2, 3)).unsqueeze(1)).sigmoid().view(h.shape[0], -1, 1, 1)
        return s.mid(h * gate.expand_as(h)) * s.other(
            F.adaptive_avg_pool2d(h, 1).squeeze(-1).mT
        ).mT.unsqueeze(-1)

    slides = {name: nn.Conv1d(1, 1, 3, padding=1, bias=False) for name in ("slide", "other")}
    return between(wiring, mid=conv(8, 8), **slides)


@awkward(24 / 26)
def attention_to_pairs_of_dimensions() -> nn.Module:
    """Triplet attention: a map of channels and rows, one of channels and columns, one of rows and columns.

    Their batch norms gather statistics of the kept channels.
    """

    def both(h: Tensor) -> Tensor:
        return torch.cat([h.amax(1, keepdim=True), h.mean(1, keepdim=True)], 1)

    def wiring(s: Any, h: Tensor) -> Tensor:
        rows, columns = h.permute(0, 2, 1, 3), h.permute(0, 3, 2, 1)
        rows = (rows * s.rows(both(rows)).sigmoid()).permute(0, 2, 1, 3)
        gate = F.batch_norm(s.columns(both(columns)), None, None, training=True).sigmoid()
        columns = (columns * gate).permute(0, 3, 2, 1)
        return s.mid(rows + columns) + s.last(h * s.space(both(h)).sigmoid())

    maps = {name: nn.Sequential(conv(2, 1), nn.BatchNorm2d(1)) for name in ("rows", "space")}
    return between(wiring, mid=conv(8, 8), last=conv(8, 8), columns=conv(2, 1), **maps)


@awkward(1.0)
def local_response() -> nn.Module:
    return between(lambda s, h: s.norm(F.local_response_norm(h, 3)), norm=nn.LocalResponseNorm(5))


@awkward(0.0)
def slides_to_another_number_of_channels() -> nn.Module:
    return between(
        lambda s, h: s.slide(h.flatten(2).mT).mT.view(-1, 6, 8, 8), 8, 6, slide=nn.Conv1d(64, 64, 3)
    )


@awkward(1.0)
def boxes_cut_out() -> nn.Module:
    """By both of torchvision's functions, of boxes that are the same for all images."""
    boxes = nn.Parameter(torch.tensor([[0.0, 1, 1, 6, 7], [1, 0, 2, 5, 5]]), requires_grad=False)

    def wiring(s: Any, h: Tensor) -> Tensor:
        return torchvision.ops.roi_align(h, s.boxes, 3) + torchvision.ops.roi_pool(h, s.boxes, 3)

    return between(wiring, boxes=boxes)
