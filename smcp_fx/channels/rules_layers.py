"""Channel rules of layers with weights: convolutions, linears, batch norms, PReLU, embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.channels.labels import line_along, narrow_uniform, place
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.trail import Call, Layer, Mix, Norm, ParameterRef
from smcp_fx.tracing.values import FROZEN


def convolution(run: Propagation, call: Call) -> Any:
    """Dense convolutions consume and produce; depthwise ones carry; grouped ones tie equal offsets, or carry."""
    name = call.name or ""
    transposed, rank = "transpose" in name, int(name[-2])
    weights = _weights(run, call)
    groups = int(call.option(6, "groups", 1))
    if weights is None:
        return _kernel_a_channel(run, call, groups)
    weight, bias = weights
    labels = run.of(call.argument(0, "input"))
    axis = labels.dim() - rank - 1
    varied = run.varied(labels)
    if varied and max(varied) < axis:  # channels folded into the batch: each is convolved on its own
        for parameter in weights:
            run.keep(parameter, call.node.name, "mixes along a dimension without channels")
        return labels[(slice(None),) * axis + (slice(1),) * (rank + 1)].expand(call.shape)
    if varied and axis not in varied:
        return _sliding(run, call, labels, varied, weights)
    inputs = channel_labels(run, labels, axis)
    channels, out_channels = inputs.numel(), call.shape[axis]
    if groups == 1 or not (groups == channels or call.node.name in run.turned):
        return dense_convolution(run, call, labels, weights, groups)
    rows = inputs.reshape(groups, -1)
    run.tie(rows, rows[:, :1].expand_as(rows))
    outputs = renamed(run, call, rows[:, 0].repeat_interleave(out_channels // groups))
    per_slot = inputs if transposed else outputs
    first = weight.place(0)
    if first is None:
        return run.unknown(call, "a weight that lacks a dimension for its channels")
    run.slot(weight.name, first, per_slot)
    if bias is not None:
        run.slot(bias.name, 0, outputs)
    sides, shape = ((inputs, per_slot), (inputs, outputs)), tuple(labels.shape)
    record(run, call, weight, bias, "depthwise", (first, first), groups, *sides, shape, (axis, axis))
    return place(outputs, call.shape, axis)


def _kernel_a_channel(run: Propagation, call: Call, groups: int) -> Any:
    """A depthwise convolution with computed kernels, one a channel: the kernels go with the channels."""
    why = _not_plain(run, call, "convolution")
    labels, kernels = (
        run.of(call.argument(0, "input")),
        [call.argument(1, "weight"), call.argument(2, "bias")],
    )
    axis = labels.dim() - int((call.name or "")[-2]) - 1
    channels = labels.shape[axis]
    source = call.node.args[0]
    if channels == 1 or not channels == groups == call.shape[axis] or not isinstance(source, fx.Node):
        return run.unknown(call, why)
    inputs = channel_labels(run, labels, axis)
    in_one_line = torch.unique(inputs).numel() < channels  # it holds the channels of all images
    if in_one_line and not run.sizes.follow_input(source, axis):
        return run.unknown(call, why)
    for one in kernels:
        if one is not None:
            run.tie(channel_labels(run, run.of(one, [0 - len(one.shape)]), 0), inputs)
    run.trail.kernels[call.node.name] = axis
    return place(inputs, call.shape, axis)


def _sliding(
    run: Propagation,
    call: Call,
    labels: Tensor,
    varied: list[int],
    weights: tuple[ParameterRef, ParameterRef | None],
) -> Any:
    """A convolution that slides over the channels, as over the weights of channel attention (ECA)."""
    why = f"{call.node.name!r} slides over the channels"
    for parameter in weights:
        run.keep(parameter, call.node.name, why)
    run.blind = True
    if (
        len(varied) == 1
        and labels.dim() == len(call.shape)
        and labels.shape[varied[0]] == call.shape[varied[0]]
    ):
        return at_full_width(run, call, labels, varied[0])
    run.pin(labels, call.node.name, f"{why}, and gives another number of them")
    return run.filled(call.value, run.fixed(call.node.name, why))


def at_full_width(run: Propagation, call: Call, labels: Tensor, dim: int) -> Any:
    """Let an operation that slides over the channels read all of them, with zeros for removed ones."""
    channels = channel_labels(run, labels, dim)
    masked = narrow_uniform(place(channels, tuple(labels.shape), dim))
    run.trail.mixes.append(Mix(call.node.name, 0, masked, "zero"))
    run.trail.full[call.node.name] = dim
    return place(renamed(run, call, channels), call.shape, dim)


def dense_convolution(
    run: Propagation,
    call: Call,
    labels: Tensor,
    weights: tuple[ParameterRef, ParameterRef | None],
    groups: int,
) -> Any:
    """A convolution that consumes and produces."""
    weight, bias = weights
    if not _is_plain(run, weight, bias):
        return run.unknown(call, _not_plain(run, call, "convolution"))
    axis, dims = labels.dim() - len(weight.shape) + 1, (0, 1) if "transpose" in (call.name or "") else (1, 0)
    return dense(run, call, labels, weight, bias, dims=dims, axes=(axis, axis), groups=groups)


def _not_plain(run: Propagation, call: Call, kind: str) -> str:
    """Why the weight cannot be treated as a layer's parameter."""
    weight = call.argument(1, "weight")
    if isinstance(weight, ParameterRef) and weight.name in run.trail.elements:
        return f"{weight.name!r} is a layer's weight and is also read as a tensor"
    return f"a {kind} whose weight is computed, not a parameter"


