"""New sizes for channels that the graph adds: padding, tensors of one value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.passes.movement_rewrites import Rewriter, numbers


def pad(run: Rewriter, node: fx.Node) -> list[str]:
    """Padding adds as many channels as are kept of those added; by negative amounts it crops."""
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    source = node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(amounts, (tuple, list)):
        return []
    before, after = run.old[source.name], run.old[node.name]
    kept_in, kept_out = run.sliced.axis(before), run.sliced.axis(after)
    found = kept_in or kept_out
    place = 0 if found is None else 2 * (before.dim() - 1 - found[0])
    if found is None or place >= len(amounts):
        return []
    dim, new = found[0], list(amounts)
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
    set_second(node, "pad", tuple(new))
    return [f"{node.name}: pads by {new[place]}, {new[place + 1]} channels"]


def fill(run: Rewriter, node: fx.Node, labels: Tensor) -> str:
    """A tensor of one value has as many channels as are kept."""
    start = int(node.op == "call_method")
    listed: Any = node.args[start] if len(node.args) > start else node.kwargs["size"]
    known = run.old.get(listed.name) if isinstance(listed, fx.Node) else listed
    apart = isinstance(known, int)
    sizes = run.parts_of(listed, node) if isinstance(listed, fx.Node) and not apart else listed
    given: list[Any] = list(node.args[start:]) if apart else list(sizes)
    wanted = run.sliced.slice(labels).shape
    for place, size in enumerate(given):
        known = run.new.get(size.name) if isinstance(size, fx.Node) else size
        if known != wanted[place]:
            new = int(wanted[place])
            if isinstance(size, fx.Node) and isinstance(known, int) and known:
                new = run.originals.in_proportion(size, known, new)  # type: ignore[assignment]
            given[place] = new
    if apart:
        node.args = (*node.args[:start], *given)
    elif len(node.args) > start:
        node.args = (*node.args[:start], tuple(given), *node.args[start + 1 :])
    else:
        node.kwargs = {**node.kwargs, "size": tuple(given)}
    return f"{node.name}: of shape {tuple(wanted)}"


def set_second(node: fx.Node, name: str, value: Any) -> None:
    if len(node.args) > 1:
        node.args = (node.args[0], value, *node.args[2:])
    else:
        node.kwargs = {**node.kwargs, name: value}
