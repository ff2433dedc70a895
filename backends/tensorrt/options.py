"""The options of TensorRT's engines on command lines; flags and help come from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from smcp_fx.backends.tensorrt.worker.building import PRECISIONS, BuildOptions
from smcp_fx.config import option
from smcp_fx.errors import InputError

_MOST_BUILDERS = 64


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How engines are built, and by which processes."""

    worker_python: str | None = option(
        None, "command of the Python that has TensorRT, where it is not this one"
    )
    builders: int = option(1, "processes that build TensorRT's engines in parallel")
    tactic_sources_off: tuple[str, ...] = option(
        (), "libraries that TensorRT's builder must not use: CUBLAS CUBLAS_LT CUDNN"
    )
    version_compatible: bool = option(
        False, "TensorRT engines that later TensorRT versions run, too (from 8.6)"
    )
    lean: bool = option(
        False, "... without the lean runtime in the file: run them with the package tensorrt_lean"
    )

    def __post_init__(self) -> None:
        if self.builders < 1:
            raise InputError(f"--builders must be at least 1, not {self.builders}")
        if self.builders > _MOST_BUILDERS:
            raise InputError(f"--builders must be at most {_MOST_BUILDERS}, not {self.builders}")

    def of_build(self, precision: str | None) -> BuildOptions:
        """Return the options that an engine is built with."""
        return BuildOptions(
            checked_precision(precision),
            version_compatible=self.version_compatible,
            lean=self.lean,
            tactic_sources_off=self.tactic_sources_off,
        )


def checked_precision(precision: str | None) -> str:
    """Return the precision of engines, fp16 by default; `InputError` for one that is not built."""
    if precision not in (None, *PRECISIONS):
        raise InputError(
            f"precision {precision!r}: TensorRT's engines are built here in {', '.join(PRECISIONS)}"
        )
    return precision or "fp16"
