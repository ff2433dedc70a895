"""The user's arguments, checked and put on grids on which sums are exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from smcp_fx.errors import InfeasibleBudgetError, InputError
from smcp_fx.knapsack.arrays import Array, ArrayOps, ops_for
from smcp_fx.knapsack.dual import Groups

#: A choice fits if fsum(costs) <= capacity + this * max(1, |capacity|): 0.1 + 0.2 fits 0.3.
CAPACITY_TOLERANCE = 1e-12

#: Sums of quantised values and costs stay below this, so that they and their differences fit int64.
_LARGEST_SUM = 2.0**60

#: Sums of values and of costs stay below this, far from overflow.
_LARGEST_TOTAL = 1e300

#: Values this much smaller than the greatest difference (times groups) would be lost to rounding.
_CONTRAST = 2.0**-20

#: Decimal grids 1, 0.1, ... are tried down to this many digits before a grid of powers of two is taken.
_MOST_DIGITS = 9


@dataclass(frozen=True)
class KnapsackProblem:
    """A checked instance: options end to end, float64; ``limit`` is the capacity with its tolerance.

    ``worth`` is the values, -inf where no choice with that option can be the best; the other options' values
    and costs are at most ``largest_value`` and ``largest_cost`` in magnitude.
    """

    groups: Groups
    values: Array
    costs: Array
    worth: Array
    largest_value: float
    largest_cost: float
    starts: np.ndarray[Any, Any]
    capacity: float
    limit: float

    def evaluate(self, picked: Array) -> tuple[float, float]:
        """Return the correctly rounded value and cost of one option per group (flat indices)."""
        host = self.groups.ops.host
        return math.fsum(host(self.values[picked]).tolist()), math.fsum(host(self.costs[picked]).tolist())

    def room(self, picked: Array) -> Fraction:
        """Return the limit less the cost of one option per group, to twice float64's precision."""
        terms = [self.limit, *(-self.groups.ops.host(self.costs[picked])).tolist()]
        rounded = math.fsum(terms)
        return Fraction(rounded) + Fraction(math.fsum([*terms, -rounded]))


@dataclass(frozen=True)
class Grid:
    """int64 ``steps`` with ``steps * size`` equal to the numbers given, exactly if ``exact``."""

    steps: Array
    size: float
    exact: bool


def read_problem(
    values: Sequence[Any], costs: Sequence[Any], capacity: float, device: str | torch.device
) -> KnapsackProblem:
    """Check the arguments and move them to ``device``, one transfer for values and one for costs.

    Raises:
        InputError: shapes that do not fit, no group, a group without options, numbers that are not finite.
        InfeasibleBudgetError: the cheapest options together exceed the capacity.
    """
    limit_base = _read_capacity(capacity)
    try:
        ops = ops_for(torch.device(device))
        ops.arange(1)
    except (AssertionError, RuntimeError) as error:
        raise InputError(f"device {str(device)!r} cannot be used by torch: {error}") from None
    if len(values) != len(costs):
        raise InputError(
            f"values has {len(values)} groups and costs has {len(costs)}: pass one pair of arrays a group"
        )
    if len(values) == 0:
        raise InputError("there are no groups: pass at least one pair of values and costs")
    flat_values, sizes = _flatten(ops, values, "values")
    flat_costs, cost_sizes = _flatten(ops, costs, "costs")
    if sizes != cost_sizes:
        g = next(g for g, (n, m) in enumerate(zip(sizes, cost_sizes, strict=True)) if n != m)
        raise InputError(
            f"group {g} has {sizes[g]} values and {cost_sizes[g]} costs: each option needs one of both"
        )
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    largest_value = _check_finite(ops, flat_values, starts, "values")
    largest_cost = _check_finite(ops, flat_costs, starts, "costs")
    groups = Groups(ops, ops.ints(starts), ops.ints(np.repeat(np.arange(len(sizes)), sizes)))
    cheapest = -ops.host(ops.segment_max(-flat_costs, groups.starts, groups.group))
    smallest = math.fsum(cheapest.tolist())
    limit = limit_base + CAPACITY_TOLERANCE * max(1.0, abs(limit_base))
    if smallest > limit:
        raise InfeasibleBudgetError(
            f"the cheapest option of each of the {len(sizes)} groups costs {smallest:.17g} together, more "
            f"than the capacity {limit_base:.17g}: raise it to at least that, or permit cheaper options",
            smallest=smallest,
            budget=limit_base,
        )
    room = limit - smallest + 2.0**-50 * (abs(limit) + largest_cost)
    worth = flat_values
    affordable = flat_costs - ops.floats(cheapest)[groups.group] <= room
    if not bool(affordable.all()):
        worth = ops.where(affordable, worth, -np.inf)
        largest_cost = float(abs(flat_costs[affordable]).max())
    if _has_contrast(ops, flat_values, starts):
        worth = _strike_hopeless(groups, worth, flat_costs, limit)
        largest_value = float(abs(flat_values[worth > -np.inf]).max())
    return KnapsackProblem(
        groups, flat_values, flat_costs, worth, largest_value, largest_cost, starts, limit_base, limit
    )


