"""The recipes' own networks: their size, their shapes, and masked against sliced."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import random_masks, randomise
from tolerances import assert_close
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError
from smcp_fx.zoo.models import build_model
from smcp_fx.zoo.ssd import SSD300, SSD512, priors_of


def test_mobilenet_v1_is_howards() -> None:
    network = build_model("smcp:mobilenet_v1")
    shapes = [tuple(m.weight.shape) for m in network.modules() if isinstance(m, nn.Conv2d)]
    widths = [32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]
    expected = [(32, 3, 3, 3)]
    for before, after in itertools.pairwise(widths):
        expected += [(before, 1, 3, 3), (after, before, 1, 1)]
    assert shapes == expected
    sides, flops = 112, 3 * 32 * 9 * 112 * 112
    for before, after, stride in zip(
        widths, widths[1:], (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1), strict=False
    ):
        sides //= stride
        flops += sides * sides * (9 * before + before * after)
    assert flops + 1024 * 1000 == 568_740_352  # the 569 M of the paper's table
    prepared = smcp_fx.prepare(network, torch.randn(1, 3, 64, 64), config=smcp_fx.PruningConfig())
    first = prepared.pruner.full_cost - 1024 * 1000
    assert first == pytest.approx(flops * (64 / 224) ** 2)


@pytest.mark.parametrize(
    ("name", "size", "sides", "each"),
    [
        ("ssd512_resnet50", 64, (8, 4, 2, 1, 1, 1, 1), (4, 6, 6, 6, 6, 4, 4)),
        ("ssd300_resnet50", 300, (38, 19, 10, 5, 3, 1), (4, 6, 6, 6, 4, 4)),
    ],
)
def test_ssd_has_an_output_a_prior(
    name: str, size: int, sides: tuple[int, ...], each: tuple[int, ...]
) -> None:
    network = build_model(f"smcp:{name}", num_classes=3).eval()
    maps = []
    for head in network.locations:
        head.register_forward_hook(lambda _, inputs, __: maps.append(tuple(inputs[0].shape[1:])))
    with torch.no_grad():
        offsets, scores = network(torch.randn(1, 3, size, size))
    assert [side for _, side, _ in maps] == list(sides)
    assert [width for width, _, _ in maps] == [1024, 512, 512, *(256,) * (len(sides) - 3)]
    count = sum(side**2 * boxes for side, boxes in zip(sides, each, strict=True))
    assert offsets.shape == (1, count, 4)
    assert scores.shape == (1, count, 3)
    assert len(priors_of({"ssd512_resnet50": SSD512, "ssd300_resnet50": SSD300}[name], size)) == count


def test_ssd_outputs_are_in_the_order_of_its_priors() -> None:
    network = build_model("smcp:ssd512_resnet50", num_classes=3).eval()
    for head in network.locations:
        nn.init.zeros_(head.weight)
        head.bias.data = torch.arange(len(head.bias), dtype=torch.float32)  # channel: shape * 4 + coordinate
    with torch.no_grad():
        offsets = network(torch.randn(1, 3, 64, 64))[0][0]
    first = offsets[: 8 * 8 * 4].reshape(8 * 8, 4, 4)  # positions, shapes, coordinates
    assert torch.equal(first, torch.arange(16.0).reshape(4, 4).expand(64, 4, 4))
    priors = priors_of(SSD512, 64)[: 8 * 8 * 4].reshape(8, 8, 4, 4)
    assert torch.equal(priors[0, :, 0, 0], priors[3, :, 2, 0])  # columns move x
    assert bool((priors[:, 0, 0, 1].diff() > 0).all())  # rows move y


@pytest.mark.parametrize(("name", "size"), [("mobilenet_v1", 32), ("ssd512_resnet50", 64)])
def test_masked_is_sliced(name: str, size: int, narrow_detector: None) -> None:
    network = randomise(build_model(f"smcp:{name}", num_classes=4)).double().eval()
    images = torch.rand(2, 3, size, size, dtype=torch.float64)
    config = MethodConfig(keep_first_convolution=True)
    prepared = smcp_fx.prepare(network, images, config=config)
    assert prepared.regions == ()  # one graph
    assert_close(prepared(images), network(images), "identity", name)
    prepared.set_masks(random_masks(prepared, 0))
    smaller = smcp_fx.convert(prepared)
    assert_close(smaller(images), prepared(images), "slicing", name)
    ratio = sum(p.numel() for p in smaller.parameters()) / sum(p.numel() for p in network.parameters())
    assert ratio < 0.6
    first = next(m for m in smaller.modules() if isinstance(m, nn.Conv2d))
    assert first.out_channels == {"mobilenet_v1": 32, "ssd512_resnet50": 64}[name]


def test_unknown_networks_are_refused() -> None:
    with pytest.raises(InputError, match="mobilenet_v1"):
        build_model("smcp:mobilenet_v9")
    with pytest.raises(InputError, match="too small"):
        priors_of(SSD300, 64)
