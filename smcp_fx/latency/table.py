"""The latency table: the latencies of fused blocks on one device, measured once and kept.

table = LatencyTable("table.sqlite")
report = table.measure(blocks, backend, whole=False)     # a few rows per block
(surfaces,) = table.surfaces(blocks, backend.fingerprint(), 0.0)
surface = surfaces[block.signature, block.grids]         # surface(c_in, c_out) in ms, vectorised
report = table.learn([(block, (64, 128))], blocks, backend)  # and one more
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from smcp_fx.backends.base import Backend, BlockLatency, Fingerprint
from smcp_fx.backends.timing.measuring import Measurement, TimingConfig
from smcp_fx.blocks.sharing import Block, Grids, priced_as, rows_by_block, unique_blocks
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.filling import Filling, MeasureReport, Wanted
from smcp_fx.latency.inputs import known_at
from smcp_fx.latency.progress import Watcher
from smcp_fx.latency.sampling import rows_of_all, rows_to_begin
from smcp_fx.latency.scale import kind_of
from smcp_fx.latency.store import LatencyStore, TableRow
from smcp_fx.latency.surface import Point, Surface, choose_scales

#: The signature of the row that holds a run's own cost, outside its blocks.
RUN_SIGNATURE = '{"steps":"none"}'

#: Below this latency (ms), an error says more about the profiler's clock (1 us) than about interpolation.
MEASURABLE_MS = 0.01


@dataclass(frozen=True)
class HeldOutError:
    """Relative errors when each row is predicted from the others, the ms measured there, and the rows themselves.

    ``steady``: which rows were steady when measured. Repeated measurements of an unsteady row differ as much.
    """

    points: int
    median: float
    p95: float
    largest: float
    errors: NDArray[np.float64] = field(repr=False, compare=False)
    measured_ms: NDArray[np.float64] = field(repr=False, compare=False)
    rows: tuple[tuple[Block, Point], ...] = field(repr=False, compare=False)
    steady: NDArray[np.bool_] = field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        errors: NDArray[np.float64],
        measured_ms: NDArray[np.float64],
        rows: tuple[tuple[Block, Point], ...],
        steady: NDArray[np.bool_],
    ) -> HeldOutError:
        """Return the median, the 95th percentile and the largest of these errors; zeros if there are none."""
        if len(errors) == 0:
            return cls(0, 0.0, 0.0, 0.0, errors, measured_ms, rows, steady)
        median, p95, largest = (float(share) for share in np.percentile(errors, [50, 95, 100]))
        return cls(len(errors), median, p95, largest, errors, measured_ms, rows, steady)

    def telling(self, ms: float = MEASURABLE_MS) -> HeldOutError:
        """Return the errors of the steady rows that took at least ``ms``."""
        kept = np.flatnonzero((self.measured_ms >= ms) & self.steady)
        return self.of(
            self.errors[kept], self.measured_ms[kept], tuple(self.rows[i] for i in kept), self.steady[kept]
        )


class LatencyTable:
    """Latencies of blocks in one SQLite file, shared by models, runs and processes.

    ``cold_share``: the weight of a row's cold state, if the backend measures both states: 0 if weights are in
    cache when the block runs (a small network), 1 if they come from memory (a large one). None derives it
    from the network's size (`LatencyCost`), and prices a single block in cache. ``read_only``: open an
    existing file, and write nothing to it.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        create: bool = True,
        read_only: bool = False,
        cold_share: float | None = None,
    ) -> None:
        if cold_share is not None and not 0 <= cold_share <= 1:
            raise InputError(f"cold_share = {cold_share}: from 0 (weights in cache) to 1 (weights in memory)")
        self.cold_share = cold_share
        self.store = LatencyStore(path, create=create, read_only=read_only)

    @property
    def path(self) -> Path:
        """The table's file."""
        return self.store.path

    def fingerprints(self) -> list[Fingerprint]:
        """Return the devices and runtimes that the table has rows for."""
        return self.store.fingerprints()

    def rows(self, fingerprint: Fingerprint | None = None) -> list[TableRow]:
        """Return all rows, or those of one fingerprint."""
        return self.store.rows(fingerprint)

    # ---- measuring ----------------------------------------------------------------------------------------------

    def measure(
        self,
        blocks: Iterable[Block],
        backend: Backend,
        progress: Watcher | None = None,
        config: TimingConfig | None = None,
        *,
        whole: bool = True,
        retry_failed: bool = False,
        retry_unstable: bool = False,
    ) -> MeasureReport:
        """Measure the rows that the table lacks for blocks; each row is kept as soon as it is measured.

        ``whole``: measure enough rows to cover the blocks' whole ranges; else only the first few, to which
        `learn` adds. The call waits for rows that another process has claimed. A failed row is marked, and
        the call continues. At the end it repeats rows of its own that were unsteady, that were measured
        while the core was slow, or that the other rows contradict. ``retry_failed`` and ``retry_unstable``
        repeat such rows of earlier calls too. ``progress`` is called after every row.

        Raises `MachineBusyError`, at the beginning or in the middle, if the machine is too busy for rows to mean
        anything; the rows measured so far are kept.
        """
        unique, fingerprint = unique_blocks(blocks), backend.fingerprint()
        if retry_failed:
            for block in unique:
                self.store.forget_failures(block.signature, fingerprint)
        again = self.unsteady(unique, fingerprint) if retry_unstable else None
        elsewhere = known_at(unique, self.store, fingerprint)
        report = self._fill(
            unique, backend, lambda: self.wanted(unique, fingerprint, whole), progress, config, again
        )
        return replace(report, elsewhere=elsewhere)

    def learn(
        self,
        rows: Iterable[tuple[Block, Point]],
        blocks: Iterable[Block],
        backend: Backend,
        progress: Watcher | None = None,
    ) -> MeasureReport:
        """Measure the ``rows`` that are neither known nor failed, as `measure` does.

        ``blocks``: the blocks whose rows, including these, are checked against each other.
        """
        blocks = list(blocks)
        asked, fingerprint = rows_by_block(rows, blocks), backend.fingerprint()

        def lacking() -> Wanted:
            return [
                (block, points)
                for block, all_points in asked
                if (points := self._unknown(block, all_points, fingerprint))
            ]

        return self._fill(unique_blocks(blocks), backend, lacking, progress, None)

    def wanted(
        self, blocks: Iterable[Block], fingerprint: Fingerprint, whole: bool = True
    ) -> list[tuple[Block, tuple[Point, ...]]]:
        """Return the blocks that lack rows, each with the widths to measure, except failed ones; see `measure`."""
        choose, rows = rows_of_all if whole else rows_to_begin, []
        for block in unique_blocks(blocks):
            failed = self.store.failures(block.signature, fingerprint)
            done = [*self._in_range(block, fingerprint), *(p for p in failed if len(p) == len(block.grids))]
            if points := tuple(choose(block.grids, done)):
                rows.append((block, points))
        return rows

    def _fill(
        self,
        blocks: Sequence[Block],
        backend: Backend,
        ask: Callable[[], Wanted],
        progress: Watcher | None,
        config: TimingConfig | None,
        again: Sequence[tuple[Block, Point, BlockLatency]] | None = None,
    ) -> MeasureReport:
        fingerprint = backend.fingerprint()
        reused = sum(len(self.store.measured(block.signature, fingerprint)) for block in blocks)
        filling = Filling(self.store, backend, config, progress)
        if again is not None or ask():
            backend.require_quiet()
        self._measure_run(backend, fingerprint)
        filling.fill(ask)
        filling.again(again or ())
        if filling.measured or again:
            filling.repeat()
            self._confirm(filling, blocks, fingerprint)
        failed = tuple(
            (block.name, point, why)
            for block in blocks
            for point, why in self.store.failures(block.signature, fingerprint).items()
        )
        unstable = tuple(
            (block.name, point, max(m.spread for m in (row.hot, row.cold) if m and not m.stable))
            for block, point, row in self.unsteady(blocks, fingerprint)
        )
        return MeasureReport(filling.measured, reused, filling.seconds, failed, unstable, filling.repeated)

    def _measure_run(self, backend: Backend, fingerprint: Fingerprint) -> None:
        """Keep the run's own cost as a row, so that predictions depend on the file alone."""
        if self.store.measured(RUN_SIGNATURE, fingerprint):
            return
        ms = backend.run_overhead_ms()
        if ms is not None and self.store.claim("one run", RUN_SIGNATURE, fingerprint, [()]) is not None:
            self.store.write(RUN_SIGNATURE, fingerprint, {(): BlockLatency(Measurement(ms, ms, ms, 1, True))})

    def _unknown(self, block: Block, points: Iterable[Point], fingerprint: Fingerprint) -> list[Point]:
        measured = self.store.measured(block.signature, fingerprint).keys()
        failed = self.store.failures(block.signature, fingerprint).keys()
        return [point for point in dict.fromkeys(points) if point not in measured and point not in failed]

    # ---- what rows say ------------------------------------------------------------------------------------------

    def run_overhead(self, fingerprint: Fingerprint) -> float:
        """Return a run's own cost outside its blocks, in ms; 0 if that is not measured."""
        latency = self.store.measured(RUN_SIGNATURE, fingerprint).get(())
        return 0.0 if latency is None else latency.hot.median_ms

    def surfaces(
        self,
        blocks: Iterable[Block],
        fingerprint: Fingerprint,
        *cold_shares: float,
        as_of: float = math.inf,
    ) -> list[dict[tuple[str, Grids], Surface]]:
        """Return, for each share, the blocks' latencies in ms as functions of their widths, by signature and grids.

        How the runtime counts channels is learned from the rows of all ``blocks``. ``as_of``: rows measured later do
        not count. `TableError` if a block lacks its first rows.
        """
        homes = priced_as(blocks)
        unique = {(home.signature, home.grids): home for home in homes.values()}
        rows = {key: self._rows_of(home, fingerprint, as_of) for key, home in unique.items()}
        kinds: dict[tuple[str, int], list[tuple[str, Grids]]] = {}
        for key in unique:
            kinds.setdefault((kind_of(key[0]), len(key[1])), []).append(key)
        each: list[dict[tuple[str, Grids], Surface]] = [{} for _ in cold_shares]
        for alike in kinds.values():
            scales = choose_scales([(key[1], _weighed(rows[key], 0.0)) for key in alike])
            for share, surfaces in zip(cold_shares, each, strict=True):
                surfaces.update({key: Surface(key[1], _weighed(rows[key], share), scales) for key in alike})
        return [
            {own: surfaces[home.signature, home.grids] for own, home in homes.items()} for surfaces in each
        ]

    def surface(self, block: Block, fingerprint: Fingerprint, cold_share: float | None = None) -> Surface:
        """Return one block's latency as `surfaces` does; ``cold_share`` instead of the table's own."""
        share = self.cold_share if cold_share is None else cold_share
        return self.surfaces([block], fingerprint, share or 0.0)[0][block.signature, block.grids]

    def unsteady(
        self, blocks: Iterable[Block], fingerprint: Fingerprint
    ) -> list[tuple[Block, Point, BlockLatency]]:
        """Return the unsteady rows that these blocks' prices use, whoever measured them."""
        rows = {
            (block.signature, point): (block, point, row)
            for block in unique_blocks(blocks)
            for point, row in sorted(self._in_range(block, fingerprint).items())
            if not row.stable
        }
        return list(rows.values())

    def held_out_error(
        self, blocks: Iterable[Block], fingerprint: Fingerprint, cold_share: float | None = None
    ) -> HeldOutError:
        """Predict each row but a block's first ones from the block's other rows, and return the errors.

        ``cold_share`` as for `surface`: 0 for weights in cache, 1 for weights in memory.
        """
        share = (self.cold_share if cold_share is None else cold_share) or 0.0
        unique = unique_blocks(blocks)
        (surfaces,) = self.surfaces(unique, fingerprint, share)
        errors_of = [
            (
                abs(ms / surface.rows[point] - 1),
                surface.rows[point],
                (block, point),
                _is_steady(rows[point], share),
            )
            for block in unique
            for surface in [surfaces[block.signature, block.grids]]
            for rows, begun in [(self._in_range(block, fingerprint), rows_to_begin(block.grids, ()))]
            for point, ms in surface.left_out().items()
            if point not in begun
        ]
        errors, measured, points, steady = zip(*errors_of, strict=True) if errors_of else ((), (), (), ())
        return HeldOutError.of(
            np.array(errors), np.array(measured), tuple(points), np.array(steady, dtype=bool)
        )

    def _confirm(self, filling: Filling, blocks: Sequence[Block], fingerprint: Fingerprint) -> None:
        """Repeat rows that the others contradict, one at a time, as each result changes the predictions."""
        measured = [
            block for block in blocks if not rows_to_begin(block.grids, self._in_range(block, fingerprint))
        ]
        (surfaces,) = self.surfaces(measured, fingerprint, 0.0)
        for block in measured:
            surface = surfaces[block.signature, block.grids]
            while filling.confirm(block, surface.surprises()):
                rows = _weighed(self._in_range(block, fingerprint), 0.0)
                surface = Surface(block.grids, rows, surface.scales)

    def latest(
        self, blocks: Iterable[Block], fingerprint: Fingerprint, asked: Iterable[Point] | None = None
    ) -> float:
        """Return when the last row of these blocks was measured or failed (seconds); 0 if none was.

        ``asked``: look only at these widths, one point per block.
        """
        blocks = list(blocks)
        points: list[Point | None] = [None] * len(blocks) if asked is None else list(asked)
        wanted = {(block.signature, point) for block, point in zip(blocks, points, strict=True)}
        times = [
            moment
            for signature in {signature for signature, _ in wanted}
            for point, moment in self.store.times(signature, fingerprint).items()
            if not wanted.isdisjoint({(signature, None), (signature, point)})
        ]
        return max(times, default=0.0)

    def _rows_of(self, block: Block, fingerprint: Fingerprint, as_of: float) -> dict[Point, BlockLatency]:
        """Return the rows of a block; `TableError` if it lacks some of the first ones."""
        rows = self._in_range(block, fingerprint, as_of)
        if not (missing := rows_to_begin(block.grids, rows)):
            return rows
        failures = self.store.failures(block.signature, fingerprint)
        for point in missing:
            if point in failures:
                raise TableError(
                    f"block {block.name!r} could not be measured at widths {point}: {failures[point].rstrip('.')}. "
                    "Measure again (smcp-table measure --retry-failed), or leave the block out of pruning."
                )
        others = [f.describe() for f in self.fingerprints() if f != fingerprint]
        hint = f" The table holds rows of: {'; '.join(others)}." if others else ""
        if elsewhere := known_at([block], self.store, fingerprint):
            hint = f" The table knows it at {elsewhere} only."
        raise TableError(
            f"block {block.name!r} is not measured at widths {missing[0]} in {self.path} on "
            f"{fingerprint.describe()}; call measure first.{hint}"
        )

    def _in_range(
        self, block: Block, fingerprint: Fingerprint, as_of: float = math.inf
    ) -> dict[Point, BlockLatency]:
        """Return the rows of a block's signature that lie within its widths."""
        return {
            point: row
            for point, row in self.store.measured(block.signature, fingerprint, as_of).items()
            if len(point) == len(block.grids)
            and all(g[0] <= width <= g[-1] for g, width in zip(block.grids, point, strict=True))
        }

    def close(self) -> None:
        """Close the file."""
        self.store.close()

    def __enter__(self) -> LatencyTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weighed(rows: Mapping[Point, BlockLatency], cold_share: float) -> dict[Point, float]:
    return {
        point: row.hot.median_ms + cold_share * (row.cold.median_ms - row.hot.median_ms if row.cold else 0.0)
        for point, row in rows.items()
    }


def _is_steady(latency: BlockLatency, cold_share: float) -> bool:
    """Return whether the states that count at this share were steady."""
    cold = latency.cold is None or cold_share == 0 or latency.cold.stable
    return cold and (latency.hot.stable or (latency.cold is not None and cold_share == 1))
