"""Channel rules of operations that mix channels: norms over channels, reductions, softmax.

In the masked model, too, these operations read only the kept channels, so slicing is exact. Each is recorded
(`Mix`) and gets masks later. If channels also vary along a dimension that is not mixed (attention heads, the
branches of a sum over stacked tensors), they are tied along the mixed one instead.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from smcp_fx.channels import rules_layers
from smcp_fx.channels.labels import at_first, compact, narrow_uniform, place, uniform, varied_dims
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.rules_elementwise import bring_together, elementwise, like
from smcp_fx.channels.rules_layers import (
    at_full_width,
    channel_labels,
    go_with,
    own_inputs,
    own_parameter,
    own_values,
    record,
    renamed,
)
from smcp_fx.channels.trail import Call, Mix, ParameterRef, tensor_leaves

#: How a reduction is restricted to the kept channels. Reductions that return places among the channels, or sort them,
#: are not here: they keep all channels.
_FORMS = {
    **dict.fromkeys(("sum", "nansum", "norm", "vectornorm", "cumsum"), "zero"),
    **dict.fromkeys(("mean",), "mean"),
    **dict.fromkeys(("amax", "max", "logsumexp"), "lowest"),
    **dict.fromkeys(("amin", "min"), "highest"),
    **dict.fromkeys(("prod",), "one"),
    **dict.fromkeys(("var", "std", "varmean", "stdmean"), "spread"),
}
_REDUCTIONS = {*_FORMS, *"argmax argmin all any nanmean median".split()} - {"cumsum"}


def tie_mixed(run: Propagation, call: Call, labels: Tensor, dims: set[int]) -> Tensor | None:
    """Tie labels along ``dims``, which an operation mixes; None if channels vary along ``dims`` only.

    The caller then pins them, or records that they are mixed (`record_mix`).

    The channel dimensions of a parameter outside layers follow from the tensors that it is combined with, which the
    second run knows. If there are none, or if the parameter is normalised, they are ``dims``.
    """
    varied = set(run.varied(labels))
    if varied & dims and varied - dims and run.is_alone(labels):
        if run.seen is None and call.name not in ("normalize", "layernorm", "rmsnorm"):
            run.blind = True
            return labels
        labels = run.settled(labels, {dim - labels.dim() for dim in dims})
    return tie_settled(run, labels, dims)


def tie_settled(run: Propagation, labels: Tensor, dims: set[int]) -> Tensor | None:
    """As `tie_mixed`, for labels whose channel dimensions are known."""
    varied = run.varied(labels)
    inside = [dim for dim in varied if dim in dims]
    if not inside:
        for dim in varied_dims(labels):  # uniform only through ties of the earlier run
            if dim in dims:
                labels = run.tie_along(labels, dim)
        return labels
    run.blind = True
    if all(dim in dims for dim in varied):
        return None
    for dim in inside:
        labels = run.tie_along(labels, dim)
    return labels


def as_image(run: Propagation, call: Call, labels: Tensor, dims: set[int]) -> Tensor:
    """Tie labels over space before channels are mixed, if channels also lie in space (pixel shuffle).

    A dimension with the same size for all images is not space (ResNeSt: branches, groups, channels).
    """
    if labels.dim() == 4 and dims in ({1}, {3}) and run.varied(labels) == [1, 2, 3]:
        space, source = {1, 2, 3} - dims, call.node.args[0]
        fixed = (isinstance(source, fx.Node) and not run.sizes.follow_input(source, dim) for dim in space)
        if not (run.sizes.sides_differ and all(fixed)):
            for dim in space:
                labels = run.tie_along(labels, dim)
    return labels


def record_mix(
    run: Propagation, call: Call, labels: Tensor, form: str, operand: int = 0, options: tuple[Any, ...] = ()
) -> None:
    """Record that the operation mixes these channels of an operand."""
    pin_in_batch(run, call, labels, operand)
    run.trail.mixes.append(Mix(call.node.name, operand, narrow_uniform(labels), form, options))


def pin_in_batch(run: Propagation, call: Call, labels: Tensor, operand: int = 0) -> None:
    """Pin channels along a dimension whose size follows the input, as a mask has a fixed length."""
    source = call.node.args[operand] if len(call.node.args) > operand else None
    if isinstance(source, fx.Node) and any(run.sizes.follow_input(source, dim) for dim in run.varied(labels)):
        run.pin(
            labels, call.node.name, f"channels that {call.shown!r} mixes lie along the batch, or along space"
        )


def bilinear(run: Propagation, call: Call) -> Any:
    """A layer of two inputs: its weight takes the second input's mask; the first input is masked before the layer."""
    if call.module is None:
        return run.unknown(call, "a bilinear layer that is no module")
    first, second = (run.of(call.argument(place, f"input{place + 1}")) for place in (0, 1))
    weight, bias = (own_parameter(run, call, name) for name in ("weight", "bias"))
    assert weight is not None
    inputs = [own_inputs(run, call, channel_labels(run, side, side.dim() - 1)) for side in (first, second)]
    outputs = run.fresh(call.node.name, call.shape[-1])
    for dim, labels in enumerate((outputs, *inputs)):
        run.slot(weight.name, dim, labels)
    if bias is not None:
        run.slot(bias.name, 0, outputs)
    record_mix(run, call, place(inputs[0], tuple(first.shape), -1), "zero")
    sides, shape, axis = (inputs[1], outputs), tuple(second.shape), second.dim() - 1
    record(run, call, weight, bias, "dense", (2, 0), 1, sides, sides, shape, (axis, axis), beside=(1,))
    return place(outputs, call.shape, -1)


