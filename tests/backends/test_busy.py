"""Machines on which others compute, too: no row is made of their time, and one too busy is told."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import smcp_fx
from smcp_fx.backends.onnxruntime import blocks
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeBackend
from smcp_fx.backends.onnxruntime.blocks import measure_block
from smcp_fx.backends.onnxruntime.overhead import Overhead
from smcp_fx.backends.onnxruntime.profile import NodeTime
from smcp_fx.backends.pytorch import TorchBackend
from smcp_fx.backends.timing import block_runs, physics, quiet
from smcp_fx.backends.timing.block_runs import sample_of_block
from smcp_fx.backends.timing.measuring import Sample
from smcp_fx.backends.timing.quiet import core_share
from smcp_fx.errors import BackendError, MachineBusyError

BLOCK, CONTEXT, LOST = 2.6, 4.4, 30.0  # ms: computed by the block and beside it, and others' time on the core


def test_an_undisturbed_run_is_taken_as_it_is() -> None:
    assert sample_of_block(BLOCK, CONTEXT, Sample(BLOCK + CONTEXT), None) == Sample(BLOCK)


@pytest.mark.parametrize("usual", [None, CONTEXT])
def test_time_lost_beside_the_block_takes_nothing_from_it(usual: float | None) -> None:
    """The wall clock says 2.6 and 34.4 ms, the thread computed 7."""
    found = sample_of_block(BLOCK, CONTEXT + LOST, Sample(BLOCK + CONTEXT, disturbed=True), usual)
    assert found == (None if usual is None else Sample(pytest.approx(BLOCK), disturbed=True))


@pytest.mark.parametrize("usual", [None, CONTEXT])
def test_time_lost_in_the_block_is_no_part_of_it(usual: float | None) -> None:
    """The wall clock says 32.6 and 4.4 ms, the thread computed 7: it may all have been the block's but for 4.4."""
    found = sample_of_block(BLOCK + LOST, CONTEXT, Sample(BLOCK + CONTEXT, disturbed=True), usual)
    assert found == (None if usual is None else Sample(pytest.approx(BLOCK), disturbed=True))


def test_a_run_that_lost_little_tells_by_itself() -> None:
    found = sample_of_block(BLOCK, CONTEXT + 0.4, Sample(BLOCK + CONTEXT, disturbed=True), None)
    assert found == Sample(BLOCK, disturbed=True)


@pytest.mark.parametrize("computed", [0.0, 4.0, CONTEXT, CONTEXT + 0.1])
def test_little_is_not_told_from_its_context(computed: float) -> None:
    """What is left beside the usual context is nothing, less, or within what contexts differ by."""
    assert sample_of_block(BLOCK, CONTEXT + LOST, Sample(computed, disturbed=True), CONTEXT) is None


def test_whatever_is_lost_no_sample_is_far_below_what_the_block_computed() -> None:
    """Runs drawn at random: contexts vary by a tenth, time is lost anywhere, in one place or in both."""
    draw = np.random.default_rng(0)
    told = 0
    for _ in range(5000):
        block, context = draw.uniform(0.05, 20, 2)
        beside = context * draw.uniform(0.9, 1.1)
        lost = draw.uniform(0, 40) * np.array([0, 1]) if draw.random() < 0.5 else draw.uniform(0, 40, 2)
        sample = Sample(block + beside, disturbed=True)
        usual = context if draw.random() < 0.5 else None
        found = sample_of_block(block + lost[0], beside + lost[1], sample, usual)
        told += found is not None
        if found is not None:
            assert 0.75 * block <= found.ms <= 1.26 * block
    assert told > 1000


