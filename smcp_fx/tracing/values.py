"""Values of a traced graph, and the keys of notes in its nodes' ``meta``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from smcp_fx.tracing.trees import leaf_class, leaves_of

#: On a placeholder or the output: where the tensors come from, or why they stay, instead of the usual reason.
ORIGIN = "smcp_origin"
#: On the output: the positions of the tensors that it does not pin.
PASSED_ON = "smcp_passed_on"
#: On a module's call: why it is treated as unknown, whatever the module is.
OPAQUE = "smcp_opaque"
#: On nodes that read weights without gradients: why the channels of layers among them stay.
FROZEN = "smcp_frozen"
#: On a call: the line of the model's code that makes it.
LINE = "smcp_line"
#: On an operation: it runs with `torch.autocast` switched off.
NO_AUTOCAST = "smcp_no_autocast"


@leaf_class
@dataclass(frozen=True)
class TensorInfo:
    """A tensor's shape and type in the example run."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_continuous(self) -> bool:
        """See `is_continuous`."""
        return is_continuous(self)


def is_continuous(value: torch.Tensor | TensorInfo) -> bool:
    """Does it hold real or complex numbers, not integers or truth values?"""
    return value.dtype.is_floating_point or value.dtype.is_complex


def has_tensors(value: Any) -> bool:
    """Does the record of a node's result hold a tensor?"""
    return any(isinstance(leaf, TensorInfo) for leaf in leaves_of(value))


def info_of(result: Any) -> Any:
    """The record of a node's result: a `TensorInfo` in place of each tensor."""
    if type(result) in (int, bool):
        return result
    if isinstance(result, torch.Size):
        return tuple(result)
    if isinstance(result, torch.Tensor):
        return TensorInfo(tuple(result.shape), result.dtype)
    if isinstance(result, (torch.finfo, torch.iinfo)):
        return None  # cannot be copied, and no size follows from it
    return pytree.tree_map(
        lambda v: TensorInfo(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v, result
    )


def held(module: nn.Module, target: str) -> Any:
    """Return what a `get_attr` node of this target reads."""
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter or buffer, the first under which the same tensor is held."""
    first: dict[int, str] = {}
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for each in named for name, tensor in each}


def plain_lists(tree: Any) -> Any:
    """The arguments of a node with lists and dicts that can be written into; fx's own refuse it."""
    # Named tuples, and what `torch.max` returns, stay what they are.
    if isinstance(tree, list) or type(tree) is tuple:
        return [*map(plain_lists, tree)] if isinstance(tree, list) else tuple(map(plain_lists, tree))
    if isinstance(tree, dict):
        return {key: plain_lists(value) for key, value in tree.items()}
    return tree
