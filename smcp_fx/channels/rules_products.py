"""Channel rules of products of two tensors: matmul, bmm, einsum, scaled dot-product attention.

Every dimension of a product is shared (a batch, attention heads), contracted (summed over), or free (of one operand
only). A contracted dimension mixes its channels. If they also vary along another dimension, they are tied along the
contracted one (a head goes as a whole); otherwise the channels of both operands go together. Shared dimensions are
tied across the operands, free ones pass. A product with a two-dimensional parameter is a dense layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from smcp_fx.channels import stacked_weights
from smcp_fx.channels.labels import uniform, varied_dims
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.rules_elementwise import bring_together
from smcp_fx.channels.rules_layers import channel_labels, dense
from smcp_fx.channels.rules_statistics import record_mix, tie_mixed, tie_settled
from smcp_fx.channels.trail import Call, ConstantRef, ParameterRef
from smcp_fx.channels.weight_views import FIRST_FACTOR, factors_in, named_dims

_FORM = "a product of this form has no channel rule"


def product(run: Propagation, call: Call) -> Any:
    """A product of two operands without repeated dimensions; a linear layer if one is a parameter matrix."""
    operands = factors_in(call.name, call.args)
    if not operands or not all(isinstance(one, (Tensor, ParameterRef)) for one in operands):
        return run.unknown(call, _FORM)
    try:
        names, out = named_dims(
            call.name or "", call.args, call.kwargs, [len(one.shape) for one in operands], len(call.shape)
        )
    except ValueError:
        return run.unknown(call, _FORM)
    made = _two_operands(run, call, (operands[0], operands[1]), names, out)
    if call.name not in ("addmm", "baddbmm") or call.shape != tuple(made.shape):
        return made
    varied = [dim - made.dim() for dim in varied_dims(made)]
    return bring_together(run, call, [run.of(call.args[0], varied), made], call.shape)


def _two_operands(
    run: Propagation, call: Call, operands: tuple[Any, Any], inputs: list[list[str]], out: list[str]
) -> Any:
    """An einsum of two operands: a linear layer if one of them is a matrix of parameters."""
    for this, other in ((0, 1), (1, 0)):
        weight, tensor, others = operands[this], operands[other], inputs[other]
        if _is_weight(weight, run) and isinstance(tensor, Tensor):
            names = inputs[this]
            read = [n for n in names[-2:] if n in others and n not in out]
            made = [n for n in names[-2:] if n in out and n not in others]
            kept = [n for n in others if n not in read]
            if len(read) == len(made) == 1 and kept == [n for n in out if n not in made]:
                dims = names.index(read[0]), names.index(made[0])
                axes = others.index(read[0]), out.index(made[0])
                return dense(run, call, tensor, weight, None, dims=dims, axes=axes)
    return _product(run, call, operands, inputs, out, call.shape)


def _is_weight(value: Any, run: Propagation) -> TypeGuard[ParameterRef]:
    """Is it a matrix of parameters, the same for all images, that no operation has read element by element?"""
    return (
        isinstance(value, ParameterRef)
        and not isinstance(value, ConstantRef)
        and len(value.shape) >= 2
        and math.prod(value.shape[:-2]) == 1
        and value.name not in run.trail.elements
        and value.name not in run.as_tensors
    )


def attention(run: Propagation, call: Call) -> Any:
    """softmax(q k^T + mask) v: whole heads go if all three operands have separate heads."""
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = call.argument(3, "attn_mask")
    if not all(isinstance(t, (Tensor, ParameterRef)) for t in (query, key, value)):
        return run.unknown(call)
    q, k, v = run.of(query), run.of(key), run.of(value)
    if call.kwargs.get("enable_gqa"):  # each head of keys and values serves several of the queries
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    lead = [f"b{d}" for d in range(q.dim() - 2)]
    shape = (*q.shape[:-1], k.shape[-2])
    scores = _product(run, call, (q, k), ([*lead, "n", "d"], [*lead, "m", "d"]), [*lead, "n", "m"], shape)
    if isinstance(mask, (Tensor, ParameterRef)):
        scores = bring_together(run, call, [scores, run.of(mask)], shape)
    mixed = tie_mixed(run, call, scores, {len(shape) - 1})
    if mixed is None:
        run.pin(scores, call.node.name, f"positions are mixed by {call.node.name!r}")
        mixed = uniform(run.fixed(call.node.name, f"made by {call.node.name!r}"), shape)
    return _product(
        run, call, (mixed, v), ([*lead, "n", "m"], [*lead, "m", "e"]), [*lead, "n", "e"], call.shape
    )


def _product(
    run: Propagation,
    call: Call,
    operands: tuple[Any, Any],
    names: Sequence[list[str]],
    out: list[str],
    shape: tuple[int, ...],
) -> Tensor:
    """Labels of a product, given names for the dimensions of the operands and of the result."""
    stacked = stacked_weights.product(run, call, operands, names, out)
    if stacked is not None:
        return stacked
    sides = [run.of(operand) for operand in operands]
    if run.reads_blocks(call.node):
        sides = _over_block(run, call, sides, names, out)
    sides = _contracted(run, call, sides, names, out)
    shared = {name for name in names[0] if name in names[1] and name in out}
    for this, other in ((0, 1), (1, 0)):
        across = {names[this][d] for d in run.varied(sides[this])}
        if across & shared:
            # This operand has separate heads: the other's heads go with them, each as a whole.
            varied_names = {names[other][d] for d in run.varied(sides[other])}
            for d in varied_dims(sides[other]) if varied_names & shared else ():
                if names[other][d] not in shared:
                    sides[other] = run.tie_along(sides[other], d)
    aligned = [_aligned(labels, own, out) for labels, own in zip(sides, names, strict=True)]
    free = [set(varied_dims(labels)) for labels in aligned]
    if free[0] and free[1] and not free[0] & free[1]:
        # A matrix of channels by channels, or an outer product. The operand with more channels becomes the rows.
        less = int(torch.unique(aligned[0]).numel() >= torch.unique(aligned[1]).numel())
        label = 0
        follows = (
            run.is_alone(labels) or run.sizes.follow_input(call.node, dim)
            for labels, (dim,) in zip(aligned, free, strict=True)
        )
        if len(free[0]) == len(free[1]) == 1 and len(call.node.all_input_nodes) <= 2 and not any(follows):
            run.trail.blocks[call.node.name] = aligned[less].expand(shape)
        else:
            why = f"spread over the channels of the other factor in {call.node.name!r}"
            run.pin(aligned[less], call.node.name, why)
            label = run.fixed(call.node.name, f"a factor of {call.node.name!r}")
        aligned[less] = uniform(label, aligned[less].shape)
    return bring_together(run, call, aligned, shape)


def _contracted(
    run: Propagation,
    call: Call,
    sides: list[Tensor],
    names: Sequence[list[str]],
    out: list[str],
    masked: int = 0,
) -> list[Tensor]:
    """The operands' labels, made uniform along the contracted dimensions.

    If both operands vary along these only, their channels go together, and a mask of the operand ``masked`` restricts
    the product to the kept ones. If only one operand does, its channels stay.
    """
    first = FIRST_FACTOR.get(call.name or "", 0)
    dims = [{d for d, name in enumerate(own) if name not in out} for own in names]
    sides = [run.settled(sides[this], _met_dims(run, sides, names, dims, this)) for this in (0, 1)]
    across = [set(run.varied(labels)) for labels in sides]
    for this, other in ((0, 1), (1, 0)):
        if (
            across[this]
            and across[this] <= dims[this]
            and across[other] & dims[other]
            and not run.is_alone(sides[this])
        ):
            # If one operand has no separate heads, tie the other's heads.
            for d in across[other] - dims[other]:
                if names[other][d] in names[this]:
                    sides[other] = run.tie_along(sides[other], d)
    mixed = [tie_settled(run, labels, summed) for labels, summed in zip(sides, dims, strict=True)]
    if mixed == [None, None] and len(dims[0]) == len(dims[1]) == 1 and _is_apart(call, first, masked):
        (left,), (right,) = dims
        run.tie(channel_labels(run, sides[0], left), channel_labels(run, sides[1], right))
        record_mix(run, call, sides[masked], "zero", first + masked)
        why = f"made of all channels by {call.node.name!r}"
        return [uniform(run.fixed(call.node.name, why), tuple(labels.shape)) for labels in sides]
    for place, labels in enumerate(sides):
        if mixed[place] is None:
            run.pin(labels, call.node.name, f"summed over in {call.node.name!r}")
            mixed[place] = uniform(
                run.fixed(call.node.name, f"summed over in {call.node.name!r}"), tuple(labels.shape)
            )
    return [labels for labels in mixed if labels is not None]


def _over_block(
    run: Propagation, call: Call, sides: list[Tensor], names: Sequence[list[str]], out: list[str]
) -> list[Tensor]:
    """The operands' labels after a product has summed over one side of a matrix; the other side remains.

    The two sides of a square matrix are tied, because perhaps no layer reads one of them.
    """
    first = FIRST_FACTOR.get(call.name or "", 0)
    summed = [name for name in names[0] if name in names[1] and name not in out]
    operands = call.node.args[first : first + 2]
    for this, source in enumerate(operands) if len(summed) == 1 and len(operands) == 2 else ():
        second = run.trail.blocks.get(source.name) if isinstance(source, fx.Node) else None
        blocks = [] if second is None else [sides[this], second]
        read, met = (names[side].index(summed[0]) for side in (this, 1 - this))
        lines = {dim: labels for labels in blocks for dim in varied_dims(labels)}
        if len(lines) == 2 and read in lines and varied_dims(sides[1 - this]) == [met]:
            (left,) = lines.keys() - {read}
            if sides[this].shape[left] == sides[this].shape[read]:
                run.tie(*(channel_labels(run, lines[dim], dim) for dim in (left, read)))
            sides[this] = lines[read]
            _contracted(run, call, sides, names, out, masked=1 - this)
            run.contracted.add(call.node)
            both = [uniform(0, tuple(labels.shape)) for labels in sides]
            both[this] = lines[left]
            return both
    return sides


def _met_dims(
    run: Propagation, sides: list[Tensor], names: Sequence[list[str]], dims: list[set[int]], this: int
) -> set[int]:
    """The dimensions of an operand, counted from the last, in which the other operand has channels."""
    labels, other = sides[this], sides[1 - this]
    if run.is_alone(other):
        return {d - labels.dim() for d in dims[this]}
    varied_names = {names[1 - this][d] for d in run.varied(other)}
    return {d - labels.dim() for d, name in enumerate(names[this]) if name in varied_names}


def _is_apart(call: Call, first: int, masked: int) -> bool:
    """Are both operands separate arguments, and the masked one a tensor?"""
    operands = call.node.args[first : first + 2]
    apart = len(operands) == 2 and all(isinstance(operand, fx.Node) for operand in operands)
    return apart and isinstance(call.args[first + masked], Tensor)


def _aligned(labels: Tensor, names: list[str], out: list[str]) -> Tensor:
    """The labels with the result's dimensions in their order, of size 1 if the operand lacks one."""
    for d in reversed(range(len(names))):
        if names[d] not in out:
            labels = labels.select(d, 0)
    kept = [name for name in names if name in out]
    labels = labels.permute([kept.index(name) for name in out if name in kept])
    for place, name in enumerate(out):
        if name not in kept:
            labels = labels.unsqueeze(place)
    return labels


RULES: dict[str, Rule] = {
    **dict.fromkeys(FIRST_FACTOR, product),
    "scaleddotproductattention": attention,
}
