"""Filling a latency table: row by row what sampling wants, then again what was measured in bad moments."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from smcp_fx.backends.base import Backend, BlockLatency, Fingerprint
from smcp_fx.backends.timing.measuring import TimingConfig
from smcp_fx.backends.timing.pace import TOLERANCE
from smcp_fx.blocks.sharing import Block, Grids
from smcp_fx.errors import MachineBusyError
from smcp_fx.latency.progress import MeasuringProgress, Watcher
from smcp_fx.latency.sampling import SamplingPlan
from smcp_fx.latency.store import LatencyStore
from smcp_fx.latency.surface import Point

#: Unsteady rows are measured again so many times, while that makes more than this share of them steady. Chosen, not
#: measured.
_AGAIN, _WORTH = 3, 0.25
#: After an unsteady row the machine is asked whether it is quiet, at most every so many seconds. Chosen: an answer
#: takes 0.2 s.
_LOOK_AGAIN_S = 10.0
#: How many times a row is tried if others' work spoils every run of it. Chosen, not measured.
_BUSY_TRIES = 3


@dataclass(frozen=True)
class MeasureReport:
    """What `LatencyTable.measure` did.

    ``failed`` and ``unstable``: rows that the blocks' prices rest on, whoever measured them: (block, widths, the
    error or the largest spread of an unsteady state). ``repeated``: how many measurements were of rows that had been
    unsteady or of a slow moment of the core.
    """

    measured: int
    reused: int
    seconds: float
    failed: tuple[tuple[str, Point, str], ...] = ()
    unstable: tuple[tuple[str, Point, float], ...] = ()
    repeated: int = 0

    def after(self, first: MeasureReport) -> MeasureReport:
        """Return what this measurement and one of the same blocks before it did together."""
        return replace(
            self,
            measured=first.measured + self.measured,
            reused=first.reused,
            seconds=first.seconds + self.seconds,
            repeated=first.repeated + self.repeated,
        )


class FillableTable(Protocol):
    """What filling asks of a latency table: see `LatencyTable` and `LatencyStore`."""

    @property
    def store(self) -> LatencyStore: ...

    def wanted(
        self, blocks: Iterable[Block], fingerprint: Fingerprint
    ) -> Sequence[tuple[Block, tuple[Point, ...]]]: ...

    def plan(
        self, block: Block, fingerprint: Fingerprint, instead: Mapping[Point, BlockLatency] | None = None
    ) -> tuple[SamplingPlan, dict[Point, str]]: ...

    def unsteady(
        self, blocks: Iterable[Block], fingerprint: Fingerprint
    ) -> Sequence[tuple[Block, Point, BlockLatency]]: ...


class Filling:
    """Measures what a table lacks for ``blocks``, and keeps every row as it comes: complete blocks stay complete."""

    def __init__(
        self,
        table: FillableTable,
        blocks: Sequence[Block],
        backend: Backend,
        config: TimingConfig | None,
        progress: Watcher | None,
    ) -> None:
        self._table, self._backend, self._config = table, backend, config
        self._blocks: dict[str, list[Block]] = {}  # by signature: those that share rows
        for block in blocks:
            self._blocks.setdefault(block.signature, []).append(block)
        self._fingerprint = backend.fingerprint()
        self._progress = progress
        self._rows: dict[tuple[str, Point], BlockLatency] = {}  # those that may be measured again
        self._pace_ms = 0.0  # of the last measurement
        self._failed: dict[tuple[str, Grids], list[tuple[str, Point, str]]] = {}
        self.incomplete = [block for block, _ in table.wanted(blocks, self._fingerprint)]
        self._left = _RowsLeft(blocks, {block.signature for block in self.incomplete})
        self._start, self._measured, self._repeated = time.monotonic(), 0, 0
        self._looked = self._start  # at whether the machine is quiet

    def run(self, reused: int, retry_unstable: bool = False) -> MeasureReport:
        """Measure what is missing, then again what is unsure; ``retry_unstable``: rows of earlier calls, too."""
        blocks = [block for alike in self._blocks.values() for block in alike]
        self._backend.expect_blocks(self.incomplete)
        for block in blocks:
            self._fill(block)
        if retry_unstable:
            for block, point, row in self._table.unsteady(blocks, self._fingerprint):
                self._rows.setdefault((block.signature, point), row)
        for _ in range(_AGAIN):
            before = self._repeated
            mended = self._repeat_unsteady() + self._repeat_slow()
            if mended <= _WORTH * (self._repeated - before):
                break
        if self._repeated:  # another process may have replaced rows of the same blocks meanwhile
            for block in blocks:
                self._fill(block)
        failed = tuple(itertools.chain.from_iterable(self._failed.values()))
        unstable = tuple(
            (block.name, point, max(m.spread for m in (row.hot, row.cold) if m and not m.stable))
            for block, point, row in self._table.unsteady(blocks, self._fingerprint)
        )
        seconds = time.monotonic() - self._start
        return MeasureReport(self._measured, reused, seconds, failed, unstable, self._repeated)

    def _fill(self, block: Block, instead: Mapping[Point, BlockLatency] | None = None) -> None:
        """Measure what the block's price lacks, as if ``instead`` stood in the file."""
        store = self._table.store
        while True:
            plan, failures = self._table.plan(block, self._fingerprint, instead)
            wanted = [point for point in plan.wanted if point not in failures]
            if not wanted:
                failed = [(block.name, point, failures[point]) for point in plan.wanted]
                self._failed[block.signature, block.grids] = failed
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
            store.write(block.signature, self._fingerprint, {point: result})
            self._measured += 1
            if isinstance(result, BlockLatency):
                self._rows[block.signature, point] = result
            self._tell(block, self._left.after(block, len(wanted) - 1))

    def _repeat_unsteady(self) -> int:
        """Measure unsteady rows again; return how many are mended."""
        return self._repeat([key for key, row in self._rows.items() if not row.stable])

    def _repeat_slow(self) -> int:
        """While the core is fast, measure rows again that it was slow for; return how many are mended."""
        limit = TOLERANCE * min((row.pace_ms for row in self._rows.values() if row.pace_ms), default=0.0)
        return self._repeat([key for key, row in self._rows.items() if row.pace_ms > limit], limit)

    def _repeat(self, found: Sequence[tuple[str, Point]], slowest_ms: float = math.inf) -> int:
        """Measure rows again and keep the surer of both, until the core gets slower; return how many are mended.

        A row is mended if it was replaced by a steady one. A block's rows are replaced together: beside rows of
        another moment a single one would look like a cliff, which sampling follows to every width. What sampling
        wants because of the new rows is measured first.
        """
        points: dict[str, list[Point]] = {}
        for signature, point in found:
            points.setdefault(signature, []).append(point)
        left, mended, slow = len(found), 0, False
        for signature, repeated in points.items():
            better: dict[Point, BlockLatency] = {}
            for point in repeated:
                left -= 1
                again = self._measure_again(signature, point, left)
                slow = self._pace_ms > slowest_ms
                if again != self._rows[signature, point]:
                    better[point] = again
                if slow:
                    break
            self._replace(signature, better)
            mended += sum(row.stable for row in better.values())
            if slow:
                break
        return mended

    def _measure_again(self, signature: str, point: Point, left: int) -> BlockLatency:
        """Return the surer of a row and its repetition; ``left``: how many are still to be repeated."""
        block, before = self._blocks[signature][0], self._rows[signature, point]
        found = self._measure(block, point)
        self._repeated += 1
        self._tell(block, left)
        return before if isinstance(found, str) else _surer(found, before)

    def _replace(self, signature: str, better: Mapping[Point, BlockLatency]) -> None:
        """Replace rows of a block in the file, all or none, once the block is complete with the new ones."""
        if not better:
            return
        for block in self._blocks[signature]:
            self._fill(block, better)
        self._rows.update({(signature, point): row for point, row in better.items()})
        self._table.store.write(signature, self._fingerprint, better)

    def _measure(self, block: Block, point: Point) -> BlockLatency | str:
        """Measure a row, or say why it failed; `MachineBusyError` where none can be measured now."""
        for left in reversed(range(_BUSY_TRIES)):
            try:
                found = self._backend.block_latency(block, point, self._config)
            except MachineBusyError:
                self._backend.require_quiet()
                if not left:
                    raise
            except Exception as error:  # whatever a runtime throws: this row is marked, the others go on
                return f"{type(error).__name__}: {error}"
            else:
                break
        self._pace_ms = found.pace_ms
        if not found.stable and time.monotonic() - self._looked >= _LOOK_AGAIN_S:
            self._backend.require_quiet()
            self._looked = time.monotonic()
        taken = [state.median_ms for state in (found.hot, found.cold) if state]
        if not all(0 < ms < math.inf for ms in taken):
            return f"measured {' and '.join(f'{ms:g}' for ms in taken)} ms, which no block can take"
        return found

    def _tell(self, block: Block, rows: float) -> None:
        if self._progress is None:
            return
        done = self._measured + self._repeated
        per_row = (time.monotonic() - self._start) / done
        self._progress(MeasuringProgress(block.name, self._measured, done / (done + rows), per_row * rows))


def _surer(found: BlockLatency, before: BlockLatency) -> BlockLatency:
    """Return the row measured at the faster pace of the core, where that is known; else the steadier one."""
    if found.pace_ms and before.pace_ms:
        if found.pace_ms * TOLERANCE < before.pace_ms:
            return found
        if before.pace_ms * TOLERANCE < found.pace_ms:
            return before
    return before.steadier(found)


class _RowsLeft:
    """Estimates how many rows are still to come, from what finished blocks with as many free widths took.

    The first guesses, by the number of free widths, are chosen, not measured.
    """

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
