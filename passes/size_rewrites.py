"""Rewrite sizes that operations hold or compute themselves: padding, constant tensors, attention's scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.passes.movement_rewrites import Rewriter, numbers


def pad(run: Rewriter, node: fx.Node) -> list[str]:
    """Count only the kept channels among those that padding adds, or crops by a negative amount."""
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    source = node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(amounts, (tuple, list)):
        return []
    before, after = run.old[source.name], run.old[node.name]
    kept_in, kept_out = run.sliced.axis(before), run.sliced.axis(after)
    cut = kept_in or kept_out
    place = 0 if cut is None else 2 * (before.dim() - 1 - cut[0])
    if cut is None or place >= len(amounts):
        return []
    dim, new = cut[0], list(amounts)
    ins = torch.arange(before.shape[dim]) if kept_in is None else kept_in[1]
    outs = torch.arange(after.shape[dim]) if kept_out is None else kept_out[1]
    first, last = numbers(run, (amounts[place], amounts[place + 1]))
    if first:
        new[place] = int((outs < first).sum()) if first > 0 else -int((ins < -first).sum())
    if last > 0:
        new[place + 1] = int((outs >= after.shape[dim] - last).sum())
    elif last < 0:
        new[place + 1] = -int((ins >= before.shape[dim] + last).sum())
    if new == list(amounts):
        return []
    set_argument(node, 1, "pad", tuple(new))
    return [f"{node.name}: pads by {new[place]}, {new[place + 1]} channels"]


def keep_scale(run: Rewriter, node: fx.Node) -> list[str]:
    """Keep attention's scale at that of its original query width."""
    query: Any = node.args[0] if node.args else node.kwargs["query"]
    before, after = (labels[query.name].shape[-1] for labels in (run.old, run.new))
    if before == after or node.kwargs.get("scale") is not None:
        return []
    node.kwargs = {**node.kwargs, "scale": before**-0.5}
    return [f"{node.name}: scaled as with {before} channels"]


def fill(run: Rewriter, node: fx.Node, labels: Tensor) -> str:
    """Give a tensor of one value as many channels as are kept."""
    start = int(node.op == "call_method")
    listed: Any = node.args[start] if len(node.args) > start else node.kwargs["size"]
    first = run.old.get(listed.name) if isinstance(listed, fx.Node) else listed
    apart = isinstance(first, int)
    sizes = run.parts_of(listed, node) if isinstance(listed, fx.Node) and not apart else listed
    written: list[Any] = list(node.args[start:]) if apart else list(sizes)
    wanted = run.sliced.slice(labels).shape
    for place, size in enumerate(written):
        first = run.new.get(size.name) if isinstance(size, fx.Node) else size
        if first != wanted[place]:
            new = int(wanted[place])
            if isinstance(size, fx.Node) and isinstance(first, int) and first:
                new = run.originals.in_proportion(size, first, new)  # type: ignore[assignment]
            written[place] = new
    if apart:
        node.args = (*node.args[:start], *written)
    elif len(node.args) > start:
        node.args = (*node.args[:start], tuple(written), *node.args[start + 1 :])
    else:
        node.kwargs = {**node.kwargs, "size": tuple(written)}
    return f"{node.name}: of shape {tuple(wanted)}"


def set_argument(node: fx.Node, position: int, name: str, value: Any) -> None:
    """Replace an argument of the call, by position if it was given so, else by name."""
    if len(node.args) > position:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
