"""Channel rules of layers whose weight is computed from the input, and of statistics of layers' weights.

See `channels.mixed_weights` and `channels.weight_statistics`. They give each kind of channels a name ("in", "out",
or the name of a product); here, ``slots`` holds the labels of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from smcp_fx.channels.facts import MIXTURE, STATISTIC
from smcp_fx.channels.labels import narrow_uniform, place, varied_dims
from smcp_fx.channels.mixed_weights import MixedWeight
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.rules_elementwise import bring_together
from smcp_fx.channels.rules_layers import channel_labels, own_inputs, record
from smcp_fx.channels.rules_statistics import correction, form_of
from smcp_fx.channels.trail import Call, Mix, Mixed, ParameterRef
from smcp_fx.channels.weight_factors import NORMS, PRODUCTS, Parts
from smcp_fx.tracing.operations import operation_of


def pin_read_otherwise(run: Propagation) -> None:
    """Pin the channels of mixed parameters that have other readers, too."""
    trail = run.trail
    for name in trail.mixed_parameters.keys() & (trail.slots.keys() | trail.elements.keys()):
        _pin_parts(run, name, trail.mixed_parameters[name])


def _pin_parts(run: Propagation, name: str, mixed: Mixed) -> None:
    for part in (part for dim in mixed for part in dim):
        if isinstance(part, Tensor):
            run.pin(part, name, f"{name!r} is mixed into a weight and is also read otherwise")


# ---- layers ---------------------------------------------------------------------------------------------


def mixture(run: Propagation, call: Call) -> Any:
    """Consumes and produces channels. The tensors that compute the weight lose the same channels."""
    weight = run.facts.mixed[call.node]
    reading = weight.reading
    product = (call.name or "") in PRODUCTS.keys() - {"linear"}
    labels = run.of(call.args[reading.operand] if product else call.argument(0, "input"))
    axis, out_axis = reading.axes
    varied = run.varied(labels)
    if product and varied and axis not in varied:
        return _of_positions(run, call, weight, labels)
    groups, images = 1 if product else int(call.option(6, "groups", 1)), reading.images
    transposed = "transpose" in (call.name or "")
    rows = channel_labels(run, labels, axis).reshape(images, -1)
    run.tie(rows, rows[:1].expand_as(rows))
    inputs = own_inputs(run, call, rows[0])
    outputs = run.fresh(call.node.name, call.shape[out_axis] // images)
    slots = {"out": outputs, "in": inputs}
    if groups > images:
        for kind, side in (("in", inputs), ("out", outputs)):
            own = side.reshape(groups // images, -1)
            run.tie(own, own[:1].expand_as(own))
            slots[kind] = own[0] if kind == ("out" if transposed else "in") else side
    sources = _record_parts(run, call, weight, slots)
    bias = None if product else call.argument(2, "bias")
    if bias is not None:
        run.tie(channel_labels(run, run.of(bias), 0).reshape(images, -1), outputs.expand(images, -1))
    source = run.trail.computed[sources[0]].source if sources[0] in run.trail.computed else sources[0]
    shape = tuple(labels.shape)
    if images > 1:
        shape = (images * shape[0], inputs.numel(), *shape[axis + 1 :])
    parameter, side_slots = ParameterRef(sources[0], reading.shape), (slots["in"], slots["out"])
    layer = parameter, None, "dense", reading.dims, groups // images, side_slots, (inputs, outputs), shape
    record(run, call, *layer, reading.axes, source, read=reading.result.name)
    made = place(outputs.repeat(images), call.shape, out_axis)
    if (call.name or "") not in ("addmm", "baddbmm"):
        return made
    dims = [dim - made.dim() for dim in varied_dims(made)]
    return bring_together(run, call, [run.of(call.args[0], dims), made], call.shape)


def _of_positions(run: Propagation, call: Call, weight: MixedWeight, labels: Tensor) -> Tensor:
    """A matrix that mixes positions: the operand's channels pass, and the generator keeps its own rule."""
    read = {product.args[operand] for product, operand, _ in weight.reads}
    others = (run.trail.labels[leaf.name] for leaf in weight.leaves.keys() - read)
    if any(isinstance(other, Tensor) and run.varied(other) for other in others):
        run.trail.passed.add(call.node.name)
        run.unknown(call)  # this pin is discarded: propagation restarts without this layer
    _record_parts(run, call, weight, {})
    return labels.narrow(weight.reading.axes[0], 0, 1).permute(weight.reading.order).expand(call.shape)


def _record_parts(run: Propagation, call: Call, weight: MixedWeight, slots: dict[str, Tensor]) -> list[str]:
    """Record the channels of all tensors that compute the weight; returns its parameters, the largest first."""
    for product, operand, dim in weight.reads:
        _read(run, call, product, operand, dim, slots)
    for node, parts in weight.parts.items():
        run.trail.mixed[node.name] = _labelled(parts, slots)
    sizes = {}
    for name, parts in weight.parameters:
        name = run.parameter(name)
        _parameter(run, name, _labelled(parts, slots))
        sizes[name] = math.prod(part.size for dim in parts for part in dim)
    _leaves(run, call, weight.leaves, slots, f"mixes the kernels of {call.node.name!r}")
    for node, operand, parts, over in weight.mixes:
        operation = operation_of(run.module, node)
        mixing = Call(node, operation, node.args, node.kwargs, None, run.values[node.name])
        _record_mix(run, mixing, operand, parts, over, slots)
    return sorted(sizes, key=lambda name: -sizes[name])


