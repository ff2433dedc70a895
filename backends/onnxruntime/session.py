"""ONNX Runtime sessions, all made the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from smcp_fx.errors import BackendError


def session_options(threads: int = 1, spinning: bool = True, exact: bool = False) -> ort.SessionOptions:
    """Return the options of every session: fixed threads, sequential, all optimisations.

    ``exact``: only optimisations that change no result. (With the others, 1.32 drops the lower bound of a
    ReLU6 whose result becomes signed bytes.)
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if exact else levels.ORT_ENABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    return options


def settings(spinning: bool) -> tuple[tuple[str, str], ...]:
    """Return the `session_options` other than the threads, for the fingerprint."""
    return (
        ("execution", "sequential"),
        ("graph_optimization", "all"),
        ("inter_op_threads", "1"),
        ("spinning", "on" if spinning else "off"),
    )


#: The runtime's execution provider for each device.
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def check_device(device: str) -> None:
    """Raise `BackendError` unless the installed ONNX Runtime runs on ``device`` ("cpu", "cuda")."""
    if device not in PROVIDERS:
        raise BackendError(f"ONNX Runtime is not measured on {device!r} here; use 'cpu' or 'cuda'")
    if PROVIDERS[device] not in ort.get_available_providers():
        raise BackendError(
            f"device {device!r}: the installed ONNX Runtime {ort.__version__} has no {PROVIDERS[device]}, only "
            f"{', '.join(ort.get_available_providers())}. On a machine with an NVIDIA GPU: pip uninstall "
            "onnxruntime, pip install onnxruntime-gpu"
        )


def create_session(
    model: Path | bytes, options: ort.SessionOptions, device: str = "cpu"
) -> ort.InferenceSession:
    """Return a session for a file or a serialised model; `BackendError` if it is refused.

    On CUDA every node must run there: a part that fell back to the CPU would be timed as if it had not.
    """
    source: Any = str(model) if isinstance(model, Path) else model
    if device == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        return ort.InferenceSession(source, options, providers=[PROVIDERS[device]])
    except Exception as error:
        name = str(model) if isinstance(model, Path) else "the model"
        raise BackendError(f"ONNX Runtime {ort.__version__} refuses {name}: {error}") from error


def run_session(session: ort.InferenceSession, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the network's outputs, in order; `BackendError` with the inputs' shapes if the runtime fails."""
    try:
        return [np.asarray(output) for output in session.run(None, dict(feed))]
    except Exception as error:
        shapes = [tuple(array.shape) for array in feed.values()]
        raise BackendError(f"ONNX Runtime failed on inputs of shapes {shapes}: {error}") from error


def bound_run(
    session: ort.InferenceSession, feed: Mapping[str, NDArray[Any]], device: str
) -> Callable[[], None]:
    """Return a function that runs once with inputs and outputs on ``device``, and returns when it is done."""
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, device, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, device)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    binding.synchronize_inputs()
    return run
