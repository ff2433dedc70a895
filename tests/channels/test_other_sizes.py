"""Channels whose ties follow from the size of the images stay; masked equals sliced at every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from models import IMAGE, Net, between, check_slicing, conv, random_masks, randomise, run
from thin_networks import thin_convnext, thin_densenet
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.channels.graph import RULES
from smcp_fx.channels.propagation import Propagation
from smcp_fx.tracing.other_sizes import at_another_size
from smcp_fx.tracing.tracer import trace

Wiring = Callable[[Any, Tensor], Tensor]
REASON = "depends on the size of the images, or on how many there are"


def tokens(h: Tensor) -> Tensor:
    """[b, h * w, c]"""
    return h.flatten(2).transpose(1, 2)


def mixed(s: Any, h: Tensor) -> Tensor:
    """Tokens taken for a feature map."""
    return tokens(h).reshape(h.shape)


def mixed_rows(s: Any, h: Tensor) -> Tensor:
    """The same of each row."""
    return h.permute(0, 2, 3, 1).reshape(h.shape[0], h.shape[2], h.shape[1], h.shape[3]).transpose(1, 2)


def mixed_images(s: Any, h: Tensor) -> Tensor:
    """Channels and images, in the wrong order."""
    return h.reshape(h.shape[1], h.shape[0], *h.shape[2:]).transpose(0, 1)


def mixed_unflattened(s: Any, h: Tensor) -> Tensor:
    """In two steps, of which neither mixes anything visibly."""
    return tokens(h).flatten(1).unflatten(1, (h.shape[1], h.shape[2], h.shape[3]))


def added(wiring: Wiring) -> Wiring:
    """Beside what is not mixed."""
    return lambda s, h: h + wiring(s, h)


def rolled(s: Any, h: Tensor) -> Tensor:
    """As many places as the image has columns."""
    return torch.roll(h, h.shape[3], 1)


def flat_parts(s: Any, h: Tensor) -> Tensor:
    """The halves of a flat tensor, changed places."""
    flat, half = h.reshape(-1), h.numel() // 2
    return torch.cat([flat[half:], flat[:half]]).view(h.shape)


SIZES = [(2, 3, 8, 8), (3, 3, 8, 4), (1, 3, 4, 12), (5, 3, 6, 10)]


def checked_at_other_sizes(net: nn.Module, example: tuple[int, ...]) -> smcp_fx.PreparedModel:
    """Masked equals sliced at all sizes that the network takes, for some masks."""
    image = torch.randn(example, dtype=torch.float64)
    model = randomise(net).double().eval()
    prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1))
    for seed in range(3):
        prepared.set_masks(random_masks(prepared, seed))
        sliced = smcp_fx.convert(prepared)
        for shape in (example, *SIZES):
            x = (torch.randn(shape, dtype=torch.float64),)
            assert_close(run(sliced, x), run(prepared, x), "slicing", f"{shape}, seed {seed}")
    return prepared


@pytest.mark.parametrize("wiring", [mixed, mixed_rows, mixed_images, mixed_unflattened])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("channels", [4, 8, 9, 12, 16, 32])
def test_channels_mixed_by_the_size_stay(wiring: Wiring, beside: bool, channels: int) -> None:
    """Sixteen places: channels that divide them, are as many, a multiple, or have no factor in common."""
    net = between(added(wiring) if beside else wiring, channels)
    channel_graph = checked_at_other_sizes(net, (2, 3, 4, 4)).channels
    assert not channel_graph["stem"].free


def test_a_way_back_at_one_size_alone_is_gone() -> None:
    """Windows of four by four, then a grid of four by four, as in MaxViT: at 16 pixels both split alike."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        b, c, rows, columns = h.shape
        windows = h.permute(0, 2, 3, 1).view(b, rows // 4, 4, columns // 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        joined = s.one(windows).permute(0, 1, 3, 2, 4, 5).reshape(b, rows, columns, c)
        grid = joined.view(b, 4, rows // 4, 4, columns // 4, c).permute(0, 2, 4, 1, 3, 5)
        mixed = s.two(grid - grid.mean((3, 4), keepdim=True))
        return mixed.permute(0, 3, 1, 4, 2, 5).reshape(b, rows, columns, c).permute(0, 3, 1, 2)

    model = randomise(between(wiring, 8, one=nn.Linear(8, 8), two=nn.Linear(8, 8))).double().eval()
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 16, 16, dtype=torch.float64))
    assert prepared.channels.free_share == 1
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    for side in (16, 24, 32):
        x = (torch.randn(2, 3, side, side, dtype=torch.float64),)
        assert_close(run(sliced, x), run(prepared, x), "slicing", str(side))


