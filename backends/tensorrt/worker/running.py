"""A loaded engine: runs on arrays, and is timed by events around a CUDA graph's replay or layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .device import Device
from .inspecting import Layer, parse_layer, parse_layers
from .problems import WorkerError

Array = NDArray[Any]
#: TensorRT's types as numpy's. numpy lacks bfloat16, which travels as the upper half of a float32.
_TYPES: dict[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "INT64": np.int64, "INT32": np.int32,
    "INT8": np.int8, "UINT8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """How an engine is measured.

    ``graph``: replay a CUDA graph instead of enqueueing plainly. ``repeated``: time runs in a row between two
    events, as layers follow each other in a network, for ``repeated_ms``; else single runs. ``spread_limit``:
    interquartile range over median above which samples are taken again, ``attempts`` times.
    """

    graph: bool = True
    repeated: bool = False
    repeated_ms: float = 2.0
    most_repeated: int = 50
    warmup_ms: float = 50.0
    min_repeats: int = 10
    max_repeats: int = 100
    budget_ms: float = 200.0
    spread_limit: float = 0.05
    attempts: int = 3


class LoadedEngine:
    """An engine with its buffers on the device; inputs are random until `run` sets them. Close it."""

    def __init__(self, trt: ModuleType, device: Device, engine: Any, batch: int | None = None) -> None:
        self._trt, self._device, self._engine = trt, device, engine
        self._addresses: dict[str, int] = {}
        self._stopwatches: dict[tuple[bool, int], Callable[[], float]] = {}
        self._graphs: list[Any] = []
        self._context = self._new_context()
        try:
            self._allocate(batch)
        except BaseException:  # out of memory halfway: free the buffers for the next engine
            self.close()
            raise

    def _allocate(self, batch: int | None) -> None:
        trt, engine = self._trt, self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]
        for name in self.inputs:
            shape = tuple(engine.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                usual = tuple(engine.get_tensor_profile_shape(name, 0)[1])
                shape = usual if batch is None else (batch, *usual[1:])
            self._set_shape(self._context, name, shape)
        generator = np.random.default_rng(0)
        for name in names:
            self._addresses[name] = int(self._device("cudaMalloc", max(self._bytes(name), 256)))
            self._context.set_tensor_address(name, self._addresses[name])
            if name in self.inputs:
                self._fill(name, generator)

    def describe(self) -> dict[str, Any]:
        """Return the names, shapes and types of inputs and outputs."""
        return {
            side: [{"name": n, "shape": list(self._shape(n)), "type": self._type(n)} for n in names]
            for side, names in (("inputs", self.inputs), ("outputs", self.outputs))
        }

    def layers(self) -> list[Layer]:
        """Return the layers as the engine inspector reports them."""
        inspector, as_json = self._engine.create_engine_inspector(), self._trt.LayerInformationFormat.JSON
        inspector.execution_context = self._context
        found = parse_layers(inspector.get_engine_information(as_json))
        if found is None:  # one layer's text is not valid JSON: lose only that one
            count = self._engine.num_layers
            found = [parse_layer(inspector.get_layer_information(index, as_json)) for index in range(count)]
        return found

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the outputs for these inputs, in order; floats of other widths are converted."""
        if len(arrays) != len(self.inputs):
            raise WorkerError(f"the engine has {len(self.inputs)} inputs, {len(arrays)} were given")
        for name, array in zip(self.inputs, arrays, strict=True):
            if tuple(array.shape) != self._shape(name):
                raise WorkerError(
                    f"input {name!r} has shape {self._shape(name)}, {tuple(array.shape)} was given"
                )
            self._device.upload(self._addresses[name], _encode(array, self._type(name)))
        self._enqueue(self._context)
        self._device.wait()
        found = []
        for name in self.outputs:
            array = np.empty(self._shape(name), _TYPES[self._type(name)])
            self._device.download(array, self._addresses[name])
            found.append(_decode(array, self._type(name)))
        return found

    def sample(self, repeats: int = 1, graph: bool = True, inner: int = 1) -> list[float]:
        """Return the ms of ``repeats`` samples, each the mean of ``inner`` runs in a row."""
        once = self._stopwatch(graph, inner)
        return [once() / inner for _ in range(repeats)]

    def measure(self, timing: Timing) -> dict[str, Any]:
        """Return median and quartiles in ms, whether they are steady, and how they were measured."""
        inner = 1
        if timing.repeated:
            alone = float(np.median(self.sample(5, timing.graph)))
            inner = int(np.clip(np.ceil(timing.repeated_ms / max(alone, 1e-4)), 1, timing.most_repeated))
        best: dict[str, Any] = {}
        for _ in range(timing.attempts):
            found = self._attempt(timing, inner)
            if not best or found["spread"] < best["spread"]:
                best = found
            if best["stable"]:
                break
        return {**best, "inner": inner, "timing": asdict(timing)}

    def layer_times(self, repeats: int = 20) -> list[tuple[str, float]]:
        """Return (name, median ms) of each layer, in order, as the profiler reports them in separate runs."""
        profiler = _profiler(self._trt)
        context = self._new_context()
        for name in self.inputs:
            self._set_shape(context, name, self._shape(name))
        for name, address in self._addresses.items():
            context.set_tensor_address(name, address)
        context.profiler = profiler
        runs: list[list[tuple[str, float]]] = []
        for _ in range(repeats + 3):
            profiler.found = []
            self._enqueue(context)
            self._device.wait()
            runs.append(profiler.found)
        names = [name for name, _ in runs[-1]]
        times = np.median([[ms for _, ms in run] for run in runs[3:] if len(run) == len(names)], axis=0)
        return [(name, float(ms)) for name, ms in zip(names, times, strict=True)]

    def close(self) -> None:
        """Free the buffers and graphs."""
        for graph in self._graphs:
            self._device("cudaGraphExecDestroy", graph)
        for address in self._addresses.values():
            self._device("cudaFree", address)
        self._addresses, self._graphs, self._stopwatches = {}, [], {}
        self._context = self._engine = None

    def _attempt(self, timing: Timing, inner: int) -> dict[str, Any]:
        once = self._stopwatch(timing.graph, inner)
        began = time.perf_counter()
        while 1e3 * (time.perf_counter() - began) < timing.warmup_ms:
            once()
        samples, spent = list[float](), 0.0
        while len(samples) < timing.min_repeats or (
            len(samples) < timing.max_repeats and spent < timing.budget_ms
        ):
            ms = once()
            spent += ms
            samples.append(ms / inner)
        q1, median, q3 = (float(q) for q in np.percentile(samples, [25, 50, 75]))
        spread = (q3 - q1) / median if median > 0 else 0.0
        return {
            "median_ms": median, "q1_ms": q1, "q3_ms": q3, "repeats": len(samples), "spread": spread,
            "stable": spread <= timing.spread_limit,
        }  # fmt: skip

    def _stopwatch(self, graph: bool, inner: int) -> Callable[[], float]:
        key = (graph, inner)
        if key not in self._stopwatches:

            def enqueue() -> None:
                for _ in range(inner):
                    self._enqueue(self._context)

            enqueue()  # the first run allocates, which a capture forbids
            self._device.wait()
            run = enqueue
            if graph:
                captured = self._device.capture(enqueue)
                self._graphs.append(captured)

                def run() -> None:
                    self._device("cudaGraphLaunch", captured, self._device.stream)

            self._stopwatches[key] = self._device.stopwatch(run)
        return self._stopwatches[key]

    def _new_context(self) -> Any:
        context = self._engine.create_execution_context()
        if context is None:
            raise WorkerError(
                "TensorRT gives no execution context for this engine: the GPU's memory may be full"
            )
        return context

    def _enqueue(self, context: Any) -> None:
        if context is None:
            raise WorkerError("this engine is closed")
        if not context.execute_async_v3(self._device.stream_handle):
            raise WorkerError("TensorRT could not run the engine: execute_async_v3 returned false")

    def _set_shape(self, context: Any, name: str, shape: tuple[int, ...]) -> None:
        if not context.set_input_shape(name, shape):
            raise WorkerError(
                f"the engine takes no input {name!r} of shape {shape}: it was built for another batch"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._context.get_tensor_shape(name))

    def _type(self, name: str) -> str:
        return str(self._engine.get_tensor_dtype(name).name)

    def _bytes(self, name: str) -> int:
        """Return a buffer's size: in a vectorised layout the channels are rounded up to whole vectors."""
        shape, engine = list(self._shape(name)), self._engine
        axis = int(engine.get_tensor_vectorized_dim(name))
        if axis >= 0:
            per_vector: int = max(int(engine.get_tensor_components_per_element(name)), 1)
            shape[axis] = -(-shape[axis] // per_vector) * per_vector
        return int(np.prod(shape, dtype=np.int64)) * int(np.dtype(_TYPES[self._type(name)]).itemsize)

    def _fill(self, name: str, generator: np.random.Generator) -> None:
        kind, size = self._type(name), self._bytes(name)
        values = generator.uniform(0.01, 1.0, 1 << 16).astype(np.float32)
        if kind not in ("FLOAT", "HALF", "BF16"):
            values = np.zeros(1 << 16, np.float32)
        self._device.fill(self._addresses[name], _encode(values, kind), size)


def _encode(array: Array, kind: str) -> Array:
    if kind == "BF16":  # round to nearest even
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype(_TYPES[kind])


def _decode(array: Array, kind: str) -> Array:
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if kind == "HALF" else array


def _profiler(trt: ModuleType) -> Any:
    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.found: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.found.append((layer_name, float(ms)))

    return Profiler()
