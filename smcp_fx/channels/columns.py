"""Matrices of channels by channels, as attention among channels has them (DANet, Restormer).

    energy = q @ k.mT                  [b, c, c]: a row a channel of q, a column a channel of k
    weights = energy.softmax(-1)       over the columns that are kept
    out = weights @ v                  the columns go with the channels of v

A tensor's labels tell channels apart along one dimension: here the rows. What the columns stand for is noted beside
them (`Trail.columns`), and followed through the operations below until a product sums over it. Columns that any other
operation reads stay.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, fx

from smcp_fx.channels.execution import execute
from smcp_fx.channels.labels import along, compact, place, uniform, varied_dims
from smcp_fx.channels.propagation import Propagation, Rule, channel_labels
from smcp_fx.channels.rules_statistics import form_of, mixes
from smcp_fx.channels.trail import Call
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.trees import leaves_of
from smcp_fx.tracing.values import TensorInfo

#: Movements that name no sizes.
_MOVES = {"transpose", "permute", "movedim", "contiguous", "t", "clone", "detach"}
_REDUCTIONS = {"max", "amax", "min", "amin", "mean", "sum", "logsumexp"}
#: Questions about a tensor that its columns do not answer.
_QUESTIONS = {"dim", "ndim", "dtype", "device"}


def following(rule: Rule) -> Rule:
    """The rule, and what its operation does with the columns of what it reads."""

    @functools.wraps(rule)
    def ruled(run: Propagation, call: Call) -> Any:
        result = rule(run, call)
        for source in call.node.all_input_nodes if run.trail.columns else ():
            if source.name in run.trail.columns and _follows(run, call, source):
                run.trail.followed.add((source.name, call.node.name))
        return result

    return ruled


def _follows(run: Propagation, call: Call, source: fx.Node) -> bool:
    """Whether it is known what the operation does with these columns; notes it."""
    dim, columns = run.trail.columns[source.name]
    shape = run.values[source.name].shape
    name = call.name or ""
    if name in ("softmax", "logsoftmax") and call.node.args[:1] == (source,):
        told = call.option(1, "dim")
        if told is None:
            return False
        if int(told) % len(shape) == dim:
            mixes(run, call, place(columns, shape, dim), "instead")
        run.trail.columns[call.node.name] = dim, columns
        return True
    if name in _REDUCTIONS and call.node.args == (source, *call.node.args[1:]):
        told, form = call.argument(1, "dim"), form_of(call)
        alone = isinstance(told, int) and told % len(shape) == dim and form is not None
        if alone and form is not None:
            mixes(run, call, place(columns, shape, dim), form)
        return alone
    if name == "expandas":
        return _expands(run, call, source)
    turned = name == "getattr" and call.node.args[1] in ("T", "mT")
    if (name in _MOVES or turned) and call.node.args[:1] == (source,):
        ruler = place(columns, shape, dim)
        moved = compact(execute(call, (ruler, *call.args[1:]), call.kwargs))
        found = varied_dims(moved)
        if len(found) == 1:
            run.trail.columns[call.node.name] = found[0], columns
        return len(found) == 1
    if has(call.name, Trait.ELEMENTWISE):
        return _elementwise(run, call, source)
    return False


def _expands(run: Propagation, call: Call, source: fx.Node) -> bool:
    """`maximum.expand_as(energy)` has the columns of the energy."""
    spread = call.node.args[0]
    dim, columns = run.trail.columns[source.name]
    if spread is source or not isinstance(spread, fx.Node) or run.values[spread.name].shape[dim] != 1:
        return False
    if len(run.values[spread.name].shape) != len(run.values[source.name].shape):
        return False
    run.trail.columns[call.node.name] = dim, columns
    return True


def _elementwise(run: Propagation, call: Call, source: fx.Node) -> bool:
    """What meets the columns has the same ones, or one value for all of them."""
    dim, columns = run.trail.columns[source.name]
    shape = run.values[source.name].shape
    outputs = [v for v in leaves_of(call.value) if isinstance(v, TensorInfo)]
    if len(outputs) != 1 or outputs[0].shape != shape:
        return False
    for other in call.node.all_input_nodes:
        value = run.values[other.name]
        if other is source or not isinstance(value, TensorInfo):
            continue
        back = dim - len(shape) + len(value.shape)
        known = run.trail.columns.get(other.name)
        if known is not None and known[0] == back:
            run.tie(columns, known[1])
        elif back >= 0 and value.shape[back] != 1:
            return False
    run.trail.columns[call.node.name] = dim, columns
    return True


def note(run: Propagation, call: Call, sides: list[Tensor], which: int, shape: tuple[int, ...]) -> bool:
    """Note that a product's factor ``which`` gives the columns, where the other one gives the rows.

    ``sides``: both factors' labels, with the result's dimensions. Returns whether it could.
    """
    dims = [varied_dims(labels) for labels in sides]
    plain = len(dims[0]) == len(dims[1]) == 1 and not any(map(run.is_alone, sides))
    plain = plain and len(call.node.all_input_nodes) <= 2
    if not plain or any(run.follows_input(call.node, dim) for (dim,) in dims):
        return False
    (dim,) = dims[which]
    run.trail.columns[call.node.name] = dim, channel_labels(run, sides[which], dim)
    sides[which] = uniform(0, shape)
    return True


def contract(
    run: Propagation,
    call: Call,
    first: int,
    sides: list[Tensor],
    names: tuple[list[str], list[str]],
    out: list[str],
) -> list[Tensor] | None:
    """Both factors' labels where a product sums over the rows or columns of such a matrix; else None.

    What is summed over goes with the channels of the other factor, of which the product sees the kept ones. So do the
    rows of a square matrix with its columns: no layer may read these.
    """
    given = call.node.args[first : first + 2]
    summed = [name for name in names[0] if name in names[1] and name not in out]
    for this, other in ((0, 1), (1, 0)):
        source = given[this] if len(given) == 2 else None
        if not isinstance(source, fx.Node) or source.name not in run.trail.columns or len(summed) != 1:
            continue
        dim, columns = run.trail.columns[source.name]
        rows = varied_dims(sides[this])
        met = names[other].index(summed[0])
        if len(rows) != 1 or rows == [dim] or varied_dims(sides[other]) != [met]:
            continue
        lines = {dim: columns, rows[0]: channel_labels(run, sides[this], rows[0])}
        read = names[this].index(summed[0])
        if read not in lines:
            continue
        (left,) = lines.keys() - {read}
        run.tie(lines[read], channel_labels(run, sides[other], met))
        if lines[left].numel() == lines[read].numel():
            run.tie(lines[left], lines[read])
        mixes(run, call, sides[other], "zero", first + other)
        run.trail.followed.add((source.name, call.node.name))
        both = [uniform(0, tuple(labels.shape)) for labels in sides]
        both[this] = along(lines[left], tuple(sides[this].shape), left)
        return both
    return None


def pin_unfollowed(run: Propagation) -> None:
    """Keep the columns that something else reads."""
    for node in run.module.graph.nodes:
        for user in node.users if node.name in run.trail.columns else ():
            asked = user.target is getattr and user.args[1] in _QUESTIONS
            if (node.name, user.name) not in run.trail.followed and not asked:
                why = f"columns of a matrix of channels by channels, which {user.name!r} reads"
                run.pin(run.trail.columns[node.name][1], user.name, why)