def convolution(channels: int = 16, side: int = 8) -> onnx.ModelProto:
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"], "conv", pads=[1, 1, 1, 1])]
    nodes.append(helper.make_node("Relu", ["a"], ["y"]))
    shape = [1, channels, side, side]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xya"]
    weight = numpy_helper.from_array(np.ones((channels, channels, 3, 3), np.float32), "w")
    graph = helper.make_graph(nodes, "block", values[:1], values[1:2], [weight], value_info=values[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes up what nodes and runs take: ``conv_ms``, ``rest_ms`` of the context's, and each run's sample."""
    read = blocks.Profiler.runs

    def install(conv_ms: float, rest_ms: float, samples: Callable[[int], Sample]) -> None:
        def made_up(node: NodeTime) -> NodeTime:
            if node.name.startswith("smcp_context"):
                return replace(node, ms=rest_ms)
            own = node.operation == "Conv" and not node.name.startswith("smcp_")
            return replace(node, ms=conv_ms if own else 0.0)

        def runs(profiler: blocks.Profiler, wanted: Collection[int]) -> list[list[NodeTime]]:
            return [[made_up(node) for node in run] for run in read(profiler, wanted)]

        count = iter(range(100_000))
        monkeypatch.setattr(blocks.Profiler, "runs", runs)
        monkeypatch.setattr(blocks, "overhead", lambda *_: Overhead(0.0, 0.0))
        monkeypatch.setattr(blocks, "pace", lambda: SimpleNamespace(usual_ms=0.0))
        monkeypatch.setattr(block_runs, "evict_caches", lambda: None)
        monkeypatch.setattr(block_runs, "displace_inner_caches", lambda: None)
        monkeypatch.setattr(block_runs, "take_sample", lambda timer, _: (timer(), samples(next(count)))[1])

    return install


def test_a_session_none_of_whose_runs_tells_is_no_row(machine: Callable[..., None]) -> None:
    """Every run computed 1 ms while its nodes beside the block took over 50 ms by the wall clock."""
    machine(0.5, 5.0, lambda _: Sample(1.0, disturbed=True))
    with pytest.raises(MachineBusyError, match="Measure again when it is idle"):
        measure_block(convolution())


def test_a_busy_moment_leaves_the_row_to_the_runs_that_tell(machine: Callable[..., None]) -> None:
    machine(0.5, 5.0, lambda run: Sample(1.0, disturbed=True) if run % 3 else Sample(200.0))
    found = measure_block(convolution())
    assert found.hot.median_ms == pytest.approx(0.5, abs=1e-3)
    assert found.cold is not None
    assert found.cold.median_ms == pytest.approx(0.5, abs=1e-3)
    assert not found.stable


def test_no_row_is_faster_than_the_processor_multiplies(machine: Callable[..., None]) -> None:
    machine(0.0008, 0.0004, lambda _: Sample(1.0))
    measure_block(convolution())
    with pytest.raises(BackendError, match=r"147,865,600 multiply-adds seemed to take .* ms, and need"):
        measure_block(convolution(64, 64))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2), (2, 6, 9, 9)),
        (nn.Conv2d(4, 8, 3, padding=1), (2, 4, 1, 1)),
        (nn.Conv2d(4, 4, (3, 5), padding=(2, 4), dilation=(2, 3), groups=4), (1, 4, 4, 7)),
        (nn.Conv1d(4, 6, 5, dilation=2), (1, 4, 30)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2), (2, 6, 5, 5)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2), (1, 6, 3, 4)),
        (nn.Linear(12, 7), (3, 12)),
        (nn.Linear(12, 7), (2, 5, 12)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)), (1, 3, 8, 8)),
    ],
)
def test_multiply_adds_of_an_onnx_model(layer: nn.Module, shape: tuple[int, ...]) -> None:
    from smcp_fx.backends.onnx.export import export_model_proto

    x = torch.randn(shape)
    model = export_model_proto(layer, (x,), dynamic_batch=False)
    products = 0.0  # where all is one, a layer's outputs add up to them
    for part in [m for m in layer.modules() if not list(m.children())]:
        for name, parameter in part.named_parameters():
            nn.init.constant_(parameter, float(name == "weight"))
        x = part(torch.ones(x.shape)).detach()
        products += float(x.double().sum()) if list(part.parameters()) else 0.0
    assert physics.multiply_adds(model) == products


def test_what_is_not_known_counts_nothing() -> None:
    model = convolution()
    assert physics.multiply_adds(model) == 16 * 16 * 22 * 22  # of 24 in each dimension two read padding
    del model.graph.value_info[:]
    assert physics.multiply_adds(model) == 0
    half = convolution()
    half.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((16, 16, 3, 3), np.float16), "w"))
    assert physics.multiply_adds(half) == 0


@pytest.mark.parametrize(("flags", "cycle"), [("sse2 avx avx512f", 32), ("sse2 avx fma", 16), ("sse2", 8)])
def test_the_peak_is_that_of_the_widest_vectors(monkeypatch, tmp_path, flags: str, cycle: int) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        f"processor\t: 0\nflags\t\t: {flags}\nvmx flags\t: avx512f\n\nprocessor\t: 1\nflags\t\t: {flags}\n"
    )
    monkeypatch.setattr(physics, "_CPU_INFO", info)
    assert physics.peak.__wrapped__() == cycle * 6.5e9
    assert physics.least_ms(convolution(), 2) == pytest.approx(0.5 * physics.least_ms(convolution(), 1))


class Shared:
    """A machine's clocks while this thread has a core for a share of the time, by the wall clock's seconds."""

    def __init__(self, share: Callable[[float], float]) -> None:
        self.share, self.now, self.cpu = share, 0.0, 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        self.cpu += 1e-3 * self.share(self.now)
        return self.now

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("backend", [OnnxRuntimeBackend, TorchBackend])
def test_a_machine_that_is_too_busy_is_told(monkeypatch: pytest.MonkeyPatch, backend: type) -> None:
    clocks = Shared(lambda _: 1 / 6)
    monkeypatch.setattr(quiet, "time", clocks)
    monkeypatch.setattr(quiet, "core_share", core_share)
    with pytest.raises(MachineBusyError, match="a core for 17% of the time, and at least 50% are needed"):
        backend().require_quiet()
    assert 20 <= clocks.now < 23
    assert issubclass(MachineBusyError, smcp_fx.SmcpError)


def test_a_quiet_machine_is_asked_once_and_a_busy_moment_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Shared(lambda _: 0.7)
    monkeypatch.setattr(quiet, "time", clocks)
    monkeypatch.setattr(quiet, "core_share", core_share)
    quiet.require_core()
    assert clocks.now < 0.25
    clocks = Shared(lambda now: 0.2 if now < 10 else 0.9)
    monkeypatch.setattr(quiet, "time", clocks)
    quiet.require_core()
    assert 10 < clocks.now < 13
