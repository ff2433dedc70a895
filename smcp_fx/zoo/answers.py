"""The kinds of a run's outputs, and the agreement between two networks' outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smcp_fx.output_kinds import Reading, named_tensors


@dataclass(frozen=True)
class Answers:
    """Readings of the outputs that count, by name, and their variances over the test samples."""

    readings: Mapping[str, Reading]
    variances: Mapping[str, float]

    @property
    def kinds(self) -> dict[str, str]:
        """The readings in the form that users give."""
        return {
            name: f"classes:{reading.dim}" if reading.kind == "classes" else reading.kind
            for name, reading in self.readings.items()
        }

    @property
    def classes(self) -> int:
        """The number of classes of the first output; 0 if it has none."""
        first = next(iter(self.readings.values()))
        return first.shape[first.dim] if first.kind == "classes" else 0

    def agreement(self, outputs: Any, wanted: Mapping[str, Tensor], alone: bool = False) -> float:
        """Return the agreement, from 0 to 1 per sample: the mean over outputs, summed over samples.

        Samples lie along the first axis, unless the outputs belong to a single one (``alone``).

        For classes, and for yes or no, it is the share of equal answers; for values, 1 less the squared error
        relative to their variance.
        """
        ours, parts = named_tensors(outputs), []
        for name, reading in self.readings.items():
            a, b = reading.scores(ours[name].cpu()), reading.scores(wanted[name])
            samples = 1 if alone else len(b)
            if reading.kind == "values":
                error = ((a - b) ** 2).reshape(samples, -1).mean(1) / self.variances[name]
                parts.append((1 - error).clamp_min(0))
            else:
                same = a.argmax(-1) == b.argmax(-1) if reading.kind == "classes" else (a > 0) == (b > 0)
                parts.append(same.float().reshape(samples, -1).mean(1))
        return float(torch.stack(parts).mean(0).sum())
