"""ONNX Runtime sessions, all made the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort

from smcp_fx.errors import BackendError


def session_options(threads: int = 1, spinning: bool = True) -> ort.SessionOptions:
    """Return the options every session is made with: fixed threads, sequential, all optimisations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    return options


def settings(spinning: bool) -> tuple[tuple[str, str], ...]:
    """Return, for the fingerprint, what `session_options` fixes beside the threads."""
    return (
        ("execution", "sequential"),
        ("graph_optimization", "all"),
        ("inter_op_threads", "1"),
        ("spinning", "on" if spinning else "off"),
    )


def create_session(model: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Return a CPU session for a file or a serialised model; `BackendError` when it is refused."""
    source: Any = str(model) if isinstance(model, Path) else model
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        what = str(model) if isinstance(model, Path) else "the model"
        raise BackendError(f"ONNX Runtime {ort.__version__} refuses {what}: {error}") from error
