"""The latency table: what the fused blocks of networks cost on one device, measured once and kept.

table = LatencyTable("table.sqlite")
report = table.measure(blocks, backend)              # fills what is missing, adaptively
price = table.price(block, backend.fingerprint())    # price(c_in, c_out) in ms, vectorised
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from smcp_fx.backends.base import Backend, BlockLatency, Fingerprint
from smcp_fx.backends.timing import TimingConfig
from smcp_fx.cost_model import Price
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency_sampling import Plan, Point, SamplingConfig, Surface, held_out_errors, plan_samples
from smcp_fx.latency_store import LatencyStore, Row


class Block(Protocol):
    """A part of a network that the engine runs as one fused kernel, with up to two free widths.

    ``name``: where it is, for messages. ``signature``: canonical JSON of everything but the widths; blocks of
    one signature share their rows. ``grids``: for each free width the ascending values that it can take.
    """

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> str: ...

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]: ...

    def build(self, widths: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return an eval-mode module with random weights at ``widths``, and its example inputs."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a measurement is. ``fraction`` is an estimate: sampling adapts to what it finds."""

    block: str
    measured: int
    fraction: float
    remaining_seconds: float


@dataclass(frozen=True)
class MeasureReport:
    """What `LatencyTable.measure` did. ``failed`` and ``unstable``: (block, widths, what) of such rows."""

    measured: int
    reused: int
    seconds: float
    failed: tuple[tuple[str, Point, str], ...] = ()
    unstable: tuple[tuple[str, Point, float], ...] = ()


@dataclass(frozen=True)
class HeldOutError:
    """Relative errors of interpolation at points it does not rest on."""

    points: int
    median: float
    p95: float
    largest: float
    errors: NDArray[np.float64] = field(repr=False, compare=False)


