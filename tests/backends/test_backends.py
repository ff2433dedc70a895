"""Engines, the measurement loop, and blocks timed inside a network."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from tolerances import assert_close
from torch import fx, nn

from smcp_fx.backends import backend_names, get_backend, measure_interleaved
from smcp_fx.backends.base import Fingerprint
from smcp_fx.backends.onnx.block_shapes import BlockShapes
from smcp_fx.backends.onnx.blocks import BlockModels, Template, consistent, resize
from smcp_fx.backends.onnxruntime import own_time
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeEngine
from smcp_fx.backends.onnxruntime.blocks import measure_block
from smcp_fx.backends.onnxruntime.context import add_context, random_feed
from smcp_fx.backends.onnxruntime.overhead import REFERENCE_SHAPE, Overhead
from smcp_fx.backends.onnxruntime.own_time import block_ms
from smcp_fx.backends.onnxruntime.profile import NodeTime
from smcp_fx.backends.onnxruntime.session import bound_run
from smcp_fx.backends.timing.measuring import (
    Sample,
    TimingConfig,
    measure_timers,
    stopwatch,
    summarise,
    take_sample,
    warm_up,
)
from smcp_fx.blocks.feeding import ACTIVATION, MOVEMENT
from smcp_fx.errors import BackendError, InputError, TableError

FAST = TimingConfig(min_repeats=2, max_repeats=3, budget_ms=1, attempts=1, warmup_ms=1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()


# ---- the measurement loop -----------------------------------------------------------------------------------


class Clock:
    """A timer that returns given ms, and counts."""

    def __init__(self, *ms: float, log: list[str] | None = None, name: str = "") -> None:
        self.ms, self.calls, self.log, self.name = list(ms), 0, log, name

    def __call__(self) -> float:
        self.calls += 1
        if self.log is not None:
            self.log.append(self.name)
        return self.ms.pop(0) if len(self.ms) > 1 else self.ms[0]


def test_median_and_quartiles():
    m = summarise([Sample(ms) for ms in (1.0, 2.0, 3.0, 4.0, 100.0)], spread_limit=1.0)
    assert (m.q1_ms, m.median_ms, m.q3_ms, m.repeats, m.stable) == (2.0, 3.0, 4.0, 5, True)
    assert m.spread == pytest.approx(2 / 3)
    assert not summarise([Sample(ms) for ms in (1.0, 2.0, 3.0, 4.0)], spread_limit=0.1).stable
    assert not summarise([Sample(1.0, True), Sample(1.0, True), Sample(1.0)], 0.1).stable


def test_warm_up_ends_when_runs_agree():
    config = TimingConfig(warmup_window=1, warmup_tolerance=0.1, warmup_ms=1e6)
    assert warm_up(Clock(9, 5, 3, 2, 1.9, 1.9), config) == 5


def test_timers_take_turns_that_begin_with_untimed_runs():
    log: list[str] = []
    config = TimingConfig(
        min_repeats=4, max_repeats=4, attempts=1, warmup_window=1, settle=3, settle_ms=1e6, burst=2
    )
    a, b = Clock(1.0, log=log, name="a"), Clock(2.0, log=log, name="b")
    first, second = measure_timers([a, b], config)
    assert "".join(log) == "aabb" + "aaaaabbbbb" * 2
    assert (first.median_ms, second.median_ms, first.repeats) == (1.0, 2.0, 4)


def test_untimed_runs_are_not_timed_and_end_with_their_time():
    """Each turn is dear at first: 9 and 9 ms untimed, then 1 ms."""
    turn = [9.0, 9.0, 1.0, 1.0]
    config = TimingConfig(min_repeats=4, max_repeats=4, attempts=1, warmup_window=1, settle=2, burst=2)
    measured, _ = measure_timers([Clock(9.0, 9.0, *turn, *turn), Clock(1.0)], config)
    assert (measured.median_ms, measured.q3_ms) == (1.0, 1.0)

    def slow() -> float:
        time.sleep(0.002)
        calls.append(0)
        return 2.0

    calls: list[int] = []
    config = TimingConfig(min_repeats=1, max_repeats=1, attempts=1, warmup_window=1, settle_ms=1.0, burst=1)
    measure_timers([slow, Clock(1.0)], config)
    assert len(calls) == 2 + 1 + 1  # warm-up, one untimed, one timed


def test_a_clock_of_whole_steps_is_averaged():
    """Three of ten runs of 2.3 steps show as 3: the median would say 2."""
    samples = [Sample(0.002)] * 7 + [Sample(0.003)] * 3
    m = summarise(samples, spread_limit=0.05, resolution_ms=0.001)
    assert m.median_ms == pytest.approx(0.0023)
    assert m.stable
    assert summarise([*samples, Sample(5.0)], 0.05, 0.001).median_ms == pytest.approx(0.0023)
    assert not summarise([Sample(0.002), Sample(0.012)] * 5, 0.05, 0.001).stable
    assert not summarise(samples, spread_limit=0.05).stable


def test_an_unstable_set_is_taken_again_and_then_said_to_be_unstable():
    config = TimingConfig(min_repeats=4, max_repeats=4, attempts=3, spread_limit=0.05, warmup_window=1)
    calm_later = Clock(1, 1, *(1, 2, 1, 2), *(1, 1, 1, 1), 5)
    (m,) = measure_timers([calm_later], config)
    assert (m.median_ms, m.stable, calm_later.calls) == (1.0, True, 10)
    (m,) = measure_timers([Clock(1, 1, *(1, 5, 1, 5), *(1, 2, 1, 2), *(1, 4, 1, 4))], config)
    assert (m.q3_ms - m.q1_ms, m.stable) == (1.0, False)


def test_repeats_follow_the_budget():
    config = TimingConfig(min_repeats=3, max_repeats=50, budget_ms=100, warmup_window=1)
    assert measure_timers([Clock(10.0)], config)[0].repeats == 10
    assert measure_timers([Clock(90.0)], config)[0].repeats == 3
    assert measure_timers([Clock(0.1)], config)[0].repeats == 50
    assert measure_timers([], config) == []


def test_a_thread_that_had_no_core_is_noticed():
    def asleep() -> float:
        time.sleep(0.02)
        return 20.0

    def busy() -> float:
        start = time.thread_time()
        while time.thread_time() - start < 0.002:
            pass
        return 2.0

    steady = SimpleNamespace(await_usual=lambda: True, is_usual=lambda: True)
    sample = take_sample(asleep, steady)
    assert sample.disturbed
    assert sample.ms < 5.0
    assert take_sample(asleep) == Sample(20.0)
    assert any(take_sample(busy, steady) == Sample(2.0) for _ in range(50))


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="min_repeats"):
        TimingConfig(min_repeats=5, max_repeats=4)
    with pytest.raises(InputError, match="attempts"):
        TimingConfig(attempts=0)


# ---- backends -----------------------------------------------------------------------------------------------


def test_unknown_names_and_options_are_errors_that_list_what_there_is():
    assert backend_names() == ("onnxruntime", "tensorrt", "torch")
    with pytest.raises(
        BackendError, match=r"unknown backend 'cuda'; there are: onnxruntime, tensorrt, torch"
    ):
        get_backend("cuda")
    with pytest.raises(BackendError, match="does not take the options"):
        get_backend("torch", colour="blue")
    with pytest.raises(InputError, match="threads = 0"):
        get_backend("onnxruntime", threads=0)
    with pytest.raises(BackendError, match="no device 'nowhere'"):
        get_backend("torch", device="nowhere")


def test_a_missing_package_gives_the_line_that_installs_it(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("smcp_fx.backends.onnx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError, match=r"'onnxruntime', which is not installed: pip install onnxruntime"):
        get_backend("onnxruntime")


def test_the_package_loads_no_runtime():
    script = (
        "import sys, smcp_fx.backends, smcp_fx.latency.table; "
        "print([m for m in ('onnx', 'onnxruntime', 'tensorrt', 'onnxscript') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_fingerprints_tell_settings_apart_and_survive_json():
    prints = [
        get_backend("onnxruntime").fingerprint(),
        get_backend("onnxruntime", threads=2).fingerprint(),
        get_backend("onnxruntime", spinning=False).fingerprint(),
        get_backend("torch").fingerprint(),
        get_backend("torch", compiled=True).fingerprint(),
    ]
    assert len({p.key() for p in prints}) == len(prints)
    assert get_backend("onnxruntime").fingerprint().key() == prints[0].key()
    for fingerprint in prints:
        assert Fingerprint.from_dict(fingerprint.as_dict()) == fingerprint
        assert fingerprint.runtime in fingerprint.describe()
    with pytest.raises(TableError, match="not a device fingerprint"):
        Fingerprint.from_dict({"backend": "torch"})


@pytest.mark.parametrize("name", ["onnxruntime", "torch"])
def test_engines_compute_what_the_module_does(name, tmp_path):
    module, x = network().train(), torch.randn(2, 3, 8, 8)
    with get_backend(name).compile(module, (x,), tmp_path / "net.onnx") as engine:
        y = torch.randn(5, 3, 8, 8)
        found = engine.run([y.numpy()])
        with torch.no_grad():
            assert np.allclose(found[0], module.eval()(y).numpy(), rtol=1e-4, atol=1e-5)
        m = engine.latency(config=FAST)
        assert 0 < m.q1_ms <= m.median_ms <= m.q3_ms
        both = measure_interleaved([engine, engine], config=FAST)
        assert all(
            FAST.min_repeats <= b.repeats <= FAST.max_repeats for b in both
        )  # disturbed ones are dropped
        with pytest.raises((BackendError, InputError)):
            engine.run([np.zeros((1, 7, 8, 8), np.float32)])
    with pytest.raises(BackendError, match="closed"):
        engine.run([y.numpy()])


def test_layer_latencies_name_every_node():
    with get_backend("onnxruntime").compile(network(), (torch.randn(2, 3, 8, 8),)) as engine:
        latencies = engine.layer_latencies()
    assert len(latencies) >= 2
    assert all(ms >= 0 for ms in latencies.values())


def test_layer_latencies_of_torch_are_by_module_and_follow_the_work():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 9, padding=4)
            self.unused = nn.ReLU()

        def forward(self, x):
            return self.large(torch.relu(self.small(x)))

    model = Twice()
    with get_backend("torch").compile(model, (torch.randn(2, 8, 48, 48),)) as engine:
        latencies = engine.layer_latencies()
        again = engine.layer_latencies()
    assert list(latencies) == list(again) == ["small", "large"]
    assert 0 < latencies["small"] < latencies["large"]
    assert not model.large._forward_hooks
    with get_backend("torch", compiled=True).compile(model, (torch.randn(2, 8, 8, 8),)) as engine:
        assert engine.layer_latencies() is None


def test_layer_latencies_are_without_what_the_profiler_adds_and_the_chain_that_tells_it(monkeypatch):
    """The times are made up. The network's result has the shape of the chain's, whose conversion is not its own."""
    from smcp_fx.backends.onnxruntime import backend as module

    read, link_ms, added_ms = module.Profiler.runs, 0.0004, 0.0041

    def runs(profiler, wanted=None):
        times = {True: link_ms + added_ms, False: 0.0052 + added_ms}
        return [[replace(n, ms=times["_link" in n.name]) for n in run] for run in read(profiler, wanted)]

    monkeypatch.setattr(module.Profiler, "runs", runs)
    monkeypatch.setattr(module, "overhead", lambda *_: Overhead(0.0, link_ms))
    chain = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)).eval()
    with get_backend("onnxruntime").compile(chain, (torch.randn(1, *REFERENCE_SHAPE[1:]),)) as engine:
        latencies = engine.layer_latencies()
    assert sum("conv" in name.lower() for name in latencies) == 2
    assert sum("Reorder" in name for name in latencies) == 2  # of the input, and of the result
    assert len(latencies) == 4
    assert np.allclose(list(latencies.values()), 0.0052)


def test_timing_with_bound_inputs_runs_the_network():
    """What CUDA is timed with, on the CPU: the same outputs, and a run at each call."""
    module, x = network(), torch.randn(2, 3, 8, 8)
    with get_backend("onnxruntime").compile(module, (x,)) as engine:
        run = bound_run(engine._session, {engine.input_names[0]: x.numpy()}, "cpu")
        run()
        assert 0 < stopwatch(run)() < 1e3


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="there is CUDA")
def test_cuda_is_refused_with_the_line_that_installs_it():
    with pytest.raises(
        BackendError, match=r"has no CUDAExecutionProvider, only .*pip install onnxruntime-gpu"
    ):
        get_backend("onnxruntime", device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs CUDA")
def test_cuda_computes_and_times_what_the_module_does():
    backend = get_backend("onnxruntime", device="cuda")
    assert "driver" in dict(backend.fingerprint().settings)
    module, x = network(), torch.randn(2, 3, 8, 8)
    with backend.compile(module, (x,)) as engine, torch.no_grad():
        assert np.allclose(engine.run([x.numpy()])[0], module(x).numpy(), rtol=1e-2, atol=1e-2)
        assert engine.latency(config=FAST).median_ms > 0
        assert engine.layer_latencies() is None
    latency = backend.block_latency(ABlock("conv", size=16), (16, 16), FAST)
    assert latency.hot.median_ms > 0
    assert latency.cold is None


def test_devices_that_are_none_are_named():
    with pytest.raises(BackendError, match="not measured on 'npu'"):
        get_backend("onnxruntime", device="npu")


def test_files_that_are_no_networks_are_refused(tmp_path):
    with pytest.raises(InputError, match="there is no ONNX file"):
        OnnxRuntimeEngine(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(BackendError, match=r"refuses .*bad\.onnx"):
        OnnxRuntimeEngine(tmp_path / "bad.onnx")


# ---- blocks -------------------------------------------------------------------------------------------------


class ConvAdd(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, stride, 1, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(c_out)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(x)) + skip)


class Head(nn.Module):
    def __init__(self, c_in: int) -> None:
        super().__init__()
        self.fc = nn.Linear(c_in, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


class Shuffle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Moves(nn.Module):
    """What slicing makes of channel shuffles and chunks: channels fetched by index, split, and joined again.

    ``c`` channels of which the first ``first`` were one half. ``dead``: with a fetch that nothing reads.
    """

    def __init__(self, c: int, first: int, dead: bool = False) -> None:
        super().__init__()
        halves = torch.arange(first), torch.arange(first, c)
        turns = [half[i : i + 1] for i in range(c) for half in halves]
        self.first, self.dead = first, dead
        self.register_buffer("shuffled", torch.cat(turns))
        self.register_buffer("back", torch.arange(c).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dead:
            torch.index_select(x, 1, self.back)
        y = torch.index_select(x, 1, self.shuffled)
        a, b = torch.split(y, [self.first, len(self.shuffled) - self.first], 1)
        return torch.index_select(torch.cat([torch.relu(b), a], 1), 1, self.back)


@dataclass(frozen=True)
class ABlock:
    kind: str
    name: str = "block"
    size: int = 8
    batch: int = 2
    stride: int = 1
    grids: tuple[tuple[int, ...], ...] = ()
    read_before: tuple[int, ...] = ()
    fed_by: tuple[str, ...] = ()
    weight_bytes: float = 0.0

    @property
    def signature(self) -> str:
        return f'["{self.kind}", {self.size}, {self.batch}, {self.stride}]'

    def build(self, widths):
        x = torch.randn(self.batch, widths[0], self.size, self.size)
        if self.kind == "head":
            return fx.symbolic_trace(Head(*widths)).eval(), (x,)
        if self.kind == "shuffle":
            return Shuffle(), (x,)
        if self.kind in ("moves", "dead moves"):
            moves = Moves(widths[0], max(widths[0] * 2 // 3, 1), self.kind == "dead moves")
            return fx.symbolic_trace(moves).eval(), (x,)
        depthwise = self.kind == "depthwise"
        c_out = widths[0] if depthwise else widths[1]
        module = ConvAdd(widths[0], c_out, self.stride, widths[0] if depthwise else 1)
        out = self.size // self.stride
        return fx.symbolic_trace(module).eval(), (x, torch.randn(self.batch, c_out, out, out))


class Svd(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


class InexpressibleBlock(ABlock):
    """What ONNX has no operation for."""

    def build(self, widths):
        return Svd(), (torch.randn(1, widths[0], 4, 4),)


@pytest.mark.parametrize(
    ("block", "points", "exports"),
    [
        (ABlock("conv"), [(8, 16), (24, 8), (16, 32), (64, 64), (40, 8), (8, 8), (32, 56)], 1),
        (ABlock("depthwise"), [(8,), (16,), (24,), (40,), (64,)], 1),
        (ABlock("head"), [(8,), (16,), (24,), (40,), (512,)], 1),
        (ABlock("shuffle"), [(8,), (16,), (24,), (40,), (512,)], 1),
    ],
)
def test_one_export_serves_all_widths(block, points, exports):
    models = BlockModels()
    for widths in points:
        model = models.model(block, widths)
        onnx.checker.check_model(model, full_check=True)
        module, inputs = block.build(widths)
        with torch.no_grad():
            expected = module(*inputs)
        with OnnxRuntimeEngine(model.SerializeToString()) as engine:
            (found,) = engine.run([i.numpy() for i in inputs])
        assert found.shape == tuple(expected.shape)
        weights = sum(np.prod(t.dims) for t in model.graph.initializer if len(t.dims) > 1)
        assert weights == sum(p.numel() for p in module.parameters() if p.dim() > 1)
    assert models.exports == exports
    assert models._finder.builds < len(points)


@pytest.mark.parametrize(("kind", "exports"), [("moves", 1), ("dead moves", 5)])
def test_moved_channels_are_those_of_each_width(kind, exports):
    """One export serves where its constants are the module's, one for one; elsewhere every width is exported."""
    models = BlockModels()
    for width in (3, 9, 8, 31, 2):
        module, (x,) = ABlock(kind).build((width,))
        model = models.model(ABlock(kind), (width,))
        onnx.checker.check_model(model, full_check=True)
        with OnnxRuntimeEngine(model.SerializeToString()) as engine:
            (found,) = engine.run([x.numpy()])
        assert np.array_equal(found, module(x).numpy())
    assert models.exports == exports


