"""The console output of a run: stages with their times, notes, progress bars."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from smcp_fx.latency.progress import Lines, MeasuringProgress, progress_line
from smcp_fx.training import Epoch


class Tick(Protocol):
    """Moves a bar to the share of work done."""

    def __call__(self, done: float, loss: float | None = None, /) -> None: ...


class Teller:
    """Prints to a console; ``notes`` go into the report, ``seconds`` holds each stage's time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}
        self._bar: tuple[Progress, TaskID, str] | None = None  # the bar shown
        self._lines = Lines()

    def say(self, text: str) -> None:
        """Print a line below the stage's name."""
        self.console.print(f"  {text}", markup=False)

    def note(self, text: str) -> None:
        """Print a line, and keep it for the report."""
        self.notes.append(text)
        self.say(text)

    def epoch(self, done: Epoch, epochs: float) -> None:
        """Print an epoch's results, unless a bar shows them."""
        if not self.console.is_terminal:
            accuracy = done.values["accuracy"]
            self.say(
                f"epoch {done.epoch} of {math.ceil(epochs)}: loss {done.loss:.4f}, test accuracy {accuracy:.2%}"
            )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print a stage's name, and add up its time."""
        self.console.print(name, markup=False, style="bold")
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    @contextmanager
    def bar(self, name: str) -> Iterator[Tick]:
        """Show a bar; yields a function of (share done, loss if there is one)."""
        with Progress(
            TextColumn("  {task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as progress:
            task = progress.add_task(name, total=None)
            self._bar = progress, task, name

            def tick(done: float, loss: float | None = None) -> None:
                words = name if loss is None else f"{name}, loss {loss:.3f}"
                progress.update(task, completed=done, total=1.0, description=words)

            try:
                yield tick
            finally:
                self._bar = None

    def measuring(self, state: MeasuringProgress) -> None:
        """Show that a row was measured: in the present bar, or in a line each minute."""
        if self._bar is None or not self.console.is_terminal:
            self._lines.show(state)
        else:
            progress, task, name = self._bar
            progress.update(task, description=f"{name}: {progress_line(state)}")
