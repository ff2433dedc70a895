"""Channel rules of element-wise operations, pooling and interpolation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smcp_fx.channels.execution import labelled
from smcp_fx.channels.labels import at_first, compact, stays, uniform, varied_dims
from smcp_fx.channels.places import is_index, keeps_values
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.trail import Call, ConstantRef, Spread, constant_made_by, tensor_leaves
from smcp_fx.tracing.traits import Trait, has, operations_with
from smcp_fx.tracing.trees import mapped
from smcp_fx.tracing.values import TensorInfo


def elementwise(run: Propagation, call: Call) -> Any:
    """Broadcast the operands and tie the channels that meet.

    An operand of size 1 where another varies is read by all of those channels: see `bring_together`.
    """
    shape = call.shape
    first = call.args[0] if call.args else None
    if isinstance(first, ConstantRef) and keeps_values(call.name) and is_index(call.node):
        return ConstantRef(f"{first.name} of {call.node.name}", shape, first.value.to(call.value.dtype))
    if has(call.name, Trait.SAME) and _gives_places(call):
        return run.unknown(call, f"{call.node.name!r} is read as an index")
    leaves = tensor_leaves((call.args, call.kwargs))
    if call.name in ("typeas", "to"):  # the second tensor only names a type
        leaves = leaves[:1]
    varied = {d - t.dim() for t in leaves if isinstance(t, Tensor) for d in varied_dims(t)}
    met = run.met(leaves)
    operands = [run.settled(run.of(leaf, varied or None), met) for leaf in leaves]
    operands = [labels for labels in operands if labels.numel() > 1 or bool((labels > 0).any())]
    if not operands:
        return run.filled(call.value, run.fixed(call.node.name, "made of constants"))
    return like(call, bring_together(run, call, operands, shape))


def _gives_places(call: Call) -> bool:
    """Does the call give integers that are read as an index only?"""
    integers = isinstance(call.value, TensorInfo) and call.value.dtype in (torch.int64, torch.int32)
    return integers and bool(call.node.users) and is_index(call.node)


def bring_together(run: Propagation, call: Call, operands: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Labels for operands that are broadcast to ``shape``: tied now, or tied or pinned later.

    An operand with size 1 in all dimensions where another varies is read by every channel, and stays: a spatial
    attention map times a feature map. An operand may also have size 1 in some of these dimensions only: a gate of
    [c, 1] times [c, k], a gate behind a pixel shuffle, rows times columns. Once the ties tell where the channels are,
    it goes with them, or stays if they lie along a dimension where it has size 1.
    """
    padded = [labels.reshape((1,) * (len(shape) - labels.dim()) + labels.shape) for labels in operands]
    stay = [labels for labels in padded if stays(labels)]
    varied = {dim for labels in padded for dim in varied_dims(labels)}
    wide = not varied or any(labels.shape[dim] > 1 for labels in stay for dim in varied)
    if stay and wide and all(stays(labels) or run.is_alone(labels) for labels in padded):
        # Biases of positions, added to attention scores: the elements of such a parameter are no channels.
        for labels in padded:
            run.pin(labels, call.node.name, f"meets values that stay in {call.node.name!r}")
        return uniform(int(stay[0].flatten()[0]), shape)
    whole = [labels for labels in stay if all(labels.shape[dim] == shape[dim] for dim in varied)]
    if whole and varied:  # operands added to a pinned full-size tensor (biases of positions) are pinned too
        for labels in padded:
            run.tie(at_first(labels, varied), at_first(whole[0], varied))
        return uniform(int(whole[0].flatten()[0]), shape)
    why = f"one value read by every channel in {call.node.name!r}"
    full, spread = [], []
    for labels in padded:
        if all(labels.shape[dim] == shape[dim] for dim in varied):
            full.append(labels)
        elif any(labels.shape[dim] > 1 for dim in varied):
            spread.append(labels)
        else:
            run.pin(labels, call.node.name, why)
    if len(full) == 1:
        merged = full[0].expand(shape)
    else:
        cores = [at_first(labels, varied) for labels in full]
        size = [shape[dim] if dim in varied else 1 for dim in range(len(shape))]
        merged = _merged(run, call, cores, size)
        if all(map(run.is_alone, padded)):
            run.stand_alone(merged)
        for core in cores:
            run.tie(merged, core)
        merged = merged.expand(shape)
    for labels in spread:
        for dim in set(varied_dims(labels)) - set(varied_dims(merged)):  # the result has one channel there
            labels = run.tie_along(labels, dim)
        reason = run.reason(call.node.name, why)
        run.trail.spread.append(Spread(at_first(merged, varied), at_first(labels, varied), reason))
    return merged


def _merged(run: Propagation, call: Call, cores: list[Tensor], size: list[int]) -> Tensor:
    """Fresh labels, one for each different combination of the operands' labels: images in a batch share theirs."""
    total = math.prod(size)
    place, count = torch.zeros(total, dtype=torch.int64), 1
    for core in cores:
        labels, inverse = torch.unique(core, return_inverse=True)
        pairs, place = torch.unique(place * labels.numel() + inverse.reshape(-1), return_inverse=True)
        count = pairs.numel()
    if not cores or count == total or not bool(torch.stack([core > 0 for core in cores]).any(0).all()):
        place, count = torch.arange(total), total
    return run.fresh(call.node.name, count)[place].reshape(size)


