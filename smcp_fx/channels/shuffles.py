"""Channel shuffles: chains of movements that only permute channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.channels.execution import moved, positions_along
from smcp_fx.channels.labels import compact, line_along, varied_dims
from smcp_fx.channels.propagation import Propagation
from smcp_fx.channels.trail import Call, Shuffle
from smcp_fx.tracing.operations import operation_name
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import TensorInfo


def find_shuffle(run: Propagation, call: Call) -> None:
    """Recognise a chain of movements that permutes one axis of its root and leaves the shape as it was.

    The chain is replaced by one ``index_select``, so the tensors inside need not stay rectangular when channels go.
    Ties inside the chain would join all units of a ShuffleNet into one.
    """
    chain: list[fx.Node] = [call.node]
    root = call.node.args[0]
    environment = run.trail.labels
    while isinstance(root, fx.Node) and isinstance(environment.get(root.name), Tensor):
        if root.name in run.trail.virtual:
            return  # a chain must not start inside another
        labels = environment[root.name]
        if len(chain) > 1 and labels.shape == torch.Size(call.shape) and _records(run, root, chain, labels):
            return
        ends_another = root.name in run.trail.shuffles  # it becomes one node, from which this chain may start
        if ends_another or not _moves_only(run, root) or len(root.users) > 1:
            return
        if not isinstance(root.args[0], fx.Node):
            return
        chain.insert(0, root)
        root = root.args[0]


def find_pieces(run: Propagation, call: Call) -> None:
    """Recognise a chain that folds channels into the batch and ends in pieces, which hold channels of its root.

    ``x.reshape(b * c // 2, 2, h * w).permute(1, 0, 2).reshape(2, b, c // 2, h, w)``, of which ``[0]`` and ``[1]`` are
    read (ShuffleNetV2+). Called at the first movement, before channels are tied in the batch.
    """
    chain, root = [call.node], call.node.args[0]
    assert isinstance(root, fx.Node)
    while len(chain[-1].users) == 1 and _moves_only(run, next(iter(chain[-1].users))):
        chain.append(next(iter(chain[-1].users)))
    labels, ends = run.trail.labels[root.name], [*chain[-1].users]
    if len(chain) < 2 or not all(_picks(run, end) for end in ends):
        return
    orders = [order for end in ends if (order := _order(run, [*chain, end], labels)) is not None]
    dims = {dim for dim, _ in orders}
    if len(orders) < len(ends) or dims != set(varied_dims(labels)) or run.sizes.follow_input(root, min(dims)):
        return
    for end, (dim, line) in zip(ends, orders, strict=True):
        run.trail.shuffles[end.name] = Shuffle(root.name, dim, line, tuple(n.name for n in chain))
    run.trail.virtual.update(node.name for node in chain)


def _picks(run: Propagation, node: fx.Node) -> bool:
    return _named(run, node) in ("getitem", "select") and all(type(part) is int for part in node.args[1:])


def _records(run: Propagation, root: fx.Node, chain: list[fx.Node], labels: Tensor) -> bool:
    order = _order(run, chain, labels)
    if order is None or order[0] not in varied_dims(labels) or run.sizes.follow_input(root, order[0]):
        return False  # it shuffles no channels, or a number that follows the input
    run.trail.shuffles[chain[-1].name] = Shuffle(root.name, *order, tuple(n.name for n in chain[:-1]))
    run.trail.virtual.update(node.name for node in chain[:-1])
    return True


def _order(run: Propagation, chain: list[fx.Node], labels: Tensor) -> tuple[int, Tensor] | None:
    """The only dimension of the root along which the chain selects or permutes, and the places that it fetches.

    Also None if the result differs at another size: `[b, h // 4, 4, c]` to `[b, h, c]` to `[b, 4, h // 4, c]`
    restores the tensor for h = 16 only.
    """
    order, root = _order_at(run, chain, run.values, varied_dims(labels)), chain[0].args[0]
    there = run.sizes.other.get(root.name) if isinstance(root, fx.Node) else None
    if order is None or not isinstance(there, TensorInfo) or there.shape == labels.shape:
        return order
    other = _order_at(run, chain, run.sizes.other, [order[0]])
    same = other is not None and other[0] == order[0] and torch.equal(other[1], order[1])
    return order if same else None


def _order_at(
    run: Propagation, chain: list[fx.Node], values: Mapping[str, Any], varied: list[int]
) -> tuple[int, Tensor] | None:
    """As `_order`, at the size of these ``values``; ``varied``: the root's dimensions that hold channels."""
    order: tuple[int, Tensor] | None = None
    shape = values[str(chain[0].args[0])].shape
    for dim, size in enumerate(shape):
        positions = positions_along(shape, dim)
        for node in chain:
            positions = moved(run.module, node, values, positions)
        positions = compact(positions)
        if positions.dim() != len(shape) or any(d != dim for d in varied_dims(positions)):
            return None
        line = line_along(positions, dim)
        if not torch.equal(line, torch.arange(size)):
            if order is not None:
                return None
            order = (dim, line.clone())
    if order is None:  # the movements cancel out
        if len(varied) != 1:
            return None
        order = (varied[0], torch.arange(shape[varied[0]]))
    return order


def _moves_only(run: Propagation, node: fx.Node) -> bool:
    return rearranges(_named(run, node))


def rearranges(name: str | None) -> bool:
    """Does the operation move one tensor and keep every element? A chain of these may be a channel shuffle."""
    return name == "contiguous" or has(name, Trait.RESHAPES | Trait.PERMUTES)


def _named(run: Propagation, node: fx.Node) -> str | None:
    if node.op not in ("call_function", "call_method", "call_module"):
        return None
    module = run.module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return operation_name(node, module)
