"""Filling a table: bad rows and moments, busy machines, and what is measured again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_latencies import FakeBackend, FakeBlock, cliffs, conv, grid

from smcp_fx.backends.base import BlockLatency, Measurement
from smcp_fx.errors import MachineBusyError, TableError
from smcp_fx.latency.progress import MeasuringProgress
from smcp_fx.latency.sampling import rows_of_all
from smcp_fx.latency.table import LatencyTable


def test_progress_rises_and_ends_at_one_block_after_the_other(tmp_path):
    seen: list[MeasuringProgress] = []
    other = FakeBlock("other", "{}", (grid(64),))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([conv(), other], FakeBackend(), seen.append)
    assert [p.measured for p in seen] == list(range(1, report.measured + 1))
    assert all(0 < p.fraction <= 1 and p.remaining_seconds >= 0 for p in seen)
    assert seen[0].fraction < 0.5 <= seen[-1].fraction


def test_a_crashing_row_is_marked_and_the_rest_goes_on(tmp_path):
    block, other = conv(), FakeBlock("other", "{}", (grid(64),))
    backend = FakeBackend(fails_at=(256, 256))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block, other], backend, None)
        assert report.failed == (("conv", (256, 256), "RuntimeError: the kernel crashed"),)
        with pytest.raises(TableError, match=r"'conv' could not be measured at widths \(256, 256\)"):
            table.surface(block, backend.fingerprint())
        table.surface(other, backend.fingerprint())
        assert [row.error for row in table.rows() if row.latency is None] == [
            "RuntimeError: the kernel crashed"
        ]
        backend.fails_at = None
        backend.log.clear()
        table.measure([block], backend)
        assert backend.log == []  # a marked row is not tried again unasked
        table.measure([block], backend, retry_failed=True)
        table.surface(block, backend.fingerprint())


def test_unstable_rows_are_reported(tmp_path):
    class Noisy(FakeBackend):
        def block_latency(self, block, widths, config=None):
            hot = Measurement(1.0, 0.8, 1.4, 3, stable=widths != (16,))
            return BlockLatency(hot)

    with LatencyTable(tmp_path / "t.sqlite") as table:
        block = FakeBlock("b", "{}", (grid(16),))
        report = table.measure([block], Noisy())
        assert report.unstable == (("b", (16,), pytest.approx(0.6)),)
        again = table.measure([block], Noisy())
        assert again.measured == 0
        assert again.unstable == report.unstable  # they are used, whoever measured them
        again = table.measure([block], Noisy(), retry_unstable=True)
        assert (again.measured, again.repeated, again.unstable) == (0, 1, report.unstable)


@pytest.mark.parametrize("ms", [0.0, -0.001, math.nan, math.inf])
def test_what_no_block_can_take_is_no_row(tmp_path, ms):
    block = FakeBlock("b", "{}", (grid(16),))
    backend = FakeBackend(latency=lambda width: ms if width == 16 else 1.0)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        assert [(name, widths) for name, widths, _ in report.failed] == [("b", (16,))]
        assert "which no block can take" in report.failed[0][2]
        with pytest.raises(TableError, match="could not be measured at widths"):
            table.surface(block, backend.fingerprint())


class BusyTimes(FakeBackend):
    """A machine that others work on: ``busy(n)`` says so before the ``n``-th measurement (from 0) and in it."""

    def __init__(self, busy: Callable[[int], bool], steady: bool = True, quiet_again: bool = False) -> None:
        super().__init__()
        self.busy, self.steady, self.quiet_again, self.asked = busy, steady, quiet_again, 0

    def run_overhead_ms(self):
        self.log.append(("run", ()))
        return 0.01

    def require_quiet(self):
        self.asked += 1
        if self.busy(len(self.log)) and not (self.quiet_again and self.asked > 1):
            raise MachineBusyError("others have the cores")

    def block_latency(self, block, widths, config=None):
        if self.steady and self.busy(len(self.log)) and not (self.quiet_again and self.asked > 2):
            raise MachineBusyError("no run was left alone")
        row = super().block_latency(block, widths)
        return replace(row, hot=replace(row.hot, stable=self.steady))


def test_a_busy_machine_is_told_before_anything_is_measured(tmp_path):
    backend = BusyTimes(lambda n: True)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(MachineBusyError, match="others have the cores"):
            table.measure([conv()], backend)
        assert (backend.log, table.rows()) == ([], [])
        backend.busy = lambda n: False
        table.measure([conv()], backend)
        backend.busy = lambda n: True
        assert table.measure([conv()], backend).measured == 0  # a complete table needs no quiet
        with pytest.raises(MachineBusyError):
            table.measure([conv()], backend, retry_unstable=True)


def test_a_machine_that_becomes_busy_ends_measuring_and_the_rows_so_far_are_kept(tmp_path):
    backend, block = BusyTimes(lambda n: n == 20), conv()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(MachineBusyError):
            table.measure([block], backend)
        assert len(backend.log) == 20
        assert len(table.rows()) == 20
        assert all(row.latency is not None for row in table.rows())  # none is marked as failed
        backend.busy = lambda n: False
        table.measure([block], backend)
        assert len(set(backend.log)) == len(backend.log)  # none was lost
        table.surface(block, backend.fingerprint())


def test_a_busy_moment_is_waited_for(tmp_path):
    backend, block = BusyTimes(lambda n: n == 20, quiet_again=True), conv()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        assert table.measure([block], backend).failed == ()
        assert backend.asked == 3  # at first, and behind two tries that nothing was left of
        table.surface(block, backend.fingerprint())


def test_behind_unsteady_rows_it_is_asked_whether_the_machine_is_quiet(tmp_path, monkeypatch):
    """Every ten seconds at most; each row takes four here."""
    backend, block = BusyTimes(lambda n: n > 30, steady=False), conv()
    clock = SimpleNamespace(monotonic=lambda: 4.0 * len(backend.log), sleep=time.sleep)
    monkeypatch.setattr("smcp_fx.latency.filling.time", clock)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(MachineBusyError):
            table.measure([block], backend)
        assert 30 < len(backend.log) <= 33
        assert backend.asked == 1 + len(backend.log) // 3


class Moments(FakeBackend):
    """A device whose ``n``-th measurement (from 0) is as ``moments(n)`` says: (factor, spread, steady, pace)."""

    def __init__(self, moments: Callable[[int], tuple[float, float, bool, float]]) -> None:
        super().__init__()
        self.moments = moments

    def block_latency(self, block, widths, config=None):
        factor, spread, steady, pace = self.moments(len(self.log))
        ms = factor * super().block_latency(block, widths).hot.median_ms
        return BlockLatency(Measurement(ms, ms * (1 - spread), ms, 3, stable=steady), pace_ms=pace)


def test_rows_of_bad_moments_are_measured_again(tmp_path):
    """Every fifth measurement of the first fifty says half as much again; the rows end as if none had."""
    good, bad = (1.0, 0.0, True, 1.0), (1.5, 0.3, False, 1.0)
    calm, block = FakeBackend(), conv()
    busy = Moments(lambda n: bad if n < 50 and n % 5 == 0 else good)
    with LatencyTable(tmp_path / "a.sqlite") as a, LatencyTable(tmp_path / "b.sqlite") as b:
        a.measure([block], calm)
        report = b.measure([block], busy)
        assert report.unstable == ()
        assert report.repeated == 10
        assert report.measured + report.repeated == len(busy.log)
        expected = a.store.measured(block.signature, calm.fingerprint())
        found = b.store.measured(block.signature, calm.fingerprint())
        assert {p: found[p].hot.median_ms for p in expected} == {
            p: row.hot.median_ms for p, row in expected.items()
        }


def test_rows_of_a_slow_pace_that_nothing_faster_was_known_of_are_measured_again(tmp_path):
    """All are steady; the first twenty are of a core at half its pace, and one later is a little slower."""
    block = conv()
    backend = Moments(
        lambda n: (2.0, 0.01, True, 2.0) if n < 20 else (1.0, 0.02, True, 1.1 if n == 25 else 1.0)
    )
    with LatencyTable(tmp_path / "t.sqlite") as table:
        assert table.measure([block], backend).repeated == 20
        rows = table.store.measured(block.signature, backend.fingerprint())
        assert all(row.hot.median_ms == pytest.approx(cliffs(*p)) for p, row in rows.items())


def test_rows_of_a_slow_pace_are_replaced_together(tmp_path):
    """Beside rows at half the pace each would look like a cliff, and sampling would want the rows around it."""
    blocks = [FakeBlock(name, f'{{"{name}": 1}}', (grid(512), grid(512))) for name in "ab"]
    calm = Moments(lambda n: (1.0, 0.0, True, 1.0))
    with LatencyTable(tmp_path / "calm.sqlite") as table:
        first = table.measure(blocks[:1], calm).measured
        both = first + table.measure(blocks, calm).measured
    busy = Moments(lambda n: (2.0, 0.0, True, 2.0) if n < first else (1.0, 0.0, True, 1.0))
    with LatencyTable(tmp_path / "busy.sqlite") as table:
        report = table.measure(blocks, busy)
        assert (report.measured, report.repeated) == (both, first)
        for block in blocks:
            rows = table.store.measured(block.signature, busy.fingerprint())
            assert all(row.hot.median_ms == pytest.approx(busy.latency(*p)) for p, row in rows.items())


def test_rows_that_are_unsteady_in_memory_only_are_measured_again(tmp_path):
    """Every fifth measurement of the first fifty says half as much again from memory."""

    class Busy(FakeBackend):
        def block_latency(self, block, widths, config=None):
            bad = len(self.log) < 50 and len(self.log) % 5 == 0
            found = super().block_latency(block, widths)
            ms = found.cold.median_ms
            return replace(found, cold=Measurement(1.5 * ms, ms, 2 * ms, 3, stable=False)) if bad else found

    block, backend = conv(), Busy(cold=2.0)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        assert (report.repeated, report.unstable) == (10, ())
        rows = table.store.measured(block.signature, backend.fingerprint()).values()
        assert all(row.cold.median_ms == 2 * row.hot.median_ms for row in rows)


def test_each_state_of_a_row_is_that_of_its_calmer_measurement(tmp_path):
    def found(hot_ms, hot_steady, cold_ms, cold_steady):
        hot, cold = (
            Measurement(ms, ms, ms if steady else 2 * ms, 3, steady)
            for ms, steady in ((hot_ms, hot_steady), (cold_ms, cold_steady))
        )
        return BlockLatency(hot, cold)

    left = [found(1, True, 2, True), found(1, True, 9, False), found(5, False, 2, True)]

    class Sequence(FakeBackend):
        def block_latency(self, block, widths, config=None):
            return left.pop(0)

    with LatencyTable(tmp_path / "t.sqlite") as table:
        block, backend = FakeBlock("b", "{}", (grid(16),)), Sequence()
        report = table.measure([block], backend)
        assert (report.repeated, report.unstable) == (1, ())
        assert set(table.store.measured("{}", backend.fingerprint()).values()) == {found(1, True, 2, True)}


def test_unsteady_rows_of_earlier_calls_are_measured_again_when_asked_for_and_the_steady_stand(tmp_path):
    block = conv()
    busy, calm = Moments(lambda n: (1.5, 0.01, n % 2 > 0, 1.0)), FakeBackend()
    busy.latency = calm.latency = lambda c_in, c_out: 1.0 + c_in * c_out
    with LatencyTable(tmp_path / "t.sqlite") as table:
        unsteady = table.measure([block], busy).unstable
        assert unsteady
        assert table.measure([block], calm).unstable == unsteady
        report = table.measure([block], calm, retry_unstable=True)
        assert (report.repeated, report.unstable) == (len(unsteady), ())
        rows = table.store.measured(block.signature, calm.fingerprint())
        for _, point, _ in unsteady:
            assert rows[point].hot.median_ms == calm.latency(*point)


def test_unsteady_rows_that_no_price_rests_on_are_not_told(tmp_path):
    """Of one signature: a row beyond the block's grid, and one that two blocks rest on."""
    noisy = Moments(lambda n: (1.0, 0.3, False, 1.0))
    wide, narrow = FakeBlock("b", "{}", (grid(64),)), FakeBlock("b", "{}", (grid(16),))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        everything = {point for _, point, _ in table.measure([wide], noisy).unstable}
        assert everything >= {(8,), (16,), (64,)}
        assert {point for _, point, _ in table.measure([narrow], noisy).unstable} == {(8,), (16,)}
        both = [point for _, point, _ in table.measure([narrow, wide], noisy).unstable]
        assert sorted(both) == sorted(everything)


