"""One stage's run: what it works with, how much time is left, and a line of JSON for every figure at once."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from records import Record

from smcp_fx.backends.base import cpu_name
from smcp_fx.latency.progress import MeasuringProgress
from smcp_fx.latency.table import LatencyTable

#: The packages whose versions every line tells.
PACKAGES = ("smcp_fx", "torch", "torchvision", "onnx", "onnxruntime", "numpy")


class NoTimeError(BaseException):
    """Time is up, or nearly. Not an `Exception`, which a table would take for a failed row."""


@dataclass(frozen=True)
class Settings:
    """What all stages share.

    ``state``: folder of the record, the latency table and timing caches. ``device``: "cuda", or "cpu" for a trial.
    ``small``: small networks and images, for a trial. ``worker_python``: command of the Python that has TensorRT.
    ``no_libraries``: TensorRT builds without cuBLAS and cuDNN.
    """

    state: Path
    device: str = "cuda"
    small: bool = False
    worker_python: str | None = None
    no_libraries: bool = False

    @property
    def device_name(self) -> str:
        """The device that figures are of."""
        return torch.cuda.get_device_name() if self.device == "cuda" else cpu_name()

    @property
    def record(self) -> Record:
        """The record as it is now; figures of a trial lie in a file of their own."""
        self.state.mkdir(parents=True, exist_ok=True)
        return Record(self.state / ("trial.jsonl" if self.small else "gpu.jsonl"))

    @property
    def has_tensorrt(self) -> bool:
        """Whether there is a TensorRT to build engines with."""
        command = [*(shlex.split(self.worker_python or "") or [sys.executable]), "-c", "import tensorrt"]
        with suppress(OSError):
            return subprocess.run(command, capture_output=True).returncode == 0
        return False


class Session:
    """A stage at work for at most ``seconds``. Figures that the record holds for this device are not repeated."""

    def __init__(self, stage: str, settings: Settings, seconds: float) -> None:
        self.stage, self.settings = stage, settings
        self.small, self.device = settings.small, settings.device
        self._began, self._seconds = time.monotonic(), seconds
        self._record, self._device_name = settings.record, settings.device_name
        self._versions, self._failed = versions(), list[str]()

    # ---- time -----------------------------------------------------------------------------------------------

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._seconds - (time.monotonic() - self._began)

    def need(self, seconds: float) -> None:
        """Stop where less is left."""
        if self.left() < seconds:
            raise NoTimeError(f"{self.left():.0f} s are left, {seconds:.0f} s are needed")

    def watch(self, state: MeasuringProgress) -> None:
        """Stop between two rows of a table when time is nearly up; every row is kept."""
        self.need(3)

    # ---- figures --------------------------------------------------------------------------------------------

    def known(self, figure: str, stage: str | None = None) -> dict[str, Any] | None:
        """Return a figure of this device that the record holds, of this stage or another."""
        found = self._figures(stage or self.stage, figure=figure)
        return found[-1]["values"] if found else None

    def all_known(self, prefix: str) -> list[dict[str, Any]]:
        """Return this stage's figures of this device whose names begin so, in order."""
        return [line["values"] for line in self._figures(self.stage) if line["figure"].startswith(prefix)]

    def tell(self, figure: str, **values: Any) -> dict[str, Any]:
        """Write a figure down, and print it."""
        values = json.loads(json.dumps(values, default=float))
        self._line("figure", figure=figure, values=values)
        return values

    def figure(self, name: str, work: Callable[[], dict[str, Any]], seconds: float = 0.0) -> dict[str, Any]:
        """Return a figure: the known one, or what ``work`` finds if so many seconds are left."""
        found = self.known(name)
        if found is None:
            self.need(seconds)
            found = self.tell(name, **work())
        return found

    def attempt(
        self, name: str, work: Callable[[], dict[str, Any]], seconds: float = 0.0
    ) -> dict[str, Any] | None:
        """As `figure`, but an error is written down as the figure, and the next figures are measured.

        The stage then ends in an error.
        """
        try:
            return self.figure(name, work, seconds)
        except Exception as error:
            _print(error)
            self._failed.append(name)
            self.tell(name, error=f"{type(error).__name__}: {error}"[:600])
            return None

    def add_version(self, name: str, version: str) -> None:
        """Tell another version with every line from now on."""
        self._versions[name] = version

    def _figures(self, stage: str, **keys: Any) -> list[dict[str, Any]]:
        """Return the lines of figures of this device; those that are errors are measured again."""
        found = self._record.find("figure", stage=stage, device=self._device_name, **keys)
        return [line for line in found if "error" not in line["values"]]

    def _line(self, kind: str, **values: Any) -> None:
        line = self._record.add(
            kind, stage=self.stage, device=self._device_name, versions=self._versions, **values
        )
        shown = {
            key: value for key, value in line.items() if key not in ("kind", "time", "versions", "device")
        }
        print(json.dumps(shown)[:600], flush=True)

    # ---- the whole stage ------------------------------------------------------------------------------------

    def run(self, work: Callable[[Session], None]) -> str:
        """Run the stage; return and write down how it ended: "whole", "cut" or "error"."""
        how, why = "whole", ""
        signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, max(self.left(), 1e-3))
        try:
            work(self)
            if self._failed:
                how, why = "error", ", ".join(self._failed)
        except NoTimeError as error:
            how, why = "cut", str(error)
        except Exception as error:
            _print(error)
            how, why = "error", f"{type(error).__name__}: {error}"[:600]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._line("end", how=how, why=why, seconds=round(time.monotonic() - self._began, 2))
        return how

    # ---- what several stages need ---------------------------------------------------------------------------

    def table(self) -> LatencyTable:
        """Return the one latency table."""
        return LatencyTable(self.settings.state / ("trial.sqlite" if self.small else "table.sqlite"))


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the packages that are installed."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _print(error: Exception) -> None:
    """Print where an error comes from, in a few lines: not much output comes back from a call."""
    print("".join(traceback.format_exception(error, limit=-3, chain=False)), file=sys.stderr, flush=True)


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise NoTimeError("time is up")
