"""Costs by name, and targets as users write them."""

from __future__ import annotations

import re
from typing import Any, Protocol

from smcp_fx.channels import ChannelGraph
from smcp_fx.config import is_number
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs.flops import FlopsCost
from smcp_fx.costs.parameters import ParamsCost
from smcp_fx.errors import InputError
from smcp_fx.tracing.tracer import Traced


class CostModel(Protocol):
    """Anything that can price a network: a latency table, for instance."""

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Bind the cost to one network."""
        ...


NAMED: dict[str, Any] = {"flops": FlopsCost, "params": ParamsCost}


def bind(cost: str | CostModel, traced: Traced, channels: ChannelGraph) -> NetworkCost:
    """Bind "flops", "params" or a cost model to a network."""
    if isinstance(cost, str):
        if cost not in NAMED:
            raise InputError(f"cost must be one of {', '.join(NAMED)} or a cost model, not {cost!r}")
        model: CostModel = NAMED[cost]()
    elif isinstance(cost, type) or not callable(getattr(cost, "network_cost", None)):
        raise InputError(f"cost must be one of {', '.join(NAMED)} or a cost model, not {cost!r}")
    else:
        model = cost
    return model.network_cost(traced, channels)


#: FLOPs are multiply-adds here, as in the pruning literature.
_SAME_UNIT = {"multiply-add": "flop", "mac": "flop"}
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def absolute_target(target: float | str, full: float, unit: str) -> float:
    """Return a target in the cost's unit.

    ``target`` is a fraction of ``full`` in (0, 1] (also as "50%"), or an absolute cost with its unit:
    "1.2 GFLOPs" (or "1.2 G multiply-adds"), "3.5 ms", "2 M parameters". Raises `InputError` for anything else.
    """
    percent = re.fullmatch(r"\s*([0-9.eE+-]+)\s*%\s*", target) if isinstance(target, str) else None
    if percent is not None:
        try:
            value = float(percent[1]) / 100
        except ValueError:
            value = -1.0
        if not 0 < value <= 1:
            raise InputError(
                f"target {target!r} is not a share of the unpruned cost: give more than 0 and at most 100%"
            )
        return value * full
    if isinstance(target, str):
        match = re.fullmatch(r"\s*([0-9.eE+-]+?)\s*([kKMGT]?)\s*([A-Za-z-]+)\s*", target)
        named = "" if match is None else match[3].lower().rstrip("s")
        if match is None or _SAME_UNIT.get(named, named) != unit.lower().rstrip("s"):
            raise InputError(
                f"target {target!r} is not a cost in {unit}: give a number and the unit, or a share as 0.5 or '50%'"
            )
        try:
            value = float(match[1]) * _PREFIX[match[2].upper()]
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise InputError(f"target {target!r} must be a positive, finite cost in {unit}")
    else:
        if not is_number(target) or not 0 < target <= 1:
            raise InputError(
                f"target {target!r} is not a fraction of the unpruned cost in (0, 1]; give one, or an absolute cost "
                f"with its unit ({unit})"
            )
        value = float(target) * full
    return value
