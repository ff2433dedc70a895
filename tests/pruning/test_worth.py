"""The worth of what a group keeps: its own law, and that solves find the most of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError
from smcp_fx.pruning.pruner import Pruner
from smcp_fx.pruning.worth import Worth

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def prepared(**options: float | str) -> tuple[smcp_fx.PreparedModel, Pruner]:
    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 1))
    config = MethodConfig(multiple=1, **options)  # type: ignore[arg-type]
    found = smcp_fx.prepare(body, IMAGE, target=0.5, config=config)
    found(IMAGE).square().sum().backward()
    found.pruner.step()
    return found, found.pruner


def flat(pruner: Pruner) -> torch.Tensor:
    return torch.cat(list(pruner.importance.values()))


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.9])
def test_worth_is_the_integral_of_what_a_channel_matters(exponent: float) -> None:
    """Against quadrature of I * r ** -exponent over the share r that is kept."""
    found, pruner = prepared()
    worth = Worth(flat(pruner), found.smcp, exponent)
    for name, own in pruner.importance.items():
        total = float(own.double().sum())
        shares = np.array([0.0, 0.05, 0.4, 1.0])
        expected = [total * quad(lambda r: r**-exponent, 0.0, share)[0] for share in shares]
        assert worth.of(name, shares * total) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("exponent", [0.0, 0.6])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_solve_keeps_the_most_worth(exponent: float, share: float) -> None:
    """Against every choice of counts; within a group the units of greatest importance are kept."""
    _, pruner = prepared(width_exponent=exponent, tolerance=0.0)
    ranked = {
        name: own.double().sort(descending=True).values.numpy() for name, own in pruner.importance.items()
    }
    power = 1 - exponent

    def total(counts: dict[str, int]) -> float:
        return sum(
            ranked[n].sum() * (ranked[n][:c].sum() / ranked[n].sum()) ** power for n, c in counts.items()
        )

    choices = [
        dict(zip(ranked, choice, strict=True))
        for choice in itertools.product(*(pruner.cost.permitted[name] for name in ranked))
    ]
    within = [counts for counts in choices if pruner.cost.cost(counts) <= share * pruner.full_cost]
    best = max(within, key=total)
    solve = pruner.solve(share)
    assert pruner.counts == best
    kept = sum(ranked[name][:count].sum() for name, count in best.items())
    assert solve.importance_kept == pytest.approx(kept / sum(own.sum() for own in ranked.values()), rel=1e-6)


@pytest.mark.parametrize("exponent", [-0.1, 1.0, float("nan")])
def test_exponents_that_have_no_integral(exponent: float) -> None:
    with pytest.raises(InputError, match="width_exponent must be a number in"):
        MethodConfig(width_exponent=exponent)
