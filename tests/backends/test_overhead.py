"""What the profiler adds and what a run costs, told apart from what nodes take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from smcp_fx.backends.base import Backend, cache_bytes
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeBackend
from smcp_fx.backends.onnxruntime.overhead import (
    Overhead,
    code_warmer,
    overhead,
    profiler_beside,
    without_reference,
)
from smcp_fx.backends.onnxruntime.own_time import block_ms
from smcp_fx.backends.onnxruntime.profile import NodeTime, Profiler
from smcp_fx.backends.timing import block_runs, fading
from smcp_fx.backends.timing.block_runs import runs_agree
from smcp_fx.backends.timing.fading import evict_caches
from smcp_fx.backends.timing.measuring import Measurement, Sample, TimingConfig


def test_overheads_are_part_of_a_latency() -> None:
    found = overhead(1, True)
    assert 0 <= found.run_ms < 5.0
    assert found.node_ms < 1.0
    backend = OnnxRuntimeBackend()
    assert backend.run_overhead_ms() == overhead(1, True).run_ms
    assert Backend.run_overhead_ms(backend) is None


def test_of_overheads_the_fastest_counts_and_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from smcp_fx.backends.onnxruntime import overhead as module

    clock, slow, fast, luck = (
        [100.0],
        Overhead(0.010, 0.0007),
        Overhead(0.007, 0.0005),
        Overhead(0.007, 0.00049),
    )
    coming = [(slow, False), (fast, True), (slow, True), (luck, True)]
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_measured", lambda *_: coming.pop(0))
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    assert overhead(1, True) is slow
    for later, expected, left in (
        (29.0, slow, 3),
        (2.0, fast, 2),
        (1.0, fast, 2),
        (1.5, fast, 1),
        (3.0, fast, 0),
    ):
        clock[0] += later
        assert overhead(1, True) is expected
        assert len(coming) == left


def test_the_profilers_part_is_taken_off_every_node() -> None:
    nodes = [NodeTime(name, "Conv", ((1, 8, 2, 2),), 0.004) for name in ("smcp_context_x", "a", "b")]
    assert np.isclose(block_ms(nodes, [], 0.0015), 2 * 0.0025)
    assert np.isclose(block_ms(nodes, []), 0.008)


def test_a_chain_beside_the_block_tells_what_the_profiler_adds() -> None:
    """Of links that take 0.4 us and show as 2, 3 and 9 us those near the median count; the block's nodes do not."""
    shown = [2, 3, 2, 3, 2, 3, 9, 3, 2]
    links = [
        NodeTime(f"smcp_reference_link{i}_nchwc", "Conv", ((1, 16, 2, 3),), ms / 1e3)
        for i, ms in enumerate(shown)
    ]
    others = [NodeTime("smcp_reference_first_nchwc", "Conv", ((1, 16, 2, 3),), 0.008)]
    others += [NodeTime("ReorderOutput_7", "ReorderOutput", ((1, 16, 2, 3),), 0.003)]
    block = [NodeTime("conv", "Conv", ((1, 32, 2, 2),), 0.050)]
    assert np.isclose(profiler_beside([[*others, *links, *block]], 0.0004), 0.0025 - 0.0004)
    own = without_reference([*others, *links, *block])
    assert np.isclose(block_ms(own, [(1, 32, 2, 2)], 0.002), 0.048)


