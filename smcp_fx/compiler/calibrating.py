"""The work without training: importances from a few images, then one solve and one repair per target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smcp_fx.calibration import RepairReport, repair
from smcp_fx.calibration.progress import Progress
from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.compiler.training import accuracy
from smcp_fx.errors import CheckpointError
from smcp_fx.prepare import convert
from smcp_fx.prepared import PreparedModel
from smcp_fx.report.schema import CalibrationFacts, RepairRow, WorthRow
from smcp_fx.zoo.data import ImageData, as_tuple
from smcp_fx.zoo.models import FittedModel

#: Images that go through the network at a time. Chosen, not measured.
_BATCH = 64

Batches = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Repaired:
    """A sliced and repaired network, its test accuracy before and after the repair, and the repair's report."""

    network: nn.Module
    sliced: float
    repaired: float
    report: RepairReport


def calibration_batches(
    data: ImageData, fitted: FittedModel, images: int, seed: int, device: torch.device
) -> Batches:
    """Return batches of ``images`` training images, drawn by ``seed``, with their labels if there are any."""
    drawn = data.drawn(images, seed)
    batches = drawn.epoch(min(_BATCH, len(drawn.train)), seed, fitted.channels, fitted.size)  # type: ignore[arg-type]
    return [
        (tuple(value.to(device) for value in as_tuple(x)), y.to(device) if data.labelled else None)
        for x, y in batches
    ]


def repaired(
    prepared: PreparedModel, batches: Batches, fitted: FittedModel, data: ImageData, progress: Progress
) -> Repaired:
    """Slice the network by its present masks, and repair the rest."""
    smaller = convert(prepared)
    sliced = accuracy(smaller, fitted, data)
    report = repair(smaller, prepared, batches, progress=progress)
    return Repaired(smaller, sliced, accuracy(smaller, fitted, data), report)


def calibration_facts(
    outcome: Repaired, prepared: PreparedModel, images: int, labelled: bool, dense: float
) -> CalibrationFacts:
    """Return the report's section on calibration."""
    names = ("path", "before", "after", "repaired", "positions", "inputs", "left")
    return CalibrationFacts(
        images=images,
        labels=labelled,
        dense=dense,
        sliced=outcome.sliced,
        repaired=outcome.repaired,
        norms=len(outcome.report.norms),
        layers=tuple(
            RepairRow(**{name: getattr(layer, name) for name in names}) for layer in outcome.report.layers
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


def save_choice(path: Path, prepared: PreparedModel, facts: CalibrationFacts) -> None:
    """Write the chosen masks, and the report's section on calibration."""
    save_checkpoint(path, prepared, extras={"calibration": asdict(facts)})


def load_choice(path: Path, prepared: PreparedModel) -> CalibrationFacts:
    """Restore a file's masks, and return its report section; raises `CheckpointError` for other files."""
    try:
        facts = dict(load_checkpoint(path, prepared)["calibration"])
        layers = tuple(RepairRow(**row) for row in facts.pop("layers"))
        worth = tuple(WorthRow(**row) for row in facts.pop("worth"))
        return CalibrationFacts(**facts, layers=layers, worth=worth)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or of another version; start without --resume") from error
