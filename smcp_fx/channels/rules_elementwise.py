"""Channel rules of element-wise operations, reductions, softmax, pooling and interpolation."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from smcp_fx.channels.labels import compress, uniform, varied_dims
from smcp_fx.channels.propagation import Propagation, Rule, tensor_leaves
from smcp_fx.channels.trail import Call, ParameterRef, Spread
from smcp_fx.tracing.traits import Trait, named
from smcp_fx.tracing.values import TensorInfo

_REDUCTIONS = """
mean sum amax amin prod std var norm logsumexp argmax argmin all any nansum nanmean median stdmean
varmean
""".split()
_ALONG = """
softmax logsoftmax softmin normalize cumsum cumprod logcumsumexp
""".split()


def elementwise(run: Propagation, call: Call) -> Any:
    """Broadcast the operands and tie what they bring together.

    An operand of size 1 where another varies is read by all of those channels: see `bring_together`.
    """
    shape = call.shape
    leaves = tensor_leaves((call.args, call.kwargs))
    told = {d - t.dim() for t in leaves if isinstance(t, Tensor) for d in varied_dims(t)}
    operands = [run.of(leaf, told or None) for leaf in leaves]
    operands = [labels for labels in operands if labels.numel() > 1 or bool((labels > 0).any())]
    if call.name in ("typeas", "to") or len(operands) == 1:
        operands = operands[:1]
    if not operands:
        return run.filled(call.value, run.fixed(call.node.name, "made of constants"))
    return _like(call, bring_together(run, call, operands, shape))


def bring_together(run: Propagation, call: Call, operands: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Labels of the shape for what broadcasting brings together: operands tied, spread ones tied later or pinned.

    An operand of size 1 wherever another varies is read by every channel, and stays (a spatial attention map times a
    feature map). One of size 1 along some of these dimensions goes with the result if this can be told apart along
    the others in the end, and stays if it is told apart where the operand has size 1: a gate of [c, 1] times [c, k],
    a gate behind a pixel shuffle, rows times columns.
    """
    padded = [labels.reshape((1,) * (len(shape) - labels.dim()) + labels.shape) for labels in operands]
    varied = {dim for labels in padded for dim in varied_dims(labels)}
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
        cores = [_core(labels, varied) for labels in full]
        size = [shape[dim] if dim in varied else 1 for dim in range(len(shape))]
        merged = run.fresh(call.node.name, math.prod(size)).reshape(size)
        for core in cores:
            run.tie(merged, core)
        merged = merged.expand(shape)
    for labels in spread:
        reason = run.reason(call.node.name, why)
        run.trail.spread.append(Spread(_core(merged, varied), _core(labels, varied), reason))
    return merged


def choice(run: Propagation, call: Call) -> Any:
    """What `train()` or `eval()` computed: tied, as an addition ties, and pinned where the two have other shapes."""
    evaluated, trained = (pytree.tree_flatten(_labelled(run, given)) for given in call.args[1:])
    if not call.node.users:
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


def _labelled(run: Propagation, tree: Any) -> Any:
    return pytree.tree_map(
        lambda v: run.of(v) if isinstance(v, (Tensor, ParameterRef)) else v,
        tree,
        is_leaf=lambda v: isinstance(v, ParameterRef),
    )


def reduction(run: Propagation, call: Call) -> Any:
    """Reduced dimensions must not tell channels apart: tie along them, or pin when nothing else varies."""
    operand = call.argument(0, "input")
    labels = run.of(operand)
    if call.name in ("max", "min"):
        other = call.argument(1, "other")
        if isinstance(other, Tensor) or len(tensor_leaves((call.args, call.kwargs))) > 1:
            return elementwise(run, call)
    dims = call.argument(_dim_position(call), "dim", call.kwargs.get("axis"))
    if dims is None or isinstance(dims, bool) or dims in ((), []):  # `x.std(False)` is not biased, over all
        dims = tuple(range(labels.dim()))
    reduced = {
        int(dim) % max(labels.dim(), 1) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])
    }
    reduced_labels = mix(run, call, labels, reduced)
    if reduced_labels is None:
        return run.unknown(call, f"channels are mixed by {call.name!r}")
    keep = len(call.shape) == labels.dim()
    for dim in sorted(reduced, reverse=True):
        reduced_labels = reduced_labels.narrow(dim, 0, 1)
        if not keep:
            reduced_labels = reduced_labels.squeeze(dim)
    return _like(call, reduced_labels)


