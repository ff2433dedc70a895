"""Corner cases of the coupled problem, and arguments that do not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from random_instances import (
    enumerate_all,
    solved,
    tiny,
    width,
)

from smcp_fx.allocation import allocate
from smcp_fx.cost_model import CostTerm, NetworkCost, Price
from smcp_fx.errors import InfeasibleBudgetError, InputError


def test_corner_cases() -> None:
    values, cost = tiny()
    assert solved(values, cost, 2.0).counts == {"a": 1, "b": 2}
    assert solved(values, cost, 100.0).counts == {"a": 2, "b": 2}
    assert solved({"a": [0.0, 0.0], "b": [0.0, 0.0]}, cost, 3.0).value == 0.0
    assert solved({"a": [-1.0, -5.0], "b": [-2.0, -1.0]}, cost, 1.0).counts == {"a": 1, "b": 1}
    no_choice = NetworkCost("ms", {}, (), 3.0)
    assert solved({}, no_choice, 3.0).counts == {}
    assert allocate({}, no_choice, 3.0, "paper").cost == 3.0
    with pytest.raises(InfeasibleBudgetError):
        solved({}, no_choice, 2.0)
    free = NetworkCost("ms", {"a": (1, 2), "b": (1, 2), "free": (4, 8)}, cost.terms)
    assert solved({**values, "free": [1.0, 2.0]}, free, 1.0).counts == {"a": 1, "b": 1, "free": 8}
    negative = NetworkCost("ms", cost.permitted, cost.terms, -10.0)
    assert solved(values, negative, -8.0).counts == {"a": 1, "b": 2}
    single = NetworkCost("ms", {"a": (2,), "b": (1, 2)}, cost.terms)
    assert solved({"a": [1.0], "b": [1.0, 3.0]}, single, 2.0).counts == {"a": 2, "b": 1}


def test_groups_without_a_choice_cost_nothing_to_carry() -> None:
    fixed = {f"fixed{k}": (3,) for k in range(40)}
    permitted = {"a": (1, 2, 3), **fixed, "b": (1, 5), "c": (2, 4), "hub": (1, 2)}
    terms = (
        CostTerm("concat", (width("a", "b", *fixed), width("c")), lambda x, y: 1.0 * x * y),
        CostTerm("other", (width("b", "c", *fixed), width("a")), lambda x, y: 2.0 * x * np.sqrt(y)),
        *(CostTerm(name, (width("hub"), width(name)), lambda x, y: 1.0 * x * y) for name in fixed),
    )
    cost = NetworkCost("ms", permitted, terms)
    values = {name: 0.1 * np.arange(1.0, len(counts) + 1.0) for name, counts in permitted.items()}
    value, total = enumerate_all(values, cost)
    for share in (0.2, 0.5, 0.9):
        budget = float(np.quantile(total, share))
        assert allocate(values, cost, budget).value == pytest.approx(value[total <= budget].max())


def test_a_width_shared_by_both_axes_is_priced_on_the_diagonal() -> None:
    grouped = CostTerm("grouped", (width("a", per_unit=4), width("a", constant=1)), lambda x, y: 1.0 * x * y)
    cost = NetworkCost("ms", {"a": (1, 2, 3)}, (grouped,))
    found = solved({"a": [1.0, 2.0, 3.0]}, cost, 24.0)
    assert found.counts == {"a": 2}
    assert found.cost == 24.0


def test_arguments_that_do_not_fit_are_refused() -> None:
    values, cost = tiny()
    with pytest.raises(InputError, match=r"missing \['b'\]"):
        solved({"a": [1.0, 2.0]}, cost, 2.0)
    with pytest.raises(InputError, match="one value each"):
        solved({"a": [1.0], "b": [1.0, 2.0]}, cost, 2.0)
    with pytest.raises(InputError, match="not all finite"):
        solved({"a": [1.0, math.nan], "b": [1.0, 2.0]}, cost, 2.0)
    with pytest.raises(InputError, match="budget must be finite"):
        solved(values, cost, math.inf)
    with pytest.raises(InputError, match="method"):
        allocate(values, cost, 2.0, "greedy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not permitted"):
        allocate(values, cost, 2.0, start={"a": 1, "b": 7})
    with pytest.raises(InputError, match=r"missing for groups \['b'\]"):
        allocate(values, cost, 2.0, "paper", current={"a": 1})


@pytest.mark.parametrize(
    ("price", "message"),
    [
        (lambda x, y: np.where(x > 1, np.nan, 1.0 * x * y), r"is nan at widths \[2, 1\]"),
        (lambda x, y: np.ones(5), "must be vectorised"),
    ],
)
def test_prices_that_cannot_be_tabulated_are_refused(price: Price, message: str) -> None:
    values, cost = tiny()
    broken = NetworkCost("ms", cost.permitted, (CostTerm("conv", cost.terms[0].widths, price),))
    with pytest.raises(InputError, match=message):
        solved(values, broken, 2.0)


def test_permitted_counts_must_ascend() -> None:
    cost = NetworkCost("ms", {"a": (2, 1)}, ())
    with pytest.raises(InputError, match="'a' must be ascending"):
        solved({"a": [1.0, 2.0]}, cost, 2.0)
    three = NetworkCost("ms", {"a": (1, 2)}, (CostTerm("t", (width("a"),) * 3, lambda x, y, z: x),))
    with pytest.raises(InputError, match="at most two"):
        solved({"a": [1.0, 2.0]}, three, 2.0)
