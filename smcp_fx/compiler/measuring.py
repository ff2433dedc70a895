"""Engines of the dense and the pruned network, and the correction a measured one teaches the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from smcp_fx.backends import Backend, Engine, Measurement, measure_interleaved
from smcp_fx.compiler.data import ImageData
from smcp_fx.compiler.models import FittedModel
from smcp_fx.prepare import PreparedModel, convert
from smcp_fx.pruner import Solve

#: A measured fraction this far from the target is good enough to leave the masks as they are.
CLOSE = 0.01
#: How often a solve is repeated with a better correction before the masks are fixed.
TRIES = 3


@dataclass(frozen=True)
class Comparison:
    """One network measured beside the dense one, in turns: predicted and measured ms."""

    name: str
    predicted_ms: float | None
    dense: Measurement
    pruned: Measurement

    @property
    def fraction(self) -> float:
        """Pruned over dense median."""
        return self.pruned.median_ms / self.dense.median_ms


class Corrector:
    """Measures the network that a solve chose, and corrects the pruner's target before masks are fixed.

    The table's sum and the engine's latency may differ by a factor (fusion across blocks, caches); the
    pruner's ``correction`` is that factor for the fraction pruned / dense.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        dense: Engine,
        inputs: tuple[Tensor, ...],
        fraction: float,
        scratch: Path,
        say: Callable[[str], None],
    ) -> None:
        self.prepared = prepared
        self.backend = backend
        self.dense = dense
        self.inputs = inputs
        self.fraction = fraction
        self.scratch = scratch
        self.say = say
        self.comparisons: list[Comparison] = []

    def after(self, solve: Solve) -> None:
        """Measure after the first solve for the final target, and after the last one until it fits."""
        schedule = self.prepared.pruner.schedule
        assert schedule is not None
        if solve.step == schedule.last_step:
            for _ in range(TRIES):
                if abs(self._measure("last masks") - self.fraction) <= CLOSE:
                    return
                self.prepared.pruner.solve()
        elif solve.step >= schedule.ramp_end and not self.comparisons:
            self._measure("first masks at the target")

    def _measure(self, name: str) -> float:
        pruner = self.prepared.pruner
        module = convert(self.prepared)
        predicted = pruner.cost.cost(pruner.counts)
        with self.backend.compile(module, self.inputs, self.scratch) as engine:
            dense, pruned = measure_interleaved([self.dense, engine])
        self.scratch.unlink(missing_ok=True)
        found = Comparison(name, predicted, dense, pruned)
        self.comparisons.append(found)
        pruner.correction = found.fraction / (predicted / pruner.full_cost)
        self.say(
            f"{name}: measured {found.fraction:.1%} of the dense latency, the table says "
            f"{predicted / pruner.full_cost:.1%}, asked {self.fraction:.1%}"
        )
        return found.fraction


def accuracy_of(engine: Engine, data: ImageData, fitted: FittedModel, batch: int) -> float:
    """Share of the test images that an emitted network gets right."""
    right = total = 0
    for images, labels in data.tests(batch, fitted.channels, fitted.size):
        filled = images
        if len(images) < batch:  # engines with a fixed batch take full batches only
            filled = torch.cat([images, images[:1].expand(batch - len(images), *images.shape[1:])])
        logits = engine.run([filled.numpy()])[0][: len(images)]
        right += int((np.argmax(logits, axis=1) == labels.numpy()).sum())
        total += len(labels)
    return right / total


def layer_counts(prepared: PreparedModel) -> list[dict[str, Any]]:
    """Channels before and after, layer by layer."""
    channels = prepared.channels
    kept = prepared.smcp.units_kept()

    def count(labels: Tensor) -> int:
        units = channels.units.of(labels)
        return int(((units < 0) | kept[units.clamp(min=0)]).sum())

    def group(labels: Tensor) -> str:
        indices = {int(channels.group_of_unit[u]) for u in channels.units.of(labels).tolist() if u >= 0}
        return ", ".join(channels.groups[i].name for i in sorted(indices) if i >= 0)

    return [
        {
            "path": layer.path,
            "kind": layer.kind,
            "in_channels": layer.input_channels.numel(),
            "in_kept": count(layer.input_channels),
            "out_channels": layer.output_channels.numel(),
            "out_kept": count(layer.output_channels),
            "in_group": group(layer.input_channels),
            "out_group": group(layer.output_channels),
        }
        for layer in channels.layers
    ]


def converted_full(prepared: PreparedModel) -> fx.GraphModule:
    """The network as a plain graph with every channel, whatever the masks are now."""
    masks = prepared.masks
    prepared.set_masks({name: torch.ones_like(mask) for name, mask in masks.items()})
    try:
        return convert(prepared)
    finally:
        prepared.set_masks(masks)
