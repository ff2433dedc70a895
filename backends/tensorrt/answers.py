"""The worker's answers as this library's fingerprints and measurements, and how rows are built and timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import helper

from smcp_fx.backends.base import Fingerprint
from smcp_fx.backends.onnx.precision import cast_model
from smcp_fx.backends.tensorrt.quantization import TENSORRT, block_in_bytes
from smcp_fx.backends.tensorrt.worker.building import BuildOptions
from smcp_fx.backends.timing.measuring import Measurement

#: The newest opset that every supported TensorRT reads.
OPSET = 17
#: How a block is timed, part of the fingerprint: rows timed differently are not mixed.
BLOCK_TIMING = "cuda graph of runs in a row"
#: A row among hundreds is quick: the table's sums average the noise out.
ROW_TIMING = {"repeated": True, "warmup_ms": 10.0, "budget_ms": 60.0, "max_repeats": 40}


def fingerprint_of(about: Mapping[str, Any], options: BuildOptions) -> Fingerprint:
    """Return everything that latencies depend on: the worker's device and versions, and build options."""
    settings = {
        "compute_capability": about["compute_capability"],
        "driver": about["driver"],
        "tf32": "on" if options.tf32 else "off",
        "block_timing": BLOCK_TIMING,
        "optimization_level": options.optimization_level,
        "workspace_mib": options.workspace_mib,
        "version_compatible": options.version_compatible or options.lean,
        "tactic_sources_off": " ".join(options.tactic_sources_off) or None,
    }
    if options.precision == "int8":
        settings |= [TENSORRT.setting]
    told = tuple(sorted((name, str(value)) for name, value in settings.items() if value not in (None, False)))
    return Fingerprint("tensorrt", about["device"], "TensorRT", about["tensorrt"], 1, options.precision, told)


def measurement(measured: Mapping[str, Any]) -> Measurement:
    """Return the worker's measurement as a `Measurement`."""
    return Measurement(
        measured["median_ms"],
        measured["q1_ms"],
        measured["q3_ms"],
        int(measured["repeats"]),
        bool(measured["stable"]),
    )


def written_block(model: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    """Return a block's model in the precision of its engine."""
    return block_in_bytes(model) if precision == "int8" else cast_model(model, precision)


def tiny_model() -> onnx.ModelProto:
    """Return a network of one small layer, to measure a run's cost beyond its layers."""
    shape, kind = [1, 8, 1, 1], onnx.TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, kind, shape) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"], name="relu")], "tiny", ends[:1], ends[1:]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
