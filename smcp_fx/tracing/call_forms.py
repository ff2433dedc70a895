"""Calls without optional arguments of the example: they are traced, too, into the same graph.

    forward(self, x, targets=None)      example (x, targets)      also traced: (x)

The flag `left_out` chooses the operations of a call, as `training` chooses those of a mode.
"""

from __future__ import annotations

import enum
import inspect
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.output_kinds import tensors_in
from smcp_fx.tracing.example_runs import run_eager
from smcp_fx.tracing.modes import form_key, is_by_mode, left_out

#: With more optional arguments than this, only the call without all of them is traced.
_MOST = 2
_OPTIONS = (bool, str, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Form:
    """A call that leaves these arguments of the example at their defaults."""

    places: tuple[int, ...]
    names: tuple[str, ...]
    defaults: tuple[Any, ...]

    @property
    def key(self) -> str:
        """Its key among the flags of modules."""
        return form_key(self.names)

    def of(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The example inputs in this form."""
        defaults = dict(zip(self.places, self.defaults, strict=True))
        return tuple(defaults.get(place, value) for place, value in enumerate(inputs))


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    """The arguments of forward; none if they are unknown, as for a scripted module."""
    try:
        return [*inspect.signature(model.forward).parameters.values()]
    except (TypeError, ValueError):
        return []


def is_option(value: Any) -> bool:
    """Is it one of a few values that forward branches on? (A number is none: forward computes with it.)"""
    return value is None or isinstance(value, _OPTIONS)


def is_constant(value: Any) -> bool:
    """Is it an option, or a frozen dataclass without tensors, as options are often given?"""
    frozen = getattr(type(value), "__dataclass_params__", None)
    return is_option(value) or (frozen is not None and frozen.frozen and not any(tensors_in(value)))


def has_name(default: Any) -> bool:
    """Can a graph's code write this default? (It cannot write tensors and other objects.)"""
    kinds = (*fx.node.base_types, enum.Enum, type(None))
    return isinstance(default, kinds) and not isinstance(default, Tensor)


def is_default(value: Any, default: Any) -> bool:
    """Is an argument the default?"""
    comparable = isinstance(default, (*_OPTIONS, int, float))
    return value is default or (type(value) is type(default) and comparable and bool(value == default))


def forms_of(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Form, ...]:
    """The calls without optional arguments of the example that the model accepts, shortest calls first."""
    parameters = parameters_of(model)
    options = [
        (place, parameter.name, parameter.default)
        for place, (parameter, value) in enumerate(zip(parameters, inputs, strict=False))
        if is_option(parameter.default) and not is_default(value, parameter.default)
    ]
    few = len(options) <= _MOST
    counts = range(len(options), 0 if few else len(options) - 1, -1) if options else ()
    forms = [Form(*zip(*chosen, strict=True)) for count in counts for chosen in combinations(options, count)]
    return tuple(form for form in forms if _runs(model, form.of(inputs)))


def may_pin(graph: fx.Graph) -> bool:
    """May calls that leave out arguments need channels that the example's call does not?

    They do not if they run a subset of its operations and return a subset of its tensors.
    """
    for node in graph.nodes:
        if not (is_by_mode(node) and node.args[0].target is left_out and node.users):
            continue
        passed, without = set[fx.Node](), set[fx.Node]()
        fx.node.map_arg(node.args[1], passed.add)
        fx.node.map_arg(node.args[2], without.add)
        if not without <= passed or any(user.op != "output" for user in node.users):
            return True
    return False


def _runs(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    try:
        run_eager(model, inputs)
    except Exception:  # a model may raise anything if an argument is missing
        return False
    return True
