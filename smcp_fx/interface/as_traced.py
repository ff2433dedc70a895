"""Lets a graph be called as its model is, also with arguments that were traced at their defaults."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import AssumptionError, InputError
from smcp_fx.interface.carried import is_plain
from smcp_fx.tracing.call_forms import Form, is_constant, is_default, is_option, parameters_of
from smcp_fx.tracing.sentences import TAKEN

#: The attribute of a graph that says how it was traced. ``fixed``: {argument: default} for those that the
#: example left out. ``needed``: the arguments without which there is no trace. ``order``: the arguments of a
#: call by position, if the graph has others, or more.
CALL = "traced_call"


def call_of(model: nn.Module, inputs: tuple[Any, ...], forms: tuple[Form, ...]) -> dict[str, Any]:
    """The attribute `CALL` of a model traced on these inputs and calls of these forms; {} if it is empty."""
    parameters = parameters_of(model)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    spare = {name for form in forms for name in form.names}
    needed = [
        parameter.name
        for parameter, value in zip(parameters, inputs, strict=False)
        if is_option(parameter.default)
        and not is_default(value, parameter.default)
        and parameter.name not in spare
    ]
    names = [parameter.name for parameter, _ in zip(parameters, inputs, strict=False)]
    left = [p for p in named if p.name not in names]
    fixed = {p.name: p.default for p in left if is_plain(p.default) or is_constant(p.default)}
    order = getattr(model.forward, "order", None)  # of `positional`
    notes = {"fixed": fixed, "needed": needed} if fixed or needed or order else {}
    return {CALL: notes | ({} if order is None else {"order": order})} if notes else {}


class CalledAsTraced(nn.Module):
    """A graph that takes the arguments of the model's forward, as far as it was traced for them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph as the model; raises `AssumptionError` for calls of a kind unlike the example."""
        if kwargs or not self._takes(args):
            args, kwargs = self._as_traced(args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except AssertionError as error:
            if str(error).startswith(TAKEN):
                raise AssumptionError(str(error)) from None
            raise

    def by_place(self, *inputs: Any) -> Any:
        """Call with the graph's own arguments in order; the model may take some of them by name only."""
        if "order" not in vars(self).get(CALL, {}):
            return self(*inputs)
        return self(**dict(zip(self._names(), inputs, strict=True)))

    def _names(self) -> list[str]:
        return [*inspect.signature(type(self).forward).parameters][1:]

    def _takes(self, args: tuple[Any, ...]) -> bool:
        """Does the graph's forward take these as the model does?"""
        count = type(self).forward.__code__.co_argcount - 1
        return (
            len(args) == count
            and "order" not in vars(self).get(CALL, {})
            and all(value is not None for value in args)
        )

    def _as_traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the graph, without those that were traced at their defaults."""
        signature = inspect.signature(type(self).forward)
        own = [*signature.parameters.values()][1:]
        if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in own):
            return args, kwargs
        notes: dict[str, Any] = vars(self).get(CALL) or {"fixed": {}, "needed": []}
        fixed: dict[str, Any] = notes["fixed"]
        order = notes.get("order") or [*self._names(), *fixed]
        placed = dict(zip(order, args, strict=False))
        for name, value in (placed | kwargs).items():
            if name in fixed and not _same(value, fixed[name]):
                called = f"a tensor {name}" if isinstance(value, Tensor) else f"{name}={value!r:.60}"
                self._refuse(
                    f"with {name}={fixed[name]!r}, its default, and is called with {called}",
                    f"an example that has it: prepare(model, {{..., {name!r}: ...}}). Calls without it work, too",
                )
        try:
            if len(args) > len(order):
                raise TypeError(f"by position it takes {', '.join(order) or 'nothing'}, and got {len(args)}")
            if twice := placed.keys() & kwargs.keys():
                raise TypeError(f"multiple values for argument {min(twice)!r}")
            by_name = {name: value for name, value in (placed | kwargs).items() if name not in fixed}
            bound = signature.bind(self, **by_name)
        except TypeError as error:
            told_of = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in own)
            raise InputError(
                f"{type(self).__name__} does not take this call: {error}. It was traced as forward({told_of}): "
                "prepare the model with an example of such a call, or call the class itself: convert(prepared, "
                "into=model) has its whole forward"
            ) from None
        for parameter in own:
            value = bound.arguments.get(parameter.name, parameter.default)
            if parameter.name in notes["needed"] and is_default(value, parameter.default):
                self._refuse(f"with {parameter.name}, and is called without it", "an example of such a call")
        return bound.args[1:], bound.kwargs

    def _refuse(self, how: str, example: str) -> None:
        raise AssumptionError(
            f"{type(self).__name__} was traced {how}. Prepare the model with {example}. Or call the class itself: "
            "convert(prepared, into=model) has its whole forward."
        )


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, Tensor) or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return False
    return value is default or (type(value) is type(default) and bool(value == default))
