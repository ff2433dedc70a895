"""INT8 by post-training quantisation, with ONNX Runtime's quantiser, in the form that a runtime wants (`Scheme`).

The file keeps float32 inputs and outputs, and pairs of quantising and dequantising nodes (QDQ) that a runtime fuses.
Weights are signed bytes with a scale per channel.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData, create_calibrator
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from smcp_fx.backends.base import Array
from smcp_fx.backends.onnx.scheme import PROCESSOR, Scheme
from smcp_fx.errors import BackendError, InputError

#: The operations that the quantiser has rules for.
OPERATIONS = tuple(sorted({*QDQRegistry, *QLinearOpsRegistry}))
#: The layers, whose weights become bytes.
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: Operations between a layer and its reader, which stay in float if the reader does.
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu")
#: Operations that compute nothing that a byte would change.
_BOOKKEEPING = {
    "Cast", "Concat", "Constant", "ConstantOfShape", "DequantizeLinear", "Dropout", "Expand", "Flatten", "Gather",
    "Identity", "QuantizeLinear", "Range", "Reshape", "Shape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
_CPU_INFO = Path("/proc/cpuinfo")
#: Instructions that multiply and add bytes, by the names that Linux gives them.
_BYTES = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


def without_instructions() -> str:
    """Return a remark if this processor has no instructions for bytes; "" if it has, or does not say."""
    text = _CPU_INFO.read_text() if _CPU_INFO.exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    flags = {
        flag for name, _, value in lines if name.strip() in ("flags", "Features") for flag in value.split()
    }
    if not flags or flags & set(_BYTES):
        return ""
    return (
        "this processor has no instructions that multiply bytes (VNNI, AMX, dot products): INT8 may be no faster "
        "than float32 on it"
    )


class Ranges:
    """The ranges of a network's tensors on calibration data; they belong to one float model."""

    def __init__(self, model: onnx.ModelProto, batches: Sequence[Array], scheme: Scheme = PROCESSOR) -> None:
        if not batches:
            raise InputError(
                "INT8 needs calibration data: give a few batches of your own images (calibration=[...]) when the "
                "backend is made, or call its calibrate()"
            )
        self.model, self._scheme = model, scheme
        with tempfile.TemporaryDirectory(prefix="smcp_fx_int8_") as folder, _quiet():
            file = Path(folder) / "float.onnx"
            onnx.save(model, file)
            try:
                calibrator = create_calibrator(
                    file,
                    list(OPERATIONS),
                    augmented_model_path=str(file.with_name("ranges.onnx")),
                    calibrate_method=CalibrationMethod.MinMax,
                )
                calibrator.collect_data(_Reader(model.graph.input[0], batches))
                self.found = calibrator.compute_data()
            except Exception as error:
                raise BackendError(f"calibration for INT8 failed: {error}") from error

    def quantised(self, keep: Collection[str] = (), only: Collection[str] = ()) -> onnx.ModelProto:
        """Return the model in INT8; ``keep``: nodes left in float; ``only``: the only nodes to quantise."""
        return _quantised(self.model, self.found, self._scheme, keep, only)


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """Feeds batches, recut if the model's own batch is fixed; the last one is filled from the beginning."""

    def __init__(self, taken: onnx.ValueInfoProto, batches: Sequence[Array]) -> None:
        fixed = taken.type.tensor_type.shape.dim[0].dim_value  # 0 if it is open
        if fixed and any(len(batch) != fixed for batch in batches):
            images = np.concatenate(batches)
            count = -(-len(images) // fixed)
            batches = np.split(np.resize(images, (count * fixed, *images.shape[1:])), count)
        self._left = iter([{taken.name: batch} for batch in batches])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._left, None)


def quantised_block(model: onnx.ModelProto, scheme: Scheme = PROCESSOR) -> onnx.ModelProto:
    """Return a block's model in INT8 with made-up ranges, on which times do not depend."""
    inferred = onnx.shape_inference.infer_shapes(model)
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    unit = np.float32(0), np.float32(1)
    ranges = TensorsData(CalibrationMethod.MinMax, {value.name: unit for value in values})
    return _quantised(inferred, ranges, scheme)


class _Quantiser(QDQQuantizer):  # type: ignore[misc]
    """ONNX Runtime's quantiser, but with some tensors left in float."""

    in_float: frozenset[str] = frozenset()

    def _is_tensor_quantizable(self, tensor_name: str) -> bool:
        return tensor_name not in self.in_float and bool(super()._is_tensor_quantizable(tensor_name))


def _read_in_float(graph: onnx.GraphProto, keep: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the tensors that only layers in float read, directly or behind activations, and the latter."""
    written = {name: node for node in graph.node for name in node.output}
    readers: dict[str, set[str]] = {value.name: {""} for value in graph.output}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.name)
    between, tensors = set[str](), set[str]()
    pending = [name for node in graph.node if node.name in keep for name in node.input]
    while pending:
        name = pending.pop()
        writer = written.get(name)
        if writer is None or not readers[name] <= {*keep, *between}:
            continue
        tensors.add(name)
        if writer.op_type in _ACTIVATIONS:
            between.add(writer.name)
            pending.append(writer.input[0])
    return tensors, between


def _quantised(
    model: onnx.ModelProto,
    ranges: Any,
    scheme: Scheme,
    keep: Collection[str] = (),
    only: Collection[str] = (),
) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    activations, options = QuantType.QInt8 if scheme.signed else QuantType.QUInt8, dict(scheme.options)
    if only:  # a layer's readers quantise its output
        options["OpTypesToExcludeOutputQuantization"] = list(LAYERS)
    tensors, between = _read_in_float(copy.graph, keep)
    try:
        with _quiet():
            quantiser = _Quantiser(
                copy, True, False, QuantType.QInt8, activations, ranges, list(only), [*keep, *between],
                list(scheme.operations or OPERATIONS), options,
            )  # fmt: skip
            quantiser.in_float = frozenset(tensors)
            for tensor in () if only else scheme.also(copy.graph):
                quantiser.quantize_activation_tensor(tensor)
            quantiser.quantize_model()
    except Exception as error:
        raise BackendError(f"ONNX Runtime's quantiser fails on this network: {error}") from error
    result: onnx.ModelProto = quantiser.model.model
    scheme.finish(result.graph)
    quantiser.model.topological_sort()  # the quantiser appends its nodes; ONNX requires order
    return result


def left_in_float(model: onnx.ModelProto, scheme: Scheme = PROCESSOR) -> dict[str, int]:
    """Return the operations of a float model that stay in float, and how often each occurs."""
    quantisable = {*(scheme.operations or OPERATIONS), *scheme.fused, *_BOOKKEEPING}
    others = Counter(node.op_type for node in model.graph.node if node.op_type not in quantisable)
    return dict(others.most_common())


def layers_of(model: onnx.ModelProto) -> list[str]:
    """Return the names of the nodes whose weights are quantised, in order."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if node.op_type in LAYERS and len(node.input) > 1 and node.input[1] in weights
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the quantiser's advice off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
