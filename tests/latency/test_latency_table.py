"""The latency table on a runtime whose latencies are known: rows, prices, and what they rest on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_latencies import FakeBackend, FakeBlock, cliffs, conv, dense, grid, truth

from smcp_fx.backends.base import BlockLatency
from smcp_fx.blocks.sharing import priced_as, unique_blocks
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.sampling import rows_to_begin
from smcp_fx.latency.table import LatencyTable


def test_measure_then_price(tmp_path):
    block, backend = conv(), FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        report = table.measure([block], backend)
        price = table.surface(block, backend.fingerprint())
        assert report.measured == len(backend.log) == len(set(backend.log))
        assert report.failed == report.unstable == ()
        errors = np.abs(dense(price, block) / truth(block) - 1)
        assert np.percentile(errors, 95) < 0.05
        held_out = table.held_out_error([block], backend.fingerprint())
        assert 0 < held_out.points < len(backend.log)
        assert held_out.largest < 0.1
        assert float(price(np.array(256), np.array(256))) == pytest.approx(cliffs(256, 256))
        for point in ((8, 256), (256, 8)):
            assert float(price(*map(np.array, point))) == pytest.approx(cliffs(*point))


def test_a_second_run_measures_nothing_and_equal_blocks_share_rows(tmp_path):
    backend = FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        first = table.measure([conv("a"), conv("b")], backend)
    with LatencyTable(tmp_path / "t.sqlite") as table:
        again = table.measure([conv("c")], backend)
        assert again.measured == 0
        assert again.reused == first.measured
        narrower = table.measure([conv("d", c_in=128)], backend)
        assert narrower.reused == first.measured
        assert narrower.measured < first.measured  # rows of the wider block serve the narrower one


def test_rows_tell_where_a_number_comes_from(tmp_path):
    block, backend = conv(c_in=16, c_out=16), FakeBackend()
    before = time.time()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure([block], backend)
        rows = table.rows()
        assert table.fingerprints() == [backend.fingerprint()]
        assert table.rows(replace(backend.fingerprint(), version="2")) == []
    assert {row.widths for row in rows} == {(8, 8), (8, 16), (16, 8), (16, 16)}
    for row in rows:
        assert row.fingerprint == backend.fingerprint()
        assert row.name == "conv"
        assert row.latency.hot.median_ms == cliffs(*row.widths)
        assert before - 1 <= row.measured_at <= time.time() + 1


def test_states_are_weighed(tmp_path):
    block, backend = conv(c_in=16, c_out=16), FakeBackend(cold=2.0)
    for share, factor in ((0.0, 1.0), (0.5, 1.5), (1.0, 2.0)):
        with LatencyTable(tmp_path / "t.sqlite", cold_share=share) as table:
            table.measure([block], backend)
            price = table.surface(block, backend.fingerprint())
            assert float(price(np.array(16), np.array(8))) == pytest.approx(factor * cliffs(16, 8))
    assert len(backend.log) == 4
    with pytest.raises(InputError, match="cold_share"):
        LatencyTable(tmp_path / "t.sqlite", cold_share=1.5)


def test_missing_rows_and_other_devices_are_errors(tmp_path):
    block, backend = conv(), FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        with pytest.raises(TableError, match=r"'conv' is not measured"):
            table.surface(block, backend.fingerprint())
        table.measure([block], backend)
        other = FakeBackend(device="another").fingerprint()
        with pytest.raises(TableError, match=r"rows of: none 1, float32, 1 thread, fake"):
            table.surface(block, other)
        with pytest.raises(TableError, match="not measured"):
            table.held_out_error([block], other)


def test_held_out_errors_are_of_the_state_that_is_asked_for(tmp_path):
    class Memory(FakeBackend):
        """From memory every row takes a millisecond more; a third of them are unsteady in cache."""

        def block_latency(self, block, widths, config=None):
            hot = super().block_latency(block, widths).hot
            in_cache = replace(hot, stable=sum(widths) % 3 != 0)
            return BlockLatency(in_cache, replace(hot, median_ms=hot.median_ms + 1.0))

    block, backend = conv(), Memory()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure([block], backend)
        in_cache, half, from_memory = (
            table.held_out_error([block], backend.fingerprint(), share) for share in (0.0, 0.5, 1.0)
        )
        assert in_cache.rows == from_memory.rows
        assert np.allclose(from_memory.measured_ms, in_cache.measured_ms + 1.0)
        assert np.allclose(half.measured_ms, in_cache.measured_ms + 0.5)
        told = table.surface(block, backend.fingerprint(), 1.0).left_out()
        for (_, point), error, ms in zip(
            from_memory.rows, from_memory.errors, from_memory.measured_ms, strict=True
        ):
            assert error == pytest.approx(abs(told[point] / ms - 1))
        middle = float(np.median(in_cache.measured_ms))
        long = in_cache.telling(middle)
        errors = dict(zip(in_cache.rows, in_cache.errors, strict=True))
        expected = [
            row
            for row, ms in zip(in_cache.rows, in_cache.measured_ms, strict=True)
            if ms >= middle and sum(row[1]) % 3 != 0
        ]
        assert list(long.rows) == expected
        assert 0 < long.points == len(expected) < sum(in_cache.measured_ms >= middle)
        expected = [errors[row] for row in expected]
        assert long.errors.tolist() == expected
        assert from_memory.telling(0.0).points == from_memory.points
        assert half.telling(0.0).rows == in_cache.telling(0.0).rows
        assert [long.median, long.p95, long.largest] == list(np.percentile(expected, [50, 95, 100]))
        assert in_cache.telling(1e9).points == 0


def test_blocks_that_a_larger_one_can_be_are_priced_by_its_rows(tmp_path: Path) -> None:
    """As a dense block's layers: each reads more than the one before, at least and at most."""
    layers = [
        FakeBlock(f"layer{k}", "a", (tuple(range(8 * k, 64 + 32 * k + 1, 8)), grid(64))) for k in (1, 2, 3)
    ]
    wide, tall = FakeBlock("wide", "b", (grid(64), grid(32))), FakeBlock("tall", "b", (grid(32), grid(64)))
    blocks = [*layers, wide, tall]
    home = priced_as(blocks)
    assert {home["a", layer.grids].name for layer in layers} == {"layer3"}
    assert home["a", layers[0].grids].grids == (tuple(range(8, 161, 8)), grid(64))
    assert home["b", wide.grids] is wide
    assert home["b", tall.grids] is tall
    assert [block.name for block in unique_blocks(blocks)] == ["layer3", "wide", "tall"]
    backend = FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure(blocks, backend)
        assert {name for name, _ in backend.log} == {"layer3", "wide", "tall"}
        (prices,) = table.surfaces(blocks, backend.fingerprint(), 0.0)
        for layer in layers:
            price = prices["a", layer.grids]
            errors = np.abs(dense(price, layer) / truth(layer) - 1)
            assert np.percentile(errors, 95) < 0.05


