"""Networks of less precision than float32: their calibration, and their comparison with float32 copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from smcp_fx.backends import Backend, Engine, compare
from smcp_fx.compiler.calibrating import calibration_batches
from smcp_fx.compiler.measuring import accuracy_of
from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.compiler.telling import Teller
from smcp_fx.errors import InputError
from smcp_fx.report.schema import PrecisionFacts
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel

#: Images that give the ranges of activations: more widened the ranges only a little. Chosen, not measured.
_RANGE_IMAGES = 128
#: A loss of accuracy above this is traced to layers, and this many layers are named. Chosen, not measured.
_LOSS, _NAMED = 0.01, 5


@dataclass(frozen=True)
class Precision:
    """The precision of a run's files, set by its ``backend``."""

    backend: Backend
    settings: CompileSettings
    tell: Teller

    def calibrate(self, fitted: FittedModel, data: ImageData) -> None:
        """Give the backend training images, if it quantises."""
        if not self.backend.calibrated:
            return
        images, host = min(_RANGE_IMAGES, self.settings.calibration), torch.device("cpu")
        batches = calibration_batches(data, fitted, images, self.settings.seed, host)
        if len(batches[0][0]) > 1:
            raise InputError(
                "--precision int8 takes networks of one input: leave it away, and quantise the pruned file"
            )
        self.backend.calibrate([x.numpy() for (x,), _ in batches])

    def choose_kept(self, full: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
        """Leave the requested number of layers in float: those whose quantisation does the most harm."""
        if not self.settings.int8_keep:
            return ()
        with self.tell.stage("quantising one layer after the other"):
            errors = self.backend.layer_errors(full, inputs)
            kept = tuple(errors)[: self.settings.int8_keep]
            self.tell.say(f"left in float32: {told_errors({name: errors[name] for name in kept})}")
        self.backend.keep_in_float(kept)
        return kept

    def facts(
        self,
        networks: tuple[nn.Module, nn.Module],
        inputs: tuple[Tensor, ...],
        pruned: Engine,
        accuracies: tuple[float, float],
        kept: tuple[str, ...],
        data: ImageData,
        fitted: FittedModel,
    ) -> PrecisionFacts | None:
        """Emit, measure and test the dense and the pruned ``networks`` in float32; None if the run uses it.

        ``pruned``: the emitted engine; ``accuracies``: the accuracies of the emitted files.
        """
        plain, settings = self.backend.full_precision(), self.settings
        if plain is None:
            return None
        with self.tell.stage("the same networks in float32"):
            dense, smaller = (
                plain.compile(network, inputs, file_of(settings.folder, side))
                for network, side in zip(networks, ("dense", "pruned"), strict=True)
            )
            beside, in_float = compare(dense, pruned), compare(dense, smaller)
            before, after = (accuracy_of(engine, data, fitted, settings.batch) for engine in (dense, smaller))
        name = self.backend.fingerprint().precision
        self.tell.say(
            f"pruned: {after:.2%} in float32, {accuracies[1]:.2%} in {name}; latency {beside.fraction:.1%} of the "
            f"dense network's in float32 (in float32 itself {in_float.fraction:.1%})"
        )
        errors: Mapping[str, float] = {}
        if after - accuracies[1] > _LOSS and self.backend.calibrated:
            errors = self.backend.layer_errors(networks[1], inputs)
            worst = {layer: errors[layer] for layer in list(errors)[:_NAMED]}
            lost, more = 100 * (after - accuracies[1]), settings.int8_keep + _NAMED
            self.tell.note(
                f"{name} costs {lost:.1f} points of accuracy. These layers change the outputs most if they alone are "
                f"quantised: {told_errors(worst)}. --int8-keep {more} leaves as many in float32"
            )
        return PrecisionFacts(
            name=name,
            dense_accuracy=before,
            pruned_accuracy=after,
            dense_ms=beside.dense.median_ms,
            fraction=beside.fraction,
            pruned_fraction=in_float.fraction,
            kept=kept,
            errors=errors,
        )


def file_of(folder: Path, side: str) -> Path:
    """Return the float32 file beside an emitted one."""
    return folder / f"{side}.float.onnx"


def told_errors(errors: Mapping[str, float]) -> str:
    """Return layers with their errors, as text."""
    return ", ".join(f"{name} ({error:.1%})" for name, error in errors.items())
