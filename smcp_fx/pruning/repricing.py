"""Choices at a cost that is exact only near given counts, and may be measured there: price, choose again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.pruning.selection import Choice

#: A cost is priced again around each choice, at most this often, until the choice lies within the target (but for
#: rounding), and less than this share below it. Chosen, not measured.
_PRICINGS, MISS, OVER = 8, 0.011, 1e-9
#: Doubt allowed in the price of a choice, as a share: while the target still falls, and at the end. If
#: measuring a choice moves its price by less than the third share, another round is not worth it.
_PASSING, LASTING, _MOVED = 0.02, 0.002, 0.005


def choose_at_price(
    whole: NetworkCost,
    counts: Mapping[str, int],
    target: float,
    select: Callable[[NetworkCost], Choice],
    learn: Callable[[Mapping[str, int], float], bool],
    moving: bool,
) -> Choice:
    """Return a choice at its true price: of several rounds, the one nearest to the target.

    ``whole``: the cost, first priced at the present ``counts``; ``select``: chooses by a price; ``learn``: as
    `NetworkCost.learn`; ``moving``: the target still falls. Raises `InfeasibleBudgetError`.
    """
    cost, choices = whole.at(counts), list[Choice]()
    for _ in range(_PRICINGS):
        try:
            choice = select(cost)
        except InfeasibleBudgetError:
            if learn(cost.smallest_counts, LASTING):  # guesses may put it out of reach
                cost = whole.at(cost.smallest_counts)
                continue
            if choices:
                break
            raise
        counts = choice.allocation.counts
        guessed = whole.at(counts)
        learned = learn(counts, _PASSING if moving else LASTING)
        cost = whole.at(counts) if learned else guessed
        choices.append(_at_price(choice, cost))
        price = choices[-1].allocation.cost
        settled = moving or not learned or abs(price / guessed.cost(counts) - 1) <= _MOVED
        if cost is whole or (settled and -MISS <= price / target - 1 <= OVER):
            return choices[-1]
    # None is close enough: take the dearest within the target, or else the one that exceeds it least.
    choices = [_at_price(choice, whole.at(choice.allocation.counts)) for choice in choices]
    return min(choices, key=lambda c: (c.allocation.cost > target, abs(c.allocation.cost - target)))


def _at_price(choice: Choice, cost: NetworkCost) -> Choice:
    """Return the choice with its price by ``cost``."""
    price = cost.cost(choice.allocation.counts)
    return dataclasses.replace(choice, allocation=dataclasses.replace(choice.allocation, cost=price))
