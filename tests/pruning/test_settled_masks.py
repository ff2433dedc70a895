"""Masks settle: gathered importances follow a law here, so that nothing needs to be trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import smcp_fx
from smcp_fx.allocation.rounding import grow_for_free
from smcp_fx.channels import ChannelGraph
from smcp_fx.config import MethodConfig
from smcp_fx.cost_model import NetworkCost, Price
from smcp_fx.costs.flops import FlopsCost
from smcp_fx.tracing.tracer import Traced

SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=45, warmup=0.1, ramp=0.4, cooldown=0, every=1)
IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
#: How importances grow in a group of which a share r is kept: r ** -0.7, the middle of what a trained ResNet showed.
INFLATION = 0.7


def network() -> nn.Sequential:
    """Convolutions of 128 channels: the cheapest choices keep every second group whole and the rest narrow."""
    layers: list[nn.Module] = []
    for channels in (3, 128, 128, 128, 128, 128):
        layers += [nn.Conv2d(channels, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(128, 4, 1))


def solves(seed: int, **options: float) -> list[smcp_fx.pruning.pruner.Solve]:
    """Solve at every step from importances that are a fixed part, inflated by narrow masks, times noise."""
    torch.manual_seed(seed)
    config = MethodConfig(**options)  # type: ignore[arg-type]
    prepared = smcp_fx.prepare(network(), IMAGE, target=0.1, schedule=SCHEDULE, config=config)
    fixed = {group.name: torch.randn(128).exp() for group in prepared.channels.groups if group.free}
    for _ in range(SCHEDULE.total_steps):
        for name, own in fixed.items():
            inflated = (
                own * prepared.masks[name].float().mean() ** -INFLATION * (0.5 * torch.randn(128)).exp()
            )
            weight = prepared.get_parameter(f"{prepared.channels[name].consumers[0]}.weight")
            slot = weight.detach().numel() / 128
            weight.grad = inflated.view(1, 128, 1, 1) / (weight.detach() * slot)
        prepared.pruner.step()
        with torch.no_grad():
            weight.mul_(0.999)  # the optimiser's step
    return prepared.pruner.history


@pytest.mark.parametrize("seed", [0, 1])
def test_masks_settle_at_the_target(seed: int) -> None:
    """After the ramp under 2% of the units change at a solve, within the budget and 99% of the best choice."""
    history = solves(seed)
    after = [solve for solve in history if solve.step > SCHEDULE.ramp_end]
    assert len(after) >= 20
    assert max(solve.changed_share for solve in after) < 0.02
    assert all(0.99 <= solve.cost / solve.target <= 1 for solve in after)
    assert all(solve.importance_kept >= 0.99 * solve.bound for solve in after)


@pytest.mark.parametrize(("exponent", "least", "most"), [(0.0, 0.1, 1.0), (0.9, 0.0, 0.02)])
def test_the_width_exponent_is_what_settles_masks(exponent: float, least: float, most: float) -> None:
    """Each of two far choices makes the other one look better: the case that the exponent is there for."""
    history = solves(0, width_exponent=exponent, memory=0.9)
    worst = max(solve.changed_share for solve in history if solve.step > SCHEDULE.ramp_end)
    assert least <= worst <= most


class Stairs:
    """FLOPs as of a runtime that works in steps of 16 channels."""

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        flops = FlopsCost().network_cost(traced, channels)

        def stairs(price: Price) -> Price:
            return lambda *widths: price(*(-(-np.asarray(width) // 16) * 16 for width in widths))

        return replace(flops, terms=tuple(replace(term, price=stairs(term.price)) for term in flops.terms))


def test_masks_that_settle_leave_no_channels_that_cost_nothing() -> None:
    """Where masks move as little as they may, counts come to stand on the steps of the cost all the same."""
    torch.manual_seed(0)
    config = MethodConfig(multiple=1, tolerance=0.05)
    prepared = smcp_fx.prepare(network(), IMAGE, target=0.5, schedule=SCHEDULE, config=config, cost=Stairs())
    moved = 0
    for _ in range(SCHEDULE.total_steps):
        for group in prepared.channels.groups:
            if group.free:
                weight = prepared.get_parameter(f"{group.consumers[0]}.weight")
                weight.grad = torch.randn(128).exp().view(1, 128, 1, 1) / weight.detach()
        solve = prepared.pruner.step()
        with torch.no_grad():
            weight.mul_(0.999)
        if solve is not None and solve.changed_share:
            moved += 1
            counts = prepared.pruner.counts
            assert counts == grow_for_free(prepared.pruner.cost, counts)
            assert solve.cost <= solve.target
    assert moved >= 5
