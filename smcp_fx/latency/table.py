"""The latency table: what the fused blocks of networks cost on one device, measured once and kept.

table = LatencyTable("table.sqlite")
report = table.measure(blocks, backend)               # fills what is missing, adaptively
home = priced_as(blocks)[block.signature, block.grids]
surface = table.surface(home, backend.fingerprint())  # surface(c_in, c_out) in ms, vectorised
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from smcp_fx.backends.base import Backend, BlockLatency, Fingerprint
from smcp_fx.backends.timing.measuring import Measurement, TimingConfig
from smcp_fx.blocks.sharing import Block, unique_blocks
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.filling import Filling, MeasureReport
from smcp_fx.latency.progress import Watcher
from smcp_fx.latency.sampling import SamplingConfig, SamplingPlan, plan_samples
from smcp_fx.latency.store import LatencyStore, TableRow
from smcp_fx.latency.surface import Point, Surface, held_out_errors

#: The signature of the row that holds what a run costs beside its blocks.
RUN_SIGNATURE = '{"steps":"none"}'

#: How far a row in cache is off between sessions (half an interquartile range, relative) if its weights have so many
#: bytes or more; with fewer bytes it falls by the square. Where weights lie in memory decides how many of them a
#: shared cache keeps: medians of linear layers of 7.5, 13.5, 16 and 21 MiB in eight sessions each, beside 32 MiB of
#: cache, had standard deviations of 2.6, 12, 9 and 12 %. It does not depend on the cache of the machine that asks:
#: whether a table is complete must not depend on who reads it.
_LUCK, _LUCK_BYTES = 0.08, 12 << 20
#: Where a block takes less (ms), an error says more about the profiler's clock (1 us) than about interpolation.
MEASURABLE_MS = 0.01


@dataclass(frozen=True)
class HeldOutError:
    """Relative errors of interpolation at points it does not rest on, the ms measured there, and which these are.

    ``steady``: which were steady when they were measured. The others are as far off from themselves.
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
        """Return the median, the 95th percentile and the largest of these errors; zeros where there are none."""
        if len(errors) == 0:
            return cls(0, 0.0, 0.0, 0.0, errors, measured_ms, rows, steady)
        median, p95, largest = (float(share) for share in np.percentile(errors, [50, 95, 100]))
        return cls(len(errors), median, p95, largest, errors, measured_ms, rows, steady)

    def telling(self, ms: float = MEASURABLE_MS) -> HeldOutError:
        """Return the errors at points that took at least so long and were steady."""
        kept = np.flatnonzero((self.measured_ms >= ms) & self.steady)
        return self.of(
            self.errors[kept], self.measured_ms[kept], tuple(self.rows[i] for i in kept), self.steady[kept]
        )


