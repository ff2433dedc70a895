"""What the profiler adds and what a run costs, told apart from what nodes take."""

from __future__ import annotations

import numpy as np

from smcp_fx.backends.base import Backend, cache_bytes
from smcp_fx.backends.onnxruntime_backend import OnnxRuntimeBackend
from smcp_fx.backends.onnxruntime_blocks import block_ms, evict_caches
from smcp_fx.backends.onnxruntime_overhead import code_warmer, overhead
from smcp_fx.backends.onnxruntime_profile import NodeTime


def test_overheads_are_measured_once_and_are_part_of_a_latency() -> None:
    found = overhead(1, True)
    assert found.profiler_ms > 0
    assert 0 <= found.run_ms < 5.0
    assert overhead(1, True) is found
    backend = OnnxRuntimeBackend()
    assert backend.run_overhead_ms() == found.run_ms
    assert Backend.run_overhead_ms(backend) is None


def test_another_usual_pace_means_other_overheads(monkeypatch) -> None:
    from smcp_fx.backends import onnxruntime_overhead as module

    class Core:
        usual_ms = 0.004

    core, made = Core(), []
    monkeypatch.setattr(module, "pace", lambda: core)
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_measured", lambda *_: made.append(core.usual_ms) or object())
    first = overhead(1, True)
    core.usual_ms = 0.0042
    assert overhead(1, True) is first
    core.usual_ms = 0.0072
    assert overhead(1, True) is not first
    assert made == [0.004, 0.0072]


def test_the_profilers_part_is_taken_off_every_node() -> None:
    nodes = [NodeTime(name, "Conv", ((1, 8, 2, 2),), 0.004) for name in ("smcp_context_x", "a", "b")]
    assert np.isclose(block_ms(nodes, [], 0.0015), 2 * 0.0025)
    assert np.isclose(block_ms(nodes, []), 0.008)


def test_conversions_that_another_block_paid_for_do_not_count() -> None:
    """A concatenation of two inputs, three quarters of whose channels an earlier one has read."""
    shapes = ((1, 24, 2, 2), (1, 8, 2, 2))
    nodes = [NodeTime("", "ReorderOutput", (shape,), 0.004) for shape in shapes]
    nodes += [NodeTime("cat", "Concat", ((1, 32, 2, 2),), 0.005)]
    assert np.isclose(block_ms(nodes, [(1, 32, 2, 2)], 0.001, paid=0.75), 0.25 * 2 * 0.003 + 0.004)
    assert np.isclose(block_ms(nodes, [(1, 32, 2, 2)], 0.001), 2 * 0.003 + 0.004)


def test_caches_are_emptied_by_more_than_they_hold() -> None:
    from smcp_fx.backends import onnxruntime_blocks

    evict_caches()
    assert onnxruntime_blocks._eviction_buffer().nbytes >= 2 * cache_bytes()


def test_the_code_warmer_runs_every_common_kind_of_node() -> None:
    (result,) = code_warmer(1)()
    assert result.shape == (1, 16)
    assert np.isfinite(result).all()
    assert code_warmer(1) is code_warmer(1)
