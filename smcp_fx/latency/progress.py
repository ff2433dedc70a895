"""Progress of measuring a latency table, shown to the user who waits for it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: The seconds between two lines if there is no terminal.
_LINE_SECONDS = 60.0


@dataclass(frozen=True)
class MeasuringProgress:
    """How far a measurement is; ``fraction`` and ``remaining_seconds`` are estimates, as rows may be repeated."""

    block: str
    measured: int
    fraction: float
    remaining_seconds: float


#: Called after every row.
Watcher = Callable[[MeasuringProgress], None]


@contextlib.contextmanager
def row_watcher(progress: bool | Watcher) -> Iterator[Watcher | None]:
    """Yield the function to call after every row; None if nothing is shown.

    ``progress``: True for a bar on standard error, or a line there each minute if that is not a terminal; False for
    nothing; or a function of the caller's own.
    """
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield None
    elif sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield Lines().show


def duration(seconds: float) -> str:
    """Return seconds as people write them: 45 s, 3 min 05 s."""
    whole = round(seconds)
    return f"{whole} s" if whole < 90 else f"{whole // 60} min {whole % 60:02d} s"


def progress_line(state: MeasuringProgress) -> str:
    """Return the progress in words."""
    return f"{state.measured} rows, about {duration(state.remaining_seconds)} left ({state.block})"


@contextlib.contextmanager
def _bar() -> Iterator[Watcher]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("  latency table"), BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(state: MeasuringProgress) -> None:
            bar.update(task, completed=state.fraction, description=progress_line(state))

        yield show


class Lines:
    """Writes a line each minute; none if the measurement takes less."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, state: MeasuringProgress) -> None:
        """Write a line if the last one was long enough ago."""
        if time.monotonic() - self._last >= _LINE_SECONDS:
            self._last = time.monotonic()
            print(f"measuring the latency table: {progress_line(state)}", file=sys.stderr, flush=True)
