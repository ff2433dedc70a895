"""Channel rules of operations that only move data: they are executed on the labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from smcp_fx.channels.execution import execute, known_values, labelled, moved, positions_along
from smcp_fx.channels.labels import (
    along,
    at_first,
    compact,
    narrow_uniform,
    reshaped,
    stays,
    uniform,
    varied_dims,
)
from smcp_fx.channels.places import at_any_place, holds_places, is_index, looks_up
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.shuffles import find_pieces, find_shuffle, rearranges
from smcp_fx.channels.steadiness import DEPENDS
from smcp_fx.channels.trail import Call, ConstantRef, MadeRef, ParameterRef, tensor_leaves
from smcp_fx.channels.weight_views import weight_of
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.traits import Trait, has, operations_with
from smcp_fx.tracing.trees import leaves_of, mapped

#: Operations that may spread one value over the channels.
SPREADS = {"expand", "expandas", "broadcastto", "repeat", "tile"}
_BY_PLACES = {"gather", "takealongdim", "scatter", "scatteradd", "scatterreduce"}
_PARTS = set(
    """
chunk getitem indexselect narrow select split splitwithsizes tensorsplit unbind unsafechunk unsafesplit
""".split()
)
#: Attributes that are the tensor itself or move its dimensions, each with its effect on the labels.
_ATTRIBUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "T": torch.t,
    "mT": lambda t: t.transpose(-2, -1),
    **dict.fromkeys(("data", "real", "imag"), lambda t: t),
}


def _hides_channels(call: Call, source: Tensor, result: Any) -> bool:
    """Does the result have channels, but no elements to hold their labels? A slice of no channel has none."""
    if not isinstance(result, Tensor) or result.numel():
        return False
    sliced = call.name in ("getitem", "narrow") and result.dim() == source.dim()
    return not sliced or any(result.shape[dim] for dim in varied_dims(source))


def move(run: Propagation, call: Call) -> Any:
    """Execute the movement on the labels."""
    if call.node.name in run.mixed_up:
        return _mixed_up(run, call)
    call = at_any_place(run, call)
    unknown = [t for t in tensor_leaves((call.args[1:], call.kwargs)) if not isinstance(t, ConstantRef)]
    shaped_as = call.name in ("expandas", "viewas", "reshapeas")  # only the shape of the other tensor matters
    if isinstance(call.args[0], Tensor) and len(unknown) > int(shaped_as):
        return run.unknown(call, f"{call.shown!r} by a tensor whose values are not known")
    if isinstance(call.args[0], ConstantRef) and is_index(call.node):
        moved = execute(call, *known_values((call.args, call.kwargs)))
        return ConstantRef(f"{call.args[0].name} of {call.node.name}", tuple(moved.shape), moved)
    if isinstance(call.args[0], ConstantRef) and holds_places(call.args[0].value, call.node):
        why = f"{call.args[0].name!r} tells where to read and write"
        run.trail.elements.setdefault(
            call.args[0].name, uniform(run.fixed(call.node.name, why), call.args[0].shape)
        )
    table, index = call.args[0], call.args[1] if len(call.args) > 1 else None
    if isinstance(table, ParameterRef) and isinstance(index, ConstantRef) and looks_up(table, index):
        # Rows that are looked up many times (relative positions) are no channels: label each column once.
        run.of(table, range(1 - len(table.shape), 0))
    if isinstance(table, ParameterRef) and call.name in SPREADS and _read_along(run, call.node) == [0]:
        run.of(table, [-len(table.shape)])  # a kernel's channels lie along its first dimension
    args, kwargs = labelled(run, call.args[:1]) + known_values(call.args[1:]), known_values(call.kwargs)
    args, kwargs = labelled(run, (args, kwargs))
    source = args[0]
    if not isinstance(source, Tensor):
        return source[args[1]] if call.name == "getitem" else run.unknown(call)
    result = mapped(lambda t: compact(t) if isinstance(t, Tensor) else t, _executed(call, args, kwargs))
    if any(_hides_channels(call, source, part) for part in leaves_of(result)):
        return run.unknown(call, f"{call.shown!r} gives a tensor without elements")
    # The result takes the other tensor's sizes, so its channels are tied to that tensor's.
    if call.name in ("reshapeas", "viewas") and isinstance(result, Tensor):
        both = {*varied_dims(result), *varied_dims(args[1])}
        run.tie(*(narrow_uniform(labels, keep=list(both)) for labels in (result, args[1])))
    if call.name in SPREADS and isinstance(result, Tensor):
        result = _expanded(run, call, source, result, args[1] if call.name == "expandas" else None)
    if call.name in _PARTS:
        run.trail.parts.append(call.node.name)
    if call.name in _PARTS or call.name == "roll":
        _refuse_parts(run, call, source)
    if rearranges(call.name) and call.node.name not in run.trail.virtual:
        find_shuffle(run, call)
    if call.node.name in run.trail.virtual:
        return result
    if has(call.name, Trait.RESHAPES):
        result = _folded_into_batch(run, call, source, result)
    else:  # for reshapes, the run at another size tells whether their numbers matter
        _refuse_numbers(run, call, source)
    return result


def _executed(call: Call, args: Any, kwargs: Any) -> Any:
    """Execute the movement on the labels. Common operations do not copy uniform dimensions."""
    source = args[0]
    if call.name == "contiguous":
        return source
    if has(call.name, Trait.RESHAPES) and math.prod(call.shape) == source.numel():
        return reshaped(source, call.shape)
    if call.name == "roll" and call.argument(2, "dims") is not None:
        return execute(call, (narrow_uniform(source), *args[1:]), kwargs).expand(source.shape)
    return execute(call, args, kwargs)


def _mixed_up(run: Propagation, call: Call) -> Tensor:
    """`[b, h * w, c]` read as `[b, c, h, w]`: pin the operand's channels, and select those of the result.

    The result's channels lie along the only dimension that has the same size for all images.
    """
    why = f"{call.node.name!r} takes positions or images for channels: which channels meet there {DEPENDS}"
    run.pin(run.of(call.args[0]), call.node.name, why)
    steady = [d for d, size in enumerate(call.shape) if size > 1 and not run.sizes.follow_input(call.node, d)]
    if len(steady) != 1:
        return uniform(run.fixed(call.node.name, why), call.shape)
    run.trail.selected.add(call.node.name)
    return along(run.fresh(call.node.name, call.shape[steady[0]]), call.shape, steady[0])


def _expanded(run: Propagation, call: Call, source: Tensor, result: Tensor, other: Tensor | None) -> Tensor:
    """Label a value that is spread over the channels: it has one copy for each kept channel.

    The copies lie along the other tensor's channels. If only sizes are given, they lie along the dimension
    that the reader tells (`_read_along`).
    """
    ahead = result.dim() - source.dim()
    spread = [d for d, n in enumerate(result.shape) if n > 1 and (d < ahead or source.shape[d - ahead] == 1)]
    varied = _read_along(run, call.node) if other is None else run.varied(other)
    places = [d for d in spread if d in varied]
    uniform = not varied_dims(source)
    if not uniform or len(places) != 1 or run.sizes.follow_input(call.node, places[0]):
        if other is not None:
            _tie_expanded(run, source, other)
        return result
    run.pin(source, call.node.name, f"one value read by every channel in {call.node.name!r}")
    channels = along(run.fresh(call.node.name, result.shape[places[0]]), result.shape, places[0])
    if other is not None:
        run.tie(channels, other)
    return channels


def _read_along(run: Propagation, node: fx.Node) -> list[int]:
    """The channel dimensions of a spread tensor, by its reader: convolution, gather or scatter; else 1."""
    for user in node.users:
        name = operation_of(run.module, user)
        if weight_of(user) is node:
            return [0]
        if name in _BY_PLACES and node in user.args[2:3] and isinstance(user.args[0], fx.Node):
            table = run.trail.labels.get(user.args[0].name)
            if table is not None and name in ("gather", "takealongdim"):
                return run.varied(run.of(table))
            rank, along = len(run.values[node.name].shape), int(user.args[1])  # type: ignore[arg-type]
            return [d for d in range(rank) if d != along % rank and not run.sizes.follow_input(node, d)]
    return [1]


def _tie_expanded(run: Propagation, source: Tensor, other: Tensor) -> None:
    """Tie a tensor to the one whose shape it is expanded to, along dimensions that already have that size."""
    labels = other[(0,) * (other.dim() - source.dim())]
    run.tie(source, at_first(labels, [dim for dim, size in enumerate(source.shape) if size > 1]))


def attribute(run: Propagation, call: Call) -> Any:
    """`x.mT`, `x.data`: an attribute of a tensor; `x.max(1).values`: a field of an operation's result."""
    source, name = call.args[:2]
    if not isinstance(source, (Tensor, ParameterRef)):
        return (
            getattr(source, name)
            if isinstance(source, tuple) and tensor_leaves(source)
            else run.unknown(call)
        )
    moved = _ATTRIBUTES.get(name)
    if moved is None or (name == "T" and len(source.shape) > 2):
        return run.unknown(call, f"attribute {name!r} of a tensor has no channel rule")
    return moved(run.of(source))


