"""The weights' own file beside the ONNX file; some models cannot have one."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.compiler.telling import Teller
from smcp_fx.errors import CheckpointError
from smcp_fx.prepared import PreparedModel
from smcp_fx.serialization.saving import check_savable, save

#: The file of the weights, beside the ONNX files.
WEIGHTS = "pruned.safetensors"


class Saver:
    """Saves weights with `smcp_fx.save`. If it refuses the model, one note says why, and the run goes on."""

    def __init__(self, settings: CompileSettings, tell: Teller) -> None:
        self._settings = settings
        self._tell = tell
        self._refused = False

    def try_on(self, full: nn.Module) -> None:
        """Find out before training whether the network can be saved.

        ``full``: the model converted at full size. Removing units changes no class, function or attribute.
        """
        try:
            check_savable(full)
        except CheckpointError as error:
            self._note(error)

    def save(self, smaller: nn.Module, prepared: PreparedModel, path: Path) -> None:
        """Save the network, with its manifest beside it."""
        settings = self._settings
        metadata = {"model": settings.model, "target": settings.target, "kept": prepared.pruner.counts}
        try:
            save(smaller, path, metadata=metadata)
        except CheckpointError as error:
            self._note(error)
            for old in (path, path.with_suffix(".json")):  # left by a run that this one replaces
                old.unlink(missing_ok=True)

    def _note(self, why: CheckpointError) -> None:
        if not self._refused:
            self._refused = True
            self._tell.note(f"the weights get no file of their own ({WEIGHTS}), only the ONNX file: {why}")
