"""When masks are solved for, and for which target: (K_w, K_t, r, K_c) of SMCP section 3.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smcp_fx.config import is_number, is_whole
from smcp_fx.errors import InputError

#: The most epochs, and steps an epoch: floats may not hold the product of larger ones as a count.
_LONGEST = 1e15


@dataclass(frozen=True)
class Schedule:
    """A pruning schedule over ``epochs`` epochs of ``steps_per_epoch`` optimiser steps.

    ``warmup`` (K_w), ``ramp`` (K_t) and ``cooldown`` (K_c) are in epochs and may be fractions; masks are
    solved for every ``every`` (r) steps between warm-up and cooldown. The time left between ramp and
    cooldown refines the masks at the final target.
    """

    epochs: float
    steps_per_epoch: int
    warmup: float
    ramp: float
    cooldown: float
    every: int

    def __post_init__(self) -> None:
        for name in ("warmup", "ramp", "cooldown"):
            _check_finite(name, getattr(self, name))
        _check_length(self.epochs, self.steps_per_epoch)
        _check_whole("every", self.every)
        if self.epochs <= 0 or self.steps_per_epoch < 1 or self.every < 1:
            raise InputError("a schedule needs epochs > 0, steps_per_epoch >= 1 and every >= 1")
        if min(self.warmup, self.ramp, self.cooldown) < 0:
            raise InputError("warmup, ramp and cooldown must not be negative")
        rounding = 1e-9 * self.epochs  # 0.1 + 0.2 + 0.3 > 0.6
        if self.warmup + self.ramp + self.cooldown > self.epochs + rounding:
            raise InputError(
                f"warmup {self.warmup} + ramp {self.ramp} + cooldown {self.cooldown} is longer than the "
                f"{self.epochs} epochs of training; shorten them, or use Schedule.scaled(epochs, steps_per_epoch)"
            )
        if self.last_step <= self.first_step:
            raise InputError("the schedule leaves no step between warm-up and cooldown to prune in")

    @classmethod
    def scaled(cls, epochs: float, steps_per_epoch: int, every: int | None = None) -> Schedule:
        """The paper's ImageNet schedule (10, 30, 45 of 90 epochs) scaled to any length.

        ``every`` defaults to a twenty-fourth of the steps between warm-up and cooldown, at most 80.
        """
        _check_length(epochs, steps_per_epoch)
        share = epochs / 90
        if every is None:
            between = max(1, round(35 * share * steps_per_epoch))
            every = max(1, min(80, between // 24))
        return cls(epochs, steps_per_epoch, 10 * share, 30 * share, 45 * share, every)

    @property
    def total_steps(self) -> int:
        """Optimiser steps in all."""
        return round(self.epochs * self.steps_per_epoch)

    @property
    def first_step(self) -> int:
        """Steps of warm-up."""
        return round(self.warmup * self.steps_per_epoch)

    @property
    def ramp_end(self) -> int:
        """The step from which the target is the final one; at the latest, the step of the last solve."""
        return min(self.first_step + round(self.ramp * self.steps_per_epoch), self.last_step)

    @property
    def last_step(self) -> int:
        """The step of the last solve; masks are fixed afterwards."""
        return self.total_steps - round(self.cooldown * self.steps_per_epoch)

    def due(self, step: int) -> bool:
        """Tell whether masks are solved for after optimiser step ``step`` (counted from 1)."""
        if not self.first_step < step <= self.last_step:
            return False
        return step == self.last_step or (step - self.first_step) % self.every == 0

    def target(self, step: int, full: float, final: float) -> float:
        """The cost aimed at after ``step`` steps: full * (final / full) ** (t / K_t), then ``final``.

        The exponential (FORCE) scheduler; ``full`` and ``final`` in the cost's unit.
        """
        if step >= self.ramp_end or self.ramp_end == self.first_step:
            return final
        if step <= self.first_step:
            return full
        progress = (step - self.first_step) / (self.ramp_end - self.first_step)
        return float(full * (final / full) ** progress)


def _check_finite(name: str, value: Any) -> None:
    if not is_number(value) or not abs(value) <= _LONGEST:
        raise InputError(f"{name} of a schedule must be a finite number, not {value!r}")


def _check_whole(name: str, value: Any) -> None:
    if not is_whole(value):
        raise InputError(f"{name} of a schedule must be a whole number, not {value!r}")


def _check_length(epochs: Any, steps_per_epoch: Any) -> None:
    _check_finite("epochs", epochs)
    _check_whole("steps_per_epoch", steps_per_epoch)
    _check_finite("steps_per_epoch", steps_per_epoch)
