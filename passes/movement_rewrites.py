"""Movements rewritten for the channels that are kept: one function per operation.

Each takes the rewriter, the node, and the labels of its input and outputs before slicing, and returns whether the
node's arguments changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from smcp_fx.errors import PassError
from smcp_fx.passes.original_numbers import OriginalNumbers
from smcp_fx.passes.sliced_labels import Sliced

SIZES = {"view", "reshape", "expand", "broadcastto", "unflatten"}
SPLITS = {"split", "splitwithsizes", "chunk", "tensorsplit", "unsafesplit", "unsafechunk"}


class Rewriter(Protocol):
    """The input of rewrites: the values (labels, numbers) of nodes before and after slicing, by name."""

    sliced: Sliced
    old: dict[str, Any]
    new: dict[str, Any]
    originals: OriginalNumbers

    def parts_of(self, sizes: fx.Node, before: fx.Node) -> list[Any]:
        """Split a shape held by one node into one new node a dimension, placed before the node ``before``."""
        ...


def _sizes(run: Rewriter, node: fx.Node, before: Tensor, outputs: list[Tensor]) -> bool:
    cut = run.sliced.axis(outputs[0])
    if cut is None:
        return False
    dim = cut[0]
    as_tuple = len(node.args) == 2 and isinstance(node.args[1], (tuple, list))
    is_unflatten = getattr(node.target, "__name__", node.target) == "unflatten" and len(node.args) == 3
    if is_unflatten:
        lengths = node.args[2]  # a node, for `y.unflatten(2, x.shape[2:])`
        base = int(node.args[1]) % before.dim()  # type: ignore[arg-type]
        sizes = [lengths] if isinstance(lengths, fx.Node) else list(lengths)  # type: ignore[arg-type]
    elif as_tuple:
        base, sizes = 0, list(node.args[1])  # type: ignore[arg-type]
    else:
        base, sizes = 0, list(node.args[1:])
    if len(sizes) == 1 and isinstance(sizes[0], fx.Node) and isinstance(run.old[sizes[0].name], tuple):
        sizes = run.parts_of(sizes[0], node)  # `y.view(x.shape)`, `torch.reshape(y, x.shape)`
        as_tuple = node.op == "call_function"
    shape = run.sliced.slice(outputs[0]).shape[base : base + len(sizes)]
    if len(shape) != len(sizes) or not 0 <= dim - base < len(sizes):
        return False
    before_them, sizes = sizes, fitted(run, sizes, shape)
    if sizes == before_them:
        return False
    if is_unflatten:
        node.args = (*node.args[:2], tuple(sizes))
    else:
        node.args = (node.args[0], tuple(sizes)) if as_tuple else (node.args[0], *sizes)
    return True


def fitted(run: Rewriter, sizes: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """The sizes, changed to those of ``shape``, the shape with the kept channels.

    A size that the graph computes (the batch, the resolution) stays computed. It is scaled if fewer channels
    make it wrong: `c // 32`, the channels in each of 32 groups.
    """
    fitting = list(sizes)
    for place, size in enumerate(sizes):
        current = run.new.get(size.name) if isinstance(size, fx.Node) else size
        if isinstance(current, int) and current not in (-1, shape[place]):
            wanted = int(shape[place])
            scaled = isinstance(size, fx.Node) and current
            fitting[place] = run.originals.in_proportion(size, current, wanted) if scaled else wanted
    return fitting


def _repeats(run: Rewriter, node: fx.Node, before: Tensor, outputs: list[Tensor]) -> bool:
    """Repeat a value that is copied for every channel once for each kept channel."""
    cut = run.sliced.axis(outputs[0])
    as_tuple = len(node.args) == 2 and isinstance(node.args[1], (tuple, list))
    times: list[Any] = list(node.args[1]) if as_tuple else list(node.args[1:])  # type: ignore[arg-type]
    if cut is None or run.sliced.axis(before) is not None or len(times) != outputs[0].dim():
        return False
    dim, wanted = cut[0], cut[1].numel()
    current = run.new.get(times[dim].name) if isinstance(times[dim], fx.Node) else times[dim]
    ahead = outputs[0].dim() - before.dim()
    if current == wanted or (dim >= ahead and before.shape[dim - ahead] > 1):
        return False
    times[dim] = wanted
    node.args = (node.args[0], tuple(times)) if as_tuple else (node.args[0], *times)
    return True


def _splits(run: Rewriter, node: fx.Node, before: Tensor, outputs: list[Tensor]) -> bool:
    cut = run.sliced.axis(before)
    if cut is None:
        return False
    dim = cut[0]
    along: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if isinstance(along, fx.Node):
        along = run.old[along.name]
    if int(along) % before.dim() != dim:
        return False
    sizes = [run.sliced.slice(out).shape[dim] for out in outputs]
    if 0 in sizes:  # `RemoveBranches` removed the readers of that piece
        pieces = list(node.users)
        if any(user.target is not operator.getitem or not isinstance(user.args[1], int) for user in pieces):
            raise PassError(f"{node.name!r}: a piece of the split would keep no channel")
        for user in pieces:
            place: Any = user.args[1]
            user.args = (node, sum(size > 0 for size in sizes[: place % len(sizes)]))
        run.new[node.name] = tuple(
            run.sliced.slice(out) for out, size in zip(outputs, sizes, strict=True) if size
        )
        sizes = [size for size in sizes if size]
    node.op, node.target = "call_function", torch.split
    node.args, node.kwargs = (node.args[0], sizes, dim), {}
    return True


def _index(run: Rewriter, node: fx.Node, before: Tensor, outputs: list[Tensor]) -> bool:
    cut = run.sliced.axis(before)
    if cut is None:
        return False
    dim, kept = cut
    index = node.args[1]
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        taken = sum(p is not None and p is not Ellipsis for p in parts)
        parts[at : at + 1] = [slice(None)] * (before.dim() - taken)
    axis = -1
    for place, part in enumerate(parts):
        axis += part is not None
        if axis != dim:
            continue
        if isinstance(part, slice) and part.step in (None, 1):
            start, stop, _ = slice(*numbers(run, (part.start, part.stop, None))).indices(before.shape[dim])
            # An open end stays open; a computed stop at the end becomes open, as the dimension may also hold
            # the batch. A literal is the same for every input.
            first = None if part.start is None else int((kept < start).sum())
            is_open = part.stop is None or (isinstance(part.stop, fx.Node) and stop == before.shape[dim])
            parts[place] = slice(first, None if is_open else int((kept < stop).sum()))
        elif isinstance(part, int):
            parts[place] = int((kept < part % before.shape[dim]).sum())
        else:
            return False
        node.args = (node.args[0], tuple(parts))
        return True
    return False


def numbers(run: Rewriter, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(run.old[v.name] if isinstance(v, fx.Node) else v for v in values)


def _narrow(run: Rewriter, node: fx.Node, before: Tensor, outputs: list[Tensor]) -> bool:
    cut = run.sliced.axis(before)
    args = numbers(run, tuple(node.args[1:4]))
    if cut is None or len(args) < 3 or args[0] % before.dim() != cut[0]:
        return False
    dim, kept = cut
    start, stop = int((kept < args[1]).sum()), int((kept < args[1] + args[2]).sum())
    node.args = (node.args[0], dim, start, stop - start)
    return True


def _select(run: Rewriter, node: fx.Node, before: Tensor, outputs: list[Tensor]) -> bool:
    cut = run.sliced.axis(before)
    args = numbers(run, tuple(node.args[1:3]))
    if cut is None or len(args) < 2 or args[0] % before.dim() != cut[0]:
        return False
    dim, kept = cut
    node.args = (node.args[0], dim, int((kept < args[1] % before.shape[dim]).sum()))
    return True


def _squeeze(run: Rewriter, node: fx.Node, before: Tensor, outputs: list[Tensor]) -> bool:
    """Keep `squeeze()` from dropping the channels' dimension if one channel is left."""
    cut = run.sliced.axis(before)
    if cut is None or cut[1].numel() > 1 or len(node.args) > 1 or node.kwargs:
        return False
    node.args = (node.args[0], tuple(dim for dim in range(before.dim()) if dim != cut[0]))
    return True


REWRITES: dict[str, Callable[[Rewriter, fx.Node, Tensor, list[Tensor]], bool]] = {
    **dict.fromkeys(SIZES, _sizes),
    **dict.fromkeys(("repeat", "tile"), _repeats),
    **dict.fromkeys(SPLITS, _splits),
    "getitem": _index,
    "narrow": _narrow,
    "select": _select,
    "squeeze": _squeeze,
}
