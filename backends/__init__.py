"""Runtimes: everything that runs, measures or emits a network.

`get_backend` is the entry point; each runtime is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from smcp_fx.backends.base import (
    PRECISIONS,
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
    "PRECISIONS",
    "Backend",
    "BlockLatency",
    "CompareConfig",
    "Engine",
    "Fingerprint",
    "Measurement",
    "RelativeLatency",
    "TimingConfig",
    "backend_names",
    "backend_options",
    "backend_packages",
    "compare",
    "get_backend",
    "measure_interleaved",
]


@dataclass(frozen=True)
class _Entry:
    """A backend's class, the packages that it needs, and the dataclass of its own options, if any."""

    backend: str
    packages: str
    options: str | None = None
    title: str = ""


_HERE = "smcp_fx.backends"
#: All backends. Elsewhere only the command lines check names: `torch` to time it, `tensorrt` for requests.
_BACKENDS = {
    "onnxruntime": _Entry(f"{_HERE}.onnxruntime.backend:OnnxRuntimeBackend", "onnxruntime onnx onnxscript"),
    "openvino": _Entry(f"{_HERE}.openvino.backend:OpenVINOBackend", "openvino onnxruntime onnx onnxscript"),
    "tensorrt": _Entry(
        f"{_HERE}.tensorrt.backend:TensorRTBackend", "onnx onnxscript",
        f"{_HERE}.tensorrt.options:EngineSettings", "TensorRT",
    ),
    "torch": _Entry(f"{_HERE}.pytorch:TorchBackend", "torch"),
}  # fmt: skip

#: The most threads that a runtime may be started with, unless the machine has more cores. Chosen, not measured.
_MOST_THREADS = 64


def backend_names() -> tuple[str, ...]:
    """Return the names that `get_backend` knows."""
    return tuple(sorted(_BACKENDS))


def backend_options() -> dict[str, tuple[str, type]]:
    """Return the dataclasses of options that only one backend has, by its name, each with a title for people."""
    return {name: (entry.title, _loaded(entry.options)) for name, entry in _BACKENDS.items() if entry.options}


def backend_packages() -> tuple[str, ...]:
    """Return the packages that backends may need, for records of versions."""
    return tuple(dict.fromkeys(name for entry in _BACKENDS.values() for name in entry.packages.split()))


def get_backend(name: str, **options: Any) -> Backend:
    """Return the backend of this name (`backend_names`) with its options.

    `BackendError` if the name or an option is unknown or the runtime is not installed.
    """
    if name not in _BACKENDS:
        raise BackendError(f"unknown backend {name!r}; there are: {', '.join(backend_names())}")
    most = max(_MOST_THREADS, os.cpu_count() or 1)
    if isinstance(options.get("threads"), int) and options["threads"] > most:
        raise InputError(
            f"threads = {options['threads']}: at most {most} on this machine of {os.cpu_count()} cores"
        )
    entry = _BACKENDS[name]
    module, _, factory_name = entry.backend.partition(":")
    install = f"pip install {entry.packages}"
    factory = getattr(import_runtime(module, f"backend {name!r}", install), factory_name)
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


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
