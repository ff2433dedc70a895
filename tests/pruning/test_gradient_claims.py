"""Claims of the paper about gradients, reproduced: why inputs are masked, and why batch norms are scaled."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.masking.masks import soft_mask

WIDTH = 512


def gradient_norm(share: float, scaling: bool) -> float:
    """Norm of the dense gradient of a convolution before a train-mode batch norm that keeps a share of its inputs.

    Inputs, weights and the gradient above the norm are independent and the same for every share; the weight's
    gradient is the gradient behind the norm times inputs that stay as they are.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 1, bias=False),
        nn.Conv2d(WIDTH, 32, 1, bias=False),
        nn.BatchNorm2d(32, eps=1e-15),
    )
    x = torch.randn(8, WIDTH, 6, 6, dtype=torch.float64)
    model[0].weight.data = torch.eye(WIDTH).view(
        WIDTH, WIDTH, 1, 1
    )  # its outputs are the inputs: independent
    config = MethodConfig(multiple=1, batch_norm_scaling=scaling)
    prepared = smcp_fx.prepare(model.double().train(), x, config=config)
    prepared.set_masks({"0": torch.arange(WIDTH) < share * WIDTH})
    above = torch.randn(8, 32, 6, 6, dtype=torch.float64)
    (prepared(x) * above).sum().backward()
    gradient = prepared.get_parameter("1.weight").grad
    assert gradient is not None
    return float(gradient.norm())


@pytest.mark.parametrize("share", [0.5, 0.25, 0.0625])
@pytest.mark.parametrize(("scaling", "power"), [(False, -0.5), (True, 0.5)])
def test_gradients_explode_without_batch_norm_scaling(share: float, scaling: bool, power: float) -> None:
    """Keeping a share rho multiplies the gradient by rho^-1/2 without and rho^1/2 with scaling (supplement)."""
    factor = gradient_norm(share, scaling) / gradient_norm(1.0, scaling)
    assert math.log(factor) == pytest.approx(power * math.log(share), abs=0.1)


def conv_norm_relu(weight: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(4, weight.shape[1], 6, 6, dtype=torch.float64)
    y = F.conv2d(x, weight)
    deviation = (y.var((0, 2, 3), unbiased=False, keepdim=True) + eps).sqrt()
    normalised = (y - y.mean((0, 2, 3), keepdim=True)) / deviation
    z = gamma.view(1, -1, 1, 1) * normalised + beta.view(1, -1, 1, 1)
    return (F.relu(z) * torch.randn_like(z)).sum()


def parameters() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(4, 6, 3, 3, dtype=torch.float64, requires_grad=True)
    gamma = torch.rand(4, dtype=torch.float64, requires_grad=True)
    beta = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    return weight, gamma, beta


def test_masking_outputs_gives_gradients_that_are_zero_or_without_bound() -> None:
    """By the batch norm's shift: nothing passes the ReLU where it is negative; else it grows with 1 / sqrt(eps)."""
    masks = torch.tensor([False, False, True, True]).view(4, 1, 1, 1)  # channels 0 and 1 go
    norms = []
    for eps in (1e-4, 1e-8, 1e-12):
        weight, gamma, beta = parameters()
        conv_norm_relu(soft_mask(weight, masks), gamma, beta, eps).backward()
        assert weight.grad is not None
        assert float(weight.grad[1].abs().max()) == 0
        norms.append(float(weight.grad[0].norm()))
        assert 0 < float(weight.grad[2:].norm()) < 1e3
    assert [b / a for a, b in pairwise(norms)] == pytest.approx([1e2, 1e2], rel=1e-6)
    weight, gamma, beta = parameters()
    conv_norm_relu(soft_mask(weight, masks), gamma, beta, 0.0).backward()
    assert weight.grad is not None
    assert not bool(torch.isfinite(weight.grad[0]).any())


def test_masking_the_batch_norm_gives_it_no_gradient() -> None:
    """With gamma and beta masked the ReLU sees zeros, and passes nothing back to either."""
    weight, gamma, beta = parameters()
    mask = torch.tensor([False, True, False, True])
    conv_norm_relu(weight, soft_mask(gamma, mask), soft_mask(beta, mask), 1e-5).backward()
    for parameter in (gamma, beta):
        assert parameter.grad is not None
        assert float(parameter.grad[~mask].abs().max()) == 0
        assert float(parameter.grad[mask].abs().max()) > 0


def test_masking_inputs_gives_every_channel_a_gradient() -> None:
    weight, gamma, beta = parameters()
    mask = (torch.arange(6) < 2).view(1, 6, 1, 1)
    conv_norm_relu(soft_mask(weight, mask), gamma, beta, 1e-5).backward()
    assert weight.grad is not None
    by_input = weight.grad.abs().amax((0, 2, 3))
    assert bool(torch.isfinite(by_input).all()) and float(by_input.min()) > 0


def trained(mask: str) -> list[int]:
    """Channels that come back at each solve of a training on the digits."""
    from smcp_fx.zoo.data import load_data

    data = load_data("digits")
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).train()
    schedule = smcp_fx.Schedule.scaled(4, data.steps_per_epoch(64))
    config = MethodConfig(multiple=4, mask=mask)  # type: ignore[arg-type]
    prepared = smcp_fx.prepare(model, torch.randn(2, 1, 16, 16), target=0.3, schedule=schedule, config=config)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(4):
        for images, labels in data.epoch(64, epoch, 1, 16):
            optimizer.zero_grad()
            F.cross_entropy(prepared(images), labels).backward()
            prepared.pruner.step()
            optimizer.step()
    assert prepared.pruner.history[-1].step == schedule.last_step
    return [solve.returned for solve in prepared.pruner.history]


def test_pruned_channels_come_back_under_soft_masks_and_not_under_permanent_ones() -> None:
    """With the default options; they are counted."""
    assert sum(trained("soft")) > 0
    assert sum(trained("permanent")) == 0
