"""Finds autograd functions whose backward equals autograd's own for their forward, and only saves memory.

They are traced through (a user's layer norm, a swish that recomputes, reversible blocks, which take modules).
Others stay calls: straight-through estimators, gradient reversals, functions written in another language.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smcp_fx.tracing.operations import function_name, normal_name
from smcp_fx.tracing.traits import Trait, has

_NO_SETUP = torch.autograd.Function.setup_context
#: Scales of values and gradients at which both backwards are compared: one that clips differs at large scales.
#: Chosen, not measured.
_SCALES = ((1.0, 1.0), (8.0, 1e-3), (0.1, 1e3))


class Context:
    """Stands in for autograd's context; raises if the forward marks its outputs."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *tensors: Any) -> None:
        """Save nothing: its own backward is not used."""

    def set_materialize_grads(self, value: bool) -> None:
        """Change nothing."""

    def mark_dirty(self, *tensors: Any) -> None:
        """A forward that writes into its inputs cannot be traced through."""
        raise TypeError("marked")

    mark_non_differentiable = mark_dirty


def forward_of_function(cls: Any) -> Any:
    """The function's forward, on its arguments only."""
    forward, setup = (type.__getattribute__(cls, name) for name in ("forward", "setup_context"))  # as written
    return functools.partial(forward, Context()) if setup is _NO_SETUP else forward


def is_plain_function(cls: Any, args: tuple[Any, ...]) -> bool:
    """Does its backward give the gradients of its forward? ``args``: its arguments, or fake tensors like them."""
    leaves = pytree.tree_leaves(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(tensor.is_complex() or not tensor.is_floating_point() for tensor in tensors):
        return False
    return _answered(cls, args, "plain", lambda: all(_alike(cls, args, *scales) for scales in _SCALES))


def works_on_each_value(cls: Any, args: tuple[Any, ...]) -> bool:
    """Is its forward element-wise, whatever its backward is? (Straight-through rounding.)

    A forward that asks for sizes is not: its values may depend on the number of channels.
    """

    if _modules(args):
        return False

    def watch() -> bool:
        with torch.no_grad(), _Watch() as watch:
            inputs = pytree.tree_map(lambda v: torch.randn(v.shape) if isinstance(v, Tensor) else v, args)
            watch.asked.clear()
            result = forward_of_function(cls)(*inputs)
        shapes = [leaf.shape for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        wanted = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        plain = isinstance(result, Tensor) and result.shape == wanted
        return plain and bool(watch.asked) and all(has(name, Trait.ELEMENTWISE) for name in watch.asked)

    return _answered(cls, args, "alone", watch)


#: Answers by class, question and arguments: a model calls a function on many weights, in each mode.
_ANSWERS: WeakKeyDictionary[Any, dict[Any, bool]] = WeakKeyDictionary()


def _answered(cls: Any, args: tuple[Any, ...], question: str, ask: Callable[[], bool]) -> bool:
    leaves, structure = pytree.tree_flatten(args)
    if not all(isinstance(leaf, (Tensor, int, float, str, bool, type(None))) for leaf in leaves):
        return _apart(ask)
    kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
    answers, key = _ANSWERS.setdefault(cls, {}), (question, repr(structure), *kinds)
    if key not in answers:
        answers[key] = _apart(ask)
    return answers[key]


class _Watch(TorchFunctionMode):
    """Records the operations that run, except questions whose answers depend on no channel."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            name = function_name(func) or normal_name(getattr(func, "__name__", ""))
            if name == "viewas" and args[0] is args[1]:  # a forward returns its input in this way
                name = "identity"
            self.asked.append(_REVERSED.get(name, name))
        return func(*args, **(kwargs or {}))


_HARMLESS = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad")} | {Tensor.dim}
_REVERSED = {"rsub": "sub", "rmul": "mul", "radd": "add", "rdiv": "div", "rtruediv": "div", "rpow": "pow"}


def _apart(ask: Callable[[], bool]) -> bool:
    """The answer, computed in a thread that no trace follows; False if the forward fails."""
    answers: list[bool] = []

    def compare() -> None:
        # A forward may raise anything for other values.
        with torch.enable_grad(), contextlib.suppress(Exception):
            answers.append(ask())

    apart = threading.Thread(target=compare)
    apart.start()
    apart.join()
    return answers == [True]


def _modules(args: Any) -> list[nn.Module]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, nn.Module)]


def _alike(cls: Any, args: tuple[Any, ...], size: float, steepness: float) -> bool:
    drawn = torch.Generator().manual_seed(0)
    random_args = pytree.tree_map(
        lambda v: (
            (size * torch.randn(v.shape, generator=drawn, dtype=torch.float64))
            if isinstance(v, Tensor)
            else v
        ),
        args,
    )
    results = []
    cotangents: list[Tensor] = []
    for function in (cls.apply, forward_of_function(cls)):
        own, inputs = _own(args, random_args)
        with _kept():
            outputs = [leaf for leaf in pytree.tree_leaves(function(*own)) if isinstance(leaf, Tensor)]
        cotangents = cotangents or [
            steepness * torch.randn(v.shape, generator=drawn, dtype=torch.float64) for v in outputs
        ]
        torch.autograd.backward(outputs, cotangents)
        results.append([*outputs, *(torch.zeros(()) if v.grad is None else v.grad for v in inputs)])
    return len(results[0]) == len(results[1]) and all(
        a.shape == b.shape and torch.allclose(a, b, 1e-6, 1e-9 * steepness, equal_nan=True)
        for a, b in zip(*results, strict=True)
    )


def _own(args: Any, random_args: Any) -> tuple[Any, list[Tensor]]:
    """Arguments for one call in double precision, and the leaves that have gradients.

    ``random_args``: the values of tensors. Modules are copied, and so are their parameters among the arguments.
    """
    memo: dict[int, Any] = {}
    modules = {id(module): copy.deepcopy(module, memo).double() for module in _modules(args)}
    copied: dict[int, Tensor] = {
        id(parameter): memo[id(parameter)] for module in _modules(args) for parameter in module.parameters()
    }
    leaves, structure = pytree.tree_flatten(args)
    own = [
        modules.get(id(leaf), copied.get(id(leaf), value))
        for leaf, value in zip(leaves, pytree.tree_leaves(random_args), strict=True)
    ]
    own = [
        value.clone().requires_grad_() if isinstance(value, Tensor) and id(leaf) not in copied else value
        for leaf, value in zip(leaves, own, strict=True)
    ]
    tensors = [value for value in own if isinstance(value, Tensor)]
    inputs = dict.fromkeys([*tensors, *(p for module in modules.values() for p in module.parameters())])
    return pytree.tree_unflatten(own, structure), [*inputs]


class _Gradients(TorchFunctionMode):
    """Gradients stay on, even if a forward switches them off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func is torch._C._set_grad_enabled else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Keep all that autograd's backward needs: gradients are on, and no tensor frees its memory."""
    ours, plain = threading.get_ident(), Tensor.set_

    def given_up(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kept = threading.get_ident() == ours and not (args or kwargs)
        return tensor if kept else plain(tensor, *args, **kwargs)

    with _Gradients(), mock.patch.object(Tensor, "set_", given_up):
        yield
