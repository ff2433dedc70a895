"""What the outputs of a run's networks are, and how far those of two networks agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smcp_fx.output_kinds import Reading, named_tensors


@dataclass(frozen=True)
class Answers:
    """Readings of the outputs that count, by name, and the variances over the test samples of those with values."""

    readings: Mapping[str, Reading]
    variances: Mapping[str, float]

    @property
    def kinds(self) -> dict[str, str]:
        """The readings as the library takes them of users."""
        return {
            name: f"classes:{reading.dim}" if reading.kind == "classes" else reading.kind
            for name, reading in self.readings.items()
        }

    @property
    def classes(self) -> int:
        """How many classes the first output has; 0 where it has none."""
        first = next(iter(self.readings.values()))
        return first.shape[first.dim] if first.kind == "classes" else 0

    def agreement(self, outputs: Any, wanted: Mapping[str, Tensor], alone: bool = False) -> float:
        """Return the sum over samples of how far outputs agree, from 0 to 1: the mean over outputs.

        The samples are along the first axis, unless all is of one (``alone``).

        Of classes, and of yes or no, it is the share of equal answers, of values 1 less the squared error relative to
        their variance.
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