def test_a_table_is_complete_at_every_moment_in_which_rows_are_measured_again(tmp_path):
    block = conv()

    class Changing(FakeBackend):
        def block_latency(self, block, widths, config=None):
            again = (block.name, widths) in self.log
            if again:
                table.surface(block, self.fingerprint())
                prices.append(widths)
            ms = super().block_latency(block, widths).hot.median_ms if again else 1e-3 * sum(widths)
            self.log.append((block.name, widths))
            return BlockLatency(Measurement(ms, ms, ms, 3, stable=again))

    prices: list[tuple[int, ...]] = []
    with LatencyTable(tmp_path / "t.sqlite") as table:
        backend = Changing()
        assert table.measure([block], backend).unstable == ()
        assert prices
        rows = table.store.measured(block.signature, backend.fingerprint())
        assert all(row.hot.median_ms == cliffs(*point) for point, row in rows.items())


def test_a_measurement_in_a_slower_state_of_the_core_replaces_none(tmp_path):
    block = FakeBlock("b", "{}", (grid(16),))
    moments = [(1.0, 0.3, False, 1.0), (1.0, 0.0, True, 1.0), (2.0, 0.0, True, 2.0)]  # rows 16, 8, 16 again
    backend = Moments(lambda n: moments[min(n, 2)])
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        assert report.unstable == (("b", (16,), pytest.approx(0.3)),)
        rows = table.store.measured("{}", backend.fingerprint())
        assert rows[16,].hot.median_ms == backend.latency(16)