def _read(
    run: Propagation, call: Call, product: fx.Node, operand: int, dim: int, slots: dict[str, Tensor]
) -> None:
    """Label the channels of the operand from which a product computes a weight (routing, a generator's features)."""
    source = product.args[operand]
    assert isinstance(source, fx.Node)
    value = run.trail.labels[source.name]
    if isinstance(value, (Tensor, ParameterRef)) and not run.sizes.follow_input(source, dim):
        labels = run.of(value, [dim - len(value.shape)])
        if dim in run.varied(labels):
            slots[product.name] = own_inputs(run, call, channel_labels(run, labels, dim))


def _leaves(
    run: Propagation, call: Call, leaves: Mapping[fx.Node, Parts], slots: Mapping[str, Tensor], why: str
) -> None:
    """Tie tensors with one kind of channels to ``slots``. Pin tensors without channels, read by both."""
    for node, parts in leaves.items():
        value = run.trail.labels[node.name]
        kinds = {part.kind for dim in parts for part in dim} & slots.keys()
        if kinds:
            dims = [d - len(parts) for d, dim in enumerate(parts) if any(part.kind for part in dim)]
            run.tie(run.of(value, dims), _plane(parts, slots, next(iter(kinds))))
        else:
            run.keep(value, call.node.name, why)


def _record_mix(
    run: Propagation,
    call: Call,
    operand: int,
    parts: Parts,
    over: tuple[int, ...],
    slots: Mapping[str, Tensor],
) -> None:
    """Record that the operation mixes the channels along the dimensions ``over`` of an operand."""
    name = call.name or ""
    form = "instead" if name in NORMS else form_of(call)
    if name in PRODUCTS or call.node.op == "call_module":
        form = "zero"
    options = (tuple(sorted(over)), correction(call)) if form == "spread" else ()
    mixed = [(d, kind) for d in over for kind in {part.kind for part in parts[d]} & slots.keys()]
    for d, kind in mixed:
        only = tuple(dim if i == d else () for i, dim in enumerate(parts))
        labels = narrow_uniform(_plane(only, slots, kind))
        if form is None or len(mixed) > 1:
            run.pin(labels, call.node.name, f"channels are mixed by {call.shown!r}")
        else:
            run.trail.mixes.append(Mix(call.node.name, operand, labels, form, options))


def _labelled(parts: Parts, slots: Mapping[str, Tensor]) -> Mixed:
    return tuple(tuple(slots.get(part.kind, part.size) for part in dim) for dim in parts)


def _parameter(run: Propagation, name: str, mixed: Mixed) -> None:
    """Record a parameter's channels: as slots if each dimension has one kind, else as factors of each dimension."""
    if not any(len(dim) > 1 and any(isinstance(part, Tensor) for part in dim) for dim in mixed):
        for d, dim in enumerate(mixed):
            if dim and isinstance(dim[0], Tensor):
                run.slot(name, d, dim[0])
        return
    earlier = run.trail.mixed_parameters.setdefault(name, mixed)
    if [[_size(part) for part in dim] for dim in earlier] != [[_size(part) for part in dim] for dim in mixed]:
        for every in (earlier, mixed):
            _pin_parts(run, name, every)
        return
    for one, other in zip(earlier, mixed, strict=True):
        for left, right in zip(one, other, strict=True):
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                run.tie(left, right)


def _size(part: Tensor | int) -> tuple[bool, int]:
    return (True, part.numel()) if isinstance(part, Tensor) else (False, part)


def _plane(parts: Parts, slots: Mapping[str, Tensor], kind: str) -> Tensor:
    """Labels of one kind of channels, for each element of a tensor with these factors."""
    flat = [part for dim in parts for part in dim]
    sizes, where = [part.size for part in flat], [1] * len(flat)
    axis = [part.kind for part in flat].index(kind)
    where[axis] = sizes[axis]
    return slots[kind].reshape(where).expand(sizes).reshape([math.prod(p.size for p in dim) for dim in parts])


# ---- statistics of weights ------------------------------------------------------------------------------


def statistic(run: Propagation, call: Call) -> Any:
    """A tensor with the channels of one side of a weight, computed from the kept ones of the other side."""
    computed, slots = run.facts.statistics[call.node], {}
    for kind, dim in zip(("in", "out"), computed.dims, strict=True):
        labels = run.trail.slots.get(computed.weight, {}).get(dim)
        if labels is None:
            labels = run.slot(computed.weight, dim, run.fresh(call.node.name, computed.shape[dim]))
        slots[kind] = labels
    run.trail.beside[computed.weight] = computed.dims
    if call.node is list(computed.ends)[-1]:  # now all tensors that it reads have labels
        for node, parts in computed.parts.items():
            run.trail.mixed[node.name] = _labelled(parts, slots)
        why = f"meets the weight {computed.weight!r}, of which {call.node.name!r} is made"
        _leaves(run, call, computed.leaves, slots, why)
    for end, operand, parts, over in computed.mixes:
        if end is call.node:
            _record_mix(run, call, operand, parts, over, slots)
    parts = computed.ends[call.node]
    kinds = {part.kind for dim in parts for part in dim} & slots.keys()
    if kinds:
        return _plane(parts, slots, kinds.pop())
    made = f"made of all channels by {call.shown!r} (at {call.node.name!r})"
    return run.filled(call.value, run.fixed(call.node.name, made))


#: Chosen by `Facts`, not by the operation's name.
RULES: dict[str, Rule] = {MIXTURE: mixture, STATISTIC: statistic}