def neighbours(run: Propagation, call: Call) -> Any:
    """Local response norm: normalises each channel by its neighbours."""
    labels = run.of(call.argument(0, "input"))
    varied = run.varied(labels)
    if varied != [1]:
        return labels if not varied else run.unknown(call, f"channels are mixed by {call.shown!r}")
    return at_full_width(run, call, labels, 1)


def reduction(run: Propagation, call: Call) -> Any:
    """Reduces over dimensions. If channels vary along these only, the result is made of the kept ones."""
    labels = run.of(call.argument(0, "input"))
    if call.name in ("max", "min"):
        other = call.argument(1, "other")
        if isinstance(other, Tensor) or len(tensor_leaves((call.args, call.kwargs))) > 1:
            return elementwise(run, call)
    dims = call.argument(2 if call.name in ("norm", "vectornorm") else 1, "dim", call.kwargs.get("axis"))
    if dims is None or isinstance(dims, bool) or dims in ((), []):  # in `x.std(False)`, it is ``unbiased``
        dims = tuple(range(labels.dim()))
    reduced = {
        int(dim) % max(labels.dim(), 1) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])
    }
    labels = as_image(run, call, labels, reduced)
    reduced_labels = tie_mixed(run, call, labels, reduced)
    if reduced_labels is None:
        form = form_of(call)
        if form is None:
            return run.unknown(call, f"channels are mixed by {call.shown!r}")
        options = (tuple(sorted(reduced)), correction(call)) if form == "spread" else ()
        record_mix(run, call, labels, form, options=options)
        reduced_labels = uniform(_made_of_channels(run, call), tuple(labels.shape))
    keep = len(call.shape) == labels.dim()
    for dim in sorted(reduced, reverse=True):
        reduced_labels = reduced_labels.narrow(dim, 0, 1)
        if not keep:
            reduced_labels = reduced_labels.squeeze(dim)
    return like(call, reduced_labels)


def _made_of_channels(run: Propagation, call: Call) -> int:
    return run.fixed(call.node.name, f"made of all channels by {call.shown!r} (at {call.node.name!r})")


def form_of(call: Call) -> str | None:
    """How the operation is restricted to the kept channels; None for a form that cannot be."""
    if call.node.kwargs.get("out") is not None:
        return None
    if call.name in ("max", "min") and isinstance(call.value, tuple) and not _reads_values_alone(call):
        return None
    if call.name in ("norm", "vectornorm"):
        order = call.argument(1, "p" if call.name == "norm" else "ord", 2)
        if order in (None, "fro", float("inf")):
            return "zero"
        return "zero" if isinstance(order, (int, float)) and order > 0 else None
    return _FORMS.get(call.name or "")


def _reads_values_alone(call: Call) -> bool:
    """Do readers of a pair (maximum, place) read the maximum only?"""
    # `values, _ = x.max(1)` takes both, and reads one.
    users = [user for user in call.node.users if user.users or user.target is not operator.getitem]
    return all(user.op == "call_function" and user.args[1:] in ((0,), ("values",)) for user in users)


def correction(call: Call) -> int:
    """The correction of a variance: the number of elements minus the divisor."""
    unbiased = call.argument(2, "unbiased", True)
    if len(call.args) > 1 and isinstance(call.args[1], bool):  # `x.std(False)`, over all dimensions
        unbiased = call.args[1]
    correction = call.kwargs.get("correction", int(bool(unbiased)))
    return 1 if correction is None else int(correction)