def join(run: Propagation, call: Call) -> Any:
    """cat, stack and similar operations. Uniform dimensions are narrowed first, so that they cost no memory."""
    parts = list(call.args[0] if call.args else call.kwargs["tensors"])
    args, kwargs = call.args, call.kwargs
    full = call.shape
    if call.name in ("hstack", "vstack"):
        if any(len(t.shape) < 2 for t in parts):
            return run.unknown(call)
        dim = int(call.name == "hstack")
    else:
        dim = int(args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0)))
    channel_dims = {d - t.dim() for t in parts if isinstance(t, Tensor) for d in varied_dims(t)}
    if call.name != "stack":
        channel_dims.add(dim % len(full) - len(full))
    met = run.met(parts)
    tensors = [run.settled(run.of(t, channel_dims if isinstance(t, MadeRef) else None), met) for t in parts]
    if call.name == "stack":
        tensors = [t.unsqueeze(dim) for t in tensors]
    tensors = [t for t in tensors if t.numel()]
    dim %= len(full)
    if tensors and dim == 0 < len(full) - 1 and all(stays(t) for t in tensors):
        # Images joined into a batch: no channel differs.
        return tensors[0][(slice(1),) * len(full)].expand(full)
    across = {d for t in tensors for d in varied_dims(t)}
    if len(across) == 1 and dim not in across:
        # Pieces of space or tokens have the same channels, which go together. The result is uniform along the joined
        # dimension, so that it stays rectangular whatever is tied later.
        first, *others = (
            narrow_uniform(t, keep=list(across))
            for t in sorted(tensors, key=run.is_alone)  # parameters outside layers last
        )
        for t in others:
            run.tie(first, t)
        return first.expand(full)
    varied = across | {dim}
    return torch.cat([at_first(t, varied) for t in tensors], dim).expand(full)


