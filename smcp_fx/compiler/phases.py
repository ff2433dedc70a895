"""The training phases of a run: the dense network, the network that learns masks, the repaired network."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from smcp_fx.calibration import recalibrate
from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.compiler.telling import Teller
from smcp_fx.compiler.training import checkpoint_of, is_guessing, training_loop
from smcp_fx.prepare import PreparedModel
from smcp_fx.pruning.solve import Solve
from smcp_fx.training import Epoch, Teacher, TrainingLoop
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel

#: Training images that batch norms' statistics are estimated from. Chosen, not measured.
_STATISTICS_IMAGES = 4096
#: Running averages of at least this momentum, PyTorch's default, follow settling weights: estimates from
#: 2,048 images were no better (docs: experiments.md).
_QUICK = 0.1
#: Share of the dense training's learning rate that a pruned network peaks at. Chosen: at small budgets a third of the
#: dense rate was best, at larger ones all of it (docs: experiments.md).
_FINE = 2 / 3


class Phases:
    """Trains a run's networks on its data. ``dense_accuracy`` is 1 until it is known."""

    def __init__(
        self,
        settings: CompileSettings,
        fitted: FittedModel,
        data: ImageData,
        tell: Teller,
        dense_accuracy: float,
    ) -> None:
        self.settings, self.fitted, self.data, self.tell = settings, fitted, data, tell
        self.dense_accuracy = dense_accuracy

    @property
    def trains_dense(self) -> bool:
        """Whether this run trains the dense network."""
        return not self.fitted.trained and self.settings.dense_epochs > 0

    def dense(self) -> list[Epoch]:
        """Train the dense network if it starts without weights."""
        settings = self.settings
        if not self.trains_dense:
            return []
        loop = training_loop(
            self.fitted.model, self.fitted, self.data, settings, "dense",
            epochs=settings.dense_epochs, lr=settings.rate, seed=settings.seed,
        )  # fmt: skip
        if settings.resume:
            loop.load()
        with self.tell.stage("training the dense model"), self.tell.bar("training the dense model") as tick:
            loop.run(stepped=tick, finished=lambda e: self.tell.epoch(e, settings.dense_epochs))
        self.dense_accuracy = loop.results[-1].values["accuracy"]
        self.tell.say(f"dense test accuracy {self.dense_accuracy:.2%}")
        return loop.results

    def masks(
        self, prepared: PreparedModel, solved: Callable[[Solve], None], resumed: Callable[[int], None]
    ) -> list[Epoch]:
        """Train a prepared network whose masks are learnt; ``resumed`` is called with the step it goes on from."""
        prepared.pruner.check_target()
        loop = self._pruned(prepared, "pruning")
        if self.settings.resume and loop.load():
            resumed(loop.step)
        return self._run(loop, "pruning while training", solved)

    def tune(self, smaller: nn.Module) -> list[Epoch]:
        """Train a network that was pruned and repaired."""
        loop = self._pruned(smaller, "tuning")
        if not (self.settings.resume and loop.load()):
            loop.save()
        return self._run(loop, "fine-tuning")

    @property
    def tuning(self) -> bool:
        """Whether there is a checkpoint of the repaired network to continue from."""
        return checkpoint_of(self.settings, "tuning").exists()

    def recalibrate(self, smaller: nn.Module) -> None:
        """Re-estimate batch norms if averages of a small momentum (MobileNetV3's) lag behind the weights."""
        norms = [
            part for part in smaller.modules() if isinstance(part, _BatchNorm) and part.track_running_stats
        ]
        if any(norm.momentum is None or norm.momentum < _QUICK for norm in norms):
            batch = self.settings.train_batch
            batches = self.data.epoch(batch, self.settings.seed, self.fitted.channels, self.fitted.size)
            recalibrate(smaller, itertools.islice(batches, max(1, _STATISTICS_IMAGES // batch)))

    def _pruned(self, network: nn.Module, name: str) -> TrainingLoop:
        """Return the training loop of a network that was or is being pruned."""
        settings = self.settings
        return training_loop(
            network, self.fitted, self.data, settings, name, epochs=settings.epochs, lr=settings.rate * _FINE,
            seed=settings.seed + 1, teacher=self._teacher(),
        )  # fmt: skip

    def _teacher(self) -> tuple[Teacher | None, float]:
        """Return the dense network to learn from, and its share; no teacher if it only guesses."""
        trained = self.fitted.trained or self.settings.dense_epochs > 0
        taught = self.settings.taught if self.data.labelled else 1.0
        if not taught or not trained or is_guessing(self.dense_accuracy, self.data.classes):
            return None, 0.0
        kinds = "classes" if self.data.answers is None else self.data.answers.kinds
        return Teacher(self.fitted.model, outputs=kinds), taught

    def _run(
        self, loop: TrainingLoop, name: str, solved: Callable[[Solve], None] | None = None
    ) -> list[Epoch]:
        """Run the loop of a pruned network to the end, and report each epoch."""
        classes = self.data.classes

        def finished(epoch: Epoch) -> None:
            share = epoch.values["accuracy"]
            if is_guessing(share, classes) and not is_guessing(self.dense_accuracy, classes):
                self.tell.say(
                    f"epoch {epoch.epoch}: test accuracy {share:.2%} is that of guessing. Batch norms are estimated "
                    "anew at the end, which may bring it back; if not, try a smaller --lr"
                )
            self.tell.epoch(epoch, loop.total_steps / loop.steps_per_epoch)

        with self.tell.stage(name), self.tell.bar(name) as tick:
            loop.run(stepped=tick, solved=solved, finished=finished)
        return loop.results
