"""Channel rules of writes at places common to all channels: by index, by scatter.

    canvas[:, :, rows] = y      m[:, :, ::2, 1::2] = 0      zeros.index_add(1, nodes, messages)

Written values go with the channels that they are written into.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smcp_fx.channels.labels import at_first, uniform, varied_dims
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.rules_elementwise import bring_together, like
from smcp_fx.channels.rules_statistics import tie_mixed
from smcp_fx.channels.trail import Call, ConstantRef, MadeRef, ParameterRef, constant_made_by

_EVERYWHERE = slice(None)
_APART = "writes to some of the channels, or in a form without a rule"


def written(run: Propagation, call: Call) -> Any:
    """`x[index] = y`: the channels stay free if the index takes all of them."""
    target, index, source = call.args
    parts = _parts(index, len(target.shape)) if isinstance(target, (Tensor, ParameterRef)) else None
    if parts is None:
        return run.unknown(call, f"{call.node.name!r} {_APART}")
    content = _beside(run, source, parts)
    dims = set() if content is None else set(varied_dims(content))
    channel_dims = {dim - len(parts) for dim in dims}
    labels = None
    if not isinstance(target, MadeRef):
        labels = run.settled(run.of(target), channel_dims or {1 - len(parts)})
        dims |= set(varied_dims(labels))
    elif channel_dims:
        labels = run.of(target, channel_dims)
    else:
        dims = set(target.channel_dims)  # any of these may hold channels
    if any(parts[dim] != _EVERYWHERE for dim in dims):
        return run.unknown(call, f"{call.node.name!r} {_APART}")
    for part in parts:
        if isinstance(part, (Tensor, ParameterRef)):
            run.pin(run.of(part), call.node.name, f"tells {call.node.name!r} where all channels are written")
    if labels is not None and content is not None:
        shape = tuple(size if dim in dims else 1 for dim, size in enumerate(labels.shape))
        bring_together(run, call, [at_first(labels, dims), at_first(content, dims)], shape)
    return None


def _parts(index: Any, rank: int) -> list[Any] | None:
    """One entry a dimension: slices, numbers, and at most one tensor of places; None for another index."""
    parts = list(index) if isinstance(index, tuple) else [index]
    places = [part for part in parts if isinstance(part, (Tensor, ParameterRef))]
    plain = all(
        isinstance(part, (int, slice)) or part is ... or any(part is place for place in places[:1])
        for part in parts
    )
    if isinstance(index, list) or not plain or any(len(part.shape) != 1 for part in places):
        return None
    if places and any(isinstance(part, int) for part in parts):  # numbers would move the places' dimension
        return None
    if any(part is ... for part in parts):
        at = next(i for i, part in enumerate(parts) if part is ...)
        parts[at : at + 1] = [_EVERYWHERE] * (rank - len(parts) + 1)
    return parts + [_EVERYWHERE] * (rank - len(parts)) if len(parts) <= rank else None


def _beside(run: Propagation, source: Any, parts: list[Any]) -> Tensor | None:
    """Labels of the written tensor, with the dimensions of the target; None for a number."""
    if not isinstance(source, (Tensor, ParameterRef)):
        return None
    labels = run.of(source)
    gone = [dim for dim, part in enumerate(parts) if isinstance(part, int)]
    ahead = len(parts) - len(gone) - labels.dim()
    labels = labels.reshape((1,) * max(ahead, 0) + tuple(labels.shape))
    for dim in gone:
        labels = labels.unsqueeze(dim)
    return labels


def scattered(run: Propagation, call: Call) -> Any:
    """Writes or adds values at places along one dimension, which must not hold channels."""
    target, dim, index = call.argument(0, "input"), call.argument(1, "dim"), call.argument(2, "index")
    source = call.argument(3, "source", call.argument(3, "src", call.argument(3, "value")))
    rank = len(call.shape)
    dim = int(dim) % rank
    content = run.of(source) if isinstance(source, (Tensor, ParameterRef)) else None
    whole = [content] if content is not None and content.dim() == rank else []
    along = {d - rank for of in whole for d in varied_dims(of)} if whole else None
    if isinstance(target, MadeRef) and not along and target.name not in run.trail.elements:
        made = run.fixed(call.node.name, constant_made_by(call.node.name))  # rows of ones and zeros
        run.trail.elements[target.name] = uniform(made, target.shape)
    labels = tie_mixed(run, call, run.of(target, along), {dim})
    if labels is None:
        return run.unknown(call, f"{call.node.name!r} {_APART}")
    operands = [labels, *whole]
    if len(index.shape) == rank and not isinstance(index, ConstantRef):
        operands.append(run.of(index))
    else:
        run.pin(run.of(index), call.node.name, f"tells {call.node.name!r} where all channels are written")
    dims = {d for one in operands for d in varied_dims(one)}
    if dim in dims or any(one.shape[d] not in (1, call.shape[d]) for one in operands for d in dims):
        return run.unknown(call, f"{call.node.name!r} {_APART}")
    shape = tuple(size if d in dims else 1 for d, size in enumerate(call.shape))
    merged = bring_together(run, call, [at_first(one, dims) for one in operands], shape)
    return like(call, merged.expand(call.shape))


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        "scatter scatteradd scatterreduce indexadd indexcopy indexfill indexreduce".split(), scattered
    ),
    "setitem": written,
}
