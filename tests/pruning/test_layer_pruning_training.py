"""Networks whose branches go while they train, and the choice of which."""

from __future__ import annotations

import itertools

import pytest
import torch
from layer_pruning_models import IMAGE, Bottleneck, body, nothing, prepared
from models import (
    Residual,
    backward,
    run,
)
from tolerances import assert_close

import smcp_fx
from smcp_fx.masking.masks import scale_gamma_direct


@pytest.mark.parametrize("gradient", ["chain", "direct"])
@pytest.mark.parametrize("mask", ["soft", "permanent"])
def test_a_network_without_a_branch_trains(gradient: str, mask: str) -> None:
    found = prepared(Residual(), config={"gamma_gradient": gradient, "mask": mask})
    found.set_masks(nothing(found, "conv1"))
    backward(found, (IMAGE.double(),))
    assert all(bool(torch.isfinite(p.grad).all()) for p in found.parameters() if p.grad is not None)
    assert not bool(found.get_parameter("conv1.weight").grad.any())  # nothing comes through the mask
    assert bool(found.get_parameter("bn2.bias").grad.any())


def test_a_scale_of_zero_gives_no_gradient() -> None:
    gamma = torch.ones(4, requires_grad=True)
    scale_gamma_direct(gamma, torch.tensor([0.0, 0.5, 1.0, 0.0])).backward(torch.ones(4))
    assert gamma.grad is not None
    assert gamma.grad.tolist() == [0.0, 2.0, 1.0, 0.0]


def steps(found: smcp_fx.PreparedModel, count: int = 2) -> None:
    """Train for some steps."""
    found.train()
    optimiser = torch.optim.SGD(found.parameters(), lr=1e-3)
    for _ in range(count):
        optimiser.zero_grad()
        found(IMAGE.double()).square().mean().backward()
        found.pruner.step()
        optimiser.step()


@pytest.mark.parametrize("allocation", ["coupled", "paper"])
@pytest.mark.parametrize("share", [0.5, 0.3])
def test_solves_remove_whole_branches(allocation: str, share: float) -> None:
    found = prepared(
        body(*(Bottleneck() for _ in range(4))),
        target=share,
        config={"allocation": allocation, "multiple": 4},
    )
    branches = found.channels.branches
    assert branches is not None
    for _ in range(3):
        steps(found)
        found.pruner.solve()
        counts = found.pruner.counts
        assert allocation == "paper" or branches.closed(counts) == counts
        assert allocation == "paper" or found.pruner.cost.cost(counts) <= found.pruner.target * (1 + 1e-9)
    sliced = smcp_fx.convert(found.eval())
    assert_close(run(sliced, (IMAGE.double(),)), run(found, (IMAGE.double(),)), "slicing")


@pytest.mark.parametrize("exponent", [0.0, 0.9])
def test_a_solve_finds_the_best_choice_with_branches_removed(exponent: float) -> None:
    """Against all choices of counts. What is of no use beside a group that keeps nothing is worth nothing."""
    config = {"multiple": 4, "tolerance": 0.0, "width_exponent": exponent}
    found = prepared(body(Bottleneck(8, 8), Bottleneck(8, 8)), config=config)
    steps(found)
    pruner, branches = found.pruner, found.channels.branches
    assert branches is not None
    ranked = {
        name: values.sort(descending=True).values.double() for name, values in pruner.importance.items()
    }
    names = list(pruner.cost.permitted)
    for share in (0.6, 0.4, 0.2):
        budget, best = share * pruner.full_cost, 0.0
        for choice in itertools.product(*pruner.cost.permitted.values()):
            counts = dict(zip(names, choice, strict=True))
            if pruner.cost.cost(counts) <= budget and branches.closed(counts) == counts:
                kept = ((ranked[name][:count].sum(), ranked[name].sum()) for name, count in counts.items())
                shares = [(whole, float(part / whole) if whole > 0 else 0.0) for part, whole in kept]
                best = max(best, sum(float(whole) * share ** (1 - exponent) for whole, share in shares))
        chosen = pruner._selector.best(torch.cat([pruner.importance[n] for n in names]), pruner.cost, budget)
        assert chosen.worth * (1 - exponent) == pytest.approx(best, rel=1e-6)
        assert chosen.allocation.cost == pytest.approx(pruner.cost.cost(chosen.allocation.counts))
        assert share > 0.3 or 0 in chosen.allocation.counts.values()


def test_what_was_known_of_a_removed_branch_is_kept() -> None:
    found = prepared(Residual(), target=0.9, config={"memory": 0.5})
    steps(found)
    found.pruner.solve()
    before = found.smcp.of_group(found.smcp.remembered, "conv1").clone()
    assert bool(before.any())
    found.set_masks(nothing(found, "conv1"))
    steps(found)
    assert not bool(found.smcp.of_group(found.smcp.gathered, "conv1").any())
    assert_close(found.pruner.importance["conv1"], before, "importance")
