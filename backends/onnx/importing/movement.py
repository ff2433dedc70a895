"""Operators that move, join, cut and make tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from smcp_fx.backends.onnx.importing.building import Builder, SizesError, module_path
from smcp_fx.backends.onnx.importing.call import FAR, Call
from smcp_fx.backends.onnx.importing.elementwise import Rule, scalar
from smcp_fx.backends.onnx.importing.size_arithmetic import combined
from smcp_fx.backends.onnx.importing.sizes import Size, array_of, as_value

#: Calls that change only how a tensor is divided into axes.
_REGROUPS = (torch.reshape, torch.unflatten, torch.flatten, torch.squeeze, torch.unsqueeze)
_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def regrouped(b: Builder, node: Any) -> Any:
    """Return the value that a chain of regroupings began with, if it has the same sizes; else the node."""
    source = node
    while isinstance(source, fx.Node) and source.target in _REGROUPS:
        source = source.args[0]
        if isinstance(source, fx.Node) and b.shapes(source) == b.shapes(node):
            return source
    return node


def reshape(b: Builder, x: Any, sizes: list[Any]) -> Any:
    """Reshape to sizes that are numbers (-1 once) or follow from open axes."""
    return regrouped(b, b.call(torch.reshape, x, tuple(sizes)))


def _reshape(b: Builder, call: Call) -> Any:
    x, wanted = call.inputs[0], call.sizes(1)
    rank = call.rank or 0
    if not call.attribute("allowzero", 0):
        if any(size == 0 and axis >= rank for axis, size in enumerate(wanted)):
            raise call.refused(f"a reshape to {wanted} of a value of rank {rank}")
        wanted = [b.size(x, axis) if isinstance(s, int) and s == 0 else s for axis, s in enumerate(wanted)]
    if wanted and isinstance(wanted[0], int) and wanted[0] == 1 and b.has_opened_batch(x):
        wanted[0] = b.size(x, 0)
    return reshape(b, x, wanted)


def _flatten(b: Builder, call: Call) -> Any:
    x, axis = call.inputs[0], call.axis(1)
    if axis != 1:
        x = b.call(torch.flatten, x, 0, axis - 1) if axis else b.call(torch.unsqueeze, x, 0)
    return regrouped(b, b.call(torch.unsqueeze, x, 1) if axis == call.rank else b.call(torch.flatten, x, 1))


def _transpose(b: Builder, call: Call) -> Any:
    rank = call.rank or 0
    return permuted(b, call.inputs[0], list(call.attribute("perm", range(rank - 1, -1, -1))))


def permuted(b: Builder, x: Any, order: list[int]) -> Any:
    """Permute; two permutations become one, or none."""
    if isinstance(x, fx.Node) and x.target is torch.permute:
        source, before, *_ = x.args
        order = [int(before[axis]) for axis in order]  # type: ignore[index, arg-type]
        x = source
    return x if order == sorted(order) else b.call(torch.permute, x, tuple(order))


def _squeeze(b: Builder, call: Call) -> Any:
    x = call.inputs[0]
    at = b.shapes(x)
    axes = call.axes() or [a for a, (s, t) in enumerate(zip(*at, strict=True)) if s == 1 and t == 1]
    if any(shape[axis] != 1 for axis in axes for shape in at):
        raise SizesError(f"axes {axes} of values of sizes {at[0]} and {at[1]} are not all of size 1")
    for axis in reversed(axes):
        x = b.call(torch.squeeze, x, axis)
    return regrouped(b, x)


def _unsqueeze(b: Builder, call: Call) -> Any:
    x = call.inputs[0]
    for axis in call.new_axes():
        x = b.call(torch.unsqueeze, x, axis)
    return regrouped(b, x)


def _expand(b: Builder, call: Call) -> Any:
    x, wanted = call.inputs[0], call.sizes(1)
    own, rank = b.shapes(x), len(b.shapes(x)[0])
    if rank > len(wanted):
        wanted = [1] * (rank - len(wanted)) + wanted
    if isinstance(x, Tensor) and x.numel() == 1:
        return b.full(wanted, x.item(), x.dtype)
    skipped = len(wanted) - rank
    sizes = [
        -1 if axis >= skipped and (size == 1 or _same(b, size, own, axis - skipped)) else size
        for axis, size in enumerate(wanted)
    ]
    return x if all(size == -1 for size in sizes) else b.method("expand", x, *sizes)


def _same(b: Builder, size: Any, own: tuple[tuple[int, ...], ...], axis: int) -> bool:
    at = size.at if isinstance(size, Size) else (size, size)
    return (own[0][axis], own[1][axis]) == tuple(at)


def _slice(b: Builder, call: Call) -> Any:
    x = call.inputs[0]
    starts, ends, axes, steps = call.slice_arguments()
    keys: list[Any] = [slice(None)] * (call.rank or 0)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            whole = isinstance(start, int) and (start == -1 or start >= FAR) and end is None
            if step != -1 or not whole:
                raise call.refused(f"a slice from {start} to {end} in steps of {step}")
            x = b.call(torch.flip, x, (axis,))
        else:
            keys[axis] = slice(start or None, end, step if step != 1 else None)
    if all(key == slice(None) for key in keys):
        return x
    while keys[-1] == slice(None):
        keys.pop()
    return b.call(operator.getitem, x, tuple(keys))


def _split(b: Builder, call: Call) -> Any:
    x, axis = call.inputs[0], call.axis(0)
    sizes = call.given("split", 1)
    if sizes is None:
        count = call.attribute("num_outputs", len(call.proto.output))
        whole = b.size(x, axis)
        if not isinstance(whole, int):
            chunks = b.call(torch.chunk, x, count, axis)
            return [b.item(chunks, index) for index in range(count)]
        each = -(-whole // count)
        sizes = [min(each, whole - index * each) for index in range(count)]
    parts = b.call(torch.split, x, tuple(sizes), axis)
    return [b.item(parts, index) for index in range(len(sizes))]


def _concat(b: Builder, call: Call) -> Any:
    values, axis = list(call.inputs), call.axis(0)
    batched = next((v for v in values if axis and isinstance(v, fx.Node) and b.has_opened_batch(v)), None)
    if batched is not None:
        whole = b.size(batched, 0)
        values = [
            b.method("expand", b.placed(v), whole, *v.shape[1:]) if isinstance(v, Tensor) else v
            for v in values
        ]
    return values[0] if len(values) == 1 else b.call(torch.cat, values, axis)


def _gather(b: Builder, call: Call) -> Any:
    data, indices = call.inputs
    axis = call.axis(0)
    if isinstance(indices, Tensor):
        if indices.dim() == 0:
            return b.call(torch.select, data, axis, int(indices))
        size = b.shapes(data)[0][axis]
        indices = torch.where(indices < 0, indices + size, indices) if bool((indices < 0).any()) else indices
    elif isinstance(data, Tensor) and data.is_floating_point() and data.dim() == 2 and axis == 0:
        table = nn.Embedding(*data.shape)
        table.weight = nn.Parameter(data)
        return b.module(module_path(call, b.name_of(data)), table, indices)
    rank = b.rank(indices)
    if rank and axis == 0 and call.rank == 1 and _are_all(b, data, indices):
        return reshape(b, data, [b.size(indices, a) for a in range(rank)])
    if rank == 1:
        return b.call(torch.index_select, data, axis, indices)
    if rank == 0:
        return b.call(
            torch.squeeze, b.call(torch.index_select, data, axis, b.call(torch.unsqueeze, indices, 0)), axis
        )
    flat = b.call(torch.index_select, data, axis, b.call(torch.flatten, indices))
    return b.call(torch.unflatten, flat, axis, tuple(b.size(indices, a) for a in range(rank or 0)))


def _are_all(b: Builder, data: Any, indices: Any) -> bool:
    """Do these indices list all elements in order? Those of a decomposed strided view may."""
    values = b.known(indices) if isinstance(indices, fx.Node) else None
    counts = [shape[0] for shape in b.shapes(data)]
    return values is not None and all(
        torch.equal(at.flatten(), torch.arange(count)) for at, count in zip(values, counts, strict=True)
    )


def _gather_nd(b: Builder, call: Call) -> Any:
    data, indices = call.inputs
    if call.attribute("batch_dims", 0):
        raise call.refused("batch_dims other than 0")
    return b.call(operator.getitem, data, _places(b, indices))


def _places(b: Builder, indices: Any) -> tuple[Any, ...]:
    """Return the columns of ``indices``, one for each leading axis that they address."""
    return tuple(b.call(torch.select, indices, -1, part) for part in range(b.shapes(indices)[0][-1]))


def _scatter_nd(b: Builder, call: Call) -> Any:
    data, indices, updates = call.inputs
    reduction = call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise call.refused(f"reduction {reduction!r}")
    return b.call(torch.index_put, data, _places(b, indices), updates, reduction == "add")


def _scatter_elements(b: Builder, call: Call) -> Any:
    if call.attribute("reduction", "none") != "none":
        raise call.refused("a reduction")
    return b.call(torch.scatter, call.inputs[0], call.axis(0), *call.inputs[1:])


def _pad(b: Builder, call: Call) -> Any:
    rank = call.rank or 0
    pads = list(call.attributes["pads"]) if "pads" in call.attributes else call.sizes(1)
    if call.has(3):
        axes = [axis % rank for axis in call.given("", 3) or []]
        sparse, pads = pads, [0] * (2 * rank)
        for index, axis in enumerate(axes):
            pads[axis], pads[axis + rank] = sparse[index], sparse[index + len(axes)]
    mode = call.attribute("mode", "constant")
    if len(pads) != 2 * rank or mode not in _MODES:
        raise call.refused(f"pads {pads} in mode {mode!r} of a value of rank {rank}")
    value = call.attribute("value", 0.0) if "value" in call.attributes else scalar(call.input(2)) or 0.0
    ends = [(pads[axis], pads[axis + rank]) for axis in range(rank)]
    while ends and ends[0] == (0, 0):
        ends.pop(0)
    flat = [amount for pair in reversed(ends) for amount in pair]
    if not flat:
        return call.inputs[0]
    if mode == "constant":
        return b.call(F.pad, call.inputs[0], tuple(flat), "constant", value)
    return b.call(F.pad, call.inputs[0], tuple(flat), _MODES[mode])


def _depth_to_space(b: Builder, call: Call) -> Any:
    x, block = call.inputs[0], call.attribute("blocksize", 1)
    if call.attribute("mode", "DCR") == "CRD":
        return b.call(torch.pixel_shuffle, x, block)
    n, c, h, w = (b.size(x, axis) for axis in range(4))
    out = c // block**2
    split = reshape(b, x, [n, block, block, out, h, w])
    mixed = reshape(b, permuted(b, split, [0, 3, 1, 2, 4, 5]), [n, c, h, w])
    return b.call(torch.pixel_shuffle, mixed, block)


def _space_to_depth(b: Builder, call: Call) -> Any:
    x, block = call.inputs[0], call.attribute("blocksize", 1)
    y = b.call(torch.pixel_unshuffle, x, block)
    n, c, h, w = (b.size(y, axis) for axis in range(4))
    split = reshape(b, y, [n, c // block**2, block, block, h, w])
    return reshape(b, permuted(b, split, [0, 2, 3, 1, 4, 5]), [n, c, h, w])


def _shape(b: Builder, call: Call) -> Any:
    rank = call.rank or 0
    start, end = call.attribute("start", 0), call.attribute("end", rank)
    axes = range(rank)[slice(start, end)]
    return as_value(array_of(b.size(call.inputs[0], axis) for axis in axes))


def _size(b: Builder, call: Call) -> Any:
    total: Any = 1
    for axis in range(call.rank or 0):
        total = combined(b, operator.mul, total, b.size(call.inputs[0], axis))
    return as_value(array_of([total], ()))


def _constant_of_shape(b: Builder, call: Call) -> Any:
    proto = call.attributes.get("value")
    value = torch.zeros(1) if proto is None else call.file.tensor(proto)
    return b.full(call.sizes(0), value.item(), value.dtype)


def _constant(b: Builder, call: Call) -> Any:
    (name, value), *_ = call.attributes.items()
    if name == "value":
        return b.name(call.file.tensor(value), str(call.proto.output[0]))
    if name in ("value_int", "value_ints"):
        return torch.tensor(value, dtype=torch.int64)
    if name in ("value_float", "value_floats"):
        return torch.tensor(value, dtype=torch.float32)
    raise call.refused(f"a constant given as {name!r}")


def _range(b: Builder, call: Call) -> Any:
    limits = [scalar(value) for value in call.inputs]
    if any(isinstance(value, fx.Node) for value in limits):
        raise call.refused("a range whose ends are computed from the data")
    dtype = b.dtype(call.inputs[0])
    if any(isinstance(value, Size) for value in limits):
        return b.call(torch.arange, *limits, dtype=dtype, device=b.device)
    return b.call(torch.arange, *limits, dtype=dtype)


def _one_hot(b: Builder, call: Call) -> Any:
    indices, _, values = call.inputs
    low, high = (float(v) for v in call.constant(2))
    y = b.call(F.one_hot, indices, int(call.constant(1)))
    axis = call.attribute("axis", -1)
    y = b.method("to", y if axis == -1 else b.call(torch.movedim, y, -1, axis), values.dtype)
    if (low, high) == (0, 1):
        return y
    return b.call(operator.add, b.call(operator.mul, y, high - low), low)


def _trilu(b: Builder, call: Call) -> Any:
    k = int(call.constant(1)) if call.has(1) else 0
    return b.call(torch.triu if call.attribute("upper", 1) else torch.tril, call.inputs[0], k)


def _non_zero(b: Builder, call: Call) -> Any:
    x = call.inputs[0]
    if isinstance(x, Tensor):
        return x.nonzero().T
    rank = call.rank or 0
    at = tuple(torch.empty((some, rank), dtype=torch.int64, device="meta") for some in (5, 7))
    return b.call(torch.permute, b.given_examples(torch.nonzero, (x,), (at[0], at[1])), (1, 0))


MOVEMENT: dict[str, Rule] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Gather": _gather,
    "GatherElements": lambda b, call: b.call(torch.gather, call.inputs[0], call.axis(0), call.inputs[1]),
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "Tile": lambda b, call: b.call(torch.tile, call.inputs[0], tuple(call.sizes(1))),
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Shape": _shape,
    "Size": _size,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "OneHot": _one_hot,
    "Trilu": _trilu,
    "NonZero": _non_zero,
}
