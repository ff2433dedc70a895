"""Gives a model a forward that takes its inputs by position, each under a name of its own.

    positional   forward(self, before, *, after)       forward(self, before, after)
    flattened    forward(self, pair, scale)            forward(self, pair_0, pair_1, scale)      pair is a list

The results are of a class derived from the model's own, and share all that the model holds. (Graphs become plain
modules: torch.export would read a graph node by node.)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import InputError
from smcp_fx.interface.example_inputs import bound_inputs
from smcp_fx.output_kinds import tensors_in
from smcp_fx.tracing.call_forms import parameters_of

#: Arguments of a call: by position, and by name.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def positional(model: nn.Module, example_inputs: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model with a forward by position, and its inputs; the model itself if its own forward will do.

    Keyword-only arguments, and those behind a ``*``, become arguments of their own. Raises `InputError` for a
    dict that fits ``forward`` only in part.
    """
    args, named = bound_inputs(example_inputs, model)
    names = _names(model, len(args))
    if not named and len(names) == len(set(names)) and not any(n.startswith("*") for n in names):
        return model, args
    names = [*(f"{n[1:]}_{i}" if n.startswith("*") else n for i, n in enumerate(names)), *named]
    split = len(args)
    taking = _taking(
        model, names, lambda values: (values[:split], dict(zip(named, values[split:], strict=True)))
    )
    forward: Any = type(taking).forward
    forward.__signature__ = _signature(model, names)
    forward.order = [re.sub(r"\W", "_", name) for name in names[:split]] + [
        p.name for p in parameters_of(model)[split:] if p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    return taking, (*args, *named.values())


def flattened(
    model: nn.Module, example_inputs: Any
) -> tuple[nn.Module, tuple[Tensor, ...], list[str] | None]:
    """The model with an argument for each tensor of its inputs, these tensors, and names for them.

    The model itself, and no names, if each input is a tensor given by position. Other values stay as they are
    in the example. Raises `InputError` if there is no tensor at all.
    """
    if isinstance(example_inputs, Tensor):
        return model, (example_inputs,), None
    args, named = bound_inputs(example_inputs, model)
    if (
        args
        and not named
        and not isinstance(example_inputs, Mapping)
        and all(isinstance(v, Tensor) for v in args)
    ):
        return model, args, None
    own_names = [n.lstrip("*") for n in _names(model, len(args))]
    arguments = [*zip(own_names, args, strict=True), *named.items()]
    parts = [[f"{name}{pytree.keystr(path)}", value] for name, tree in arguments
             for path, value in pytree.tree_flatten_with_path(tree)[0]]  # fmt: skip
    _, structure = pytree.tree_flatten((args, named))
    values = [value for _, value in parts]
    tensors = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    if not tensors:
        kinds = ", ".join(type(value).__name__ for value in values) or "none"
        raise InputError(f"example_inputs must hold tensors, in tuples, lists or dicts, and are: {kinds}")
    names = [re.sub(r"\W+", "_", parts[place][0]).strip("_") for place in tensors]

    def rebuilt(leaves: tuple[Any, ...]) -> Call:
        now = dict(zip(tensors, leaves, strict=True))
        call: Call = pytree.tree_unflatten([now.get(i, v) for i, v in enumerate(values)], structure)
        return call

    return _taking(model, names, rebuilt), tuple(values[place] for place in tensors), names


def returning_tensors(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[nn.Module, list[str] | None]:
    """The model with a tuple of tensors for its output, and their names, if its output holds anything else.

    (Dataclasses, numbers, strings.) The model itself, and no names, if it returns only tensors in tuples,
    lists, dicts or other containers that torch knows.
    """
    try:
        with torch.no_grad():
            outputs = model(*(tensor.clone() for tensor in inputs))
    except Exception:  # the export reports the error
        return model, None
    tensors, leaves = dict(tensors_in(outputs)), pytree.tree_leaves(outputs)
    only_tensors = all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
    if not tensors or (only_tensors and len(tensors) == sum(leaf is not None for leaf in leaves)):
        return model, None
    taken = _names(model, len(inputs))

    def values_of(output: Any) -> tuple[Tensor, ...]:
        return tuple(dict(tensors_in(output)).values())

    names = [re.sub(r"\W+", "_", name) for name in tensors]
    return _taking(model, taken, lambda values: (values, {}), values_of), names


def _names(model: nn.Module, count: int) -> list[str]:
    """The names of the first arguments of forward; "*args" for each that goes into ``*args``."""
    names: list[str] = []
    for parameter in parameters_of(model):
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind == parameter.VAR_POSITIONAL:
            names += [f"*{parameter.name}"] * (count - len(names))
    return [*names, *(f"input_{i}" for i in range(len(names), count))][:count]


def _signature(model: nn.Module, names: list[str]) -> inspect.Signature:
    """The signature of a forward with these arguments, the model's defaults, and its other arguments last.

    An argument loses its default if a later one has none.
    """
    sort, none = inspect.Parameter, inspect.Parameter.empty
    own = {p.name: p for p in parameters_of(model) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    defaults = [own[name].default if name in own else none for name in names]
    first = max((place for place, default in enumerate(defaults) if default is none), default=-1)
    taken = [
        sort(re.sub(r"\W", "_", name), sort.POSITIONAL_OR_KEYWORD, default=none if place < first else default)
        for place, (name, default) in enumerate(zip(names, defaults, strict=True))
    ]
    left = [p.replace(kind=sort.KEYWORD_ONLY) for name, p in own.items() if name not in names]
    return inspect.Signature([sort("self", sort.POSITIONAL_OR_KEYWORD), *taken, *left])


def _taking(
    model: nn.Module,
    names: list[str],
    rebuilt: Callable[[tuple[Any, ...]], Call],
    returned: Callable[[Any], Any] = lambda outputs: outputs,
) -> nn.Module:
    """The model with a forward of these arguments; ``rebuilt`` turns them into those of its own forward.

    ``returned``: turns the model's outputs into those to return.
    """
    held = dict(vars(model))
    own = held.pop("forward", None)  # a forward of the instance

    def call(self: nn.Module, *values: Any) -> Any:
        args, named = rebuilt(values)
        return returned(own(*args, **named) if own is not None else type(model).forward(self, *args, **named))

    space: dict[str, Any] = {"_call": call}
    listed = ", ".join(re.sub(r"\W", "_", name) for name in names)
    # The tracer reads the names in a function's code.
    exec(f"def forward(self, {listed}):\n    return _call(self, {listed})", space)  # noqa: S102
    base = nn.Module if isinstance(model, fx.GraphModule) else type(model)
    kind = type(
        type(model).__name__, (base,), {"forward": space["forward"], "__module__": type(model).__module__}
    )
    taking: nn.Module = nn.Module.__new__(kind)
    vars(taking).update(held)
    return taking