def softmax(run: Propagation, call: Call) -> Any:
    """Mixes along one dimension: as a reduction that keeps its shape."""
    labels = run.of(call.argument(0, "input"))
    position = 2 if call.name == "normalize" and call.module is None else 1
    dim = call.option(position, "dim")
    if dim is None:  # torch's own choice, from before it asked for one
        dim = 1 if call.name == "normalize" or labels.dim() not in (0, 1, 3) else 0
    mixed = mix(run, call, labels, {int(dim) % labels.dim()})
    return run.unknown(call, f"channels are mixed by {call.name!r}") if mixed is None else _like(call, mixed)


def pooling(run: Propagation, call: Call) -> Any:
    """Works inside each channel: the spatial dimensions must not tell channels apart."""
    labels = run.of(call.argument(0, "input"))
    spatial = _spatial_rank(call)
    for dim in run.varied(labels):
        if dim >= labels.dim() - spatial:
            labels = run.tie_along(labels, dim)
    for dim in range(labels.dim() - spatial, labels.dim()):
        labels = labels.narrow(dim, 0, 1)
    return pytree.tree_map(
        lambda v: compress(labels.expand(v.shape)) if isinstance(v, TensorInfo) else v, call.value
    )


def glu(run: Propagation, call: Call) -> Any:
    """Halves along a dimension, one gating the other: the halves are tied."""
    labels = run.of(call.argument(0, "input"))
    dim = int(call.option(1, "dim", -1))
    value, gate = labels.chunk(2, dim)
    run.tie(value, gate)
    return compress(value)


def mix(run: Propagation, call: Call, labels: Tensor, dims: set[int]) -> Tensor | None:
    """Tie along ``dims`` where they vary; None when they alone vary, so that tying would be one unit."""
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


def _like(call: Call, labels: Tensor) -> Any:
    """The labels for every output tensor of the call, each in its own shape."""
    return pytree.tree_map(lambda v: labels.expand(v.shape) if isinstance(v, TensorInfo) else v, call.value)


def _core(labels: Tensor, varied: set[int]) -> Tensor:
    for dim in range(labels.dim()):
        if dim not in varied:
            labels = labels.narrow(dim, 0, 1)
    return labels


def _dim_position(call: Call) -> int:
    return 2 if call.name == "norm" else 1


def _spatial_rank(call: Call) -> int:
    digits = [c for c in call.name or "" if c.isdigit()]
    if digits:
        return int(digits[0])
    return len(call.shape) - 2  # interpolate, upsample


def constant(run: Propagation, call: Call) -> Any:
    """Tensors made from nothing stay; they pin what they are added to channel by channel, no more."""
    return pytree.tree_map(
        lambda v: (
            uniform(run.fixed(call.node.name, f"constant made by {call.node.name!r}"), v.shape)
            if isinstance(v, TensorInfo)
            else v
        ),
        call.value,
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(named(Trait.ELEMENTWISE), elementwise),
    **dict.fromkeys([*_REDUCTIONS, "max", "min"], reduction),
    **dict.fromkeys(_ALONG, softmax),
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
    "zeros": constant,
    "ones": constant,
    "full": constant,
    "arange": constant,
    "empty": constant,
    "tensor": constant,
    "newempty": constant,
    "newzeros": constant,
    "newones": constant,
    "newfull": constant,
    "rand": constant,
    "randn": constant,
    "linspace": constant,
}
