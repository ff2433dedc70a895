"""Halving a group's counts closes gaps that the Lagrangian bound and a short listing leave open."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from smcp_fx.allocation import allocate, certificate, solve
from smcp_fx.allocation.problem import tabulate
from smcp_fx.allocation.solve import node_choice
from smcp_fx.cost_model import CostTerm, NetworkCost, Width
from smcp_fx.errors import InfeasibleBudgetError

COUNTS = (8, 16, 24, 32, 48, 64)


def chain(groups: int) -> NetworkCost:
    """A chain of layers that cost in * out: narrow and whole groups in turn are cheap, in either order."""
    names = [f"g{k}" for k in range(groups)]
    widths = [Width(3), *(Width(groups=((name, 1),)) for name in names), Width(10)]
    terms = tuple(
        CostTerm(f"layer{n}", pair, lambda i, o: 1.0 * i * o)
        for n, pair in enumerate(itertools.pairwise(widths))
    )
    return NetworkCost("MAC", dict.fromkeys(names, COUNTS), terms)


def brute_force(cost: NetworkCost, values: dict[str, np.ndarray], budget: float) -> float:
    """The most value of all choices within the budget, by enumeration."""
    columns = np.meshgrid(*(np.arange(len(COUNTS)) for _ in values), indexing="ij")
    picked = [column.ravel() for column in columns]
    widths = [np.asarray(COUNTS)[column] for column in picked]
    price = 3.0 * widths[0] + 10.0 * widths[-1] + sum(a * b for a, b in itertools.pairwise(widths))
    worth = sum(v[column] for v, column in zip(values.values(), picked, strict=True))
    return float(np.max(worth[price <= budget]))


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_found_and_proven(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "_MAX_ROWS", 2)  # no listing to speak of
    rng = np.random.default_rng(seed)
    cost = chain(6)
    values = {name: np.sqrt(COUNTS) * rng.uniform(0.9, 1.1) for name in cost.permitted}
    budget = rng.uniform(0.1, 0.4) * cost.cost(cost.full_counts)
    problem = tabulate(cost)
    choice, bound, _ = node_choice(problem, list(values.values()), budget)
    alone = sum(v[i] for v, i in zip(values.values(), choice, strict=True))
    found = allocate(values, cost, budget)
    optimum = brute_force(cost, values, budget)
    assert bound > alone * (1 + 1e-4), "the Lagrangian closes this one by itself: it tests nothing"
    assert found.cost <= budget
    assert alone <= found.value <= optimum * (1 + 1e-12) <= found.bound * (1 + 2e-12)
    assert found.gap < (bound - alone) / bound
    assert found.gap > 1e-6 or found.value == pytest.approx(optimum, rel=1e-6)


def test_halves_may_be_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half that cannot meet the budget is left out, and a budget that nothing meets is refused as ever."""
    monkeypatch.setattr(certificate, "_MAX_ROWS", 2)
    cost = chain(4)
    values = {name: np.sqrt(COUNTS) for name in cost.permitted}
    least = cost.cost(dict.fromkeys(cost.permitted, 8))
    found = allocate(values, cost, 1.3 * least)
    assert found.value == pytest.approx(brute_force(cost, values, 1.3 * least), rel=1e-12)
    with pytest.raises(InfeasibleBudgetError):
        allocate(values, cost, 0.99 * least)


def test_losses_next_to_nothing_are_not_worth_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that lose next to nothing, beside one that loses much: a gap is worth what is at stake."""
    monkeypatch.setattr(certificate, "_MAX_ROWS", 2)
    rng, cost = np.random.default_rng(0), chain(6)
    slight = {name: 1e-13 * (np.sqrt(COUNTS) * rng.uniform(0.9, 1.1) - 8) for name in cost.permitted}
    budget = 0.2 * cost.cost(cost.full_counts)
    solves: list[float] = []

    def counted(*arguments: Any) -> Any:
        solves.append(0.0)
        return node_choice(*arguments)

    monkeypatch.setattr(solve, "node_choice", counted)
    allocate(slight, cost, budget)
    assert len(solves) > 2, "nothing is halved: it tests nothing"
    solves.clear()
    found = allocate(slight | {"g5": np.array([-1.0, -1.0, -1.0, -1.0, -1.0, 0.0])}, cost, budget)
    assert found.counts["g5"] == COUNTS[-1]
    assert found.gap <= 1e-6
    assert len(solves) == 1
