"""The base of runtimes for ONNX models on processors: exports, quiet, caches, and INT8 by this library."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from torch import Tensor, nn

from smcp_fx.backends.base import Array
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.calibrated import CalibratedBackend
from smcp_fx.backends.onnx.export import export_model_proto, export_onnx, write_model
from smcp_fx.backends.onnx.quantization import quantised_block, without_instructions
from smcp_fx.backends.timing.fading import fading_half_ms
from smcp_fx.backends.timing.quiet import require_core
from smcp_fx.errors import InputError

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block


class ProcessorBackend(CalibratedBackend):
    """A runtime that loads ONNX models, on a processor with ``threads`` threads.

    If ``precision`` is "int8", models are quantised before the runtime sees them, calibrated on the batches
    of ``calibration``. ``opset``: the exports'; None for the default.
    """

    def __init__(
        self, threads: int, precision: str | None, calibration: Sequence[Array], opset: int | None = None
    ) -> None:
        if threads < 1:
            raise InputError(f"threads = {threads}: at least 1 is needed")
        super().__init__(precision or "fp32", calibration, opset)
        self.threads = threads
        self._models = BlockModels(opset)

    def remarks(self) -> tuple[str, ...]:
        """Warn if this processor has no instructions for bytes."""
        return tuple(filter(None, [without_instructions()])) if self.calibrated else ()

    def try_export(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> None:
        """Export ``module`` as `compile` does, and discard the result."""
        if self.writer is None:
            export_model_proto(module, example_inputs, opset=self.opset)
            return
        with tempfile.TemporaryDirectory() as folder:
            self._written(module, example_inputs, Path(folder) / "tried.onnx")

    def expect_blocks(self, blocks: Sequence[Block]) -> None:
        """Export these blocks together."""
        self._models.expect(blocks)

    def fading_half_ms(self) -> float:
        """Return after how many ms half of the outer cache is replaced; inf if it stays."""
        return fading_half_ms()

    def require_quiet(self) -> None:
        """Raise `MachineBusyError` unless this thread has a core most of the time."""
        require_core()

    def _exported(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...]
    ) -> tuple[bytes, tuple[str, ...]]:
        """Return a model for the examples' batch, quantised for INT8, and remarks on operations in float."""
        model = export_model_proto(module, example_inputs, opset=self.opset, dynamic_batch=False)
        model, remarks = self._quantised(model) if self.calibrated else (model, ())
        return model.SerializeToString(), remarks

    def _written(self, module: nn.Module, example_inputs: tuple[Tensor, ...], path: Path | str) -> Path:
        """Write a checked file, in float."""
        if self.writer is None:
            return export_onnx(module, example_inputs, path, opset=self.opset)
        half = self.precision == "fp32"
        file: Path = self.writer.write(module, example_inputs, Path(path), self.opset, half)
        return file

    def _quantised_file(self, path: Path) -> tuple[str, ...]:
        """Quantise a float file in its place, for INT8; return the remarks."""
        if not self.calibrated:
            return ()
        model, remarks = self._quantised(onnx.load(path))
        write_model(model, path)
        return remarks

    def _for_blocks(self) -> Callable[[onnx.ModelProto], onnx.ModelProto] | None:
        """Return the function that quantises a block with its context; None if nothing is quantised."""
        return quantised_block if self.calibrated else None