def test_channels_rolled_by_the_width_stay() -> None:
    """By four places at the example's width, by eight at the other."""
    assert not checked_at_other_sizes(between(rolled, 9), (2, 3, 4, 4)).channels["stem"].free


@pytest.mark.parametrize(
    "wiring",
    [
        lambda s, h: torch.roll(h, h.shape[3], 1),  # by as many as there are channels, at both sizes
        lambda s, h: torch.roll(h, h.shape[3] % 4 + 1, 1),
        lambda s, h: h + h[:, : h.shape[3] // 2].sum(1, True),
        lambda s, h: h + h.narrow(1, 0, h.shape[3] // 4).sum(1, True),
        lambda s, h: h + h.select(1, h.shape[3] % 4).unsqueeze(1),
        lambda s, h: h + h[:, h.shape[2] % 4].unsqueeze(1),
        lambda s, h: h + h.split(h.shape[3] // 2, 1)[0].sum(1, True),
        lambda s, h: h + nn.functional.pad(h, (0, 0, 0, 0, -(h.shape[3] // 4), 0)).sum(1, True),
        lambda s, h: torch.roll(h, h.shape[0], 1),
    ],
)  # fmt: skip
def test_channels_moved_by_a_number_of_the_input_stay(wiring: Wiring) -> None:
    """Where the number is the same at two sizes, or moves nothing there, too."""
    graph = checked_at_other_sizes(between(wiring, 4), (2, 3, 4, 4)).channels
    assert any(
        "moves channels by a number that follows the input's size" in why for why in graph["stem"].pinned
    )


@pytest.mark.parametrize(
    "wiring",
    [
        lambda s, h: torch.roll(h, (h.shape[3] // 2, 3), (3, 1))[:, 2:, h.shape[2] // 4 :],
        lambda s, h: h[:, 2:, :, : 1 - h.shape[3]],  # one column, and with one more than that none
    ],
)
def test_numbers_of_the_input_may_move_rows_beside_channels(wiring: Wiring) -> None:
    assert checked_at_other_sizes(between(wiring, 8, 6), (2, 3, 4, 4)).channels["stem"].free


@pytest.mark.parametrize("channels_last", [False, True])
def test_padding_by_a_number_of_the_input_may_stand_beside_channels(channels_last: bool) -> None:
    """To whole windows, as in Swin: at the example's size nothing is added, at others something is."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        right, below = (-h.shape[3]) % 4, (-h.shape[2]) % 4
        if channels_last:
            last = nn.functional.pad(h.permute(0, 2, 3, 1), (0, 0, 0, right, 0, below))
            return last.permute(0, 3, 1, 2)
        return nn.functional.pad(h, (0, right, 0, below))

    assert checked_at_other_sizes(between(wiring, 8), (2, 3, 4, 4)).channels["stem"].free


def test_strides_stay_the_inputs() -> None:
    graph = checked_at_other_sizes(
        between(lambda s, h: h.as_strided(h.shape, h.stride()), 8), (2, 3, 4, 4)
    ).channels
    assert not graph["stem"].free


def test_parts_of_what_grows_with_the_input_stay() -> None:
    """Where the parts begin would be written down for the example."""
    graph = checked_at_other_sizes(between(flat_parts, 8), (2, 3, 4, 4)).channels
    assert any("follows the input's size" in why for why in graph["stem"].pinned)


def test_the_reason_names_the_operation() -> None:
    """A channel of one meets sixteen of the other at the example's size, and more at a larger one."""
    net = Net(
        lambda s, x: s.out(s.one(x) + mixed(s, s.two(x))), one=conv(3, 64), two=conv(3, 64), out=conv(64, 4)
    )
    graph = checked_at_other_sizes(net, (2, 3, 4, 4)).channels
    text = graph.explain("two", 3)
    assert "'reshape' takes positions or images for channels" in text and REASON in text
    assert graph["one"].free


@pytest.mark.parametrize("layer_pruning", [False, True])
def test_only_the_channels_that_are_mixed_by_the_size_stay(layer_pruning: bool) -> None:
    """As in MAnet: what they are added to, and what reads them, takes the kept ones of what the mixture gives."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        return h + tokens(s.one(h)).reshape(h.shape) + s.three(tokens(s.two(h)).reshape(h.shape))

    net = between(wiring, 8, one=conv(8, 8), two=conv(8, 8), three=conv(8, 8))
    channel_graph = checked_at_other_sizes(net, (2, 3, 4, 4)).channels
    assert channel_graph["stem"].free
    assert not channel_graph["one"].free and not channel_graph["two"].free
    assert channel_graph["input of three"].free and channel_graph.free_share == 1
    check_slicing(net, (torch.randn(2, 3, 4, 4),), layer_pruning=layer_pruning)


@pytest.mark.parametrize(
    "wiring",
    [
        lambda s, h: tokens(h).transpose(1, 2).reshape(h.shape),
        lambda s, h: tokens(h).reshape(h.shape[0], -1, 4, h.shape[1] // 4).flatten(2).transpose(1, 2).view(h.shape),
        lambda s, h: h.view(h.shape[0], 2, -1, *h.shape[2:]).transpose(1, 2).flatten(1, 2),
        lambda s, h: h.flatten(1).relu().view(h.shape),
        lambda s, h: h.reshape(-1).relu().view(h.shape),
        lambda s, h: h.reshape(-1)[: h.numel()].view(h.shape),
        lambda s, h: torch.roll(h, h.shape[3] // 2, 3).roll(3, 1),
    ],
    ids=["tokens", "heads", "shuffle", "flat", "all_flat", "flat_slice", "roll"],
)  # fmt: skip
def test_what_is_right_at_every_size_is_free(wiring: Wiring) -> None:
    assert checked_at_other_sizes(between(wiring, 16), (2, 3, 4, 4)).channels["stem"].free


def test_masks_of_statistics_behind_a_pixel_shuffle_fit_every_size() -> None:
    """A shortcut ties the channels that lie in space: a mask has one element a channel all the same."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = F.pixel_shuffle(h, 2)
        h = h + s.beside(h)
        return (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1)

    assert (
        checked_at_other_sizes(between(wiring, 16, 4, beside=conv(4, 4)), (2, 3, 4, 4)).channels["stem"].free
    )


def test_a_network_of_one_size_is_free() -> None:
    """There is no other size at which it could go wrong."""
    net = Net(lambda s, x: s.out(s.stem(x).view(2, 128)), stem=conv(3, 8), out=nn.Linear(128, 4))
    assert check_slicing(net, (torch.randn(2, 3, 4, 4),)).channels["stem"].free
    traced = trace(net, (torch.randn(2, 3, 4, 4).double(),))
    assert at_another_size(traced) is None


@pytest.mark.parametrize(
    "build",
    [torchvision.models.resnet18, torchvision.models.mobilenet_v3_small, thin_densenet, thin_convnext],
)
def test_networks_that_regroup_nothing_are_not_run_again(build: Callable[[], nn.Module]) -> None:
    traced = trace(build().eval(), (torch.randn(1, 3, 64, 64),))
    assert at_another_size(traced) is None


def test_the_other_size_leaves_the_model_and_the_generator_alone() -> None:
    net = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.Dropout(), conv(8, 4), nn.Flatten(2))
    traced = trace(net, (torch.randn(2, 3, 40, 24),))
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    values = at_another_size(traced)
    assert values is not None and values["_0"].shape == (4, 8, 72, 48)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_what_lies_before_a_written_end_stays() -> None:
    """256 is the end of this example's tensor, and the middle of a larger one's."""
    net = Net(
        lambda s, x: s.out(s.stem(x).reshape(-1)[:256].view(2, -1, 4, 4)), stem=conv(3, 8), out=conv(8, 4)
    )
    prepared = smcp_fx.prepare(net.eval(), torch.randn(2, 3, 4, 4), config=smcp_fx.PruningConfig(multiple=1))
    assert any(REASON in why for why in prepared.channels["stem"].pinned)


@pytest.mark.parametrize("one_size", [False, True])
def test_more_images_are_known_from_other_sides(one_size: bool) -> None:
    """A network that takes one size is seen with more images alone: its positions look like branches or groups."""
    places = torch.randn(8, 8, 8) if one_size else torch.tensor(0.0)
    net = between(lambda s, h: (h + places).flatten(2).unflatten(2, h.shape[2:]))
    traced = trace(net.eval(), (torch.randn(IMAGE),))
    other = at_another_size(traced)
    assert other is not None and other["x"].shape[0] == 4
    propagation = Propagation(traced.module, traced.values, RULES, other=other)
    assert propagation.sizes.sides_differ is not one_size
