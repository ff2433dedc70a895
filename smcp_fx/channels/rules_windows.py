"""Channel rules of operations on windows or points of each channel: unfold, fold, grids, max-unpooling."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from smcp_fx.channels.labels import compact, place
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.rules_elementwise import bring_together, like
from smcp_fx.channels.rules_layers import channel_labels, dense_convolution, renamed
from smcp_fx.channels.trail import Call, MadeRef, ParameterRef, tensor_leaves


def unfold(run: Propagation, call: Call) -> Any:
    """Lays out the windows channel by channel; `x.unfold(dim, ...)` adds a dimension instead."""
    labels = run.of(call.argument(0, "input"))
    if call.node.op == "call_method":
        return _windows_of_one_dimension(run, call, labels)
    axis = labels.dim() - 3
    channels = channel_labels(run, labels, axis)
    return place(channels.repeat_interleave(call.shape[-2] // channels.numel()), call.shape, -2)


def _windows_of_one_dimension(run: Propagation, call: Call, labels: Tensor) -> Any:
    dim = int(call.argument(1, "dimension")) % labels.dim()
    if dim in run.varied(labels):
        return run.unknown(call, "windows that slide over the channels")
    line = compact(labels).narrow(dim, 0, 1).unsqueeze(-1)
    return compact(line.expand(call.shape))


def fold(run: Propagation, call: Call) -> Any:
    """Adds the windows of each channel up again: all places of a window are one channel."""
    labels = run.of(call.argument(0, "input"))
    axis = labels.dim() - 2
    rows = channel_labels(run, labels, axis).reshape(call.shape[-3], -1)
    run.tie(rows, rows[:, :1].expand_as(rows))
    return place(rows[:, 0], call.shape, -3)


def grid_sample(run: Propagation, call: Call) -> Any:
    """Every channel is read at the same points."""
    grid = run.of(call.argument(1, "grid"))
    run.pin(grid, call.node.name, f"tells {call.node.name!r} where all channels are read")
    channels = channel_labels(run, run.of(call.argument(0, "input")), 1)
    return place(channels, call.shape, 1)


def max_unpool(run: Propagation, call: Call) -> Any:
    """Puts each value where the indices of its own channel say."""
    operands = [run.of(call.argument(0, "input")), run.of(call.argument(1, "indices"))]
    axis = operands[0].dim() - int((call.name or "")[-2]) - 1
    merged = bring_together(run, call, operands, tuple(operands[0].shape))
    return place(channel_labels(run, merged, axis), call.shape, axis)


def boxes_of(run: Propagation, call: Call) -> Any:
    """Cuts boxes out of images, every channel at the same places."""
    for operand in tensor_leaves((call.args[1:], call.kwargs)):
        run.pin(run.of(operand), call.node.name, f"tells {call.node.name!r} where all channels are read")
    return like(call, place(channel_labels(run, run.of(call.argument(0, "input")), 1), call.shape, 1))


def carried(run: Propagation, call: Call) -> Any:
    """Tensors that Python code cuts out of several maps, whose channels go together: see `regions.carriers`."""
    first, *others = (channel_labels(run, run.of(operand), 1) for operand in call.args[1:])
    for other in others:
        run.tie(first, other)
    return place(renamed(run, call, first), call.shape, 1)


def deformable(run: Propagation, call: Call) -> Any:
    """A convolution at displaced points. Each group of channels has its own offsets."""
    source, weight, offset, mask, bias = call.args[:5]
    for operand in (offset, mask):
        run.pin(run.of(operand), call.node.name, f"tells {call.node.name!r} where all channels are read")
    inputs = channel_labels(run, run.of(source), 1)
    labels = place(inputs, tuple(source.shape), 1)
    rows = inputs.reshape(run.of(offset).shape[1] // (2 * math.prod(weight.shape[2:])), -1)
    run.tie(rows, rows[:1].expand_as(rows))
    # Without a bias, torchvision passes zeros.
    made = not isinstance(bias, ParameterRef) or isinstance(bias, MadeRef)
    weights = (weight, None if made else bias)
    result = dense_convolution(run, call, labels, weights, inputs.numel() // weight.shape[1])
    if made and bias is not None:
        run.tie(run.of(bias), channel_labels(run, result, 1))
    return result


RULES: dict[str, Rule] = {
    "unfold": unfold,
    "fold": fold,
    "gridsample": grid_sample,
    "deformconv2d": deformable,
    **dict.fromkeys(("roialign", "roipool"), boxes_of),
    "carriedchannels": carried,
    **{f"maxunpool{rank}d": max_unpool for rank in (1, 2, 3)},
}
