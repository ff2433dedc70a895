"""Tensors with channels along two dimensions: matrices of channels by channels (DANet, Restormer).

    energy = q @ k.mT                  [b, c, c]: a row a channel of q, a column a channel of k
    weights = energy.softmax(-1)       over the columns that are kept
    out = weights @ v                  the columns go with the channels of v

A *block* is a label tensor that varies along one dimension. The rows of such a matrix are its first block
(`Trail.labels`), its columns the second (`Trail.blocks`). A rule that treats each dimension separately runs once
for each block. Any other operation that reads the matrix pins the channels of its second block.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from smcp_fx.channels.labels import compact, uniform, varied_dims
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.trail import Call
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.trees import leaves_of
from smcp_fx.tracing.values import TensorInfo

#: Besides element-wise operations: movements without sizes among their arguments, and operations over one dimension.
_BLOCKWISE = set(
    """
amax amin contiguous expandas getattr logsoftmax logsumexp max mean min movedim permute softmax sum t transpose
""".split()
)


def by_block(rule: Rule) -> Rule:
    """The rule, run once for each block of the tensors that the operation reads."""

    @functools.wraps(rule)
    def ruled(run: Propagation, call: Call) -> Any:
        mixes = run.trail.mixes
        before = len(mixes)
        result = rule(run, call)
        if run.reads_blocks(call.node) and call.node not in run.contracted:
            between = len(mixes)
            second = _second(run, call)
            made = None if second is None else rule(run, second)
            if before < between < len(mixes) or not _keep(run, call.node, result, made):
                run.pin_blocks(call.node)
                del mixes[between:]
        return result

    return ruled


def _second(run: Propagation, call: Call) -> Call | None:
    """The call on the second blocks; an operand without one has no channels there. None if a block cannot pass."""
    if not (call.name in _BLOCKWISE or has(call.name, Trait.ELEMENTWISE)):
        return None
    blocks = run.trail.blocks
    (dim, *others) = {
        varied_dims(blocks[n.name])[0] - blocks[n.name].dim() for n in run.reads_blocks(call.node)
    }

    def operand(node: fx.Node) -> Any:
        value = run.values[node.name]
        if node.name in blocks or not isinstance(value, TensorInfo):
            return blocks.get(node.name, run.trail.labels[node.name])
        if len(value.shape) >= -dim and value.shape[dim] != 1:
            raise LookupError  # its channels along this dimension are unknown
        return uniform(0, value.shape)

    try:
        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), operand)
    except LookupError:
        return None
    return None if others else replace(call, args=tuple(args), kwargs=dict(kwargs))


def _keep(run: Propagation, node: fx.Node, first: Any, second: Any) -> bool:
    """Record the second block of a result. False if the result cannot have one."""
    varied = [
        labels for labels in leaves_of(second) if isinstance(labels, Tensor) and varied_dims(compact(labels))
    ]
    if not varied:
        return second is not None
    if second is not varied[0] or not isinstance(first, Tensor) or first.shape != second.shape:
        return False
    block = run.trail.blocks[node.name] = compact(second)
    return len(varied_dims(block)) == 1 and varied_dims(block) != varied_dims(compact(first))
