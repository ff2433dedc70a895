"""Networks everybody knows: the paper's numbers for ResNet-50, and masked against sliced on torchvision's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import check_slicing, random_masks, randomise, run, size_of, without_repeats
from thin_networks import (
    narrow_vgg11_bn,
    short_googlenet,
    short_mobilenet,
    thin_convnext,
    thin_densenet,
    thin_efficientnet,
    thin_regnet,
    thin_resnet50,
    thin_resnext50,
    thin_shufflenet,
    thin_swin_t,
)
from tolerances import assert_close
from torch import nn
from torchvision import models
from torchvision.models.video.mvit import MSBlockConfig, MViT
from torchvision.models.video.swin_transformer import SwinTransformer3d

import smcp_fx
from smcp_fx.config import MethodConfig

# (network, pixels a side: the fewest that every stage still sees); all their channels are free
NETWORKS: list[tuple[Callable[..., nn.Module], int]] = [
    (thin_resnet50, 64),
    (narrow_vgg11_bn, 32),
    (thin_densenet, 32),
    (short_mobilenet, 32),
    (thin_efficientnet, 32),
    (thin_shufflenet, 32),
    (short_googlenet, 32),
    (models.squeezenet1_1, 32),
    (thin_regnet, 32),
    (thin_resnext50, 32),
    (thin_convnext, 32),  # through layer norms over the kept channels
    (thin_swin_t, 32),  # the same, and attention whose heads go whole
]


def calibrate(model: nn.Module, side: int) -> None:
    """Give batch norms statistics near those of images, so that deep layers still see the input."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    run(model.train(), (torch.randn(8, 3, side, side, dtype=next(model.parameters()).dtype),))
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean += 0.2 * torch.randn_like(norm.running_mean) * norm.running_var.sqrt()
        norm.running_var.clamp_(min=0.5 * float(norm.running_var.mean()))  # none that amplifies rounding
        norm.running_var *= 0.7 + 0.6 * torch.rand_like(norm.running_var)
    model.eval()


def test_resnet50_has_the_papers_groups() -> None:
    """38 groups with a convolution to prune, 22,531 input channels of convolutions, at most 2048 in one."""
    prepared = smcp_fx.prepare(models.resnet50(), torch.randn(1, 3, 32, 32))
    graph = prepared.channels
    convolutions = [layer for layer in graph.layers if len(layer.weight_shape) == 4]
    assert len(convolutions) == 53
    names = {layer.path for layer in convolutions}
    read = [group for group in graph.groups if names.intersection(group.consumers)]
    assert len(read) == 38
    inputs = [layer.in_labels.numel() for layer in convolutions]
    assert sum(inputs) == 22531 and max(inputs) == 2048
    assert graph.free_share == 1.0
    pinned = [group for group in graph.groups if not group.free]
    assert {group.consumers for group in pinned} == {("conv1",), ()}  # the image, and the logits


@pytest.mark.parametrize(("build", "side"), NETWORKS, ids=[build.__name__ for build, _ in NETWORKS])
def test_slicing_is_exact(build: Callable[..., nn.Module], side: int) -> None:
    # In float64: some of these amplify float32's rounding beyond its tolerance on some processors.
    model = randomise(without_repeats(build(weights=None))).double().eval()
    inputs = (torch.randn(2, 3, side, side, dtype=torch.float64),)
    prepared = smcp_fx.prepare(model, inputs, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    assert prepared.channels.free_share == 1
    assert_close(run(prepared, inputs), run(model, inputs), "identity", "all channels kept")
    prepared.set_masks(random_masks(prepared, 0, 0.6))
    calibrate(prepared, side)
    masked = run(prepared, inputs)
    # The images make a difference that is larger than what is allowed between masked and sliced.
    assert float(masked.std(0).mean()) > 3e-5 * float(masked.abs().max())
    sliced = smcp_fx.convert(prepared)
    assert size_of(sliced) < 0.9 * size_of(model)
    assert_close(run(sliced, inputs), masked, "slicing", f"{size_of(sliced)} of {size_of(model)} parameters")


def test_a_small_mvit_is_free() -> None:
    """Functions that torchvision keeps whole are traced; so are relative positions, worked out from sizes."""
    blocks = [
        MSBlockConfig(1, 16, 32, [], [3, 3, 3], [], [1, 2, 2]),
        MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
    ]
    model = MViT(
        (32, 32), 4, blocks, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, num_classes=5, stochastic_depth_prob=0.0,
    )  # fmt: skip
    assert check_slicing(model, (torch.randn(1, 3, 4, 32, 32),), seeds=(0,)).channels.free_share == 1


def test_a_small_video_swin_is_free() -> None:
    """Its windows reach beyond the two frames."""
    model = SwinTransformer3d([2, 4, 4], 8, [2], [2], [8, 3, 3], num_classes=5, stochastic_depth_prob=0.0)
    assert check_slicing(model, (torch.randn(1, 3, 4, 16, 16),), seeds=(0,)).channels.free_share == 1