def _is_plain(run: Propagation, weight: Any, bias: Any) -> bool:
    """Are weight and bias parameters, and do only layers read the weight?"""
    read = isinstance(weight, ParameterRef) and (bias is None or isinstance(bias, ParameterRef))
    return read and weight.name not in run.trail.elements


def linear(run: Propagation, call: Call) -> Any:
    """Linears consume and produce along the last dimension, on tensors of any rank."""
    weights = _weights(run, call)
    if weights is None:
        return run.unknown(call, _not_plain(run, call, "linear"))
    return dense(run, call, run.of(call.argument(0, "input")), *weights, dims=(1, 0), axes=(-1, -1))


def dense(
    run: Propagation,
    call: Call,
    labels: Tensor,
    weight: ParameterRef,
    bias: ParameterRef | None,
    *,
    dims: tuple[int, int],
    axes: tuple[int, int],
    groups: int = 1,
) -> Any:
    """A layer with a weight that is a parameter: convolutions, `linear`, `x @ weight`, `weight @ x`, an einsum.

    ``dims``: the dimensions of input and output channels of the weight, which may be a view of a parameter;
    ``axes``: their dimensions in the input and in the output. The other dimensions keep their order.
    """
    places = [weight.place(dim % len(weight.shape)) for dim in dims]
    if places[0] is None or places[1] is None:
        return run.unknown(call, "a weight that lacks a dimension for its channels")
    in_dim, out_dim = places[0], places[1]
    axis, out_axis = axes[0] % labels.dim(), axes[1] % len(call.shape)
    labels = run.settled(labels, {axis - labels.dim()})
    varied = run.varied(labels)
    if varied and axis not in varied:
        # The layer mixes a dimension without channels (tokens): the channels pass, the weight stays whole.
        for parameter in (weight, bias):
            run.keep(parameter, call.node.name, "mixes along a dimension without channels")
        return labels.narrow(axis, 0, 1).movedim(axis, out_axis).expand(call.shape)
    inputs = own_inputs(run, call, channel_labels(run, labels, axis))
    slots = run.trail.slots.get(weight.name, {}).get(out_dim)
    transposed = "transpose" in (call.name or "")
    if slots is None:
        outputs = run.fresh(call.node.name, call.shape[out_axis])
    else:
        outputs = renamed(run, call, slots.repeat(groups) if transposed else slots)
    in_slots, out_slots = inputs, outputs
    if groups > 1:  # channels at equal places in the groups go together
        rows, columns = inputs.reshape(groups, -1), outputs.reshape(groups, -1)
        for side in (rows, columns):
            run.tie(side, side[:1].expand_as(side))
        run.trail.within[call.node.name] = groups, (inputs, outputs)
        in_slots, out_slots = (inputs, columns[0]) if transposed else (rows[0], outputs)
    run.slot(weight.name, in_dim, in_slots)
    run.slot(weight.name, out_dim, out_slots)
    if bias is not None:
        run.slot(bias.name, 0, outputs)
    sides, pair, shape = ((in_slots, out_slots), (inputs, outputs)), (in_dim, out_dim), tuple(labels.shape)
    record(run, call, weight, bias, "dense", pair, groups, *sides, shape, (axis, out_axis))
    return place(outputs, call.shape, out_axis)


