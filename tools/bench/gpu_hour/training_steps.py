"""A training step with masks and importances against one without: `training.py` in a process of its own, by kind."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gpu_hour.session import NoTimeError, Session

SCRIPT = Path(__file__).parents[1] / "training.py"


def eager(session: Session) -> None:
    """ResNet-50 at batch 128, eager, in bf16 and fp16."""
    for dtype in ("bf16", "fp16"):
        session.attempt(f"eager, {dtype}", partial(_step, session, dtype), 40)


def compiled(session: Session) -> None:
    """The same compiled."""
    for dtype in ("bf16", "fp16"):
        session.attempt(f"compiled, {dtype}", partial(_step, session, dtype, "--compile"), 120)


def _step(session: Session, dtype: str, *more: str) -> dict[str, Any]:
    sizes = ["resnet50", "--batch", "128", "--rounds", "10"]
    if session.small:
        sizes = ["resnet18", "--batch", "2", "--side", "16", "--rounds", "1", "--warmup", "1"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = [sys.executable, str(SCRIPT), *sizes, "--device", session.device, "--dtype", dtype]
        command += ["--channels-last", "--variants", "plain", "default", "--json", str(file), *more]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(session.left(), 1))
        except subprocess.TimeoutExpired as error:
            raise NoTimeError("a step's measurement was cut") from error
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        found = json.loads(file.read_text(encoding="utf-8"))
    return {key: found[key] for key in ("batch", "variants", "solve_seconds", "solve_share")}
