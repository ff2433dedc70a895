"""Products of a tensor with a stack of matrices, held in one parameter: grouped linears, experts, spectral layers.

    bmm(x, weight)                          x [groups, b, i], weight [groups, i, o]
    einsum("bnd,thde->tbhne", x, weight)    queries, keys and values of all heads
    einsum("bixy,ioxy->boxy", x, weight)    a matrix for each frequency

Each dimension of the weight is summed over, made, or shared by operand and result. A summed dimension holds the
input channels, a made dimension the output channels, of all matrices. If the operand's channels lie along a shared
dimension, whole matrices go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from smcp_fx.channels.labels import line_along, narrow_uniform, place
from smcp_fx.channels.propagation import Propagation
from smcp_fx.channels.rules_layers import channel_labels, own_inputs, record, renamed
from smcp_fx.channels.trail import Call, ConstantRef, MadeRef, ParameterRef


@dataclass(frozen=True)
class _Stack:
    """A product's weight. The places of its dimensions (``held``) and of the operand's (``there``), by name."""

    weight: ParameterRef
    held: dict[str, int]
    there: dict[str, int]
    out: list[str]

    @property
    def summed(self) -> list[str]:
        return [name for name in self.held if name in self.there and name not in self.out]

    @property
    def shared(self) -> list[str]:
        return [name for name in self.held if name in self.there and name in self.out]

    @property
    def made(self) -> list[str]:
        """The dimensions that the weight adds to the result, in the result's order."""
        return [name for name in self.out if name in self.held and name not in self.there]

    def dim(self, name: str) -> int:
        """The dimension of the parameter itself."""
        dim = self.weight.place(self.held[name])
        assert dim is not None, "a weight that lacks a dimension for its channels"
        return dim

    def beside(self, *channels: str) -> tuple[int, ...]:
        """The parameter's dimensions, without these channels and without summed dimensions."""
        return tuple(self.dim(name) for name in self.held if name not in (*channels, *self.summed))


def product(
    run: Propagation,
    call: Call,
    operands: tuple[Any, Any],
    names: Sequence[list[str]],
    out: list[str],
) -> Tensor | None:
    """Labels of the product if one operand is a stack that reads the other's channels; else None."""
    for this, other in ((1, 0), (0, 1)):
        weight, tensor = operands[this], operands[other]
        if not _is_stack(weight, run) or not isinstance(tensor, Tensor):
            continue
        held = {n: d for d, n in enumerate(names[this]) if weight.shape[d] > 1}
        there = {n: d for d, n in enumerate(names[other]) if tensor.shape[d] > 1 or n not in held}
        stack = _Stack(weight, held, there, out)
        if stack.made and stack.held.keys() ^ stack.there.keys() <= set(out):
            return _layer(run, call, tensor, stack)
    return None


def _is_stack(value: Any, run: Propagation) -> TypeGuard[ParameterRef]:
    parameter = isinstance(value, ParameterRef) and not isinstance(value, (ConstantRef, MadeRef))
    return parameter and len(value.shape) > 2 and value.name not in run.trail.elements


def _layer(run: Propagation, call: Call, labels: Tensor, stack: _Stack) -> Tensor | None:
    read, at = run.trail.stacks.get(call.node.name, ("", ""))
    decided = bool(read)
    varied = {name for name, dim in stack.there.items() if dim in run.varied(labels)}
    shared = varied.intersection(stack.shared)
    if not decided:
        whole = bool(shared) and (call.node.name in run.turned or varied.isdisjoint(stack.summed))
        candidates = shared if whole else varied - shared
        read = max(sorted(candidates), key=lambda name: _apart(run, labels, stack.there[name]), default="")
        at = read if whole else ""
        decided = whole or run.seen is not None or (len(candidates) == 1 and len(stack.made) == 1)
    if read not in stack.held:  # there are no channels, or they pass beside the weight
        core = narrow_uniform(labels)
        if any(core.shape[stack.there[name]] > 1 for name in stack.shared):
            # Ties merged all heads into one unit; allow removing whole heads.
            run.trail.within[call.node.name] = 1, (core.flatten(),)
        return None
    if read == at:
        return _whole_matrices(run, call, labels, stack, read)
    for name in shared:  # matrices share their channels, as in grouped convolutions
        labels = run.tie_along(labels, stack.there[name])
    sizes = [stack.weight.shape[stack.held[name]] for name in stack.made]
    made = run.fresh(call.node.name, math.prod(sizes)).reshape(sizes)
    told_apart = [stack.made[dim] for dim in run.varied(made)] or stack.made
    at = at or max(told_apart, key=lambda name: _apart(run, made, stack.made.index(name)))
    if not decided:
        # One dimension of each side holds the channels. All ties together tell the second run which.
        run.blind = True
        sides = (labels, stack.there[read]), (made, stack.made.index(at))
        inputs, outputs = (line_along(side, dim) for side, dim in sides)
        _record(run, call, labels, stack, (read, at), (inputs, outputs))
        spread = [made.shape[stack.made.index(name)] if name in stack.made else 1 for name in stack.out]
        return made.reshape(spread).expand(call.shape)
    inputs = own_inputs(run, call, channel_labels(run, labels, stack.there[read]))
    outputs = channel_labels(run, made, stack.made.index(at))
    dims = stack.dim(read), stack.dim(at)
    if run.trail.slots.get(stack.weight.name, dict.fromkeys(dims)).keys() != set(dims):
        why = f"{stack.weight.name!r} is read along other dimensions elsewhere"
        return run.unknown(call, why)  # type: ignore[no-any-return]
    for dim, line in zip(dims, (inputs, outputs), strict=True):
        run.slot(stack.weight.name, dim, line)
    _record(run, call, labels, stack, (read, at), (inputs, outputs))
    run.trail.stacks[call.node.name] = read, at
    if shared:
        groups = math.prod(labels.shape[stack.there[name]] for name in shared)
        run.trail.within[call.node.name] = groups, (inputs, outputs)
    return place(outputs, call.shape, stack.out.index(at))


def _whole_matrices(run: Propagation, call: Call, labels: Tensor, stack: _Stack, name: str) -> Tensor:
    """Each channel, or head, has its own matrix, and goes with it."""
    inputs = own_inputs(run, call, channel_labels(run, labels, stack.there[name]))
    outputs = run.slot(stack.weight.name, stack.dim(name), renamed(run, call, inputs))
    _record(run, call, labels, stack, (name, name), (inputs, outputs))
    run.trail.stacks[call.node.name] = name, name
    return place(outputs, call.shape, stack.out.index(name))


def _record(
    run: Propagation,
    call: Call,
    labels: Tensor,
    stack: _Stack,
    names: tuple[str, str],
    channels: tuple[Tensor, Tensor],
) -> None:
    read, made = names
    whole = read == made
    record(
        run,
        call,
        stack.weight,
        None,
        "depthwise" if whole else "dense",
        (stack.dim(read), stack.dim(made)),
        channels[0].numel() if whole else 1,
        (channels[1], channels[1]) if whole else channels,
        channels,
        tuple(labels.shape),
        (stack.there[read], stack.out.index(made)),
        beside=stack.beside(read, made),
    )


def _apart(run: Propagation, labels: Tensor, dim: int) -> int:
    """The number of different channels along the dimension."""
    return int(torch.unique(line_along(run.units(labels), dim)).numel())