def record(
    run: Propagation,
    call: Call,
    weight: ParameterRef,
    bias: ParameterRef | None,
    kind: str,
    dims: tuple[int, int],
    groups: int,
    slots: tuple[Tensor, Tensor],
    channels: tuple[Tensor, Tensor],
    shape: tuple[int, ...],
    axes: tuple[int, int],
    source: str | None = None,
    beside: tuple[int, ...] = (),
    read: str = "",
) -> None:
    """Record a layer. ``dims``, ``slots``, ``channels``, ``axes``: (input, output); ``shape``: of the input.

    ``source``: a parameter that the weight is computed from; ``beside``, ``read``: see `Layer`.
    """
    for labels in channels if FROZEN in call.node.meta else ():
        run.pin(labels, call.node.name, str(call.node.meta[FROZEN]))
    computed = run.trail.computed.get(weight.name)
    run.trail.layers.append(
        Layer(
            node=call.node.name,
            path=_path(call, weight),
            kind=kind,
            weight=weight.name,
            bias=bias.name if bias is not None else None,
            in_dim=dims[0],
            out_dim=dims[1],
            groups=groups,
            in_labels=slots[0],
            out_labels=slots[1],
            input_channels=channels[0],
            output_channels=channels[1],
            images=shape[0] if axes[0] > 0 else 1,
            in_shape=shape,
            out_shape=call.shape,
            transposed="transpose" in (call.name or ""),
            weight_shape=weight.base.shape,
            axis=axes[1],
            source=source or (weight.name if computed is None else computed.source),
            computed=source is not None or computed is not None,
            beside=beside,
            read=read,
        )
    )


def batch_norm(run: Propagation, call: Call) -> Any:
    """Batch norms and instance norms carry channels: they normalise each one separately."""
    labels = run.of(call.argument(0, "input"))
    axis = 0 if call.name == "instancenorm" and labels.dim() == _unbatched_rank(call) else 1
    channels = channel_labels(run, labels, axis)
    for statistic in own_values(run, call, {1: "running_mean", 2: "running_var"}):
        if isinstance(statistic, ParameterRef):
            run.slot(statistic.name, 0, channels)
        elif statistic is not None:
            return run.unknown(call, "a batch norm whose statistics are computed, not buffers")
    own = own_values(run, call, {3: "weight", 4: "bias", 1: "running_mean"})
    for weight in own[:2]:
        go_with(run, weight, channels, 0, (channels.numel(),))
    held = [value.name if isinstance(value, ParameterRef) else "" for value in own]
    if call.name == "batchnorm" and any(held):
        path = next(filter(None, held)).rpartition(".")[0]
        run.trail.norms.append(Norm(call.node.name, path, channels, held[0]))
    if call.name == "instancenorm":
        run.trail.grouped[call.node.name] = (channels.numel(), channels)
    return place(renamed(run, call, channels), call.shape, axis)


def prelu(run: Propagation, call: Call) -> Any:
    """One slope a channel (dimension 1), or one for all."""
    labels = run.of(call.argument(0, "input"))
    weight = own_parameter(run, call, "weight") if call.module is not None else call.argument(1, "weight")
    if not isinstance(weight, ParameterRef):
        return run.unknown(call, "a PReLU whose slopes are computed, not a parameter")
    if weight.shape == (1,) or labels.dim() < 2:
        return labels
    channels = channel_labels(run, labels, 1)
    run.slot(weight.name, 0, channels)
    return place(channels, call.shape, 1)


