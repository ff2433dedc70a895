"""Results of operations on fake tensors, for operations that are slow on these.

A fake tensor goes through Python at each operation, and is decomposed where a plain tensor on the meta device is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from smcp_fx.tracing.operations import operation_name, result_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.trees import leaves_of, mapped

#: Operations that the meta device knows by itself, beside movements and joins.
_KNOWN = frozenset("bmm matmul mm pad".split())
#: Element-wise ones whose result is of the operands' type.
_ARITHMETIC = frozenset("add div dropout gelu mul relu sigmoid silu softmax stochasticdepth sub".split())


def known_result(node: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
    """The result of a node; None if it is unknown, or if the operation would fail."""
    if not args or not (isinstance(args[0], (Tensor, list, tuple)) or isinstance(args[-1], Tensor)):
        return None
    name = operation_name(node, module)
    if name == "getitem" and not isinstance(args[0], Tensor):
        return None
    moves = has(name, Trait.MOVES | Trait.JOINS) or name in _KNOWN
    if not (moves or name in _ARITHMETIC or name in ("batchnorm", "layernorm", "linear")):
        return None
    if str(getattr(node.target, "__name__", node.target)).endswith("_") or "out" in kwargs:
        return None  # it changes its operand
    leaves = leaves_of((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    first = next(iter(tensors), None)
    if first is None or any(type(t) is not type(first) or t.device != first.device for t in tensors):
        return None
    if not hasattr(first, "fake_mode") or torch.is_autocast_enabled(first.device.type):
        return None
    if moves and module is None:
        return _moved(node, first, args, kwargs)
    if any(t.dtype != first.dtype for t in tensors) or not first.is_floating_point():
        return None
    if name in _ARITHMETIC:
        typed = any(isinstance(leaf, (complex, torch.dtype)) for leaf in leaves)
        return None if typed else _combined(first, tensors)
    return _layer(name, module, first, args)


def _moved(node: fx.Node, first: Tensor, args: Any, kwargs: Any) -> Any:
    """The result for plain tensors on the meta device; None if that fails: a fake tensor will say why."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    mode, device = first.fake_mode, first.device  # type: ignore[attr-defined]

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    with unset_fake_temporarily():
        args, kwargs = mapped(plain, (args, kwargs))
        try:
            result = result_of(node, None, args, kwargs)
        except Exception:  # a fake tensor fails, too, and says why
            return None
    return mapped(lambda v: FakeTensor(mode, v, device) if isinstance(v, Tensor) else v, result)


def _combined(first: Tensor, tensors: list[Tensor]) -> Tensor | None:
    """Of element-wise arithmetic."""
    if not all(t.shape == first.shape and t.is_contiguous() for t in tensors):
        return None
    return _new(first, first.shape)


def _layer(name: str | None, module: nn.Module | None, given: Tensor, args: Any) -> Tensor | None:
    """Of layers that fake tensors decompose."""
    if given.dim() < 1:
        return None
    if module is not None and any(own.dtype != given.dtype for own in module.parameters(recurse=False)):
        return None
    if isinstance(module, _BatchNorm):
        return torch.empty_like(given)
    if name == "layernorm":
        sizes: Any = module.normalized_shape if module is not None else args[1] if len(args) > 1 else ()
        return _new(given, given.shape) if sizes and given.shape[-len(sizes) :] == tuple(sizes) else None
    if name == "linear":
        weight = module.weight if module is not None else args[1] if len(args) > 1 else None
        if isinstance(weight, Tensor) and weight.dim() == 2 and given.shape[-1] == weight.shape[1]:
            return _new(given, (*given.shape[:-1], weight.shape[0]))
    return None


def _new(given: Tensor, shape: Any) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    with unset_fake_temporarily():
        plain = torch.empty(tuple(shape), dtype=given.dtype, device="meta")
    return FakeTensor(given.fake_mode, plain, given.device)  # type: ignore[attr-defined]