def pad(run: Propagation, call: Call) -> Any:
    """Padding along uniform dimensions passes the labels; along the channels it adds slots that stay."""
    labels = run.of(call.argument(0, "input"))
    amounts: Any = call.module.padding if call.module is not None else call.argument(1, "pad")
    mode = "module" if call.module is not None else call.argument(2, "mode", "constant")
    _refuse_numbers(run, call, labels)
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))  # from the last dimension to the first
    for dim in range(labels.dim() - len(pairs), labels.dim()):
        before, after = pairs[labels.dim() - 1 - dim]
        size = call.shape[dim]
        if before == after == 0:
            continue
        if dim in run.varied(labels):
            if mode != "constant" or (call.module is not None and min(before, after) < 0):
                return run.unknown(call, "padding that copies channels")
            if min(before, after) < 0:
                run.trail.parts.append(call.node.name)
            ahead = [0, 0] * (labels.dim() - 1 - dim)
            labels = F.pad(labels, [*ahead, min(before, 0), min(after, 0)])
            shape = [*labels.shape]
            ends = []
            several = bool(run.turned) and len(run.varied(labels)) > 1
            run.blind |= several
            for amount, edge in ((max(before, 0), 0), (max(after, 0), -1)):
                shape[dim] = amount
                if several:  # whole heads go, each with its padding
                    ends.append(labels.narrow(dim, edge % labels.shape[dim], 1).expand(shape))
                else:
                    ends.append(along(_added(run, call, amount), shape, dim))
            labels = torch.cat([ends[0], labels, ends[1]], dim)
        else:
            labels = compact(labels).narrow(dim, 0, 1)
            labels = labels.expand(*labels.shape[:dim], size, *labels.shape[dim + 1 :])
    return labels


def _added(run: Propagation, call: Call, amount: int) -> Tensor:
    """Labels of channels that padding adds: tied to the channels they meet later, or fixed for a module."""
    if call.module is None:
        return run.fresh(call.node.name, amount)
    return torch.full((amount,), run.fixed(call.node.name, f"padding added by {call.node.name!r}"))


