"""Networks compiled by OpenVINO with fixed properties, and the time of each of their nodes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from smcp_fx.backends.base import Array
from smcp_fx.errors import BackendError, InputError

#: By precision, OpenVINO's name of the type to compute in, and the capability that the device must have.
#: Quantised parts of a network run in integers, whatever the type of the others.
PRECISIONS = {
    "fp32": ("f32", "FP32"),
    "bf16": ("bf16", "BF16"),
    "fp16": ("f16", "FP16"),
    "int8": ("f32", "INT8"),
}
#: Performance counts are whole microseconds: each run is rounded down, and so is the mean over all runs.
_ROUNDED_MS = 0.5e-3


@functools.cache
def core() -> ov.Core:
    """Return this process's runtime."""
    return ov.Core()


def version() -> str:
    """Return the installed version, without the name of its build."""
    return str(ov.get_version()).split("-")[0]


def check_precision(precision: str) -> None:
    """Raise `InputError` for an unknown precision, and `BackendError` for one that this processor lacks."""
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r}: OpenVINO computes in {', '.join(PRECISIONS)} here")
    capable = list(core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    if PRECISIONS[precision][1] not in capable:
        raise BackendError(
            f"precision {precision!r}: this processor has no instructions for it, so that OpenVINO {version()} would "
            f"convert to float32 and back; it has {', '.join(capable)}"
        )


def properties(threads: int, precision: str) -> dict[str, Any]:
    """Return the properties of every compiled network: one stream of ``threads``, in one precision."""
    return {
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": PRECISIONS[precision][0],
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # a pinned thread cannot move to a free core
    }


def settings(precision: str) -> tuple[tuple[str, str], ...]:
    """Return the `properties` other than the threads, for the fingerprint."""
    fixed = {name.lower(): str(value).lower() for name, value in properties(1, precision).items()}
    del fixed["inference_num_threads"]
    return tuple(fixed.items())


@dataclass(frozen=True)
class Node:
    """A node as it runs: its name, the layers it computes (none if the runtime inserted it), its readers."""

    name: str
    layers: tuple[str, ...]
    readers: tuple[str, ...]


class Session:
    """A compiled network with its request. ``counts``: with performance counts.

    ``model``: a file, or a serialised ONNX model. ``shapes``: of its inputs, if the file leaves them open.
    `BackendError` if OpenVINO refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        threads: int = 1,
        precision: str = "fp32",
        *,
        shapes: Sequence[Sequence[int]] = (),
        counts: bool = False,
    ) -> None:
        name = str(model) if isinstance(model, Path) else "the model"
        try:
            network = core().read_model(model)
            if shapes:
                network.reshape(dict(zip(network.inputs, map(list, shapes), strict=True)))
            options = {**properties(threads, precision), "PERF_COUNT": counts}
            self._compiled = core().compile_model(network, "CPU", options)
            self._request = self._compiled.create_infer_request()
        except Exception as error:
            raise BackendError(f"OpenVINO {version()} refuses {name}: {error}") from error
        self.input_names = [_name(port, f"input {i}") for i, port in enumerate(network.inputs)]
        self.output_names = [_name(port, f"output {i}") for i, port in enumerate(network.outputs)]
        self._held: list[Array] = []  # the request reads these in place
        self._runs = 0

    def feed(self, inputs: Sequence[Array]) -> None:
        """Use these inputs in the following runs."""
        if len(inputs) != len(self.input_names):
            raise InputError(f"the network has {len(self.input_names)} inputs, {len(inputs)} were given")
        self._held = [np.asarray(array, order="C") for array in inputs]
        try:
            for index, array in enumerate(self._held):
                self._request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
        except Exception as error:
            raise BackendError(f"OpenVINO failed on {_shapes(inputs)}: {error}") from error

    @property
    def run(self) -> Callable[[], object]:
        """A function that runs once, in this thread."""

        def once() -> None:
            self._request.infer(share_outputs=True)
            self._runs += 1

        return once

    def outputs(self) -> list[Array]:
        """Run once and return the outputs, in order; `BackendError` with the inputs' shapes if that fails."""
        try:
            self.run()
            tensors = [self._request.get_output_tensor(i) for i in range(len(self.output_names))]
        except Exception as error:
            raise BackendError(f"OpenVINO failed on {_shapes(self._held)}: {error}") from error
        return [np.array(tensor.data) for tensor in tensors]

    def spent(self) -> dict[str, float]:
        """Return the ms that each node took in all runs so far; 0 if it was folded into another node."""
        lost = 2 * _ROUNDED_MS
        return {
            entry.node_name: self._runs * (1e3 * entry.real_time.total_seconds() + lost)
            if str(entry.status).endswith("EXECUTED")
            else 0.0
            for entry in self._request.profiling_info
        }

    def nodes(self) -> list[Node]:
        """Return the nodes as they run, in order."""
        ordered = []
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            layers = tuple(filter(None, _text(info, "originalLayersNames").split(",")))
            readers = tuple(
                port.get_node().get_friendly_name()
                for output in node.outputs()
                for port in output.get_target_inputs()
            )
            place = _text(info, "execOrder")
            ordered.append(
                (int(place) if place.isdigit() else math.inf, Node(node.get_friendly_name(), layers, readers))
            )
        return [node for _, node in sorted(ordered, key=lambda pair: pair[0])]


def _text(info: Mapping[str, Any], name: str) -> str:
    """Return a note that the runtime left on a node."""
    if name not in info:
        return ""
    value = info[name]
    return str(getattr(value, "value", value))


def _name(port: Any, otherwise: str) -> str:
    return str(port.get_any_name()) if port.get_names() else otherwise


def _shapes(arrays: Sequence[Array]) -> str:
    return f"inputs of shapes {[tuple(array.shape) for array in arrays]}"
