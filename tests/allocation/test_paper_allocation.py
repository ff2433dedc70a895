"""The paper's linearised method, and the coupled one beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from random_instances import (
    FAMILIES,
    network,
    random_instance,
    tiny,
    width,
)

from smcp_fx.allocation import allocate
from smcp_fx.allocation.paper import linearised
from smcp_fx.allocation.problem import tabulate
from smcp_fx.cost_model import CostTerm, NetworkCost, Width
from smcp_fx.errors import InfeasibleBudgetError


def test_the_papers_method_prices_layers_at_the_current_neighbours() -> None:
    a, b = width("a"), width("b")
    terms = (
        CostTerm("conv1", (Width(3), a), lambda x, y: 1.0 * x * y),
        CostTerm("conv2", (a, b), lambda x, y: 1.0 * x * y),
        CostTerm("conv3", (b, Width(10)), lambda x, y: 1.0 * x * y),
    )
    cost = NetworkCost("MAC", {"a": (1, 2, 4), "b": (2, 8)}, terms, 7.0)
    current = {"a": 2, "b": 8}
    costs, constant = linearised(cost, tabulate(cost), current)
    np.testing.assert_allclose(costs[0], [8.0, 16.0, 32.0])
    np.testing.assert_allclose(costs[1], [20.0, 80.0])
    assert constant == 7.0 + 3 * 2
    values = {"a": np.array([1.0, 2.0, 2.5]), "b": np.array([1.0, 2.0])}
    found = allocate(values, cost, 7.0 + 6.0 + 96.0, "paper", current=current)
    assert found.counts == {"a": 2, "b": 8}
    assert found.method == "paper"
    assert found.bound == found.gap == math.inf


@pytest.mark.parametrize("current", [{"a": 1, "b": 2}, {"a": 4, "b": 8}])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_the_papers_method_stays_within_the_budget_where_its_prices_are_far_off(
    share: float, current: Mapping[str, int]
) -> None:
    """Priced at narrow neighbours everything fits; at wide ones, beside a width that must stay, nothing may."""
    a, b = width("a"), width("b")
    terms = (
        CostTerm("conv1", (a, Width(16)), lambda x, y: 1.0 * x * y),
        CostTerm("conv2", (a, b), lambda x, y: 9.0 * x * y),
    )
    cost = NetworkCost("MAC", {"a": tuple(range(1, 17)), "b": (8, *range(9, 17))}, terms)
    values = {"a": np.arange(16.0), "b": np.arange(9.0)}
    budget = share * cost.cost(cost.full_counts)
    found = allocate(values, cost, budget, "paper", current=current)
    assert found.cost <= budget
    assert found.counts != {"a": 1, "b": 8}


def test_a_budget_out_of_reach_is_an_error_of_the_papers_method_too() -> None:
    values, cost = tiny()
    with pytest.raises(InfeasibleBudgetError, match="smallest reachable cost is 1 "):
        allocate(values, cost, 0.5, "paper")


def test_the_papers_costs_add_up_at_the_current_counts() -> None:
    for family in FAMILIES:
        _, cost = random_instance(family, 5)
        current = cost.full_counts
        costs, constant = linearised(cost, tabulate(cost), current)
        assert constant + sum(c[-1] for c in costs) == pytest.approx(cost.cost(current))


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "densenet121"])
def test_the_coupled_method_beats_the_paper_at_its_own_true_cost(name: str) -> None:
    values, cost = network(name, "flops")
    counts: Mapping[str, int] = cost.full_counts
    full = cost.cost(counts)
    for step in range(1, 9):
        last = allocate(values, cost, full * 0.3 ** (step / 8), "paper", current=counts)
        counts = last.counts
    assert allocate(values, cost, last.cost).value >= last.value