def cosine_similarity(run: Propagation, call: Call) -> Any:
    """A product that sums over a dimension, divided by both norms. Channels along that dimension go together."""
    inputs = [call.argument(0, "x1"), call.argument(1, "x2")]
    dim = int(call.argument(2, "dim", 1))
    sides = [run.of(one) for one in inputs]
    mixed = [tie_mixed(run, call, labels, {dim % labels.dim()}) for labels in sides]
    if mixed == [None, None] and len(call.node.args) > 1 and sides[0].shape == sides[1].shape:
        run.tie(*(channel_labels(run, labels, dim % labels.dim()) for labels in sides))
        for operand, labels in enumerate(sides):
            record_mix(run, call, labels, "zero", operand)
        return uniform(_made_of_channels(run, call), call.shape)
    if None in mixed or sides[0].shape != sides[1].shape:
        return run.unknown(call, f"channels are mixed by {call.shown!r}")
    merged = bring_together(run, call, [one for one in mixed if one is not None], tuple(sides[0].shape))
    return like(call, merged.select(dim, 0))


def cdist(run: Propagation, call: Call) -> Any:
    """Distances between the rows of two tensors. It sums over their channels, which go together."""
    sides = [run.of(call.argument(0, "x1"), {-1}), run.of(call.argument(1, "x2"), {-1})]
    settled = [run.settled(labels, {-1}) for labels in sides]
    if len(call.node.args) < 2 or any(
        run.varied(labels) not in ([], [labels.dim() - 1]) for labels in settled
    ):
        return run.unknown(call, "'cdist' of channels that are not the last dimension has no channel rule")
    if any(run.varied(labels) for labels in settled):
        run.blind = True
        run.tie(*(channel_labels(run, labels, labels.dim() - 1) for labels in settled))
        for operand, labels in enumerate(settled):
            record_mix(run, call, labels, "zero", operand)
    return uniform(_made_of_channels(run, call), call.shape)


def softmax(run: Propagation, call: Call) -> Any:
    """Mixes along one dimension, like a reduction, but keeps the shape."""
    labels = run.of(call.argument(0, "input"))
    position = 2 if call.name == "normalize" and call.module is None else 1
    dim = call.option(position, "dim")
    if dim is None:  # the dimension that torch chooses, a deprecated form
        dim = 1 if call.name == "normalize" or labels.dim() not in (0, 1, 3) else 0
        explicit = call.name == "normalize"
    else:
        explicit = True
    axis = int(dim) % labels.dim()
    labels = as_image(run, call, labels, {axis})
    mixed = tie_mixed(run, call, labels, {axis})
    if mixed is not None:
        return like(call, mixed)
    form = {"softmax": "instead", "logsoftmax": "instead", "normalize": "instead"}.get(
        call.name or "", _FORMS.get(call.name or "")
    )
    if form is None or not explicit or call.kwargs.get("out") is not None:
        return run.unknown(call, f"channels are mixed by {call.shown!r}")
    channels = channel_labels(run, labels, axis)
    record_mix(run, call, place(channels, tuple(labels.shape), axis), form)
    return like(call, place(renamed(run, call, channels), tuple(labels.shape), axis))


def ranked(run: Propagation, call: Call) -> Any:
    """Sorts along one dimension, or picks from it. Channels along other dimensions pass."""
    labels = run.of(call.argument(0, "input"))
    dim = int(call.argument(2 if call.name == "topk" else 1, "dim", -1)) % labels.dim()
    mixed = tie_mixed(run, call, labels, {dim})
    return (
        run.unknown(call, f"channels are mixed by {call.shown!r}")
        if mixed is None
        else like(call, mixed.narrow(dim, 0, 1))
    )


def gathered(run: Propagation, call: Call) -> Any:
    """Reads each channel along another dimension, at its own places or at places common to all."""
    labels, dim, index = run.of(call.argument(0, "input")), call.argument(1, "dim"), call.argument(2, "index")
    dim = int(dim) % labels.dim()
    mixed = tie_mixed(run, call, labels, {dim})
    if mixed is None or len(index.shape) != labels.dim():
        return run.unknown(call, f"channels are mixed by {call.shown!r}")
    if any(index.shape[d] != labels.shape[d] for d in run.varied(mixed)):
        return run.unknown(call, f"{call.shown!r} reads some of the channels")
    # Along the other dimensions, it reads the first elements.
    read = mixed.narrow(dim, 0, 1)[tuple(slice(size) for size in index.shape)]
    shape = tuple(index.shape)
    return bring_together(run, call, [compact(read.expand(shape)), run.of(index)], shape)


