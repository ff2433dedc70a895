"""FLOPs and parameters of random prunings, counted independently on the converted module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, Residual, between, chain, conv, conv_bn, free_parameter, random_masks, size_of
from models_attention import channels_attend_to_channels, channels_attend_to_fewer
from models_generated import hypernetwork_of_two_layers, linear_of_each_image
from models_products import TOKENS, attention_of_one_head, attention_of_torch_with_one_head
from thin_networks import thin_shufflenet
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

import smcp_fx
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs.binding import absolute_target
from smcp_fx.errors import InputError


def flops_of(model: nn.Module, x: Tensor) -> int:
    """Multiply-adds of one image, counted by hooks from the shapes that pass: one a weight and position used."""
    total = 0

    def count(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        positions = inputs[0] if getattr(module, "transposed", False) else output
        if isinstance(module, nn.Linear):
            total += module.weight.numel() * positions.numel() // module.out_features
        else:
            per_channel = module.weight.numel() * positions[0, 0].numel()
            total += per_channel * x.shape[0]

    hooks = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    assert total % x.shape[0] == 0
    return total // x.shape[0]


def concat() -> nn.Module:
    return Net(
        lambda s, x: s.out(torch.cat([s.one(x), s.mid(s.one(x)), x], 1)),
        one=conv(3, 8),
        mid=conv(8, 6),
        out=conv(17, 4),
    )


SMALL: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: chain(8, 12, 16),
    "residual": Residual,
    "concat": concat,
    "grouped": lambda: between(lambda s, h: s.mid(h), 12, 24, mid=conv(12, 24, groups=3)),
    "depthwise": lambda: between(lambda s, h: s.mid(h), 8, 24, mid=conv_bn(8, 24, groups=8)),
    "transposed": lambda: between(lambda s, h: s.mid(h), 8, 12, mid=nn.ConvTranspose2d(8, 12, 3, 2, 1)),
    "transposed grouped": lambda: between(
        lambda s, h: s.mid(h), 8, 12, mid=nn.ConvTranspose2d(8, 12, 2, 2, groups=2)
    ),
    "flatten": lambda: nn.Sequential(conv(3, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)),
    "tokens": lambda: Net(
        lambda s, x: s.two(F.gelu(s.one(s.stem(x).flatten(2).transpose(1, 2)))),
        stem=conv(3, 8),
        one=nn.Linear(8, 6),
        two=nn.Linear(6, 4),
    ),
    "called twice": lambda: between(lambda s, h: s.mid(F.relu(s.mid(h))), mid=conv_bn(8, 8)),
    "scale": lambda: between(lambda s, h: h * s.scale, scale=free_parameter(8, 1, 1)),
    "prelu and norms": lambda: between(
        lambda s, h: s.act(s.norm(h)), norm=nn.GroupNorm(4, 8), act=nn.PReLU(8)
    ),
}


def check(model: nn.Module, x: Tensor, seeds: range) -> None:
    """Both costs at the counts of random masks equal what is counted on the converted module, exactly."""
    model.eval()
    prepared = smcp_fx.prepare(model, x, config=smcp_fx.PruningConfig(multiple=1))
    pruner, parameters = prepared.pruner, prepared.plan.parameters
    assert pruner.full_cost == flops_of(model, x)
    assert parameters.cost(parameters.full_counts) == size_of(model)
    for seed in seeds:
        prepared.set_masks(random_masks(prepared, seed))
        sliced = smcp_fx.convert(prepared)
        assert pruner.cost.cost(pruner.counts) == flops_of(sliced, x)
        assert parameters.cost(pruner.counts) == size_of(sliced)


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (channels_attend_to_channels, (2, 3, 8, 8)),
        (channels_attend_to_fewer, (2, 3, 8, 8)),
        (hypernetwork_of_two_layers, (2, 3, 8, 8)),
        (linear_of_each_image, (2, 3, 8, 8)),
        (attention_of_one_head, TOKENS),
        (attention_of_torch_with_one_head, TOKENS),
    ],
)
def test_products(made: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """As torch counts them in the deployed network, by the rows and columns that are left, and what they sum over."""
    x = torch.randn(shape)
    prepared = smcp_fx.prepare(made().eval(), x, cost="flops", config=smcp_fx.PruningConfig(multiple=1))
    for seed in range(3):
        prepared.set_masks(random_masks(prepared, seed))
        sliced = smcp_fx.convert(prepared)
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
            sliced(x)
        total = counted.get_total_flops() / 2 / x.shape[0]
        assert prepared.pruner.cost.cost(prepared.pruner.counts) == total


@pytest.mark.parametrize("name", SMALL)
def test_small_networks(name: str) -> None:
    check(SMALL[name](), torch.randn(2, 3, 8, 8), range(4))


@pytest.mark.parametrize("build", [models.mobilenet_v3_small, thin_shufflenet, models.squeezenet1_1])
def test_known_networks(build: Callable[[], nn.Module]) -> None:
    check(build(), torch.randn(1, 3, 32, 32), range(1))


def test_resnet50_has_the_known_cost() -> None:
    """25,557,032 parameters, and 4.09 G multiply-adds at 224 x 224 (a 49th of the convolutions' at 32 x 32)."""
    prepared = smcp_fx.prepare(models.resnet50(), torch.zeros(1, 3, 32, 32), cost="params")
    assert prepared.pruner.full_cost == 25_557_032
    flops, classifier = prepared.plan.flops, 2048 * 1000
    assert (flops.cost(flops.full_counts) - classifier) * 49 + classifier == 4_089_184_256


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (0.25, 2.5e8),
        (1, 1e9),
        ("0.3 GFLOPs", 3e8),
        ("2e3 KFLOPs", 2e6),
        (" 7 M flop ", 7e6),
        ("5 FLOPs", 5.0),
        ("50%", 5e8),
        (" 12.5 % ", 1.25e8),
        ("1.5 M multiply-adds", 1.5e6),
        ("2 MMACs", 2e6),
    ],
)
def test_targets(target: float | str, expected: float) -> None:
    assert absolute_target(target, 1e9, "FLOPs") == pytest.approx(expected)


@pytest.mark.parametrize(
    "target", [0, 1.01, -0.5, True, None, "0.5", "5 ms", "0 FLOPs", "inf FLOPs", "FLOPs"]
)
def test_targets_that_make_no_sense(target: Any) -> None:
    with pytest.raises(InputError, match="FLOPs"):
        absolute_target(target, 1e9, "FLOPs")


class Channels:
    """A cost model of a user's own: the first convolution's output channels."""

    def network_cost(self, traced: Any, channels: ChannelGraph) -> NetworkCost:
        from smcp_fx.cost_model import CostTerm

        width = channels.width(channels.layers[0].output_channels)
        permitted = {group.name: group.permitted for group in channels.groups if group.free}
        return NetworkCost("channels", permitted, (CostTerm("first", (width,), lambda w: 1.0 * w),))


def test_a_cost_model_of_ones_own() -> None:
    prepared = smcp_fx.prepare(chain(16, 24), torch.randn(2, 3, 8, 8), cost=Channels(), target="8 channels")
    assert (prepared.pruner.full_cost, prepared.pruner.target) == (16, 8)


@pytest.mark.parametrize("target", ["0%", "150 %", "nan%", "-5 %", "1e1e1 %", "%"])
def test_shares_that_make_no_sense(target: str) -> None:
    with pytest.raises(InputError, match="target"):
        absolute_target(target, 1e9, "FLOPs")
