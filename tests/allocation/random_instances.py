"""Random instances of the coupled problem, and networks as the benchmarks have them."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from smcp_fx.allocation import Allocation, allocate
from smcp_fx.cost_model import CostTerm, NetworkCost, Price, Width

Values = dict[str, NDArray[np.float64]]


Random = np.random.Generator


def load_instances() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "bench" / "allocation_instances.py"
    spec = importlib.util.spec_from_file_location("allocation_instances", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


instances = load_instances()


def width(*groups: str, constant: int = 0, per_unit: int = 1) -> Width:
    return Width(constant, tuple((group, per_unit) for group in groups))


def random_price(rng: Random) -> Price:
    kind = rng.integers(4)
    a, b, c = rng.uniform(0.5, 2.0), rng.uniform(0.0, 20.0), int(rng.integers(2, 12))
    table = rng.integers(0, 40, (7, 11)).astype(float)

    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        x = np.asarray(widths[0], float)
        y = np.asarray(widths[1], float) if len(widths) > 1 else np.asarray(4.0)
        if kind == 0:
            return a * x * y
        if kind == 1:
            return b + a * np.ceil(x / c) * np.ceil(y / 4)
        if kind == 2:
            return a * np.ceil(x / c) * y + b * (x % 3 != 0) + x
        return table[np.asarray(x, int) % 7, np.asarray(y, int) % 11]

    return price


def chain(rng: Random) -> list[tuple[Width, ...]]:
    scopes: list[tuple[Width, ...]] = [(width(constant=3), width("g0"))]
    scopes += [(width(f"g{k}"), width(f"g{k + 1}")) for k in range(5)]
    return [*scopes, (width("g5", per_unit=int(rng.integers(1, 5))),), (width("g2"),)]


def residual(rng: Random) -> list[tuple[Width, ...]]:
    scopes: list[tuple[Width, ...]] = [(width("g0"),), (width("g0"), width("g1"))]
    for inner in ("g2", "g3"):
        scopes += [(width("g1"), width(inner)), (width(inner), width("g1"))]
    return [*scopes, (width("g1"), width("g4")), (width("g4"), width("g5")), (width("g5"), width("g1"))]


def nested(rng: Random) -> list[tuple[Width, ...]]:
    scopes: list[tuple[Width, ...]] = [(width("g0"), width("g1")), (width("g1"), width("g2"))]
    scopes += [(width("g0", "g2"), width("g3")), (width("g3"), width("g4"))]
    return [*scopes, (width("g0", "g2", "g4"), width("g5")), (width("g0", "g2", "g4", per_unit=3),)]


def overlapping(rng: Random) -> list[tuple[Width, ...]]:
    names = [f"g{k}" for k in range(6)]
    scopes: list[tuple[Width, ...]] = []
    for _ in range(6):
        members = rng.choice(names, int(rng.integers(2, 4)), replace=False)
        scopes.append((width(*members, constant=int(rng.integers(3))), width(str(rng.choice(names)))))
    return [*scopes, (Width(2, (("g0", 2), ("g1", 1))), Width(0, (("g2", 1), ("g3", 3))))]


FAMILIES: dict[str, Callable[[Random], list[tuple[Width, ...]]]] = {
    "chain": chain,
    "residual": residual,
    "nested": nested,
    "overlapping": overlapping,
}


def random_instance(family: str, seed: int) -> tuple[Values, NetworkCost]:
    rng = np.random.default_rng([seed, len(family)])
    permitted, values = {}, {}
    for k in range(6):
        size = int(rng.integers(1, 6))
        counts = np.sort(rng.choice(np.arange(1, 17), size, replace=False))
        permitted[f"g{k}"] = tuple(int(count) for count in counts)
        kind = rng.integers(3)
        gains = rng.exponential(1.0, size) if kind else rng.integers(0, 3, size).astype(float)
        values[f"g{k}"] = np.cumsum(gains) if kind < 2 else rng.normal(0.0, 2.0, size)
    terms = tuple(
        CostTerm(f"layer{n}", widths, random_price(rng)) for n, widths in enumerate(FAMILIES[family](rng))
    )
    return values, NetworkCost("ms", permitted, terms, float(rng.uniform(0.0, 5.0)))


def enumerate_all(values: Values, cost: NetworkCost) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return value and cost of every combination of counts, from the prices alone."""
    names = list(cost.permitted)
    rest = np.arange(math.prod(len(counts) for counts in cost.permitted.values()))
    at = {}
    for name in reversed(names):
        rest, at[name] = np.divmod(rest, len(cost.permitted[name]))
    value = sum((values[name][at[name]] for name in names), np.zeros(1))
    total = np.full(len(value), cost.constant)
    for term in cost.terms:
        channels = []
        for axis in term.widths:
            here = np.full(len(value), axis.constant)
            for name, per_unit in axis.groups:
                here = here + per_unit * np.asarray(cost.permitted[name])[at[name]]
            channels.append(here)
        total = total + term.price(*channels)
    return value, total


def true_value(values: Values, cost: NetworkCost, counts: Mapping[str, int]) -> float:
    return float(sum(values[name][cost.permitted[name].index(counts[name])] for name in cost.permitted))


def network(name: str, kind: str, seed: int = 0) -> tuple[Values, NetworkCost]:
    cost = instances.network_cost(name, kind)
    return instances.values_of(cost, instances.synthetic_importances(cost, seed)), cost


def tiny() -> tuple[dict[str, list[float]], NetworkCost]:
    terms = (CostTerm("conv", (width("a"), width("b")), lambda x, y: 1.0 * x * y),)
    return {"a": [1.0, 2.0], "b": [1.0, 3.0]}, NetworkCost("ms", {"a": (1, 2), "b": (1, 2)}, terms)


def solved(values: Mapping[str, list[float]], cost: NetworkCost, budget: float) -> Allocation:
    return allocate(values, cost, budget)