def layer_norm(run: Propagation, call: Call) -> Any:
    """Normalises over dimensions, by the kept channels' statistics. So does RMS norm."""
    labels = run.of(call.argument(0, "input"))
    shape = tuple(call.option(1, "normalized_shape"))
    first = labels.dim() - len(shape)
    dims = set(range(first, labels.dim()))
    names = {2: "weight"} if call.name == "rmsnorm" else {2: "weight", 3: "bias"}
    labels = as_image(run, call, labels, dims)
    tied = tie_mixed(run, call, labels, dims)
    if tied is not None:
        # Channels that also vary along another dimension (heads) go with all elements that are normalised.
        for weight in (_shape_of(run, call, shape), *own_values(run, call, names)):
            run.keep(weight, call.node.name, "weight of a layer norm")
        return tied
    axis = max(dims, key=lambda dim: torch.unique(at_first(labels, [dim])).numel())
    channels = channel_labels(run, labels, axis)
    for weight in (_shape_of(run, call, shape), *own_values(run, call, names)):
        go_with(run, weight, channels, axis - first, shape)
    record_mix(run, call, place(channels, tuple(labels.shape), axis), "instead")
    return place(renamed(run, call, channels), call.shape, axis)


def group_norm(run: Propagation, call: Call) -> Any:
    """Many small groups: whole groups go. Few large groups: channels at equal places in each group go.

    Channels at equal places also go if whole groups leave no choice: a U-Net norms concats in other groups.
    """
    labels = run.of(call.argument(0, "input"))
    groups = int(call.option(1, "num_groups"))
    channels = channel_labels(run, labels, 1)
    rows = channels.reshape(groups, -1)
    within = 4 * groups <= rows.shape[1] or groups == 1 or call.node.name in run.turned
    if within:
        run.tie(rows, rows[:1].expand_as(rows))
        if run.varied(place(channels, tuple(labels.shape), 1)):
            record_mix(run, call, place(channels, tuple(labels.shape), 1), "instead")
    else:
        run.tie(rows, rows[:, :1].expand_as(rows))
        run.trail.grouped[call.node.name] = (groups, channels)
    for weight in own_values(run, call, {2: "weight", 3: "bias"}):
        go_with(run, weight, channels, 0, (channels.numel(),))
    return place(renamed(run, call, channels), call.shape, 1)


def batch_norm(run: Propagation, call: Call) -> Any:
    """Carries channels, or normalises over channels that lie among its positions, as in triplet attention.

    In training, the statistics are of the kept positions; in evaluation, each value is normalised separately.
    """
    labels = run.of(call.argument(0, "input"))
    varied = run.varied(labels)
    own = (
        type(call.module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        or call.node.target is F.batch_norm
    )
    if not own or len(varied) != 1 or 1 in varied:
        return rules_layers.batch_norm(run, call)
    run.blind = True
    for value in own_values(run, call, {1: "running_mean", 2: "running_var", 3: "weight", 4: "bias"}):
        run.keep(value, call.node.name, "batch norm over channels")
    channels = channel_labels(run, labels, varied[0])
    record_mix(run, call, place(channels, call.shape, varied[0]), "instead")
    return place(renamed(run, call, channels), call.shape, varied[0])


def _shape_of(run: Propagation, call: Call, shape: tuple[int, ...]) -> ParameterRef | None:
    """A module's `normalized_shape`, which all its calls share, as if it were a weight."""
    return None if call.module is None else ParameterRef(f"{call.node.target}.normalized_shape", shape)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(
        ("softmax", "logsoftmax", "softmin", "normalize", "cumsum", "cumprod", "logcumsumexp"), softmax
    ),
    "localresponsenorm": neighbours,
    "bilinear": bilinear,
    "cosinesimilarity": cosine_similarity,
    "cdist": cdist,
    **dict.fromkeys(("topk", "sort", "argsort", "msort"), ranked),
    **dict.fromkeys(("gather", "takealongdim"), gathered),
    "layernorm": layer_norm,
    "rmsnorm": layer_norm,
    "groupnorm": group_norm,
    "batchnorm": batch_norm,
}
