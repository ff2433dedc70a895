"""Calls of `torch.autograd.Function` stay calls and keep their own backward, unless autograd's gives the same.

    Reverse.apply(x)   is one call in the graph; traced through, it would be what autograd makes of its forward

What such a call does with channels is unknown, so its operands and results are pinned, unless its forward is
element-wise.

Functions compiled by `torch.jit.script` are traced through, by the Python that they were compiled from.
`Variable(x)` is x.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import FunctionMeta
from torch.fx.proxy import Proxy
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from smcp_fx.tracing.plain_functions import forward_of_function, is_plain_function, works_on_each_value


@contextmanager
def functions_kept(tracer: Any) -> Iterator[None]:
    """While it is entered, functions of autograd that are applied to proxies become nodes.

    So do functions whose `apply` was bound before (`swish = Swish.apply`). That C code looks up two attributes:
    first the backward's class, while gradients are as the model has set them, then the forward.
    """
    gradients = [True]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _any_proxy(args, kwargs):
            return _plain_apply.__get__(None, cls)(*args, **kwargs)
        if issubclass(cls, CheckpointFunction):
            return args[0](*args[2:])  # it recomputes what it runs, which changes no number
        if not kwargs and is_plain_function(cls, pytree.tree_map(seen, args)):
            with tracer.contexts.with_gradients():  # gradients are always off inside such a forward
                return forward_of_function(cls)(*args)
        alone = not kwargs and works_on_each_value(cls, pytree.tree_map(seen, args))
        return tracer.create_proxy("call_function", applied(cls, alone), args, kwargs)

    def seen(leaf: Any) -> Any:
        return tracer.held_or_value(leaf.node) if isinstance(leaf, Proxy) else leaf

    def looked_up(cls: Any, name: str) -> Any:
        attribute = type.__getattribute__(cls, name)
        if name == "_backward_cls":
            gradients[0] = torch.is_grad_enabled()
        if name == "setup_context" and attribute is not _NO_SETUP:
            return lambda *args: None if _any_proxy(args) else attribute(*args)
        if name != "forward":
            return attribute
        # If a function has a separate setup_context, its forward gets no context.
        separate = type.__getattribute__(cls, "setup_context") is not _NO_SETUP

        def forward(*args: Any) -> Any:
            if not _any_proxy(args):
                return attribute(*args)
            with torch.set_grad_enabled(gradients[0]):
                return apply(cls, *(args if separate else args[1:]))

        return forward

    def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
        written = getattr(function, "_torchdynamo_inline", None)  # the Python function that was compiled
        if written is not None and _any_proxy(args, kwargs):
            return written(*args, **kwargs)
        return _run_scripted(function, *args, **kwargs)

    def variable(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if _any_proxy(args) else type.__call__(cls, *args, **kwargs)

    with (
        mock.patch.object(type(torch.autograd.Variable), "__call__", variable, create=True),
        mock.patch.object(torch.jit.ScriptFunction, "__call__", scripted),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(FunctionMeta, "__getattribute__", looked_up),
    ):
        yield


_run_scripted: Any = torch.jit.ScriptFunction.__call__
_plain_apply = vars(torch.autograd.Function)["apply"]
_NO_SETUP = torch.autograd.Function.setup_context


def _any_proxy(*trees: Any) -> bool:
    return any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves(trees))


class Applied:
    """Applies an autograd class. Has the names by which fx writes a function, and pickles by the class."""

    def __init__(self, cls: Any, alone: bool) -> None:
        self.cls, self._alone = cls, alone
        self.operation = "ownelementwise" if alone else None  # its name (`tracing.operations`)
        self.__name__ = self.__qualname__ = f"{cls.__name__}_apply"
        self.__module__ = cls.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.cls.__qualname__}.apply>"

    def __reduce__(self) -> tuple[Any, ...]:
        return applied, (self.cls, self._alone)


@functools.cache
def applied(cls: Any, alone: bool = False) -> Applied:
    """The object that applies this class, one a class. ``alone``: the function is element-wise."""
    return Applied(cls, alone)
