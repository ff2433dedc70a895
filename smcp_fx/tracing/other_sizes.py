"""The values of a traced network's nodes for another size and number of images.

The channel graph is derived from one example, but which channels meet must not depend on that example's size. So the
graph is run once more, on the example repeated or cut to other sizes, if the network takes these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.tracing.example_runs import record, unchanged
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.shape_runs import ShapeRuns
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.traits import Trait, has

#: These may combine channels of one operand with positions of the other.
_PRODUCTS = frozenset("baddbmm bmm einsum matmul mm scaleddotproductattention tensordot".split())
#: Networks that halve the image five times accept sides that differ by multiples of this.
_STEP = 32


def at_another_size(traced: Traced) -> dict[str, Any] | None:
    """The values of all nodes, like `Traced.values`, at the first other size that the network accepts.

    First come twice as many images that are somewhat larger, then more images alone, then other sides, tried on one
    image first, which fails soonest. None if the network accepts no other size, or no operation makes sizes matter.
    """
    if not _sizes_may_matter(traced):
        return None
    tensors = [leaf for leaf in pytree.tree_leaves(traced.inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        return None
    shapes = ShapeRuns(traced.module, traced.values, traced.inputs)
    sides = tensors[0].shape[2:]
    more, *others = _larger(sides)
    values = _values(traced, shapes, 2, more)
    if values is not None:
        return values
    only_images = _values(traced, shapes, 2, {})
    if only_images is None:
        others = [more, *others]
    for new in others:
        values = _values(traced, shapes, 1, new) if new else None
        if values is not None and only_images is not None:
            values = _values(traced, shapes, 2, new)
        if values is not None:
            return values
    return only_images


def _sizes_may_matter(traced: Traced) -> bool:
    """May the combined channels depend on sizes? They do not in convolutions, norms, sums and concatenations."""
    for node in traced.module.graph.nodes:
        name = operation_of(traced.module, node) if node.op.startswith("call_") else None
        if name in _PRODUCTS:
            return True
        if has(name, Trait.REGROUPS) and not _only_ones(traced, node):
            return True
        moves = has(name, Trait.MOVES) and not has(name, Trait.REGROUPS)
        if (moves or name == "pad") and len(node.all_input_nodes) > 1:
            return True
    return False


def _only_ones(traced: Traced, node: fx.Node) -> bool:
    """Does a reshape add or drop nothing but dimensions of size one at the end?"""
    source = node.args[0] if node.args else None
    shapes = [getattr(traced.values.get(str(of)), "shape", None) for of in (source, node)]
    if shapes[0] is None or shapes[1] is None:
        return False
    before, after = list(shapes[0]), list(shapes[1])
    for sizes in (before, after):
        while sizes and sizes[-1] == 1:
            sizes.pop()
    return before == after


def _larger(sides: torch.Size) -> list[dict[int, int]]:
    """Other sides: first cheap ones that most networks accept, last ones that only some networks need."""
    rules: tuple[Callable[[int], int], ...] = (
        lambda side: side + _STEP if side > _STEP and len(sides) > 1 else 2 * side,
        lambda side: 2 * side,
        lambda side: side // 2,
    )
    candidates = [{side: rule(side) for side in sides} for rule in rules]
    return [new if all(new.values()) else {} for new in candidates]


def _values(traced: Traced, shapes: ShapeRuns, times: int, sides: dict[int, int]) -> dict[str, Any] | None:
    """The values for ``times`` as many images with these sides; None if the network does not accept them."""
    inputs = _resized(traced.inputs, times, sides)
    values = None if shapes.refuse(inputs) else _recorded(traced, inputs)
    if values is None:
        return None
    images = _images(traced.inputs)
    end = next(node.name for node in traced.module.graph.nodes if node.op == "output")
    outputs = (pytree.tree_leaves(each[end]) for each in (traced.values, values))
    for before, after in zip(*outputs, strict=False):
        if getattr(before, "shape", ())[:1] == (images,) and after.shape[0] != times * images:
            return None  # `x.view(-1, 512)` turned positions into images
    return values


def _recorded(traced: Traced, inputs: tuple[Any, ...]) -> dict[str, Any] | None:
    """The values of a run of the network itself; None if it fails."""
    try:
        with unchanged(traced.module), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return record(traced.module, inputs)[1]
    except Exception:  # a model may raise anything for inputs that it was not made for
        return None


def _images(inputs: tuple[Any, ...]) -> int:
    return next(
        leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()
    )


def _resized(inputs: tuple[Any, ...], times: int, sides: dict[int, int]) -> tuple[Any, ...]:
    """The tensors with dimensions as long as the batch, or as one of the image's sides, cut or repeated."""
    images, first = _images(inputs), True

    def resized(leaf: Any) -> Any:
        nonlocal first
        if not isinstance(leaf, Tensor):
            return leaf
        spared, first = (1,) if first and leaf.dim() else (), first and not leaf.dim()  # an image's channels
        for dim, size in enumerate(leaf.shape):
            new = times * images if dim == 0 and size == images else sides.get(size, size) if dim else size
            if new != size and dim not in spared:
                leaf = leaf.detach().index_select(dim, torch.arange(new, device=leaf.device) % size)
        return leaf

    changed: tuple[Any, ...] = pytree.tree_map(resized, inputs)
    return changed
