"""Small networks that move data between their convolutions: concats, splits, shuffles, views, paddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import IMAGE, Net, awkward, between, conv, free_parameter
from torch import Tensor, nn


@awkward(1.0)
def chunk_and_cat() -> nn.Module:
    return between(lambda s, h: torch.cat(h.chunk(2, -3)[::-1], -3))


@awkward(1.0)
def chunk_function_by_keyword() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        a, b = torch.chunk(h, chunks=2, dim=1)
        return a * torch.sigmoid(b)

    return between(wiring, 8, 4)


@awkward(1.0)
def split_into_unequal_parts() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        one, two = torch.split(s.stem(x), [3, 5], 1)
        return s.left(one) + s.right(two)  # type: ignore[no-any-return]

    return Net(wiring, stem=conv(3, 8), left=conv(3, 4), right=conv(5, 4))


@awkward(1.0)
def split_by_half_the_shape() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        parts = h.split(h.shape[1] // 2, dim=-3)
        return torch.cat([parts[1], s.mid(parts[0])], dim=1)

    return between(wiring, 8, 8, mid=conv(4, 4))


@awkward(1.0)
def stack_and_sum() -> nn.Module:
    return Net(
        lambda s, x: s.out(torch.stack([s.one(x), s.two(x)], -4).sum(-4)),
        one=conv(3, 8),
        two=conv(3, 8),
        out=conv(8, 4),
    )


@awkward(1.0)
def stack_and_unbind() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        one, two = torch.stack([s.one(x), s.two(x)], 0).unbind(0)
        return s.out(one * two)  # type: ignore[no-any-return]

    return Net(wiring, one=conv(3, 8), two=conv(3, 8), out=conv(8, 4))


@awkward(0.0)
def unbind_channels() -> nn.Module:
    return between(lambda s, h: torch.stack(h.unbind(1)[:5], 1), 8, 5)


@awkward(1.0)
def shuffle_by_sizes() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        b, c, y, x = h.size()
        h = h.view(b, 2, c // 2, y, x)
        h = torch.transpose(h, 1, 2).contiguous()
        return h.view(b, c, y, x)

    return between(wiring)


@awkward(1.0)
def shuffle_by_literals() -> nn.Module:
    return between(lambda s, h: h.reshape(-1, 2, 6, 8, 8).permute(0, 2, 1, 3, 4).reshape(-1, 12, 8, 8), 12)


@awkward(1.0)
def shuffle_module() -> nn.Module:
    return between(lambda s, h: s.shuffle(h), 12, shuffle=nn.ChannelShuffle(3))


@awkward(0.8)
def shuffle_between_grouped() -> nn.Module:
    """Pinned between the two: both tie equal offsets, and across the shuffle these ties chain all channels."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = s.one(h)
        h = h.view(h.shape[0], 3, 4, 8, 8).transpose(1, 2).reshape(h.shape[0], 12, 8, 8)
        return s.two(h)  # type: ignore[no-any-return]

    return between(wiring, 12, 12, one=conv(12, 12, groups=3), two=conv(12, 12, groups=3))


@awkward(1.0)
def pixel_shuffle() -> nn.Module:
    return between(lambda s, h: F.pixel_shuffle(h, 2), 16, 4)


@awkward(1.0)
def step_over_unshuffled_pixels() -> nn.Module:
    return between(lambda s, h: F.pixel_unshuffle(h, 2)[:, 1::3], 4, 5)


@awkward(1.0)
def pixel_unshuffle() -> nn.Module:
    return between(lambda s, h: s.down(h), 8, 32, down=nn.PixelUnshuffle(2))


@awkward(1.0)
def flatten_and_linear() -> nn.Module:
    return nn.Sequential(
        conv(3, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 12), nn.ReLU(), nn.Linear(12, 4)
    )


@awkward(1.0)
def view_and_linear() -> nn.Module:
    return Net(lambda s, x: s.out(s.stem(x).view(x.size(0), -1)), stem=conv(3, 8), out=nn.Linear(512, 4))