def choice(run: Propagation, call: Call) -> Any:
    """The result of `train()` or of `eval()`: both are tied, as by an addition, or pinned if their shapes differ."""
    evaluated, trained = (pytree.tree_flatten(labelled(run, side)) for side in call.args[1:])
    effect = all(user.target is call.node.target for user in call.node.users)
    if not call.node.users or (effect and [None] in (evaluated[0], trained[0])):
        return pytree.tree_unflatten(*(evaluated if evaluated[0] != [None] else trained))
    alike = evaluated[1] == trained[1] and all(
        isinstance(a, Tensor) == isinstance(b, Tensor)
        and getattr(a, "shape", None) == getattr(b, "shape", None)
        for a, b in zip(evaluated[0], trained[0], strict=True)
    )
    if not alike:
        ends = any(user.op == "output" for user in call.node.users)
        why = "reaches the network's output" if ends else "has another shape in train() than in eval()"
        for labels in evaluated[0] + trained[0]:
            if isinstance(labels, Tensor):
                run.pin(labels, call.node.name, why)
        return pytree.tree_unflatten(*evaluated)
    united = [
        bring_together(run, call, [a, b], tuple(a.shape)) if isinstance(a, Tensor) and a is not b else a
        for a, b in zip(evaluated[0], trained[0], strict=True)
    ]
    return pytree.tree_unflatten(united, evaluated[1])


def pooling(run: Propagation, call: Call) -> Any:
    """Works inside each channel: channels must not lie along the spatial dimensions that it changes."""
    labels = run.of(call.argument(0, "input"))
    pooled = _pooled(call, labels.dim())
    for dim in run.varied(labels):
        if dim in pooled:
            labels = run.tie_along(labels, dim)
    return like(call, at_first(labels, [dim for dim in range(labels.dim()) if dim not in pooled]))


def _pooled(call: Call, rank: int) -> list[int]:
    """The spatial dimensions that a pooling changes: not those with windows of one, or of the size None."""
    name, count = call.name or "", _spatial_rank(call)

    def each(position: int, option: str, default: Any = None) -> list[Any]:
        given = call.option(position, option, default)
        values = list(given) if isinstance(given, (tuple, list)) else [given]
        return values * count if len(values) == 1 else values

    if "adaptive" in name:
        left = [size is None for size in each(1, "output_size")]
    elif name.startswith(("avgpool", "maxpool")):
        settings = zip(each(1, "kernel_size"), each(2, "stride"), each(3, "padding", 0), strict=True)
        left = [(window, stride or window, padding) == (1, 1, 0) for window, stride, padding in settings]
    else:
        left = [False] * count
    return [dim for dim, kept in zip(range(rank - count, rank), left, strict=True) if not kept]


def glu(run: Propagation, call: Call) -> Any:
    """Splits a dimension into halves, one gating the other. The halves are tied."""
    labels = run.of(call.argument(0, "input"))
    dim = int(call.option(1, "dim", -1))
    value, gate = labels.chunk(2, dim)
    run.tie(value, gate)
    return compact(value)


def like(call: Call, labels: Tensor) -> Any:
    """The labels for every output tensor of the call, each in its own shape."""
    return mapped(lambda v: labels.expand(v.shape) if isinstance(v, TensorInfo) else v, call.value)


def _spatial_rank(call: Call) -> int:
    digits = [c for c in call.name or "" if c.isdigit()]
    if digits:
        return int(digits[0])
    return len(call.shape) - 2  # interpolate, upsample


def constant(run: Propagation, call: Call) -> Any:
    """Tensors made from numbers stay. They pin only operands whose channels meet them one by one."""
    return run.filled(call.value, run.fixed(call.node.name, constant_made_by(call.node.name)))


def triangle(run: Propagation, call: Call) -> Any:
    """Keeps a part of a matrix of positions: channels must not lie along the last two dimensions."""
    labels = run.of(call.argument(0, "input"), range(-len(call.shape), -2))
    if max(run.varied(labels), default=-1) >= labels.dim() - 2:
        return run.unknown(call, f"{call.node.name!r} keeps a part of a matrix of channels")
    return labels


def one_hot(run: Propagation, call: Call) -> Any:
    """Ones at computed places. The places stay."""
    run.pin(run.of(call.args[0]), call.node.name, f"channels are mixed by {call.shown!r}")
    return constant(run, call)


def filled(run: Propagation, call: Call) -> Any:
    """One value everywhere: labelled once it is combined with a tensor, along that tensor's channels."""
    return run.made(call.node, call.shape) or constant(run, call)


RULES: dict[str, Rule] = {
    **dict.fromkeys(operations_with(Trait.ELEMENTWISE), elementwise),
    **{
        f"{kind}pool{rank}d": pooling
        for kind in ("avg", "max", "adaptiveavg", "adaptivemax", "lp")
        for rank in (1, 2, 3)
    },
    **{f"maxpool{rank}dwithindices": pooling for rank in (1, 2, 3)},
    "interpolate": pooling,
    "upsample": pooling,
    "upsamplingnearest2d": pooling,
    "upsamplingbilinear2d": pooling,
    "glu": glu,
    "bymode": choice,
    "onehot": one_hot,
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(operations_with(Trait.FILLS), filled),
    **dict.fromkeys(("arange", "tensor", "newtensor", "rand", "randn", "linspace"), constant),
}
