"""Closed-form repair: fits a sliced network to the outputs of the whole one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from smcp_fx.calibration.batches import MEMORY, Batch, device_of, each_batch, entering
from smcp_fx.calibration.progress import Progress
from smcp_fx.calibration.side_by_side import Narrowed, RepairReport, SideBySide
from smcp_fx.errors import InputError
from smcp_fx.interface.wrapping import require_whole
from smcp_fx.outcomes import in_mode
from smcp_fx.passes.sliced_labels import Sliced
from smcp_fx.prepare import sliced_graph, trained_graph
from smcp_fx.prepared import PreparedModel, prepared_of
from smcp_fx.tracing.copying import sharing


def repair(
    smaller: nn.Module, prepared: nn.Module, batches: Any, *, progress: Progress | None = None
) -> RepairReport:
    """Fit a sliced network to the whole one's outputs, in place, without labels or gradients.

    ``smaller`` must be the result of `convert` for ``prepared`` in its present state. It is fitted to the
    network as last trained: with every channel or, after steps under masks (`Pruner.step`), with those masks.
    So a network that was trained under its present masks stays the same, and so does a layer that does not
    improve on held-out images. In a model traced in parts, each region is fitted to its outputs in the whole
    model; the Python between the regions stays.

    Args:
        smaller: the converted model; it stays a plain one, and keeps its types and modes.
        prepared: the model that it was converted from.
        batches: as for `recalibrate`; a few hundred images suffice. At most 2 GiB of activations are held at a time,
            so the first layers see fewer large images than the last.
        progress: called with the share done, 0 to 1, after each layer.

    Raises `InputError`, and leaves ``smaller`` as it was, for batches that do not fit, for fewer than two images, for
    activations that are not finite, and for models that do not belong together.
    """
    prepared = prepared_of("repair", prepared)
    require_whole(smaller, "repair")
    fresh = narrowed(prepared)
    if not _alike(smaller, fresh.module):
        raise InputError(
            "smaller is not what convert makes of this prepared model with the masks it has now: convert it again"
        )
    # A model traced in regions is fitted through their joined graph, on the model's own tensors.
    one = fresh.module is fresh.graph
    graph = smaller if one else sharing(smaller, fresh.graph.graph)
    assert isinstance(graph, fx.GraphModule)
    return fit([replace(fresh, module=smaller, graph=graph)], prepared, batches, progress)[0]


def narrowed(prepared: PreparedModel) -> Narrowed:
    """Return the network that the present masks leave, ready to be fitted."""
    graph, module = sliced_graph(prepared)
    keep = prepared.smcp.units_kept() | ~prepared.channels.free_units
    trained = prepared.smcp.units_kept(prepared.smcp.trained) | ~prepared.channels.free_units
    kept, shared = (Sliced(prepared.channels, units) for units in (keep, keep & trained))
    return Narrowed(module, graph, kept, shared)


def fit(
    networks: Sequence[Narrowed],
    prepared: PreparedModel,
    batches: Any,
    progress: Progress | None = None,
    rows: float = 1.0,
) -> list[RepairReport]:
    """Fit several networks in one pass, each as `repair` does; ``rows``: share of a repair's rows to use."""
    whole, whole_model = trained_graph(prepared)
    modules, joined = [network.module for network in networks], prepared.plan.traced.joined
    with torch.no_grad(), ExitStack() as stack:
        for module in (*modules, whole_model):
            stack.enter_context(in_mode(module, False))
        for module in modules:
            stack.enter_context(_unless_it_fails(module))
        used = [entering(whole_model, joined, one) for one in _fitting(batches, device_of(modules[0]))]
        return SideBySide(networks, whole, used, rows).run(progress)


def _alike(smaller: nn.Module, fresh: nn.Module) -> bool:
    """Whether both are of one kind, with tensors of the same names and shapes."""
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for model in (smaller, fresh)
    ]
    return shapes[0] == shapes[1] and isinstance(smaller, fx.GraphModule) == isinstance(fresh, fx.GraphModule)


def _fitting(batches: Any, device: torch.device) -> list[Batch]:
    """Return the first batches, as many as fit into memory, but at least one."""
    held: list[Batch] = []
    taken = 0
    for batch in each_batch(batches):
        taken += batch.nbytes
        if held and taken > MEMORY:
            break
        held.append(batch.to(device))
    if sum(batch.images for batch in held) < 2:
        raise InputError(
            "repair needs two images or more, to fit layers on some and check them on others: give a few hundred"
        )
    return held


@contextmanager
def _unless_it_fails(module: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers if the code inside fails."""
    before = [(tensor, tensor.clone()) for tensor in (*module.parameters(), *module.buffers())]
    try:
        yield
    except BaseException:
        for tensor, value in before:
            tensor.copy_(value)
        raise