def test_blocks_that_are_expected_are_exported_together():
    one, two = ((8, 16, 64),), ((8, 16, 64), (8, 32))
    blocks = [ABlock("conv", "a", grids=two), ABlock("depthwise", "b", grids=one), ABlock("head", "c", grids=one),
              ABlock("conv", "d", size=4, grids=two), ABlock("moves", "e", grids=one),
              ABlock("no such", "f"), ABlock("moves", "g", size=4, grids=one)]  # fmt: skip
    models = BlockModels()
    models.expect(blocks)
    models.expect(blocks)
    assert models.exports == 1
    for block in blocks:
        for widths in itertools.product(*block.grids) if block.grids else ():
            module, inputs = block.build(widths)
            model = models.model(block, widths)
            onnx.checker.check_model(model, full_check=True)
            with OnnxRuntimeEngine(model.SerializeToString()) as engine:
                (found,) = engine.run([x.numpy() for x in inputs])
            with torch.no_grad():
                expected = module(*inputs).numpy()
            assert found.shape == expected.shape
            assert block.kind != "moves" or np.array_equal(found, expected)
    assert models.exports == 1


def test_blocks_that_cannot_be_exported_together_are_exported_apart():
    blocks = [InexpressibleBlock("svd", "x", grids=((8,),)), ABlock("depthwise", "y", grids=((8,),))]
    models = BlockModels()
    models.expect(blocks)
    assert models.exports == 1
    models.model(blocks[1], (8,))
    assert models.exports == 1
    with pytest.raises(BackendError, match="linalg_svd"):
        models.model(blocks[0], (8,))


