"""Fills a latency table: measures the rows asked for, and repeats rows measured at a bad moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from smcp_fx.backends.base import Backend, BlockLatency
from smcp_fx.backends.timing.measuring import TimingConfig
from smcp_fx.backends.timing.pace import TOLERANCE
from smcp_fx.blocks.sharing import Block
from smcp_fx.errors import MachineBusyError
from smcp_fx.latency.progress import MeasuringProgress, Watcher
from smcp_fx.latency.store import LatencyStore
from smcp_fx.latency.surface import Point

#: What to measure: blocks, each with widths.
Wanted = Sequence[tuple[Block, Sequence[Point]]]

#: Rounds in which unsteady rows are measured again, as long as each makes more than this share of them
#: steady. Chosen, not measured.
_AGAIN, _WORTH = 3, 0.25
#: Two measurements of a row confirm each other if they differ by less than this share. Chosen: three times as much as
#: steady rows differ.
_AGREE = 0.06
#: After an unsteady row we check whether the machine is quiet, if the last check is this many seconds old.
#: Chosen: a check takes 0.2 s.
_CHECK_AGAIN_S = 10.0
#: How often a row is tried if other processes spoil all its runs. Chosen, not measured.
_BUSY_TRIES = 3


@dataclass(frozen=True)
class MeasureReport:
    """The result of a measurement.

    ``failed`` and ``unstable``: rows behind the blocks' prices, whoever measured them: (block, widths, the
    error or the largest spread of an unsteady state). ``repeated``: how many measurements repeated a row that
    was unsteady, that was measured while the core was slow, or that the other rows contradict. ``elsewhere``:
    the other inputs at which the table knew blocks that lacked rows (`known_at`).
    """

    measured: int
    reused: int
    seconds: float
    failed: tuple[tuple[str, Point, str], ...] = ()
    unstable: tuple[tuple[str, Point, float], ...] = ()
    repeated: int = 0
    elsewhere: str = ""

    def after(self, first: MeasureReport) -> MeasureReport:
        """Return the sum of this measurement and an earlier one of the same blocks."""
        return replace(
            self,
            measured=first.measured + self.measured,
            reused=first.reused,
            seconds=first.seconds + self.seconds,
            failed=tuple(dict.fromkeys((*first.failed, *self.failed))),
            repeated=first.repeated + self.repeated,
            elsewhere=first.elsewhere,
        )


class Filling:
    """Measures rows and stores each at once. ``measured`` and ``repeated`` count them."""

    def __init__(
        self, store: LatencyStore, backend: Backend, config: TimingConfig | None, progress: Watcher | None
    ) -> None:
        self._store, self._backend, self._config, self._progress = store, backend, config, progress
        self._fingerprint = backend.fingerprint()
        self._rows: dict[tuple[str, Point], tuple[Block, BlockLatency]] = {}  # that may be measured again
        self._repeated_rows = set[tuple[str, Point]]()
        self._pace_ms = 0.0  # of the last measurement
        self.measured = self.repeated = 0
        self._start = self._checked = time.monotonic()  # when the machine was last seen to be quiet

    @property
    def seconds(self) -> float:
        """How long it took so far."""
        return time.monotonic() - self._start

    def fill(self, ask: Callable[[], Wanted]) -> None:
        """Measure the rows that ``ask`` returns until it returns none; wait for rows of other processes."""
        while wanted := ask():
            self._backend.expect_blocks([block for block, _ in wanted])
            self._backend.prepare_rows([(block, point) for block, points in wanted for point in points])
            left, before = sum(len(points) for _, points in wanted), self.measured
            for block, points in wanted:
                while (
                    point := self._store.claim(block.name, block.signature, self._fingerprint, points)
                ) is not None:
                    left -= 1
                    self._measure_claimed(block, point, left)
            if self.measured == before:
                time.sleep(0.05)

    def again(self, rows: Iterable[tuple[Block, Point, BlockLatency]]) -> None:
        """Add rows of earlier calls, so that `repeat` measures them again if they are unsteady."""
        for block, point, row in rows:
            self._rows.setdefault((block.signature, point), (block, row))

    def repeat(self) -> None:
        """Repeat the rows that are unsteady or were measured while the core was slow."""
        for _ in range(_AGAIN):
            before = self.repeated
            mended = self._repeat_unsteady() + self._repeat_slow()
            if mended <= _WORTH * (self.repeated - before):
                break

    def confirm(self, block: Block, points: Iterable[Point]) -> bool:
        """Repeat the first of these rows that was measured only once; return whether there was one.

        If measurements disagree, the median of three counts.
        """
        for point in points:
            key = block.signature, point
            if key in self._rows and key not in self._repeated_rows:
                self._confirm(key)
                return True
        return False

    def _measure_claimed(self, block: Block, point: Point, left: int) -> None:
        try:
            result = self._measure(block, point)
        except BaseException:
            self._store.release(block.signature, self._fingerprint, [point])
            raise
        self._keep(block, point, result)
        self.measured += 1
        self._tell(block, left)

    def _keep(self, block: Block, point: Point, result: BlockLatency | str) -> None:
        self._store.write(block.signature, self._fingerprint, {point: result})
        if isinstance(result, BlockLatency):
            self._rows[block.signature, point] = block, result

    def _repeat_unsteady(self) -> int:
        return self._repeat([key for key, (_, row) in self._rows.items() if not row.stable])

    def _repeat_slow(self) -> int:
        """While the core is fast, repeat the rows measured when it was slow; return how many improved."""
        limit = TOLERANCE * min((row.pace_ms for _, row in self._rows.values() if row.pace_ms), default=0.0)
        return self._repeat([key for key, (_, row) in self._rows.items() if row.pace_ms > limit], limit)

    def _repeat(self, keys: Sequence[tuple[str, Point]], slowest_ms: float = math.inf) -> int:
        """Measure rows again and keep the surer result, until the core gets slower; return how many improved."""
        mended = 0
        for left, key in zip(reversed(range(len(keys))), keys, strict=True):
            block, before = self._rows[key]
            again = self._measure_again(key, left)
            better = before if again is None else _surer(again, before)
            if better != before:
                self._keep(block, key[1], better)
                mended += better.stable
            if self._pace_ms > slowest_ms:
                break
        return mended

    def _confirm(self, key: tuple[str, Point]) -> None:
        block, first = self._rows[key]
        taken = [first]
        while len(taken) < 3 and (again := self._measure_again(key, 0)) is not None:
            taken.append(again)
            if abs(math.log(again.hot.median_ms / first.hot.median_ms)) <= _AGREE:
                break
        if len(taken) == 3:
            self._keep(block, key[1], sorted(taken, key=lambda row: row.hot.median_ms)[1])

    def _measure_again(self, key: tuple[str, Point], left: int) -> BlockLatency | None:
        block, _ = self._rows[key]
        self._repeated_rows.add(key)
        latency = self._measure(block, key[1])
        self.repeated += 1
        self._tell(block, left)
        return None if isinstance(latency, str) else latency

    def _measure(self, block: Block, point: Point) -> BlockLatency | str:
        """Measure a row, or return why that failed; `MachineBusyError` if none can be measured now."""
        for left in reversed(range(_BUSY_TRIES)):
            try:
                latency = self._backend.block_latency(block, point, self._config)
            except MachineBusyError:
                self._backend.require_quiet()
                if not left:
                    raise
            except Exception as error:  # whatever a runtime raises: this row is marked, the others go on
                return f"{type(error).__name__}: {error}"
            else:
                break
        self._pace_ms = latency.pace_ms
        if not latency.stable and time.monotonic() - self._checked >= _CHECK_AGAIN_S:
            self._backend.require_quiet()
            self._checked = time.monotonic()
        taken = [state.median_ms for state in (latency.hot, latency.cold) if state]
        if not all(0 < ms < math.inf for ms in taken):
            return f"measured {' and '.join(f'{ms:g}' for ms in taken)} ms, which no block can take"
        return latency

    def _tell(self, block: Block, left: int) -> None:
        if self._progress is None:
            return
        done = self.measured + self.repeated
        self._progress(
            MeasuringProgress(block.name, self.measured, done / (done + left), self.seconds / done * left)
        )


def _surer(new: BlockLatency, before: BlockLatency) -> BlockLatency:
    """Return the row measured while the core was faster, if that is known; else the steadier one."""
    if new.pace_ms and before.pace_ms:
        if new.pace_ms * TOLERANCE < before.pace_ms:
            return new
        if before.pace_ms * TOLERANCE < new.pace_ms:
            return before
    return before.steadier(new)
