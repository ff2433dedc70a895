"""Backends and engines: names, fingerprints, outputs, layers and devices."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime as ort
import pytest
import torch
from fake_blocks import ABlock
from torch import nn

from smcp_fx.backends import backend_names, get_backend, measure_interleaved
from smcp_fx.backends.base import Fingerprint
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeEngine
from smcp_fx.backends.onnxruntime.session import bound_run
from smcp_fx.backends.timing.measuring import (
    TimingConfig,
    stopwatch,
)
from smcp_fx.errors import BackendError, InputError, TableError

FAST = TimingConfig(min_repeats=2, max_repeats=3, budget_ms=1, attempts=1, warmup_ms=1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()


def test_unknown_names_and_options_are_errors_that_list_what_there_is():
    assert backend_names() == ("onnxruntime", "openvino", "tensorrt", "torch")
    with pytest.raises(
        BackendError, match=r"unknown backend 'cuda'; there are: onnxruntime, openvino, tensorrt, torch"
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
