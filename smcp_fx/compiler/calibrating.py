"""A run without training: importances from a few images, one solve and repair a target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smcp_fx.calibration import RepairReport, repair
from smcp_fx.compiler.training import accuracy
from smcp_fx.prepare import convert
from smcp_fx.prepared import PreparedModel
from smcp_fx.report.schema import CalibrationFacts, RepairRow, WorthRow
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel

#: Images that go through the network at a time.
_BATCH = 64

Batches = list[tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Repaired:
    """A network without training: test accuracy as it was sliced and as it was repaired, and what the repair did."""

    network: nn.Module
    sliced: float
    repaired: float
    report: RepairReport


def calibration_batches(
    data: ImageData, fitted: FittedModel, images: int, seed: int, device: torch.device
) -> Batches:
    """Return so many training images, drawn by ``seed``, in batches; with their labels where there are any."""
    drawn = data.drawn(images, seed)
    found = drawn.epoch(min(_BATCH, len(drawn.train)), seed, fitted.channels, fitted.size)  # type: ignore[arg-type]
    return [(x.to(device), y.to(device) if data.labelled else None) for x, y in found]


def repaired(prepared: PreparedModel, batches: Batches, fitted: FittedModel, data: ImageData) -> Repaired:
    """Slice the network by its present masks, and repair what is left."""
    smaller = convert(prepared)
    sliced = accuracy(smaller, fitted, data)
    report = repair(smaller, prepared, batches)
    return Repaired(smaller, sliced, accuracy(smaller, fitted, data), report)


def calibration_facts(
    found: Repaired, prepared: PreparedModel, images: int, labelled: bool, dense: float
) -> CalibrationFacts:
    """Return what the report says of it."""
    names = ("path", "before", "after", "repaired", "positions", "inputs", "left")
    return CalibrationFacts(
        images=images,
        labels=labelled,
        dense=dense,
        sliced=found.sliced,
        repaired=found.repaired,
        norms=len(found.report.norms),
        layers=tuple(
            RepairRow(**{name: getattr(layer, name) for name in names}) for layer in found.report.layers
        ),
        worth=_worth(prepared),
    )


def _worth(prepared: PreparedModel) -> tuple[WorthRow, ...]:
    """Return each group's rises of the loss at its permitted counts."""
    pruner = prepared.pruner
    rows = []
    for name, rises in (pruner.rises or {}).items():
        kept = pruner.counts[name]
        counts = tuple(sorted({*pruner.cost.permitted[name], kept}))
        rows.append(WorthRow(name, len(rises) - 1, kept, counts, tuple(float(rises[c]) for c in counts)))
    return tuple(rows)