def test_few_rows_and_those_asked_for(tmp_path: Path) -> None:
    block, backend = conv(), FakeBackend()
    with LatencyTable(tmp_path / "t.sqlite") as table:
        begun = table.measure([block], backend, whole=False)
        assert begun.measured == len(rows_to_begin(block.grids, ())) < 7
        asked = [(200, 120), (64, 64)]
        before = table.surface(block, backend.fingerprint())
        report = table.learn([(block, point) for point in asked], [block], backend)
        assert report.measured == 2 - ((64, 64) in before.rows)
        assert table.learn([(block, point) for point in asked], [block], backend).measured == 0
        price = table.surface(block, backend.fingerprint())
        for point in asked:
            assert float(price(*map(np.array, point))) == pytest.approx(cliffs(*point))
            assert float(price.doubt(*map(np.array, point))) == 0.0


def test_rows_that_blocks_of_one_kind_lack_are_each_measured_in_one_wide_enough(tmp_path: Path) -> None:
    """As the first layers of a ResNet-50's stages: the narrower one comes first, and cannot be made wider."""
    narrow, wide, tall = conv("narrow", c_in=64, c_out=64), conv("wide", c_out=64), conv("tall", c_in=64)
    blocks, backend = [narrow, wide, tall], FakeBackend()
    assert narrow.signature == wide.signature == tall.signature
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure(blocks, backend, whole=False)
        backend.log.clear()
        table.learn([(narrow, (24, 40)), (wide, (232, 40)), (tall, (24, 232))], blocks, backend)
    assert {name: point for name, point in backend.log if point != (24, 40)} == {
        "wide": (232, 40), "tall": (24, 232)
    }  # fmt: skip
    assert ("narrow", (24, 40)) not in backend.log  # priced, and measured, as part of a larger one


def test_a_row_that_was_asked_for_and_fails_leaves_the_others_in_use(tmp_path: Path) -> None:
    block, backend = conv(), FakeBackend(fails_at=(200, 120))
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.measure([block], backend, whole=False)
        report = table.learn([(block, (200, 120))], [block], backend)
        assert report.failed == (("conv", (200, 120), "RuntimeError: the kernel crashed"),)
        assert float(table.surface(block, backend.fingerprint())(np.array(200), np.array(120))) > 0
        backend.log.clear()
        table.learn([(block, (200, 120))], [block], backend)
        assert backend.log == []


def test_a_table_that_was_measured_along_lines_is_gone_on_with(tmp_path: Path) -> None:
    """As earlier versions did: their rows are enough to begin with."""
    block, backend = conv(), FakeBackend()
    lines = [(x, y) for x in block.grids[0] for y in (8, 16, 256)]
    lines += [(x, y) for x in (8, 16, 256) for y in block.grids[1]] + [(128, 128)]
    with LatencyTable(tmp_path / "t.sqlite") as table:
        table.learn([(block, point) for point in lines], [], backend)
        assert table.measure([block], backend, whole=False).measured <= 1
        errors = np.abs(dense(table.surface(block, backend.fingerprint()), block) / truth(block) - 1)
        assert np.percentile(errors, 95) < 0.1
