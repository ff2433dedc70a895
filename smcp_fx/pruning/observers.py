"""Reports on pruning while it runs: lines of JSON, TensorBoard, a progress bar, or an observer of your own.

prepared.pruner.observers.append(smcp_fx.observers.JsonLines("pruning.jsonl"))
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smcp_fx.errors import InputError
from smcp_fx.pruning import ranks

if TYPE_CHECKING:
    from smcp_fx.pruning.solve import Solve


class Observer:
    """Is notified of every optimiser step and every solve; subclasses override the methods they need.

    On several ranks, each one has its own observers; the classes below write only on rank 0.
    """

    def stepped(self, step: int, total: int | None) -> None:
        """Optimiser step ``step`` of ``total`` (None without a schedule) was counted."""

    def solved(self, solve: Solve) -> None:
        """Masks were solved for."""


class JsonLines(Observer):
    """Appends a line of JSON per solve to a file; complete lines survive a killed run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            open(self.path, "a").close()  # fail now if it is a folder or not writable
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error}; give another path") from error

    def solved(self, solve: Solve) -> None:
        """Write the line, with the time of day in seconds since 1970."""
        if ranks.rank() != 0:
            return
        record = {"time": time.time(), **dataclasses.asdict(solve)}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record)) + "\n")


class TensorBoard(Observer):
    """Writes `Solve.metrics` to TensorBoard event files; needs tensorboard."""

    def __init__(self, folder: Path | str, prefix: str = "pruning") -> None:
        try:
            board: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise InputError(
                f"TensorBoard is not installed ({error}): pip install tensorboard, or use smcp_fx.observers.JsonLines"
            ) from error
        self.prefix = prefix
        self.writer: Any = board.SummaryWriter(str(folder)) if ranks.rank() == 0 else None

    def solved(self, solve: Solve) -> None:
        """Write every number, and flush them."""
        if self.writer is None:
            return
        for name, value in solve.metrics().items():
            self.writer.add_scalar(f"{self.prefix}/{name}", value, solve.step)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()


class ProgressBar(Observer):
    """A bar on the terminal: steps of the schedule, with the last solve's target and cost."""

    def __init__(self, console: Any = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("warm-up", total=None)

    def stepped(self, step: int, total: int | None) -> None:
        """Move the bar; it ends with the schedule."""
        if ranks.rank() != 0:
            return
        self._bar.start()
        self._bar.update(self._task, completed=step, total=total)
        if total is not None and step >= total:
            self._bar.stop()

    def solved(self, solve: Solve) -> None:
        """Show the last solve."""
        text = f"cost {solve.cost:.4g} of {solve.target:.4g}, {solve.importance_kept:.1%} of the importance"
        self._bar.update(self._task, description=text)

    def close(self) -> None:
        """Release the terminal if training ends early."""
        self._bar.stop()


def _finite(value: Any) -> Any:
    """Turn infinities and NaN into null: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