def embedding(run: Propagation, call: Call) -> Any:
    """An embedding produces channels along the last dimension."""
    weight = own_parameter(run, call, "weight") if call.module is not None else call.argument(1, "weight")
    if not isinstance(weight, (Tensor, ParameterRef)):
        return run.unknown(call)
    if call.option(3, "max_norm", None) is not None:
        return run.unknown(call, "max_norm scales each row of the embedding by all of its columns")
    if isinstance(weight, Tensor) or weight.name in run.trail.elements or weight.name in run.as_tensors:
        return place(channel_labels(run, run.settled(run.of(weight, [-1]), [-1]), 1), call.shape, -1)
    fresh = run.trail.slots.get(weight.name, {}).get(1)
    channels = run.fresh(call.node.name, call.shape[-1]) if fresh is None else fresh
    run.slot(weight.name, 1, channels)
    run.trail.free_standing.add(weight.name)
    return place(channels, call.shape, -1)


def channel_labels(run: Propagation, labels: Tensor, dim: int) -> Tensor:
    """Labels along ``dim``, 1-D. The other dimensions are tied if they vary."""
    for other in run.varied(labels):
        if other != dim:
            labels = run.tie_along(labels, other)
    return line_along(labels, dim)


def own_inputs(run: Propagation, call: Call, labels: Tensor) -> Tensor:
    """Give slots that read a fixed source new labels, pinned for the source's reason."""
    fixed = labels < 0
    if not bool(fixed.any()):
        return labels
    labels = labels.clone()
    own = run.fresh(f"{call.node.name}.input", int(fixed.sum()))
    for source in torch.unique(labels[fixed]).tolist():
        run.trail.pins.append((own[labels[fixed] == source], -1 - source))
    labels[fixed] = own
    return labels


def renamed(run: Propagation, call: Call, channels: Tensor) -> Tensor:
    """The same channels under new labels, so that a label identifies the layer that wrote its values."""
    fresh = run.fresh(call.node.name, channels.numel())
    run.tie(fresh, channels)
    return torch.where(channels > 0, fresh, channels)


def _weights(run: Propagation, call: Call) -> tuple[ParameterRef, ParameterRef | None] | None:
    if call.module is not None:
        weight = own_parameter(run, call, "weight")
        return None if weight is None else (weight, own_parameter(run, call, "bias"))
    weight, bias = call.argument(1, "weight"), call.argument(2, "bias")
    return (weight, bias) if _is_plain(run, weight, bias) else None


def own_parameter(run: Propagation, call: Call, attribute: str) -> ParameterRef | None:
    tensor = getattr(call.module, attribute, None)
    if not isinstance(tensor, Tensor):
        return None
    return ParameterRef(run.parameter(f"{call.node.target}.{attribute}"), tuple(tensor.shape))


def own_values(run: Propagation, call: Call, names: dict[int, str]) -> list[Any]:
    """A norm's weights or statistics, by position and name: parameters, labels of computed tensors, or None."""
    if call.module is not None:
        return [own_parameter(run, call, name) for name in names.values()]
    return [call.argument(position, name) for position, name in names.items()]


def go_with(run: Propagation, weight: Any, channels: Tensor, dim: int, shape: tuple[int, ...]) -> None:
    """Tie dimension ``dim`` of a norm's weight, which has this shape, to these channels."""
    if isinstance(weight, ParameterRef):
        run.slot(weight.name, dim, channels)
    elif isinstance(weight, Tensor):
        run.tie(weight, place(channels, shape, dim))


def _unbatched_rank(call: Call) -> int:
    ranks = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}
    return ranks.get(type(call.module), -1)  # type: ignore[arg-type]


def _path(call: Call, weight: ParameterRef) -> str:
    return str(call.node.target) if call.module is not None else weight.name


RULES: dict[str, Rule] = {
    **{f"conv{rank}d": convolution for rank in (1, 2, 3)},
    **{f"convtranspose{rank}d": convolution for rank in (1, 2, 3)},
    "linear": linear,
    "batchnorm": batch_norm,
    "instancenorm": batch_norm,
    "prelu": prelu,
    "embedding": embedding,
}