class LatencyTable:
    """Latencies of blocks in one SQLite file, shared by models, runs and processes.

    ``cold_share``: how the two states of a row are weighed where a backend tells them apart: 0 for weights
    that are in cache when the block runs (a small network), 1 for weights that come from memory (a large
    one). None leaves it to the network's size (`LatencyCost`); a block by itself is then priced in cache.
    ``read_only``: open a file that exists, and write nothing to it.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        create: bool = True,
        read_only: bool = False,
        sampling: SamplingConfig | None = None,
        cold_share: float | None = None,
    ) -> None:
        if cold_share is not None and not 0 <= cold_share <= 1:
            raise InputError(f"cold_share = {cold_share}: from 0 (weights in cache) to 1 (weights in memory)")
        self.sampling = sampling or SamplingConfig()
        self.cold_share = cold_share
        self.store = LatencyStore(path, create=create, read_only=read_only)

    @property
    def path(self) -> Path:
        """The table's file."""
        return self.store.path

    def fingerprints(self) -> list[Fingerprint]:
        """Return the devices and runtimes that the table has rows of."""
        return self.store.fingerprints()

    def rows(self, fingerprint: Fingerprint | None = None) -> list[TableRow]:
        """Return all rows, or those of one fingerprint, for reports."""
        return self.store.rows(fingerprint)

    def measure(
        self,
        blocks: Iterable[Block],
        backend: Backend,
        progress: Watcher | None = None,
        config: TimingConfig | None = None,
        *,
        retry_failed: bool = False,
        retry_unstable: bool = False,
    ) -> MeasureReport:
        """Measure what `surface` lacks to hold on the blocks' grids; every row is kept as it comes.

        Adaptive: see `plan_samples`. Rows that another process has claimed are waited for. A row whose measurement
        fails is marked, and the rest goes on. At the end, rows of this call are measured again if they are unsteady,
        or of a moment in which the core was slower than it turned out to be. ``retry_failed`` and ``retry_unstable``
        measure such rows of earlier calls again, too. ``progress`` is called after every row.

        Raises `MachineBusyError`, at the beginning or in the middle, where the machine is too busy for a row to mean
        anything; the rows so far are kept.
        """
        unique = unique_blocks(blocks)
        fingerprint = backend.fingerprint()
        reused = 0
        for block in unique:
            if retry_failed:
                self.store.forget_failures(block.signature, fingerprint)
            reused += len(self.store.measured(block.signature, fingerprint))
        filling = Filling(self, unique, backend, config, progress)
        if filling.incomplete or retry_unstable:
            backend.require_quiet()
        self._measure_run(backend, fingerprint)
        return filling.run(reused, retry_unstable)

    def wanted(
        self, blocks: Iterable[Block], fingerprint: Fingerprint, ahead: bool = False
    ) -> list[tuple[Block, tuple[Point, ...]]]:
        """Return the blocks that are not complete, each with the widths to measure next (failed ones left out).

        Sampling adapts: after these, others may be wanted. ``ahead``: add those that will be wanted if the latency
        turns out to be as smooth as can be; for devices where every question takes long.
        """
        found = []
        for block in unique_blocks(blocks):
            plan, failures = self.plan(block, fingerprint)
            wanted = self._wanted_ahead(block, fingerprint) if ahead and plan.wanted else plan.wanted
            points = tuple(point for point in wanted if point not in failures)
            if points:
                found.append((block, points))
        return found

    def plan(
        self, block: Block, fingerprint: Fingerprint, instead: Mapping[Point, BlockLatency] | None = None
    ) -> tuple[SamplingPlan, dict[Point, str]]:
        """Return what to measure next of a block, or its surface; and what failed, where that is wanted.

        ``instead``: rows to take in place of those in the file.
        """
        rows = {**self.store.measured(block.signature, fingerprint), **(instead or {})}
        # Sampling must not depend on the share, or a table would be complete for one share only. The cliffs are
        # the kernels', and show in the hot state; what memory adds is smooth.
        known = {point: _weighed(latency, 0.0) for point, latency in rows.items()}
        noise = {point: _noise(block, point, row) for point, row in rows.items()}
        plan = plan_samples(block.grids, known, self.sampling, _seed(block.signature), noise)
        return plan, self.store.failures(block.signature, fingerprint) if plan.wanted else {}

    def run_overhead(self, fingerprint: Fingerprint) -> float:
        """Return what a run costs beside its blocks, in ms; 0 where that is not measured."""
        found = self.store.measured(RUN_SIGNATURE, fingerprint).get(())
        return 0.0 if found is None else found.hot.median_ms

    def surface(self, block: Block, fingerprint: Fingerprint, cold_share: float | None = None) -> Surface:
        """Return the block's latency in ms as a function of its widths (int arrays that broadcast).

        ``cold_share`` instead of the table's own. `TableError` when the block is not measured on its whole grid, and
        when the surface is called outside of it.
        """
        plan, failures = self.plan(block, fingerprint)
        if plan.surface is not None:
            share = self.cold_share if cold_share is None else cold_share
            return Surface(plan.surface.axes, self._known(block, fingerprint, share or 0.0))
        for point in plan.wanted:
            if point in failures:
                raise TableError(
                    f"block {block.name!r} could not be measured at widths {point}: {failures[point].rstrip('.')}. "
                    "Measure again (smcp-table measure --retry-failed), or leave the block out of pruning."
                )
        others = [f.describe() for f in self.fingerprints() if f != fingerprint]
        hint = f" The table holds rows of: {'; '.join(others)}." if others else ""
        raise TableError(
            f"block {block.name!r} is not measured at widths {plan.wanted[0]} in {self.path} on "
            f"{fingerprint.describe()}; call measure first.{hint}"
        )

    def unsteady(
        self, blocks: Iterable[Block], fingerprint: Fingerprint
    ) -> list[tuple[Block, Point, BlockLatency]]:
        """Return the unsteady rows that these blocks' prices rest on, whoever measured them."""
        found = {}
        for block in unique_blocks(blocks):
            rows = self.store.measured(block.signature, fingerprint)
            for point in sorted(self.plan(block, fingerprint)[0].used & rows.keys()):
                if not rows[point].stable:
                    found[block.signature, point] = block, point, rows[point]
        return list(found.values())

    def held_out_error(
        self, blocks: Iterable[Block], fingerprint: Fingerprint, cold_share: float | None = None
    ) -> HeldOutError:
        """Return how far interpolation is off at the measured points that it does not rest on.

        ``cold_share`` as for `surface`: 0 for the state in cache, 1 for that from memory.
        """
        share = (self.cold_share if cold_share is None else cold_share) or 0.0
        errors, measured, rows = [np.zeros(0)], [np.zeros(0)], list[tuple[Block, Point]]()
        steady: list[bool] = []
        for block in unique_blocks(blocks):
            plan, failures = self.plan(block, fingerprint)
            if plan.surface is None and not failures:
                self.surface(block, fingerprint)
            if plan.surface is not None:
                known = self._known(block, fingerprint, share)
                surface = Surface(plan.surface.axes, known)
                errors.append(held_out_errors(surface, plan.probes, known))
                measured.append(np.array([known[point] for point in plan.probes]))
                rows += [(block, point) for point in plan.probes]
                found = self.store.measured(block.signature, fingerprint)
                steady += [_is_steady(found[point], share) for point in plan.probes]
        return HeldOutError.of(
            np.concatenate(errors), np.concatenate(measured), tuple(rows), np.array(steady, dtype=bool)
        )

    def close(self) -> None:
        """Close the file."""
        self.store.close()

    def __enter__(self) -> LatencyTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _measure_run(self, backend: Backend, fingerprint: Fingerprint) -> None:
        """Keep the run's own cost as a row, so that a prediction is a function of the file alone."""
        ms = backend.run_overhead_ms()
        if ms is not None and self.store.claim("one run", RUN_SIGNATURE, fingerprint, [()]) is not None:
            self.store.write(RUN_SIGNATURE, fingerprint, {(): BlockLatency(Measurement(ms, ms, ms, 1, True))})

    def _known(self, block: Block, fingerprint: Fingerprint, share: float) -> dict[Point, float]:
        rows = self.store.measured(block.signature, fingerprint)
        return {point: _weighed(latency, share) for point, latency in rows.items()}

    def _wanted_ahead(self, block: Block, fingerprint: Fingerprint) -> tuple[Point, ...]:
        """Plan on with guesses for what is not measured: in proportion to each width, from the largest known."""
        rows = self.store.measured(block.signature, fingerprint)
        known = {point: _weighed(latency, 0.0) for point, latency in rows.items()}
        wanted: list[Point] = []
        while True:
            plan = plan_samples(block.grids, known, self.sampling, _seed(block.signature))
            if not plan.wanted:
                return tuple(wanted)
            for point in plan.wanted:
                top = max(rows, default=point)
                scale = _weighed(rows[top], 0.0) / float(np.prod(top or (1,))) if rows else 1.0
                known[point] = scale * float(np.prod(point or (1,)))
                wanted.append(point)


def _weighed(latency: BlockLatency, cold_share: float) -> float:
    hot = latency.hot.median_ms
    return hot if latency.cold is None else hot + cold_share * (latency.cold.median_ms - hot)


def _noise(block: Block, point: Point, row: BlockLatency) -> float:
    """Return how far a row in cache may be off, in ms: by its quartiles, and by how much sessions differ."""
    within = (row.hot.q3_ms - row.hot.q1_ms) / 2
    if row.cold is None:
        return within
    shares = [width / grid[-1] for width, grid in zip(point, block.grids, strict=True)]
    size = min(block.weight_bytes * math.prod(shares) / _LUCK_BYTES, 1.0)
    return max(within, _LUCK * size**2 * row.hot.median_ms)


def _is_steady(latency: BlockLatency, cold_share: float) -> bool:
    """Return whether those states were steady that count at this share."""
    cold = latency.cold is None or cold_share == 0 or latency.cold.stable
    return cold and (latency.hot.stable or (latency.cold is not None and cold_share == 1))


def _seed(signature: str) -> int:
    return int.from_bytes(hashlib.sha256(signature.encode()).digest()[:8], "big")
