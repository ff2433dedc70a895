"""The base of backends that quantise for INT8 themselves: calibration, layers kept in float, layer errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import onnx
from torch import Tensor, nn

from smcp_fx.backends.base import Array, Backend
from smcp_fx.backends.onnx.export import export_model_proto
from smcp_fx.backends.onnx.scheme import PROCESSOR, Scheme
from smcp_fx.errors import BackendError, InputError


class CalibratedBackend(Backend):
    """A backend that quantises models by its ``scheme`` for its runtime, if ``precision`` is "int8".

    ``calibration``: batches of the network's input. ``opset``: the exports'; None for the default.
    """

    scheme: ClassVar[Scheme] = PROCESSOR

    def __init__(self, precision: str, calibration: Sequence[Array], opset: int | None = None) -> None:
        self.precision, self.opset = precision, opset
        self._kept = frozenset[str]()
        self.calibrate(calibration)

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether it quantises."""
        return self.precision == "int8"

    @property
    def _quantiser(self) -> ModuleType:
        """Return the module that quantises; `BackendError` if ONNX Runtime is missing."""
        from smcp_fx.backends import import_runtime

        return import_runtime(
            "smcp_fx.backends.onnx.quantization", "precision int8", "pip install onnxruntime"
        )

    def calibrate(self, batches: Sequence[Array]) -> None:
        """Take batches of the network's input, from which INT8 files get their ranges."""
        self._batches = tuple(np.ascontiguousarray(batch) for batch in batches)

    def keep_in_float(self, layers: Collection[str]) -> None:
        """Keep these layers in float from now on."""
        self._kept = frozenset(layers)

    def layer_errors(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> dict[str, float]:
        """Quantise one layer after the other, alone, and run the first calibration batch."""
        if not self.calibrated:
            return {}
        ranges = self._ranges(export_model_proto(module, example_inputs, opset=self.opset))
        expected, errors = self._outputs(ranges.model, self._batches[:1]), dict[str, float]()
        for name in self._quantiser.layers_of(ranges.model):
            alone = ranges.quantised(only=[name])
            errors[name] = _error(self._outputs(alone, self._batches[:1]), expected)
        return dict(sorted(errors.items(), key=lambda pair: -pair[1]))

    def _quantised(self, model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        """Return a float model in INT8, and remarks on operations that stay in float."""
        layers = self._quantiser.layers_of(model)
        unknown = sorted(self._kept - {*layers})
        if unknown:
            raise InputError(
                f"{', '.join(unknown)} cannot be kept in float: the layers are {', '.join(layers)}"
            )
        if not set(layers) - self._kept:
            raise BackendError("no layer of this network can be quantised: compile it in float")
        others = self._quantiser.left_in_float(model, self.scheme)
        listed = ", ".join(f"{operation} ({times})" for operation, times in others.items())
        remark = (f"INT8: the quantiser leaves these operations in float32: {listed}",) if listed else ()
        return self._ranges(model).quantised(keep=sorted(self._kept)), remark

    def _outputs(self, model: onnx.ModelProto, inputs: Sequence[Array]) -> list[Array]:
        """Return a model's outputs in ONNX Runtime."""
        from smcp_fx.backends.onnxruntime.session import create_session, run_session, session_options

        session = create_session(model.SerializeToString(), session_options(exact=self.scheme.signed))
        names = [value.name for value in session.get_inputs()]
        return run_session(session, dict(zip(names, inputs, strict=True)))

    def _ranges(self, model: onnx.ModelProto) -> Any:
        return self._quantiser.Ranges(model, self._batches, self.scheme)


def _error(actual: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the root mean square of the differences, as a share of the expected outputs' own."""
    off = sum(float(np.square(a - b).sum()) for a, b in zip(actual, expected, strict=True))
    return float(np.sqrt(off / max(sum(float(np.square(b).sum()) for b in expected), 1e-30)))