def test_whole_numbers_are_not_made_up():
    """A template whose parameter is an index that it does not know as a move serves no other width."""
    value = functools.partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    for kind, serves in ((np.int64, False), (np.float32, True)):
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("Gather" if kind is np.int64 else "Add", ["x", "index"], ["y"])], "g",
            [value("x", shape=[3])], [value("y", shape=[3])],
            [onnx.numpy_helper.from_array(np.array([2, 1, 0], kind), "index")],
        )  # fmt: skip
        template = Template(onnx.helper.make_model(graph), ())
        wanted = BlockShapes("", (), {"index": (4,)}, {}, ((4,),), ((4,),))
        assert (resize(template, wanted) is not None) == serves


def test_constants_that_an_export_shares_are_told_apart():
    """Two fetches of the same channels at the width that is exported, and of others at the next."""

    class Twice(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.register_buffer("first", torch.tensor(first))
            self.register_buffer("second", torch.tensor(second))

        def forward(self, x):
            return torch.index_select(torch.relu(torch.index_select(x, 1, self.first)), 1, self.second)

    class Block(ABlock):
        def build(self, widths):
            both = Twice([1, 0], [1, 0]) if widths == (2,) else Twice([2, 0, 1], [2, 1, 0])
            return fx.symbolic_trace(both).eval(), (torch.randn(1, *widths, 2, 2),)

    models = BlockModels()
    for widths in ((2,), (3,)):
        module, (x,) = Block("twice").build(widths)
        with OnnxRuntimeEngine(models.model(Block("twice"), widths).SerializeToString()) as engine:
            (found,) = engine.run([x.numpy()])
        assert np.array_equal(found, module(x).numpy())
    assert models.exports == 1


def test_blocks_of_one_structure_share_an_export_whatever_their_size_and_name():
    models = BlockModels()
    models.model(ABlock("conv"), (8, 16))
    model = models.model(ABlock("conv", name="other", size=4, batch=3), (16, 8))
    assert models.exports == 1
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [3, 8, 4, 4]
    strided = models.model(ABlock("conv", stride=2), (16, 8))
    assert models.exports == 2
    assert [d.dim_value for d in strided.graph.output[0].type.tensor_type.shape.dim] == [2, 8, 4, 4]


def test_a_template_that_gathers_what_is_not_there_does_not_serve():
    gather = onnx.helper.make_node("Gather", ["x", "indices"], ["y"], axis=1)
    value = functools.partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    indices = onnx.numpy_helper.from_array(np.array([0, 2, 5]), "indices")
    for channels, serves in ((6, True), (5, False)):
        graph = onnx.helper.make_graph(
            [gather], "g", [value("x", shape=[1, channels, 2])], [value("y", shape=[1, 3, 2])], [indices]
        )
        assert consistent(onnx.helper.make_model(graph)) == serves


def test_a_template_of_other_modules_does_not_serve():
    models = BlockModels()
    models.model(ABlock("conv"), (8, 16))
    (template,) = models._templates._templates.values()
    shapes = models._finder.shapes(ABlock("conv"), (8, 16))
    assert resize(template, shapes) is not None
    assert resize(template, replace(shapes, modules=(*shapes.modules, "another"))) is None


def test_a_block_onnx_cannot_express_is_named():
    with pytest.raises(BackendError, match=r"block 'block' at widths \(8,\): .*linalg_svd"):
        BlockModels().model(InexpressibleBlock("svd"), (8,))


def test_context_feeds_the_block_from_a_layer_and_images_directly():
    model = add_context(BlockModels().model(ABlock("conv"), (8, 16)))
    onnx.checker.check_model(model, full_check=True)
    assert [tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input] == [
        (2, 1, 8, 8),
        (2, 1, 8, 8),
    ]
    assert [n.op_type for n in model.graph.node] == [
        "Conv", "Relu", "Conv", "Relu", "Conv", "Add", "Relu", "GlobalAveragePool",
    ]  # fmt: skip
    image = BlockModels().model(ABlock("conv"), (3, 16))
    assert [d.dim_value for d in add_context(image).graph.input[0].type.tensor_type.shape.dim] == [2, 3, 8, 8]


def test_context_writes_inputs_as_the_network_does():
    model = add_context(BlockModels().model(ABlock("conv"), (8, 16)), (MOVEMENT, ACTIVATION))
    onnx.checker.check_model(model, full_check=True)
    assert [n.op_type for n in model.graph.node] == [
        "Abs", "Conv", "Sigmoid", "Mul", "Conv", "Add", "Relu", "GlobalAveragePool",
    ]  # fmt: skip
    assert all(n.name.startswith("smcp_context") for n in [*list(model.graph.node)[:4], model.graph.node[-1]])
    plain, blocked = ([d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input)
    assert (plain, blocked) == ([2, 8, 8, 8], [2, 1, 8, 8])
    # The block's second input is what SiLU wrote: the sum of a convolution of no weights and of it is the output.
    for tensor in model.graph.initializer:
        if not tensor.name.startswith("smcp_context"):
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = random_feed(model)
    weight = next(
        numpy_helper.to_array(t) for t in model.graph.initializer if t.name.startswith("smcp_context")
    )
    image = feed[session.get_inputs()[1].name] * weight[:, 0]
    silu = image / (1 + np.exp(-image))
    found, expected = session.run(None, feed)[0][..., 0, 0], np.maximum(silu, 0).mean((2, 3))
    assert_close(torch.from_numpy(found), torch.from_numpy(expected), "slicing")


def test_a_results_conversion_does_not_count_where_vectors_do_not_divide_its_channels(monkeypatch):
    counted = []

    def spy(nodes, results, profiler_ms=0.0, paid=0.0, copies=1):
        own = [n for n in nodes if not n.name.startswith("smcp_context")]
        computing = sum(n.ms for n in own if not n.operation.startswith("Reorder"))
        counted.append((len(own), block_ms(nodes, results, copies=copies), computing))
        return block_ms(nodes, results, profiler_ms, paid, copies)

    monkeypatch.setattr(own_time, "block_ms", spy)
    conversions = 0
    for channels in (20, 24, 64):
        counted.clear()
        measure_block(BlockModels().model(ABlock("conv"), (64, channels)))
        assert counted
        assert all(np.isclose(ms, computing) for _, ms, computing in counted), channels
        conversions += max(number for number, _, _ in counted) - 1
    if not conversions:
        pytest.skip("ONNX Runtime has no blocked layout on this processor")


def test_the_block_is_told_from_its_context():
    nodes = [
        NodeTime("smcp_context_x_nchwc", "Conv", ((2, 16, 8, 8),), 10.0),
        NodeTime("ReorderOutput", "ReorderOutput", ((2, 8, 8, 8),), 0.5),  # the block asks for this one
        NodeTime("relu_nchwc", "Conv", ((2, 32, 8, 8),), 3.0),
        NodeTime("ReorderOutput_token", "ReorderOutput", ((2, 32, 8, 8),), 0.25),  # the result's
    ]
    assert block_ms(nodes, [(2, 32, 8, 8)]) == 3.5
    # ... or that of the mean that the context takes of it.
    nodes[-1:] = [
        NodeTime("smcp_context_y_mean_nchwc", "GlobalAveragePool", ((2, 32, 1, 1),), 1.0),
        NodeTime("ReorderOutput_token", "ReorderOutput", ((2, 32, 1, 1),), 0.25),
    ]
    assert block_ms(nodes, [(2, 32, 8, 8)]) == 3.5


def test_a_gate_pays_for_its_input_though_its_twin_ran_in_turns():
    """The gate's result is plain, as the mean is: the one conversion is of its input, which has the same shape."""
    shape, mean = ((2, 20, 8, 8),), ((2, 20, 1, 1),)
    one = [
        NodeTime("smcp_context_x_nchwc", "Conv", ((2, 32, 8, 8),), 10.0),
        NodeTime("ReorderOutput", "ReorderOutput", shape, 0.5),
        NodeTime("gate", "Mul", shape, 3.0),
        NodeTime("smcp_context_y_mean", "GlobalAveragePool", mean, 1.0),
    ]
    two = [
        replace(node, name=f"{node.name}_smcp_twin") if "Reorder" not in node.name else node for node in one
    ]
    assert block_ms(one, [shape[0]]) == 3.5
    in_turns = [node for pair in zip(two, one, strict=True) for node in pair]
    assert block_ms(in_turns, [shape[0]], copies=2) == 7.0
    # A result that lies in the runtime's layout is converted for the mean, in both.
    read = NodeTime("ReorderOutput_7", "ReorderOutput", shape, 0.25)
    converted = [*in_turns[:-2], read, in_turns[-2], read, in_turns[-1]]
    assert block_ms(converted, [shape[0]], copies=2) == 7.0


def test_nodes_that_the_runtime_puts_around_context_are_context():
    cast = NodeTime("InsertedPrecisionFreeCast_smcp_context_x_image", "Cast", ((2, 20, 8, 8),), 9.0)
    assert block_ms([cast, NodeTime("conv", "Conv", ((2, 20, 8, 8),), 3.0)], [(2, 20, 8, 8)]) == 3.0


def test_block_latency_grows_with_the_work():
    backend = get_backend("onnxruntime")
    small = backend.block_latency(ABlock("conv", size=16, batch=4), (16, 16))
    large = backend.block_latency(ABlock("conv", size=16, batch=4), (256, 256))
    assert large.hot.median_ms > 10 * small.hot.median_ms  # 256 times the multiplications
    assert large.cold is not None
    with_torch = get_backend("torch").block_latency(ABlock("conv"), (16, 16), FAST)
    assert with_torch.hot.median_ms > 0
    assert with_torch.cold is None
