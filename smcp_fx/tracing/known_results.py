"""Results computed from shapes and types alone, for operations that are slow on tensors without values.

While a model is traced, values are fake tensors, which go through Python at each operation. A graph at another size
runs on the meta device, where torch decomposes some layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.tracing.operations import operation_name, result_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.trees import leaves_of, mapped

#: Element-wise operations whose result has the operands' type.
_ARITHMETIC = frozenset("add div dropout gelu mul relu sigmoid silu stochasticdepth sub".split())
#: Operations on one tensor, and its weight.
_LAYERS = frozenset("batchnorm groupnorm layernorm linear roll softmax".split())
_ATTENTION = "scaleddotproductattention"
#: Operations, besides movements and joins, that are fast on the meta device but slow on fake tensors.
_FAST = frozenset("bmm matmul mm pad".split())


def known_result(node: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> Tensor | None:
    """The result for tensors on the meta device; None if it is not known here, or if the operation would fail."""
    name = operation_name(node, module)
    if not (name in _ARITHMETIC or name in _LAYERS or name == _ATTENTION) or _writes(node, kwargs):
        return None
    leaves = leaves_of((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    first = next(iter(tensors), None)
    if first is None or not first.is_floating_point() or any(t.dtype != first.dtype for t in tensors):
        return None
    if any(isinstance(leaf, (complex, torch.dtype)) for leaf in leaves):
        return None
    if name == _ATTENTION:
        return _attended(*tensors) if len(tensors) == 3 and len(args) >= 3 else None
    if name in _LAYERS:
        return _layer(name, module, first, args) if args and args[0] is first else None
    whole = all(t.shape == first.shape or _broadcasts(t.shape, first.shape) for t in tensors)
    alike = all(t.is_contiguous() for t in tensors) or len({(t.shape, t.stride()) for t in tensors}) == 1
    return torch.empty_like(first) if whole and alike else None


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    fits = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and key.shape[-2] == value.shape[-2]
    fits &= query.shape[-1] == key.shape[-1]
    return _ordered((*query.shape[:-1], value.shape[-1]), query) if fits else None


def _layer(name: str | None, module: nn.Module | None, x: Tensor, args: Any) -> Tensor | None:
    if module is not None and any(own.dtype != x.dtype for own in module.parameters(recurse=False)):
        return None

    def option(attribute: str) -> Any:
        return (*args, None)[1] if module is None else getattr(module, attribute)

    if name == "linear":
        weight = option("weight")
        if not isinstance(weight, Tensor) or weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
            return None
        return _ordered((*x.shape[:-1], weight.shape[0]), x)
    if name == "layernorm":
        sizes = tuple(option("normalized_shape") or ())
        return _ordered(x.shape, x) if sizes and x.shape[-len(sizes) :] == sizes else None
    fits = x.is_contiguous()
    if name == "groupnorm":
        fits = x.dim() > 1 and x.shape[1] % (option("num_groups") or 1) == 0
    elif name == "batchnorm":
        mean = option("running_mean")
        fits = isinstance(mean, Tensor) and x.shape[1:2] == mean.shape
    return torch.empty_like(x) if fits else None


def of_fake_tensors(node: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
    """`known_result` for fake tensors of one device; also runs movements, on plain meta tensors."""
    name = operation_name(node, module)
    moves = module is None and (has(name, Trait.MOVES | Trait.JOINS) or name in _FAST)
    if not (moves or name in _ARITHMETIC or name in _LAYERS) or _writes(node, kwargs):
        return None
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    mode = getattr(next(iter(tensors), None), "fake_mode", None)
    if mode is None or len({(type(t), t.device) for t in tensors}) > 1:
        return None
    if torch.is_autocast_enabled(tensors[0].device.type) or (name == "getitem" and args[0] is not tensors[0]):
        return None
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    def plain(value: Any) -> Any:
        return on_meta(value) if isinstance(value, Tensor) else value

    with unset_fake_temporarily():
        args, kwargs = mapped(plain, (args, kwargs))
        try:
            result = known_result(node, module, args, kwargs)
            if result is None and moves:
                result = result_of(node, module, args, kwargs)
        except Exception:  # a fake tensor fails, too, and says why
            return None
    device = tensors[0].device
    return mapped(lambda v: FakeTensor(mode, v, device) if isinstance(v, Tensor) else v, result)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same layout on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _writes(node: fx.Node, kwargs: Any) -> bool:
    return str(getattr(node.target, "__name__", node.target)).endswith("_") or "out" in kwargs


def _broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, other) for size, other in pairs)


def _ordered(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")
