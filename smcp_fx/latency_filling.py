"""Filling a latency table: row by row what sampling wants, and once more what was measured in bad moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smcp_fx.backends.base import Backend, BlockLatency
from smcp_fx.backends.pace import TOLERANCE
from smcp_fx.backends.timing import TimingConfig
from smcp_fx.latency_blocks import Block
from smcp_fx.latency_surface import Point

if TYPE_CHECKING:
    from smcp_fx.latency_table import LatencyTable

#: So often are unsteady rows measured again, as long as that makes more than this share of them steady.
_AGAIN, _WORTH = 3, 0.25


@dataclass(frozen=True)
class Progress:
    """How far a measurement is. ``fraction`` is an estimate: sampling adapts to what it finds."""

    block: str
    measured: int
    fraction: float
    remaining_seconds: float


@dataclass(frozen=True)
class MeasureReport:
    """What `LatencyTable.measure` did.

    ``failed`` and ``unstable``: (block, widths, error or largest spread) of such rows among those that the blocks
    need, whoever measured them. ``repeated``: so many measurements were made of rows that had been unsteady, or of
    a slow moment of the core.
    """

    measured: int
    reused: int
    seconds: float
    failed: tuple[tuple[str, Point, str], ...] = ()
    unstable: tuple[tuple[str, Point, float], ...] = ()
    repeated: int = 0


class Filling:
    """Measures what a table lacks of ``blocks``, each signature once, and keeps every row as it comes."""

    def __init__(
        self,
        table: LatencyTable,
        blocks: Sequence[Block],
        backend: Backend,
        config: TimingConfig | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._table, self._backend, self._config = table, backend, config
        self._blocks = blocks  # by position: some share a signature, and with it rows
        self._fingerprint = backend.fingerprint()
        self._progress = progress
        self._rows: dict[tuple[int, Point], BlockLatency] = {}
        self._pace_ms = 0.0  # of the last measurement
        self._used: dict[int, set[Point]] = {}  # what each block's surface rests on, or is held against
        self._changed = False
        self._failed: dict[tuple[int, Point], str] = {}
        self._left = _RowsLeft(blocks, {b.signature for b, _ in table.wanted(blocks, self._fingerprint)})
        self._start, self._measured, self._repeated = time.monotonic(), 0, 0

    def run(self, reused: int) -> MeasureReport:
        """Measure all, then again what is unsure; that may make sampling want other rows."""
        for index in range(len(self._blocks)):
            self._fill(index)
        for _ in range(_AGAIN):
            before, self._changed = self._repeated, False
            mended = self._repeat_unsteady() + self._repeat_slow()
            for index in range(len(self._blocks)) if self._changed else ():
                self._fill(index)
            if mended <= _WORTH * (self._repeated - before):
                break
        failed = [(self._blocks[index].name, p, error) for (index, p), error in self._failed.items()]
        seconds = time.monotonic() - self._start
        return MeasureReport(
            self._measured, reused, seconds, tuple(failed), tuple(self._unstable()), self._repeated
        )

    def _unstable(self) -> Iterator[tuple[str, Point, float]]:
        """The unsteady rows among those that are used, each once."""
        told = set()
        for index, points in self._used.items():
            block = self._blocks[index]
            rows = self._table.store.measured(block.signature, self._fingerprint)
            for point in sorted(points & rows.keys()):
                if not rows[point].stable and (block.signature, point) not in told:
                    told.add((block.signature, point))
                    yield block.name, point, rows[point].spread

    def _fill(self, index: int) -> None:
        store, block = self._table.store, self._blocks[index]
        while True:
            plan, failures = self._table.plan(block, self._fingerprint)
            wanted = [point for point in plan.wanted if point not in failures]
            if not wanted:
                self._failed |= {(index, point): failures[point] for point in plan.wanted}
                if plan.surface is not None:
                    self._used[index] = {*plan.surface.points, *plan.probes}
                self._left.finished(block)
                return
            self._backend.prepare_blocks(block, wanted)
            point = store.claim(block.name, block.signature, self._fingerprint, wanted)
            if point is None:  # another process is at them
                time.sleep(0.05)
                continue
            try:
                result = self._measure(block, point)
            except BaseException:
                store.release(block.signature, self._fingerprint, [point])
                raise
            store.write(block.signature, self._fingerprint, point, result)
            self._measured += 1
            if isinstance(result, BlockLatency):
                self._rows[index, point] = result
            self._tell(block, self._left.after(block, len(wanted) - 1))

    def _repeat_unsteady(self) -> int:
        """Measure unsteady rows again; return how many are mended."""
        found = [key for key, row in self._rows.items() if not row.stable]
        return sum(self._repeat(*key, left) for key, left in zip(found, _countdown(found), strict=True))

    def _repeat_slow(self) -> int:
        """Measure rows again of moments in which the core was slow, while it is fast; return how many are mended."""
        limit = TOLERANCE * min((row.pace_ms for row in self._rows.values()), default=0.0)
        found = [key for key, row in self._rows.items() if row.pace_ms > limit]
        mended = 0
        for key, left in zip(found, _countdown(found), strict=True):
            mended += self._repeat(*key, left)
            if self._pace_ms > limit:
                break
        return mended

    def _repeat(self, index: int, point: Point, left: int) -> bool:
        """Measure a row again, and keep the surer of the two, state by state; whether that is steady, and news.

        ``left``: so many are to be repeated after it.
        """
        block, before = self._blocks[index], self._rows[index, point]
        found = self._measure(block, point)
        self._repeated += 1
        self._tell(block, left)
        if isinstance(found, str) or (kept := _surer(found, before)) == before:
            return False
        self._rows[index, point], self._changed = kept, True
        self._table.store.write(block.signature, self._fingerprint, point, kept)
        return kept.stable

    def _measure(self, block: Block, point: Point) -> BlockLatency | str:
        try:
            found = self._backend.block_latency(block, point, self._config)
            self._pace_ms = found.pace_ms
            return found
        except Exception as error:  # whatever a runtime throws: this row is marked, the others go on
            return f"{type(error).__name__}: {error}"

    def _tell(self, block: Block, rows: float) -> None:
        if self._progress is None:
            return
        done = self._measured + self._repeated
        per_row = (time.monotonic() - self._start) / done
        self._progress(Progress(block.name, self._measured, done / (done + rows), per_row * rows))


def _countdown(found: Sequence[object]) -> range:
    """How many come after each."""
    return range(len(found) - 1, -1, -1)


def _surer(found: BlockLatency, before: BlockLatency) -> BlockLatency:
    """Return the row of the faster state of the core; of one state of it, hot and cold as they were calmer."""
    if found.pace_ms * TOLERANCE < before.pace_ms:
        return found
    if before.pace_ms * TOLERANCE < found.pace_ms:
        return before
    cold = before.cold.surer(found.cold) if before.cold and found.cold else before.cold
    return BlockLatency(before.hot.surer(found.hot), cold, before.pace_ms)


class _RowsLeft:
    """Estimates how many rows are still to come, from what finished blocks with as many free widths took."""

    def __init__(self, blocks: Sequence[Block], incomplete: set[str]) -> None:
        self._open = {b.signature: len(b.grids) for b in blocks if b.signature in incomplete}
        self._rows = dict.fromkeys(self._open, 0)
        self._usual = {0: [1.0], 1: [12.0], 2: [45.0]}

    def after(self, block: Block, wanted: int) -> float:
        """Count a row of ``block``, of which ``wanted`` are known to be missing; return the rows left."""
        signature = block.signature
        self._rows[signature] = self._rows.get(signature, 0) + 1
        expected = {kind: sum(rows) / len(rows) for kind, rows in self._usual.items()}
        own = max(wanted, expected[len(block.grids)] - self._rows[signature])
        return own + sum(expected[kind] for other, kind in self._open.items() if other != signature)

    def finished(self, block: Block) -> None:
        """Take ``block`` off the list."""
        kind = self._open.pop(block.signature, None)
        if kind is not None and self._rows[block.signature]:
            self._usual[kind].append(float(self._rows[block.signature]))