def test_of_two_unsteady_measurements_of_a_row_the_calmer_stands(tmp_path):
    block = FakeBlock("b", "{}", (grid(16),))
    spreads = [0.0, 0.5, 0.3, 0.4]  # rows 8 and 16, then 16 again, once: nothing became steady
    first = Moments(lambda n: (1.0, spreads[n], n == 0, 1.0))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], first)
        assert report.repeated == 1
        assert [spread for *_, spread in report.unstable] == [pytest.approx(0.3)]
        assert len(first.log) == 3


class Outliers(FakeBackend):
    """Gives some rows ``factors``, one a measurement of the row, and is right after the last."""

    def __init__(self, factors: dict[tuple[int, ...], list[float]]) -> None:
        super().__init__(latency=lambda x, y: 0.1 + 1e-4 * x * y)
        self.left = {point: list(each) for point, each in factors.items()}

    def block_latency(self, block, widths, config=None):
        hot = super().block_latency(block, widths).hot
        factor = self.left[widths].pop(0) if self.left.get(widths) else 1.0
        return BlockLatency(replace(hot, median_ms=factor * hot.median_ms))


@pytest.mark.parametrize("factor", [0.001, 0.4, 2.0])
def test_a_row_unlike_the_others_is_measured_again(tmp_path, factor):
    """Steady, and wrong: the repetition does not confirm it, and the middle one of three counts."""
    point = (128, 128)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        backend = Outliers({point: [factor]})
        report = table.measure([conv()], backend)
        rows = table.store.measured(conv().signature, backend.fingerprint())
        assert all(row.hot.median_ms == pytest.approx(backend.latency(*p)) for p, row in rows.items())
        assert 2 <= report.repeated <= 6


def test_a_row_unlike_the_others_that_repeats_stands(tmp_path):
    """A cliff of the runtime: it is asked for once more, and nothing around it is measured for it."""
    point = (128, 128)
    with LatencyTable(tmp_path / "a.sqlite") as a, LatencyTable(tmp_path / "b.sqlite") as b:
        smooth, cliff = Outliers({}), Outliers({point: [1.7] * 9})
        first, second = a.measure([conv()], smooth), b.measure([conv()], cliff)
        assert (first.measured, first.repeated) == (second.measured, 0)
        row = b.store.measured(conv().signature, cliff.fingerprint())[point]
        assert row.hot.median_ms == pytest.approx(1.7 * smooth.latency(*point))
        assert cliff.log.count(("conv", point)) == 2


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_noise_asks_for_no_more_rows(tmp_path, noise):
    """Rows that repeat differently, as on a busy machine: as many of them, and as few."""
    rng = np.random.default_rng(0)
    backend = Moments(lambda n: (rng.lognormal(0, noise), 0.05, True, 1.0))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([conv()], backend)
        assert {point for _, point in backend.log} == set(rows_of_all(conv().grids, ()))
        assert report.measured == len(rows_of_all(conv().grids, ()))
