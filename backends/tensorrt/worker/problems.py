"""How TensorRT and CUDA are found, and the worker's errors when something is missing or does not fit."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

INSTALL = (
    "pip install tensorrt cuda-bindings (full wheels come from NVIDIA's own index: add --extra-index-url "
    "https://pypi.nvidia.com; on a Jetson TensorRT comes with JetPack: apt-get install python3-libnvinfer)"
)


class WorkerError(Exception):
    """Something that the user can fix, explained in one paragraph."""


class WorkerDied(WorkerError):  # noqa: N818
    """The worker's process is gone: killed, crashed, out of memory, or too slow."""


def read_object(file: Path, advice: str) -> dict[str, Any]:
    """Return the object that a JSON file holds; `WorkerError` names a file that holds none, with ``advice``."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half a pair of surrogates cannot be printed
    except RecursionError:
        raise WorkerError(f"{file} is damaged (nested too deep): {advice}") from None
    except (OSError, ValueError) as error:
        raise WorkerError(f"{file} is damaged ({error}): {advice}") from error
    if not isinstance(found, dict):
        raise WorkerError(f"{file} is damaged (it holds no object): {advice}")
    return found


def import_tensorrt(lean: bool = False) -> ModuleType:
    """Return the module tensorrt, or tensorrt_lean, which only runs version-compatible engines."""
    name = "tensorrt_lean" if lean else "tensorrt"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        install = "pip install tensorrt-lean cuda-bindings" if lean else INSTALL
        found = f"cannot be loaded ({error})" if error.name != name else "is not installed"
        raise WorkerError(f"{name} {found} for {sys.executable}: {install}") from error


def import_cuda() -> Any:
    """Return the CUDA runtime's bindings, of cuda-bindings or of older cuda-python packages."""
    for name in ("cuda.bindings.runtime", "cuda.cudart"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise WorkerError(
        f"cuda-bindings is not installed for {sys.executable}: pip install cuda-bindings, of a version not newer "
        "than the driver's CUDA (nvidia-smi tells it; 'cuda-bindings<13' for CUDA 12)"
    )


def cache_folder() -> Path:
    """Return the folder of timing caches: in the user's home, or among temporary files if there is none."""
    try:
        return Path.home() / ".cache" / "smcp_fx"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "smcp_fx"


def major_minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; zeros if it has none."""
    numbers = [int(part) if part.isdecimal() else 0 for part in (*version.split("."), "0")]
    return numbers[0], numbers[1]
