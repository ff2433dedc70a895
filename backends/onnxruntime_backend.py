"""ONNX Runtime: engines with pinned threads, and single blocks timed the way they run inside a network."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
from torch import Tensor, nn

from smcp_fx.backends.base import Array, Backend, BlockLatency, Engine, Fingerprint, cpu_name, to_arrays
from smcp_fx.backends.timing import Timer, TimingConfig
from smcp_fx.errors import BackendError, InputError

#: What an engine of this backend is made with, beside the threads; part of the fingerprint.
SETTINGS = (
    ("execution", "sequential"),
    ("graph_optimization", "all"),
    ("inter_op_threads", "1"),
    ("spinning", "off"),
)


def session_options(threads: int = 1) -> ort.SessionOptions:
    """Return the options every session is made with: fixed threads, sequential, all optimisations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def create_session(model: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Return a CPU session for a file or a serialised model; `BackendError` when it is refused."""
    source: Any = str(model) if isinstance(model, Path) else model
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        what = str(model) if isinstance(model, Path) else "the model"
        raise BackendError(f"ONNX Runtime {ort.__version__} refuses {what}: {error}") from error


class OnnxRuntimeEngine(Engine):
    """An ONNX file (or a serialised model) in ONNX Runtime, on the CPU.

    ``example_inputs`` (tensors or arrays) are what it is timed on; without them `latency` needs its inputs.
    """

    def __init__(
        self, model: Path | str | bytes, example_inputs: Sequence[Tensor | Array] = (), threads: int = 1
    ) -> None:
        self._model = model if isinstance(model, bytes) else Path(model)
        if isinstance(self._model, Path) and not self._model.exists():
            raise InputError(f"there is no ONNX file {self._model}")
        self._threads = threads
        self._inputs = [i if isinstance(i, np.ndarray) else to_arrays([i])[0] for i in example_inputs]
        self._session: ort.InferenceSession | None = create_session(self._model, session_options(threads))
        self.input_names = [value.name for value in self._session.get_inputs()]
        self.output_names = [value.name for value in self._session.get_outputs()]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Return the network's outputs, in order."""
        outputs = self._live().run(None, self._feed(inputs))
        return [np.asarray(output) for output in outputs]

    def timer(self, inputs: Sequence[Array] | None = None) -> Timer:
        """Return a function that runs once and returns the ms it took."""
        session, feed = self._live(), self._feed(self._inputs if inputs is None else inputs)

        def once() -> float:
            start = time.perf_counter()
            session.run(None, feed)
            return 1e3 * (time.perf_counter() - start)

        return once

    def layer_latencies(self, repeats: int = 7) -> dict[str, float]:
        """Return the median ms of each node that the runtime executes, in order of execution.

        Names are the runtime's: a fused node carries the name of one of its parts.
        """
        feed = self._feed(self._inputs)
        with Profiler(self._model, self._threads) as profiler:
            for _ in range(2 + repeats):
                profiler.session.run(None, feed)
            runs = profiler.node_times()[2:]
        names = [node.label for node in runs[0]]
        return {
            name: float(np.median([run[position].ms for run in runs])) for position, name in enumerate(names)
        }

    def close(self) -> None:
        """Free the session."""
        self._session = None

    def _live(self) -> ort.InferenceSession:
        if self._session is None:
            raise BackendError("this engine was closed")
        return self._session

    def _feed(self, inputs: Sequence[Array]) -> dict[str, Array]:
        if len(inputs) != len(self.input_names):
            raise InputError(f"the network has {len(self.input_names)} inputs, {len(inputs)} were given")
        return dict(zip(self.input_names, inputs, strict=True))