class LatencyTable:
    """Latencies of blocks in one SQLite file, shared by models, runs and processes.

    ``cold_share``: how the two states of a row are weighed where a backend tells them apart: 0 for weights
    that are in cache when the block runs (a small network), 1 for weights that come from memory (a large
    one).
    """

    def __init__(
        self,
        path: Path | str,
        *,
        create: bool = True,
        sampling: SamplingConfig | None = None,
        cold_share: float = 0.5,
    ) -> None:
        if not 0 <= cold_share <= 1:
            raise InputError(f"cold_share = {cold_share}: from 0 (weights in cache) to 1 (weights in memory)")
        self.sampling = sampling or SamplingConfig()
        self.cold_share = cold_share
        self.store = LatencyStore(path, create=create)

    @property
    def path(self) -> Path:
        """The table's file."""
        return self.store.path

    def fingerprints(self) -> list[Fingerprint]:
        """Return the devices and runtimes that the table has rows of."""
        return self.store.fingerprints()

    def rows(self, fingerprint: Fingerprint | None = None) -> list[Row]:
        """Return all rows, or those of one fingerprint, for reports."""
        return self.store.rows(fingerprint)

    def measure(
        self,
        blocks: Iterable[Block],
        backend: Backend,
        progress: Callable[[Progress], None] | None = None,
        config: TimingConfig | None = None,
        *,
        retry_failed: bool = False,
        retry_unstable: bool = False,
    ) -> MeasureReport:
        """Measure what is missing for `price` to hold on the blocks' grids; every row is kept as it comes.

        Adaptive: see `plan_samples`. Rows that another process has claimed are waited for. A block whose
        measurement fails is marked, and the rest goes on. ``retry_failed`` and ``retry_unstable`` measure such
        rows of earlier runs again.
        """
        unique = list({(b.signature, b.grids): b for b in blocks}.values())
        fingerprint = backend.fingerprint()
        start, measured, reused = time.monotonic(), 0, 0
        failed: list[tuple[str, Point, str]] = []
        unstable: list[tuple[str, Point, float]] = []
        for position, block in enumerate(unique):
            if retry_failed or retry_unstable:
                self.store.forget(block.signature, fingerprint, failed=retry_failed, unstable=retry_unstable)
            reused += len(self.store.measured(block.signature, fingerprint))
            while True:
                plan, failures = self._plan(block, fingerprint)
                wanted = [point for point in plan.wanted if point not in failures]
                if not wanted:
                    failed += [(block.name, p, failures[p]) for p in plan.wanted]
                    break
                point = self.store.claim(block.name, block.signature, fingerprint, wanted)
                if point is None:  # another process is at them
                    time.sleep(0.05)
                    continue
                result = self._measure_row(block, point, backend, fingerprint, config)
                measured += 1
                if isinstance(result, BlockLatency) and not result.hot.stable:
                    unstable.append((block.name, point, result.hot.spread))
                if progress is not None:
                    done = (position + 1.0 - 0.5 * min(1.0, len(plan.wanted) / 20)) / len(unique)
                    elapsed = time.monotonic() - start
                    progress(Progress(block.name, measured, done, elapsed * (1 - done) / done))
        return MeasureReport(measured, reused, time.monotonic() - start, tuple(failed), tuple(unstable))

    def price(self, block: Block, fingerprint: Fingerprint) -> Price:
        """Return the block's latency in ms as a function of its widths (int arrays that broadcast).

        `TableError` when the block is not measured on its whole grid, and when called outside of it.
        """
        return self.surface(block, fingerprint)

    def surface(self, block: Block, fingerprint: Fingerprint) -> Surface:
        """Return the block's interpolated latency; `TableError` as for `price`."""
        plan, failures = self._plan(block, fingerprint)
        if plan.surface is not None:
            return Surface(plan.surface.axes, self._known(block, fingerprint))
        for point in plan.wanted:
            if point in failures:
                raise TableError(
                    f"block {block.name!r} could not be measured at widths {point}: {failures[point]}. "
                    "Measure again with retry_failed=True, or leave the block out of pruning."
                )
        others = [f.describe() for f in self.fingerprints() if f != fingerprint]
        hint = f" The table holds rows of: {'; '.join(others)}." if others else ""
        raise TableError(
            f"block {block.name!r} is not measured at widths {plan.wanted[0]} in {self.path} on "
            f"{fingerprint.describe()}; call measure first.{hint}"
        )

    def held_out_error(self, blocks: Iterable[Block], fingerprint: Fingerprint) -> HeldOutError:
        """Return how far interpolation is off at the measured points that it does not rest on."""
        parts = [np.zeros(0)]
        for block in {b.signature: b for b in blocks}.values():
            plan, failures = self._plan(block, fingerprint)
            if plan.surface is None and not failures:
                self.surface(block, fingerprint)
            if plan.surface is not None:
                known = self._known(block, fingerprint)
                surface = Surface(plan.surface.axes, known)
                parts.append(held_out_errors(surface, plan.probes, known))
        errors = np.concatenate(parts)
        if len(errors) == 0:
            return HeldOutError(0, 0.0, 0.0, 0.0, errors)
        median, p95 = np.percentile(errors, [50, 95])
        return HeldOutError(len(errors), float(median), float(p95), float(errors.max()), errors)

    def close(self) -> None:
        """Close the file."""
        self.store.close()

    def __enter__(self) -> LatencyTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _known(self, block: Block, fingerprint: Fingerprint) -> dict[Point, float]:
        rows = self.store.measured(block.signature, fingerprint)
        return {point: _weighed(latency, self.cold_share) for point, latency in rows.items()}

    def _plan(self, block: Block, fingerprint: Fingerprint) -> tuple[Plan, dict[Point, str]]:
        rows = self.store.measured(block.signature, fingerprint)
        # Sampling must not depend on the share, or a table would be complete for one share only.
        known = {point: _weighed(latency, 0.5) for point, latency in rows.items()}
        noise = {point: (row.hot.q3_ms - row.hot.q1_ms) / 2 for point, row in rows.items()}
        plan = plan_samples(block.grids, known, self.sampling, _seed(block.signature), noise)
        return plan, self.store.failures(block.signature, fingerprint) if plan.wanted else {}

    def _measure_row(
        self,
        block: Block,
        point: Point,
        backend: Backend,
        fingerprint: Fingerprint,
        config: TimingConfig | None,
    ) -> BlockLatency | str:
        result: BlockLatency | str
        try:
            result = backend.block_latency(block, point, config)
        except Exception as error:  # whatever a runtime throws: this row is marked, the others go on
            result = f"{type(error).__name__}: {error}"
        except BaseException:
            self.store.release(block.signature, fingerprint, [point])
            raise
        self.store.write(block.signature, fingerprint, point, result)
        return result


def sum_of_prices(prices: Sequence[Price], widths: Sequence[Sequence[int]]) -> float:
    """Return the sum over blocks of their prices at their widths, in ms."""
    return float(
        sum(float(price(*(np.asarray(w) for w in ws))) for price, ws in zip(prices, widths, strict=True))
    )


def _weighed(latency: BlockLatency, cold_share: float) -> float:
    hot = latency.hot.median_ms
    return hot if latency.cold is None else hot + cold_share * (latency.cold.median_ms - hot)


def _seed(signature: str) -> int:
    return int.from_bytes(hashlib.sha256(signature.encode()).digest()[:8], "big")
