"""Channel rule of layers whose weight is computed from the input: see `channels.mixed_weights`."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from smcp_fx.channels import rules_layers
from smcp_fx.channels.labels import narrow_uniform, place
from smcp_fx.channels.mixed_weights import MixedWeight, Part, Parts
from smcp_fx.channels.propagation import Propagation, Rule, channel_labels
from smcp_fx.channels.rules_layers import own_inputs, record
from smcp_fx.channels.trail import Call, Mix, Mixed, ParameterRef
from smcp_fx.tracing.operations import operation_of


def convolution(run: Propagation, call: Call) -> Any:
    """Of a weight that is computed from the input, where it can be followed; else as any other."""
    found = run.mixed.get(call.node)
    if found is None:
        return rules_layers.convolution(run, call)
    return mixture(run, call, found, int(call.option(6, "groups", 1)))


def linear(run: Propagation, call: Call) -> Any:
    """The same."""
    found = run.mixed.get(call.node)
    if found is None:
        return rules_layers.linear(run, call)
    return mixture(run, call, found, 1)


def pin_read_otherwise(run: Propagation) -> None:
    """Keep the channels of mixed parameters that something else reads, too."""
    trail = run.trail
    for name in trail.mixed_parameters.keys() & (trail.slots.keys() | trail.elements.keys()):
        for part in (part for dim in trail.mixed_parameters[name] for part in dim):
            if isinstance(part, Tensor):
                run.pin(part, name, f"{name!r} is mixed into a weight and is also read otherwise")


def mixture(run: Propagation, call: Call, found: MixedWeight, groups: int) -> Any:
    """Consumes and produces, as with a weight that is a parameter; what computes the weight loses these channels."""
    labels = run.of(call.argument(0, "input"))
    shape = run.values[found.result.name].shape
    axis = labels.dim() - len(shape) + 1
    transposed = "transpose" in (call.name or "")
    rows = channel_labels(run, labels, axis).reshape(found.images, -1)
    run.tie(rows, rows[:1].expand_as(rows))
    inputs = own_inputs(run, call, rows[0])
    outputs = run.fresh(call.node.name, call.shape[axis] // found.images)
    slots = {"out": outputs, "in": inputs}
    if groups > found.images:
        for kind, side in (("in", inputs), ("out", outputs)):
            own = side.reshape(groups // found.images, -1)
            run.tie(own, own[:1].expand_as(own))
            slots[kind] = own[0] if kind == ("out" if transposed else "in") else side
    sources = _record_parts(run, call, found, slots)
    bias = call.argument(2, "bias")
    if bias is not None:
        run.tie(
            channel_labels(run, run.of(bias), 0).reshape(found.images, -1), outputs.expand(found.images, -1)
        )
    record(
        run,
        call,
        ParameterRef(sources[0], (shape[0] // found.images, *shape[1:])),
        None,
        "dense",
        (0, 1) if transposed else (1, 0),
        groups // found.images,
        (slots["in"], slots["out"]),
        (inputs, outputs),
        tuple(labels.shape)
        if found.images == 1
        else (found.images * labels.shape[0], inputs.numel(), *labels.shape[axis + 1 :]),
        (axis, axis),
        source=run.trail.computed[sources[0]].source if sources[0] in run.trail.computed else sources[0],
    )
    return place(outputs.repeat(found.images), call.shape, axis)


def _record_parts(run: Propagation, call: Call, found: MixedWeight, slots: dict[str, Tensor]) -> list[str]:
    """Note what the weight is computed from; returns the parameters, the largest first."""
    for node, parts in found.parts.items():
        run.trail.mixed[node.name] = _labelled(parts, slots)
    sources = {}
    for node, parts in found.parameters.items():
        name = run.computed.get(node.name) or run.parameter(str(node.target))
        _parameter(run, name, _labelled(parts, slots))
        sources[name] = run.values[node.name].shape
    for node, parts in found.modules.items():
        module = run.module.get_submodule(str(node.target))
        for attribute in ("weight", "bias"):
            tensor = getattr(module, attribute)
            if tensor is not None:
                dims = (*parts, *((Part("", size),) for size in tensor.shape[1:]))
                name = run.parameter(f"{node.target}.{attribute}")
                _parameter(run, name, _labelled(dims, slots))
                sources[name] = tuple(tensor.shape)
    why = f"mixes the kernels of {call.node.name!r}"
    for node, parts in found.leaves.items():
        value = run.trail.labels[node.name]
        kinds = {part.kind for dim in parts for part in dim} - {""}
        if kinds:
            told = [d - len(parts) for d, dim in enumerate(parts) if any(part.kind for part in dim)]
            run.tie(run.of(value, told), _plane(parts, slots, next(iter(kinds))))
        elif isinstance(value, ParameterRef):
            run.fix_parameter(value, call.node.name, why)
        elif isinstance(value, Tensor):
            run.pin(value, call.node.name, why)
    for node, source, over in found.sums:
        for d in over:
            for kind in {part.kind for part in found.parts[source][d]} - {""}:
                form = "zero" if operation_of(run.module, node) == "sum" else "mean"
                only = tuple(dim if i == d else () for i, dim in enumerate(found.parts[source]))
                run.trail.mixes.append(Mix(node.name, 0, narrow_uniform(_plane(only, slots, kind)), form))
    return sorted(sources, key=lambda name: -math.prod(sources[name]))


def _labelled(parts: Parts, slots: dict[str, Tensor]) -> Mixed:
    return tuple(tuple(slots.get(part.kind, part.size) for part in dim) for dim in parts)


def _parameter(run: Propagation, name: str, mixed: Mixed) -> None:
    """A parameter's slots: of a dimension that is one kind of channels alone, or of several in one."""
    if not any(len(dim) > 1 and any(isinstance(part, Tensor) for part in dim) for dim in mixed):
        for d, dim in enumerate(mixed):
            if dim and isinstance(dim[0], Tensor):
                run.slot(name, d, dim[0])
        return
    known = run.trail.mixed_parameters.setdefault(name, mixed)
    for one, other in zip(known, mixed, strict=True):
        for left, right in zip(one, other, strict=True):
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                run.tie(left, right)


def _plane(parts: Parts, slots: dict[str, Tensor], kind: str) -> Tensor:
    """Labels of one kind of channels, for each element of a tensor of such dimensions."""
    sizes = [part.size for dim in parts for part in dim]
    kinds = [part.kind for dim in parts for part in dim]
    where = [1] * len(sizes)
    where[kinds.index(kind)] = sizes[kinds.index(kind)]
    return slots[kind].reshape(where).expand(sizes).reshape([math.prod(p.size for p in dim) for dim in parts])


RULES: dict[str, Rule] = {
    **{f"conv{form}{rank}d": convolution for form in ("", "transpose") for rank in (1, 2, 3)},
    "linear": linear,
}