@awkward(1.0)
def view_by_literals() -> nn.Module:
    return Net(lambda s, x: s.out(s.stem(x).view(-1, 512)), stem=conv(3, 8), out=nn.Linear(512, 4))


@awkward(1.0)
def reshape_by_keyword() -> nn.Module:
    return Net(
        lambda s, x: s.out(torch.reshape(input=s.stem(x), shape=(2, 512))),
        stem=conv(3, 8),
        out=nn.Linear(512, 4),
    )


@awkward(1.0)
def flatten_by_keyword() -> nn.Module:
    return Net(
        lambda s, x: s.out(torch.flatten(input=s.stem(x), start_dim=1)),
        stem=conv(3, 8),
        out=nn.Linear(512, 4),
    )


@awkward(1.0)
def unflatten_module() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 128), nn.Unflatten(1, (8, 4, 4)), nn.ReLU(), conv(8, 4))


@awkward(1.0)
def unflatten_by_keyword() -> nn.Module:
    return Net(
        lambda s, x: s.out(s.stem(x.flatten(1)).unflatten(dim=1, sizes=(8, 4, 4))),
        stem=nn.Linear(192, 128),
        out=conv(8, 4),
    )


@awkward(1.0)
def permute_linear_permute() -> nn.Module:
    return between(lambda s, h: s.mid(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), 8, 6, mid=nn.Linear(8, 6))


@awkward(1.0)
def tokens() -> nn.Module:
    return Net(
        lambda s, x: s.out(F.gelu(s.mid(s.stem(x).flatten(2).transpose(1, 2)))),
        stem=conv(3, 8),
        mid=nn.Linear(8, 6),
        out=nn.Linear(6, 4),
    )


@awkward(1.0)
def token_mixing() -> nn.Module:
    return Net(
        lambda s, x: s.out(s.mix(s.stem(x).flatten(2))),
        stem=conv(3, 8),
        mix=nn.Linear(64, 10),
        out=nn.Conv1d(8, 4, 1),
    )


@awkward(1.0)
def roll() -> nn.Module:
    return between(lambda s, h: torch.roll(h, 3, 1) + torch.roll(h, shifts=(1, 2), dims=(2, 3)).roll(3, 1))


@awkward(1.0)
def temporal_shift() -> nn.Module:
    return between(lambda s, h: torch.cat([h[:, :2].roll(1, 0), h[:, 2:4].roll(-1, 0), h[:, 4:]], 1))


@awkward(1.0)
def pad_in_space() -> nn.Module:
    return between(lambda s, h: s.pad(F.pad(h, (1, 2, 0, 1))), pad=nn.ReflectionPad2d(1))


@awkward(8 / 13)
def pad_channels() -> nn.Module:
    return between(lambda s, h: F.pad(h, (0, 0, 0, 0, 2, 3)), 8, 13)


@awkward(1.0)
def crop_channels_by_padding() -> nn.Module:
    """A negative amount of padding changes with the channels that are kept."""
    return between(lambda s, h: F.pad(h, (0, 0, 0, 0, -3, 0)), 8, 5)


@awkward(6 / 8)
def shift_channels_by_padding() -> nn.Module:
    """Two channels of zeros stay, and the crop follows the channels that are kept."""
    return between(lambda s, h: F.pad(h, (0, 0, 0, 0, 2, -2)))


@awkward(1.0)
def repeat_channels() -> nn.Module:
    return between(lambda s, h: h.repeat(1, 2, 1, 1).repeat_interleave(2, 1).flip(1), 4, 16)


@awkward(0.0)
def channels_into_the_batch() -> nn.Module:
    return between(lambda s, h: h.view(16, 1, 8, 8), 8, 1)


@awkward(1.0)
def vector_there_and_back() -> nn.Module:
    return between(lambda s, h: h + h.mean((0, 2, 3)).view(1, -1, 1, 1).flatten().view(1, -1, 1, 1))


