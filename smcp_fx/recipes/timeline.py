"""A recipe laid out on given data and ranks: steps, pruning schedule, learning rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smcp_fx.errors import InputError
from smcp_fx.recipes.recipe import Recipe
from smcp_fx.schedule import Schedule


@dataclass(frozen=True)
class Timeline:
    """A run's ``schedule`` and `rate`. Epochs are the run's: the recipe's epochs times ``fraction``."""

    recipe: Recipe
    images: int
    ranks: int
    fraction: float
    schedule: Schedule

    @classmethod
    def of(cls, recipe: Recipe, images: int, ranks: int, fraction: float) -> Timeline:
        """Lay out a recipe for ``images`` training images on ``ranks`` processes.

        ``fraction`` shrinks everything counted in epochs, and the steps between two solves (at least one). Batch,
        network and number of solves stay. The last, smaller batch of an epoch is dropped.
        """
        if not 0 < fraction <= 1:
            raise InputError(f"--fraction must be in (0, 1], not {fraction}")
        if ranks < 1:
            raise InputError(f"--ranks must be at least 1, not {ranks}")
        training, pruning = recipe.training, recipe.pruning
        steps = images // (training.batch * ranks)
        if not steps:
            raise InputError(
                f"{images} training images are fewer than one batch: {training.batch} on each of {ranks} "
                f"rank{'s' * (ranks > 1)}. Give more images, or a smaller batch (--set training.batch=N)"
            )
        schedule = Schedule(
            training.epochs * fraction,
            steps,
            pruning.warmup * fraction,
            pruning.ramp * fraction,
            pruning.cooldown * fraction,
            max(1, round(pruning.every * fraction)),
        )
        return cls(recipe, images, ranks, fraction, schedule)

    @property
    def total_batch(self) -> int:
        """Images per step, over all ranks."""
        return self.recipe.training.batch * self.ranks

    @property
    def solves(self) -> int:
        """The number of solves."""
        return self.solves_until(self.schedule.total_steps)

    def solves_until(self, step: int) -> int:
        """Return the number of solves up to optimiser step ``step``."""
        first, last = self.schedule.first_step, self.schedule.last_step
        if step <= first:
            return 0
        regular, rest = divmod(last - first, self.schedule.every)
        return regular + bool(rest) if step >= last else (step - first) // self.schedule.every

    @property
    def peak_rate(self) -> float:
        """The learning rate at the end of its warm-up: linear in the total batch."""
        return self.recipe.training.rate * self.total_batch / self.recipe.training.rate_batch

    def rate(self, step: int) -> float:
        """Return the learning rate of the optimiser step after ``step`` steps."""
        training = self.recipe.training
        total, each = self.schedule.total_steps, self.schedule.steps_per_epoch
        warm = round(training.rate_warmup * self.fraction * each)
        if step < warm:
            return self.peak_rate * (step + 1) / warm
        if training.rate_decay == "cosine":
            return self.peak_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))
        rate = self.peak_rate
        for epoch, factor in training.rate_steps:
            if step >= epoch * self.fraction * each:
                rate *= factor
        return rate

    def evaluated(self, step: int) -> bool:
        """Return whether the network is evaluated after ``step`` steps; only at an epoch's end."""
        each, every = self.schedule.steps_per_epoch, self.recipe.training.evaluate_every * self.fraction
        if step % each:
            return False
        epoch = step // each
        return math.floor(epoch / every) > math.floor((epoch - 1) / every)
