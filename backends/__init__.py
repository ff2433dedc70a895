"""Runtimes: everything that runs, measures or emits a network.

`get_backend` is the way in; each runtime is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

from smcp_fx.backends.base import (
    Backend,
    BlockLatency,
    Engine,
    Fingerprint,
    measure_interleaved,
)
from smcp_fx.backends.timing.comparing import CompareConfig, RelativeLatency, compare
from smcp_fx.backends.timing.measuring import Measurement, TimingConfig
from smcp_fx.errors import BackendError, InputError

__all__ = [
    "Backend",
    "BlockLatency",
    "CompareConfig",
    "Engine",
    "Fingerprint",
    "Measurement",
    "RelativeLatency",
    "TimingConfig",
    "backend_names",
    "compare",
    "get_backend",
    "measure_interleaved",
]

#: name: (module, class, how to install what it needs)
_BACKENDS = {
    "onnxruntime": (
        "smcp_fx.backends.onnxruntime.backend",
        "OnnxRuntimeBackend",
        "pip install onnxruntime onnx onnxscript",
    ),
    "tensorrt": (
        "smcp_fx.backends.tensorrt.backend",
        "TensorRTBackend",
        "pip install onnx onnxscript",
    ),
    "torch": ("smcp_fx.backends.pytorch", "TorchBackend", "pip install torch"),
}


#: The most threads that a runtime may be started with, unless the machine has more cores.
_MOST_THREADS = 64


def backend_names() -> tuple[str, ...]:
    """Return the names that `get_backend` knows."""
    return tuple(sorted(_BACKENDS))


def get_backend(name: str, **options: Any) -> Backend:
    """Return the backend ``name`` ("onnxruntime", "tensorrt" or "torch") with its options.

    `BackendError` when the name or an option is unknown or the runtime is not installed.
    """
    if name not in _BACKENDS:
        raise BackendError(f"unknown backend {name!r}; there are: {', '.join(backend_names())}")
    most = max(_MOST_THREADS, os.cpu_count() or 1)
    if isinstance(options.get("threads"), int) and options["threads"] > most:
        raise InputError(
            f"threads = {options['threads']}: at most {most} on this machine of {os.cpu_count()} cores"
        )
    module, attribute, install = _BACKENDS[name]
    factory = getattr(import_runtime(module, f"backend {name!r}", install), attribute)
    try:
        backend: Backend = factory(**options)
    except TypeError as error:
        raise BackendError(
            f"backend {name!r} does not take the options {sorted(options)}: {error}"
        ) from error
    return backend


def import_runtime(module: str, what: str, install: str) -> ModuleType:
    """Import a module of ours; `BackendError` says how to ``install`` a package that it lacks, and for ``what``."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("smcp_fx"):
            raise
        raise BackendError(
            f"{what} needs the package {error.name!r}, which is not installed: {install}"
        ) from error