@awkward(1.0, (2, 3, 16, 16))
def size_of_another_tensor() -> nn.Module:
    """A view of one tensor by the channel count of another, which shrinks."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.out(h).flatten(2) + x.view(x.shape[0], h.shape[1] * 6, -1).mean((1, 2), keepdim=True)  # type: ignore[no-any-return]

    return Net(wiring, stem=conv(3, 8), out=conv(8, 4))


@awkward(1.0)
def expand_to_batch() -> nn.Module:
    return between(lambda s, h: h + s.bias.expand(h.shape[0], 8, 8, 8), bias=free_parameter(1, 8, 1, 1))


@awkward(1.0, IMAGE)
def resize_like() -> nn.Module:
    return between(lambda s, h: h + F.interpolate(s.mid(h), size=h.shape[-2:]), mid=conv(8, 8, stride=2))


@awkward(1.0)
def concat_with_zeros() -> nn.Module:
    return between(lambda s, h: torch.cat([h, h.new_zeros(h.shape[0], 2, 8, 8)], 1), 8, 10)


@awkward(1.0)
def permutes_that_cancel() -> nn.Module:
    """The chain of movements is the identity, and the channels are not on axis 1 at its ends."""
    return Net(
        lambda s, x: s.three(s.two(s.one(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).permute(0, 2, 3, 1))),
        one=nn.Linear(3, 6),
        two=nn.Linear(6, 5),
        three=nn.Linear(5, 4),
    )


@awkward(1.0)
def split_piece_that_may_empty() -> nn.Module:
    """All channels of one piece may go while its group keeps some: pooling refuses a tensor of no channels."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        one, two = h.split([2, 6], 1)
        return torch.cat([F.max_pool2d(two, 3, 1, 1), F.max_pool2d(one, 3, 1, 1)], 1)

    return between(wiring)


@awkward(1.0)
def shuffle_that_runs_into_other_movements() -> nn.Module:
    """The movements after a shuffle cancel the last of its own: two chains, which must not share a node."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        mixed = h.reshape(h.shape[0], 3, -1, 64).transpose(1, 2).flatten(1, 2).unflatten(2, (8, 8))
        tokens = s.mid(mixed.flatten(2).transpose(1, 2))
        return tokens.transpose(1, 2).reshape(h.shape[0], -1, 8, 8)  # type: ignore[no-any-return]

    return between(wiring, 9, 6, mid=nn.Linear(9, 6))


@awkward(1.0)
def hstack_and_vstack() -> nn.Module:
    return between(lambda s, h: torch.hstack([h, torch.vstack([h, h.relu()]).chunk(2)[1]]), 8, 16)


@awkward(1.0)
def split_with_sizes() -> nn.Module:
    return between(lambda s, h: torch.cat(h.split_with_sizes([3, 2, 5], 1)[::-1], 1), 10)


@awkward(1.0)
def squeezed_to_one_channel() -> nn.Module:
    """Of two channels one is left, whose dimension is of size 1 then, and stays."""
    return Net(
        lambda s, x: s.out(F.adaptive_avg_pool2d(s.stem(x), 1).squeeze()),
        stem=conv(3, 2),
        out=nn.Linear(2, 4),
    )


@awkward(1.0)
def attributes_that_move() -> nn.Module:
    return Net(
        lambda s, x: s.out(s.stem(x).flatten(2).mT + s.stem(x).data.mean((2, 3)).T.T[:, None]),
        stem=conv(3, 8),
        out=nn.Linear(8, 4),
    )


@awkward(1.0)
def parts_without_channels() -> nn.Module:
    return between(lambda s, h: torch.cat([h[:, :0], h.relu(), h[:, 8:] * 2], 1))


@awkward(0.0)
def parts_without_elements() -> nn.Module:
    """Nothing shows which of their channels is which."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        none = h[..., h.shape[3] :].unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2)
        channels, left = h.split([8, 0], 1)
        return torch.cat([torch.cat([left, channels], 1), none], 3)

    return between(wiring)