def _folded_into_batch(run: Propagation, call: Call, source: Tensor, result: Any) -> Any:
    """Handle channels folded into the batch. With groups, tie the channels at equal offsets in each group.

    Without groups, the batch itself loses elements. Its size must then follow the input's: a literal would be
    that of the example.
    """
    if result.dim() < 2 or source.dim() < 2 or 0 not in varied_dims(result) or 0 in varied_dims(source):
        return result
    varied = run.varied(result)
    if varied_dims(result) != [0]:
        find_pieces(run, call)
        if call.node.name in run.trail.virtual:
            return result
    if varied != [0]:
        run.blind = True
        if result.shape[1] > 1:
            return run.tie_along(result, 0)
        for dim in varied_dims(result)[1:]:  # a kernel a channel: [b * c, 1, 3, 3]
            result = run.tie_along(result, dim)
    sizes = call.node.args[1:]
    first = next(iter(sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes), None)
    written = isinstance(first, int) and first >= 0 and call.name in ("view", "reshape")
    if written or not run.sizes.follow_input(call.node, 0):
        run.pin(source, call.node.name, f"channels are folded into the batch by {call.node.name!r}")
    return result


def _refuse_parts(run: Propagation, call: Call, source: Tensor) -> None:
    """Pin channels that are taken in part along a dimension whose size follows the input.

    Their positions would become literals, but depend on the batch: `x.view(-1)` has it in that dimension.
    """
    start = call.node.args[0]
    if not isinstance(start, fx.Node):
        return
    for dim in run.varied(source):
        size = source.shape[dim]
        if not run.sizes.follow_input(start, dim):
            continue
        ruler = positions_along(source.shape, dim)
        args, kwargs = labelled(run, known_values((call.args[1:], call.kwargs)))
        parts = tensor_leaves(execute(call, (ruler, *args), kwargs))
        if call.name in ("roll", "indexselect"):
            left = all(isinstance(part, Tensor) and torch.equal(part, ruler) for part in parts)
        else:
            left = all(isinstance(part, Tensor) and torch.unique(part).numel() == size for part in parts)
            place = call.argument(1 if call.name in ("narrow", "unbind") else 2, "dim", 0)
            left &= call.name in ("getitem", "select", "unbind") or place % source.dim() != dim
        if not left:
            why = "takes parts of a dimension that holds channels and follows the input's size"
            run.pin(source, call.node.name, f"{call.node.name!r} {why}")


def _refuse_numbers(run: Propagation, call: Call, source: Tensor) -> None:
    """Pin channels that are moved by a number that follows the input's size: it would become a literal.

    `torch.roll(h, h.shape[3], 1)`: a larger image would move them elsewhere.
    """
    numbers = [
        n
        for n in call.node.all_input_nodes
        if type(run.values.get(n.name)) is int and run.sizes.follow_input(n)
    ]
    if not numbers:
        return

    def places(ruler: Tensor, more: int) -> list[list[int]]:
        values = {n.name: labelled(run, run.trail.labels[n.name]) for n in call.node.all_input_nodes}
        values |= {n.name: run.values[n.name] + more for n in numbers}
        result = moved(run.module, call.node, values, ruler)
        parts = [part for part in leaves_of(result) if isinstance(part, Tensor)]
        return [narrow_uniform(compact(part)).flatten().tolist() for part in parts]

    for dim in run.varied(source):
        if call.name == "pad" and not _pads(call, source.dim() - 1 - dim, numbers):
            continue  # it pads a dimension without channels
        ruler = positions_along(source.shape, dim)
        for more in (1, -1):
            try:
                other = places(ruler, more)
            except (RuntimeError, IndexError, ValueError, TypeError):
                continue
            if not all(other):  # nothing is left to compare: `h[:, :, :-n]` with n = 0
                continue
            if other != places(ruler, 0):
                why = "moves channels by a number that follows the input's size"
                run.pin(source, call.node.name, f"{call.node.name!r} {why}")
            break


def _pads(call: Call, from_last: int, numbers: list[fx.Node]) -> bool:
    """Is one of the numbers a padding of this dimension, counted from the last?"""
    amounts = call.node.args[1] if len(call.node.args) > 1 else call.node.kwargs.get("pad")
    if not isinstance(amounts, (tuple, list)):
        return True
    return any(amount in numbers for amount in amounts[2 * from_last : 2 * from_last + 2])


RULES: dict[str, Rule] = {
    **dict.fromkeys(operations_with(Trait.MOVES), move),
    "getattr": attribute,
    **dict.fromkeys(operations_with(Trait.JOINS), join),
    **dict.fromkeys(operations_with(Trait.PADS), pad),
}