def quantise(ops: ArrayOps, x: Array, group_count: int) -> Grid:
    """Put float64 ``x`` on a grid whose sums over groups are exact in int64.

    Decimal numbers (0.1, 2.75) keep their decimal grid, dyadic ones theirs; others are rounded to a grid of
    2^-60 of the largest sum.
    """
    if len(x) == 0:
        return Grid(ops.ints(x), 1.0, True)
    largest = float(abs(x).max())
    reach = max(largest * group_count, 1e-280)
    probe = np.asarray(ops.host(x[:64]))
    for digits in range(_MOST_DIGITS + 1):
        scale = 10.0**digits
        # Beyond 2^53, products are rounded, and a neighbour would pass for the number itself.
        if largest * scale > 2.0**53 or reach * scale > _LARGEST_SUM:
            break
        if not (np.rint(probe * scale) / scale == probe).all():
            continue
        steps = ops.rint(x * scale)
        if bool((steps / scale == x).all()):
            return Grid(ops.ints(steps), 1.0 / scale, True)
    exponent = min(1000, math.floor(math.log2(_LARGEST_SUM / reach)))
    scale = 2.0**exponent
    steps = ops.rint(x * scale)
    exact = bool((steps / scale == x).all())
    return Grid(ops.ints(steps), 1.0 / scale, exact)


def _has_contrast(ops: ArrayOps, values: Array, starts: np.ndarray[Any, Any]) -> bool:
    """Return whether the values' range dwarfs the differences seen in a sample of the groups."""
    spread = float(values.max()) - float(values.min())
    if spread == 0.0:
        return False
    smallest = np.inf
    for g in np.linspace(0, len(starts) - 1, min(len(starts), 8)).astype(np.int64).tolist():
        end = int(starts[g + 1]) if g + 1 < len(starts) else len(values)
        options = ops.host(values[int(starts[g]) : end])
        behind = options.max() - options
        if (behind > 0).any():
            smallest = min(smallest, float(np.median(behind[behind > 0])))
    return spread * _CONTRAST > smallest / len(starts) or smallest == np.inf


def _strike_hopeless(groups: Groups, values: Array, costs: Array, limit: float) -> Array:
    """Set to -inf the values that are so low (-1e30 for "never") that they would blur the others.

    If a choice fits and has every group within t of its best value, no better choice has a group more than
    t * groups below its best value.
    """
    ops = groups.ops
    top, _ = groups.best(values)
    behind = top[groups.group] - values
    while True:
        worst = float(ops.where(behind < np.inf, behind, 0.0).max())
        near = worst * _CONTRAST / groups.count
        cheapest = ops.segment_max(ops.where(behind <= near, -costs, -np.inf), groups.starts, groups.group)
        if worst == 0.0 or not -float(cheapest.sum()) <= limit - 2.0**-40 * abs(limit):
            return values
        hopeless = behind > 2.0 * near * groups.count
        values = ops.where(hopeless, -np.inf, values)
        behind = ops.where(hopeless, np.inf, behind)


def _read_capacity(capacity: float) -> float:
    try:
        number = float(capacity)
    except (TypeError, ValueError) as error:
        raise InputError(f"capacity must be a number, not {capacity!r}") from error
    if not math.isfinite(number):
        raise InputError(f"capacity is {number}: pass a finite number in the unit of the costs")
    return number


def _flatten(ops: ArrayOps, xs: Sequence[Any], name: str) -> tuple[Array, list[int]]:
    """Return all groups' numbers end to end, float64 on the device, and the groups' sizes."""
    if set(map(type, xs)) == {np.ndarray}:
        sizes = list(map(len, xs)) if all(x.ndim for x in xs) else [0]
        if min(sizes) > 0:
            flat: Any = np.concatenate(xs)
            if flat.ndim == 1 and flat.dtype.kind in "iuf":
                return ops.floats(flat), sizes
    arrays: list[Any] = []
    for g, x in enumerate(xs):
        if not isinstance(x, np.ndarray | torch.Tensor):
            try:
                x = np.asarray(x, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise InputError(f"{name}[{g}] is not a 1-D array of numbers: {error}") from error
        if x.ndim != 1 or len(x) == 0:
            raise InputError(
                f"{name}[{g}] has shape {tuple(x.shape)}: each group needs a 1-D array of at least one option"
            )
        arrays.append(x)
    sizes = [len(x) for x in arrays]
    if all(isinstance(x, np.ndarray) for x in arrays):
        flat = np.concatenate(arrays)
        _check_real(flat.dtype.kind in "iuf", name, flat.dtype)
    else:
        tensors = [torch.as_tensor(x).detach() for x in arrays]
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        flat = torch.cat([t.to(device=device, dtype=torch.float64) for t in tensors])
        for t in tensors:
            _check_real(not t.is_complex() and t.dtype != torch.bool, name, t.dtype)
    return ops.floats(flat), sizes


def _check_real(real: bool, name: str, dtype: object) -> None:
    if not real:
        raise InputError(f"{name} holds {dtype}: pass real numbers (float64 is what the solver computes in)")


def _check_finite(ops: ArrayOps, x: Array, starts: np.ndarray[Any, Any], name: str) -> float:
    """Return the largest magnitude; refuse NaN, infinities, and numbers whose sums could overflow."""
    largest = float(abs(x).max())
    if largest < _LARGEST_TOTAL / len(starts):
        return largest
    host = ops.host(x)
    at = int(np.flatnonzero(~(abs(host) < _LARGEST_TOTAL / len(starts)))[0])
    g = int(np.searchsorted(starts, at, side="right")) - 1
    raise InputError(
        f"{name}[{g}][{at - int(starts[g])}] is {float(host[at])}: values and costs must be finite, and "
        f"their sums below {_LARGEST_TOTAL:g}; leave out options that must not be taken"
    )
