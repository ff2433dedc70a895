"""Closed-form repair of a sliced network: what is left is fitted to what the whole network computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from smcp_fx.calibration.batches import Batch, device_of, each_batch
from smcp_fx.calibration.frontier import Frontier
from smcp_fx.calibration.side_by_side import RepairReport, SideBySide
from smcp_fx.errors import InputError
from smcp_fx.outcomes import in_mode
from smcp_fx.passes.sliced_labels import Sliced
from smcp_fx.prepare import converted_full, sliced
from smcp_fx.prepared import PreparedModel
from smcp_fx.tracing.wrapping import unwrapped

#: What the values of all batches may take at one time, in bytes: later batches are left out.
_MEMORY = 2 * 2**30


def repair(smaller: nn.Module, prepared: nn.Module, batches: Any) -> RepairReport:
    """Fit what is left of a sliced network to what the whole one computed, in place; no labels, no gradients.

    ``smaller`` is what `convert` made of ``prepared`` as it is now. The whole network is the prepared one with every
    channel on. A layer whose outputs do not come nearer to the whole network's on images held out stays as it was.

    Args:
        smaller: the converted model; it stays a plain one, and keeps its types and modes.
        prepared: what it was converted from.
        batches: as for `recalibrate`; a few hundred images do. As many as 2 GiB of activations allow are used.

    Raises `InputError`, and leaves ``smaller`` as it was, for batches that do not fit or are none, for activations
    that are not finite, and for models that do not belong together.
    """
    prepared = unwrapped(prepared)
    if not isinstance(prepared, PreparedModel):
        raise InputError(f"repair needs what prepare returned, not {type(prepared).__name__}")
    expected = {name: tuple(t.shape) for name, t in sliced(prepared).state_dict().items()}
    if {name: tuple(t.shape) for name, t in smaller.state_dict().items()} != expected:
        raise InputError(
            "smaller is not what convert makes of this prepared model with the masks it has now: convert it again"
        )
    if not isinstance(smaller, fx.GraphModule):
        raise InputError("repair works on models that were traced as a whole; this one was traced in regions")
    whole = converted_full(prepared)
    assert isinstance(whole, fx.GraphModule)
    keep = prepared.smcp.units_kept().cpu() | ~prepared.channels.free_units
    with torch.no_grad(), in_mode(smaller, False), in_mode(whole, False), _unless_it_fails(smaller):
        used = _fitting(smaller, whole, batches)
        return SideBySide(smaller, whole, used, Sliced(prepared.channels, keep)).run()


def _fitting(smaller: fx.GraphModule, whole: fx.GraphModule, batches: Any) -> list[Batch]:
    """The first batches, as many as fit into memory; one at least."""
    found: list[Batch] = []
    device, taken, each = device_of(smaller), 0.0, 0.0
    for batch in each_batch(batches):
        batch = batch.to(device)
        if not found:
            each = sum(Frontier(module, []).peak(batch) for module in (smaller, whole)) / batch.images
        taken += each * batch.images
        if found and taken > _MEMORY:
            break
        found.append(batch)
    return found


@contextmanager
def _unless_it_fails(module: nn.Module) -> Iterator[None]:
    """Parameters and buffers are as they were if what is done meanwhile fails."""
    before = [(tensor, tensor.clone()) for tensor in (*module.parameters(), *module.buffers())]
    try:
        yield
    except BaseException:
        for tensor, value in before:
            tensor.copy_(value)
        raise
