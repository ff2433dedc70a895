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
    found = allocate(values, cost, 7.0 + 6.0 + 100.0, "paper", current={"a": 4, "b": 2})
    assert found.cost == cost.cost(found.counts)
    assert found.counts == {"a": 4, "b": 8}
    assert found.cost > 7.0 + 6.0 + 100.0


def test_the_papers_method_takes_the_cheapest_counts_where_its_capacity_has_none() -> None:
    values, cost = tiny()
    assert allocate(values, cost, 0.5, "paper").counts == {"a": 1, "b": 1}


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
