"""Counts that cost as much as larger ones: dropped before, grown after."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from smcp_fx.allocation.rounding import grow_for_free, without_dominated
from smcp_fx.cost_model import CostTerm, NetworkCost, Width


def stepped(step: int):
    return lambda x, y: (-(-x // step) * step) * (-(-y // step) * step) * 1e-3


def test_counts_within_a_step_of_the_runtime_are_dropped() -> None:
    a, b = Width(groups=(("a", 1),)), Width(groups=(("b", 1),))
    terms = (CostTerm("1", (Width(3), a), stepped(16)), CostTerm("2", (a, b), stepped(16)))
    cost = NetworkCost("ms", {"a": (8, 16, 24, 32, 40), "b": (8, 16, 24)}, terms)
    assert without_dominated(cost).permitted == {"a": (16, 32, 40), "b": (16, 24)}


def test_counts_that_save_next_to_nothing_are_dropped() -> None:
    """8 is all but as dear as 16; of 24, 32, 40 each saves 1% against the next: two steps save enough."""
    prices = {8: 0.5, 16: 0.505, 24: 0.98, 32: 0.99, 40: 1.0}
    term = CostTerm("1", (Width(groups=(("a", 1),)),), lambda x: np.vectorize(prices.get)(x))
    cost = NetworkCost("ms", {"a": tuple(prices)}, (term,))
    assert without_dominated(cost).permitted["a"] == tuple(prices)
    assert without_dominated(cost, 0.015).permitted["a"] == (16, 24, 40)


@st.composite
def costs(draw: st.DrawFn) -> NetworkCost:
    """Three groups in a chain with a concat; prices are drawn from few values, so that ties and cliffs abound."""
    permitted = {name: tuple(range(1, draw(st.integers(2, 5)))) for name in "abc"}
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    widths = {
        "ab": (Width(0, (("a", 1),)), Width(1, (("b", 1),))),
        "bc": (Width(0, (("b", 1), ("c", 2))), Width(0, (("c", 1),))),
        "aa": (Width(0, (("a", 1),)), Width(0, (("a", 1),))),
    }

    def price(table: np.ndarray):
        return lambda x, y: table[x, y]

    terms = tuple(
        CostTerm(name, pair, price(rng.integers(1, 4, (16, 16)).astype(float)))
        for name, pair in widths.items()
    )
    return NetworkCost("ms", permitted, terms)


@settings(max_examples=60, deadline=None)
@given(costs(), st.integers(0, 1000))
def test_dropping_dominated_counts_loses_no_value(cost: NetworkCost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = {name: np.cumsum(rng.random(len(allowed))) for name, allowed in cost.permitted.items()}
    reduced = without_dominated(cost)

    def best(permitted, budget: float) -> float:
        found = -np.inf
        for choice in itertools.product(*permitted.values()):
            counts = dict(zip(permitted, choice, strict=True))
            if cost.cost(counts) <= budget:
                worth = sum(values[n][cost.permitted[n].index(c)] for n, c in counts.items())
                found = max(found, worth)
        return found

    for name, allowed in cost.permitted.items():
        assert reduced.permitted[name][-1] == allowed[-1]
        assert set(reduced.permitted[name]) <= set(allowed)
    for budget in (3.0, 4.0, 6.0, 9.0):
        assert best(reduced.permitted, budget) == best(cost.permitted, budget)


@settings(max_examples=60, deadline=None)
@given(costs())
def test_growing_for_free_ends_where_no_larger_count_is_free(cost: NetworkCost) -> None:
    start = cost.smallest_counts
    grown = grow_for_free(cost, start)
    assert cost.cost(grown) <= cost.cost(start)
    assert all(grown[name] >= start[name] for name in start)
    for name, allowed in cost.permitted.items():
        for count in allowed:
            if count > grown[name]:
                assert cost.cost({**grown, name: count}) > cost.cost(grown)