@pytest.mark.parametrize("added_ms", [0.0, 0.0015, 0.0041])
def test_a_block_costs_the_same_whatever_the_profiler_adds(
    monkeypatch: pytest.MonkeyPatch, added_ms: float
) -> None:
    """What a busy memory adds to the block's nodes is in the chain's nodes, too; the times here are made up."""
    from smcp_fx.backends.onnxruntime import blocks as module

    link_ms, conv_ms, other_ms = 0.0004, 0.0103, 0.008
    read = module.Profiler.runs

    def made_up(node: NodeTime) -> float:
        if node.operation == "Conv" and not node.name.startswith("smcp_"):
            return conv_ms + added_ms
        return (link_ms if "_link" in node.name else other_ms) + added_ms

    def runs(profiler: module.Profiler, wanted: Collection[int]) -> list[list[NodeTime]]:
        return [[replace(node, ms=made_up(node)) for node in run] for run in read(profiler, wanted)]

    monkeypatch.setattr(module.Profiler, "runs", runs)
    monkeypatch.setattr(module, "overhead", lambda *_: Overhead(0.0, link_ms))
    monkeypatch.setattr(block_runs, "take_sample", lambda timer, _: Sample(timer()))
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"], "conv"), helper.make_node("Relu", ["a"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16, 8, 8]) for name in "xy"]
    weight = numpy_helper.from_array(np.ones((16, 16, 3, 3), np.float32), "w")
    nodes[0].attribute.append(helper.make_attribute("pads", [1, 1, 1, 1]))
    graph = helper.make_graph(nodes, "block", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = module.measure_block(model)
    for state in (found.hot, found.cold):
        assert np.isclose(state.median_ms, conv_ms)


def test_a_state_that_is_unsteady_is_taken_from_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    from smcp_fx.backends.onnxruntime import blocks as module

    def found(ms: float, stable: bool) -> Measurement:
        return Measurement(ms, ms, ms if stable else 2 * ms, 3, stable)

    sessions = [(found(1.0, True), found(3.0, False)), (found(1.5, False), found(2.0, True))]
    monkeypatch.setattr(module, "_attempt", lambda *_: sessions.pop(0))
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16, 8, 8]) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "block", values[:1], values[1:]), ir_version=8)
    row = module.measure_block(model, config=TimingConfig(attempts=3))
    assert (row.hot, row.cold) == (found(1.0, True), found(2.0, True))
    assert sessions == []


def test_only_the_runs_that_are_wanted_are_read() -> None:
    """Names that look like the profile's own marks do not confuse it."""
    names = ["model_run", 'x_kernel_time"', '"model_run"']
    nodes = [helper.make_node("Relu", [a], [b], name) for a, b, name in zip("xab", "aby", names, strict=True)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with Profiler(model.SerializeToString()) as profiler:
        for _ in range(4):
            profiler.session.run(None, {"x": np.ones((1, 4), np.float32)})
        runs = profiler.runs({1, 3})
    assert [len(run) for run in runs] == [0, 3, 0, 3]
    for run in (runs[1], runs[3]):
        assert [node.name for node in run] == names
        assert {node.operation for node in run} == {"Relu"}
        assert {node.output_shapes for node in run} == {((1, 4),)}


def test_runs_that_agree_end_a_row_and_disturbed_ones_do_not() -> None:
    alike = [Sample(1.0 + 0.001 * i) for i in range(11)]
    assert runs_agree(alike)
    assert not runs_agree(alike[:10])
    assert not runs_agree([*alike[:10], Sample(1.0, disturbed=True)])
    assert not runs_agree([Sample(1.0 + 0.01 * i) for i in range(11)])
    assert runs_agree([Sample(1.0), Sample(1.05)], 2)
    assert not runs_agree([Sample(1.0), Sample(1.08)], 2)


def test_conversions_that_another_block_paid_for_do_not_count() -> None:
    """A concatenation of two inputs, three quarters of whose channels an earlier one has read."""
    shapes = ((1, 24, 2, 2), (1, 8, 2, 2))
    nodes = [NodeTime("", "ReorderOutput", (shape,), 0.004) for shape in shapes]
    nodes += [NodeTime("cat", "Concat", ((1, 32, 2, 2),), 0.005)]
    assert np.isclose(block_ms(nodes, [(1, 32, 2, 2)], 0.001, paid=0.75), 0.25 * 2 * 0.003 + 0.004)
    assert np.isclose(block_ms(nodes, [(1, 32, 2, 2)], 0.001), 2 * 0.003 + 0.004)


def test_caches_are_emptied_by_more_than_they_hold() -> None:
    evict_caches()
    assert fading._eviction_buffer().nbytes >= 2 * cache_bytes()


def test_the_code_warmer_runs_every_common_kind_of_node() -> None:
    (result,) = code_warmer(1)()
    assert result.shape == (1, 16)
    assert np.isfinite(result).all()
    assert code_warmer(1) is code_warmer(1)
