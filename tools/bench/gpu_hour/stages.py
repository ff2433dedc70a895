"""The stages in order, and one call's work: the next stages that fit the time, each in a process of its own."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpu_hour.session import Session, Settings

#: A stage that does not end by itself is ended so many seconds after its time.
_GRACE = 15.0


@dataclass(frozen=True)
class Stage:
    """``work``: module and function. ``least``: seconds without which it is not begun; after ``most`` it is cut."""

    name: str
    work: str
    least: float
    most: float
    tensorrt: bool = False

    def run(self, settings: Settings, seconds: float) -> str:
        """Run it in this process; return how it ended."""
        module, _, function = self.work.partition(":")
        work: Callable[[Session], None] = getattr(importlib.import_module(f"gpu_hour.{module}"), function)
        return Session(self.name, settings, seconds).run(work)


STAGES = (
    Stage("pytorch-resnet50", "pytorch_graphs:resnet50", 60, 420),
    Stage("pytorch-mobilenet_v2", "pytorch_graphs:mobilenet_v2", 60, 420),
    Stage("tensorrt-rows", "tensorrt_rows:rows", 90, 420, tensorrt=True),
    Stage("tensorrt-resnet18", "tensorrt_engines:resnet18", 90, 450, tensorrt=True),
    Stage("tensorrt-resnet50", "tensorrt_engines:resnet50", 120, 450, tensorrt=True),
    Stage("solvers", "solvers:solvers", 30, 180),
    Stage("training", "training_steps:eager", 60, 240),
    Stage("training-compiled", "training_steps:compiled", 120, 420),
    Stage("compress", "compressing:resnet50", 60, 420),
    Stage("int8", "tensorrt_engines:int8", 120, 450, tensorrt=True),
    Stage("engines", "tensorrt_engines:engines", 90, 240, tensorrt=True),
)


def endings(settings: Settings) -> dict[str, str]:
    """Return how each stage ended last on this device, by its name; those that never ran are left out."""
    lines = settings.record.find("end", device=settings.device_name)
    return {line["stage"]: line["how"] for line in lines}


def run_next(settings: Settings, seconds: float, names: Sequence[str] = (), again: bool = False) -> None:
    """Run the stages that have not ended as a whole, in order, as long as they fit into ``seconds``.

    Each runs once a call. ``names``: only these. ``again``: also those that ended in an error.
    """
    began, ended, built = time.monotonic(), endings(settings), settings.has_tensorrt
    for stage in STAGES:
        over = ended.get(stage.name)
        if (names and stage.name not in names) or over == "whole" or (over == "error" and not again):
            continue
        left = seconds - (time.monotonic() - began)
        why = "there is no TensorRT yet" if stage.tensorrt and not built else ""
        if not why and left < (least := 2 * _GRACE if settings.small else stage.least):
            why = f"{left:.0f} s are left, it needs {least:.0f} s"
        if why:
            print(f"-- {stage.name}: not now, {why}", flush=True)
            continue
        print(f"-- {stage.name}: {min(stage.most, left):.0f} s at most", flush=True)
        how = _apart(stage, settings, min(stage.most, left - _GRACE))
        print(f"-- {stage.name}: {how}", flush=True)


def _apart(stage: Stage, settings: Settings, seconds: float) -> str:
    """Run a stage in a process of its own, with all that it starts in one group, and end what does not end."""
    command = [
        sys.executable,
        "-m",
        "gpu_hour",
        *_flags(settings),
        "stage",
        stage.name,
        "--seconds",
        f"{seconds}",
    ]
    process = subprocess.Popen(command, preexec_fn=os.setpgrp)
    how = why = ""
    try:
        code = process.wait(timeout=max(seconds, 0.0) + _GRACE)
        if code:
            how, why = "error", f"exit code {code}"
    except subprocess.TimeoutExpired:
        how, why = "cut", "killed, as it did not end in time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if how:  # or it has written its own end
        name = settings.device_name
        settings.record.add(
            "end", stage=stage.name, device=name, versions={}, how=how, why=why, seconds=seconds
        )
    return why or endings(settings).get(stage.name, "no end")


def _flags(settings: Settings) -> list[str]:
    found = ["--state", str(settings.state), "--device", settings.device]
    found += ["--small"] if settings.small else []
    found += ["--no-library-tactics"] if settings.no_libraries else []
    return found + (["--worker-python", settings.worker_python] if settings.worker_python else [])
