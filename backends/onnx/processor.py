"""What the runtimes share that run ONNX models on processors: exports, quiet, caches, and INT8 by this library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from torch import Tensor, nn

from smcp_fx.backends.base import Array, Backend
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.export import export_model_proto, write_model
from smcp_fx.backends.onnx.quantization import (
    Ranges,
    layers_of,
    left_in_float,
    quantised_block,
    without_instructions,
)
from smcp_fx.backends.timing.fading import fading_half_ms
from smcp_fx.backends.timing.quiet import require_core
from smcp_fx.errors import BackendError, InputError

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block


class ProcessorBackend(Backend):
    """A runtime that loads ONNX models, on a processor with ``threads`` threads.

    Where its ``precision`` is "int8", models are quantised before it sees them, calibrated on the batches of
    ``calibration``. ``opset``: that of the exports; None for the usual one.
    """

    def __init__(
        self, threads: int, precision: str | None, calibration: Sequence[Array], opset: int | None = None
    ) -> None:
        if threads < 1:
            raise InputError(f"threads = {threads}: at least 1 is needed")
        self.threads, self.precision, self.opset = threads, precision or "fp32", opset
        self._models = BlockModels(opset)
        self._kept = frozenset[str]()
        self.calibrate(calibration)

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether it quantises."""
        return self.precision == "int8"

    def remarks(self) -> tuple[str, ...]:
        """Say so where this processor has no instructions for bytes."""
        return tuple(filter(None, [without_instructions()])) if self.calibrated else ()

    def calibrate(self, batches: Sequence[Array]) -> None:
        """Take batches of the network's input, whose ranges INT8 files will have."""
        self._batches = tuple(np.ascontiguousarray(batch) for batch in batches)

    def keep_in_float(self, layers: Collection[str]) -> None:
        """Leave these layers in float from now on."""
        self._kept = frozenset(layers)

    def layer_errors(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> dict[str, float]:
        """Quantise one layer after the other, alone, and run the first calibration batch."""
        from smcp_fx.backends.onnxruntime.session import create_session, run_session, session_options

        if not self.calibrated:
            return {}
        ranges = self._ranges(export_model_proto(module, example_inputs))
        feed = {ranges.model.graph.input[0].name: self._batches[0]}

        def outputs(model: onnx.ModelProto) -> list[Array]:
            return run_session(create_session(model.SerializeToString(), session_options()), feed)

        expected = outputs(ranges.model)
        found = {
            name: _error(outputs(ranges.quantised(only=[name])), expected) for name in layers_of(ranges.model)
        }
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def try_export(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> None:
        """Export ``module`` as `compile` does, and throw the result away."""
        export_model_proto(module, example_inputs, opset=self.opset)

    def expect_blocks(self, blocks: Sequence[Block]) -> None:
        """Export them together."""
        self._models.expect(blocks)

    def fading_half_ms(self) -> float:
        """Return after how many ms half of what the outer cache held is gone; inf where it stays."""
        return fading_half_ms()

    def require_quiet(self) -> None:
        """Raise `MachineBusyError` unless this thread has a core most of the time."""
        require_core()

    def _exported(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...]
    ) -> tuple[bytes, tuple[str, ...]]:
        """Return a model for the examples' batch, quantised for INT8, and remarks on what stays in float."""
        model = export_model_proto(module, example_inputs, opset=self.opset, dynamic_batch=False)
        model, remarks = self._quantised(model) if self.calibrated else (model, ())
        return model.SerializeToString(), remarks

    def _quantised(self, model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        """Return a float model in INT8, and remarks on what stays in float."""
        layers = layers_of(model)
        unknown = sorted(self._kept - {*layers})
        if unknown:
            raise InputError(
                f"{', '.join(unknown)} cannot be kept in float: the layers are {', '.join(layers)}"
            )
        if not set(layers) - self._kept:
            raise BackendError("no layer of this network can be quantised: compile it in float")
        others = left_in_float(model)
        told = ", ".join(f"{operation} ({times})" for operation, times in others.items())
        remark = (f"INT8: the quantiser leaves these operations in float32: {told}",) if told else ()
        return self._ranges(model).quantised(keep=sorted(self._kept)), remark

    def _quantised_file(self, path: Path) -> tuple[str, ...]:
        """Quantise a float file in its place, for INT8; return the remarks."""
        if not self.calibrated:
            return ()
        model, remarks = self._quantised(onnx.load(path))
        write_model(model, path)
        return remarks

    def _for_blocks(self) -> Callable[[onnx.ModelProto], onnx.ModelProto] | None:
        """Return what quantises a block with all that stands around it; None where nothing is quantised."""
        return quantised_block if self.calibrated else None

    def _ranges(self, model: onnx.ModelProto) -> Ranges:
        return Ranges(model, self._batches)


def _error(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the root mean square of the differences, as a share of that of what is expected."""
    off = sum(float(np.square(a - b).sum()) for a, b in zip(found, expected, strict=True))
    return float(np.sqrt(off / max(sum(float(np.square(b).sum()) for b in expected), 1e-30)))
