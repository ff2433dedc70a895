"""PyTorch as a runtime: half precision, and on a stand-in for CUDA graphs, layouts, and rows of a latency table."""

from __future__ import annotations

from pathlib import Path

import fake_cuda
import numpy as np
import pytest
import torch
from tolerances import TOLERANCES
from torch import nn

import smcp_fx
from smcp_fx.backends import pytorch
from smcp_fx.backends.pytorch import TorchBackend
from smcp_fx.backends.timing.measuring import TimingConfig
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable

#: The stand-in's times mean nothing: one sample, which is steady.
ONCE = TimingConfig(min_repeats=1, max_repeats=1, budget_ms=0.0, warmup_ms=0.0, attempts=1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    ).eval()  # fmt: skip


@pytest.mark.parametrize(("precision", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_computes_nearly_the_same_and_gives_float32(precision: str, kind: torch.dtype) -> None:
    module, images = network(), torch.randn(2, 3, 8, 8)
    backend = TorchBackend(precision=precision)
    with backend.compile(module, (images,)) as engine:
        (found,) = engine.run([images.numpy()])
        assert engine.timer()() > 0 and engine.reload().timer([images.numpy()])() > 0
    with torch.no_grad():
        expected = module(images).numpy()
    assert found.dtype == np.float32
    assert 0 < np.abs(found - expected).max() <= TOLERANCES["identity", kind] * np.abs(expected).max()
    assert next(module.parameters()).dtype == torch.float32  # a copy was converted
    assert backend.fingerprint().precision == precision
    plain = backend.full_precision()
    assert plain is not None and plain.full_precision() is None
    assert plain.fingerprint() == TorchBackend().fingerprint() == TorchBackend(precision="fp32").fingerprint()


def test_a_graph_on_cuda_holds_one_run_in_half_precision_with_channels_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cuda.pretend(monkeypatch)
    backend = TorchBackend("cuda", precision="fp16")
    with backend.compile(network(), (torch.randn(2, 3, 8, 8),)) as engine:
        assert engine.latency(config=ONCE).median_ms > 0
    (graph,) = fake_cuda.CUDAGraph.captured
    convolutions = [args for func, args, _ in graph.calls if "conv" in str(func)]
    assert len(convolutions) == 2
    for images, weights, *_ in convolutions:
        assert images.dtype == weights.dtype == torch.float16
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert weights.is_contiguous(memory_format=torch.channels_last)
    settings = dict(backend.fingerprint().settings)
    assert settings["graph_replay"] == "on" and settings["layout"] == "channels last"
    assert "layout" not in dict(TorchBackend("cuda").fingerprint().settings)
    assert backend.cache_bytes() == 50 << 20


def test_rows_on_cuda_are_runs_in_a_row_and_make_a_table_on_demand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cuda.pretend(monkeypatch)
    monkeypatch.setattr(pytorch, "_ROW", ONCE)
    backend = TorchBackend("cuda", precision="fp16")
    images = torch.randn(2, 3, 8, 8)
    with LatencyTable(tmp_path / "table.sqlite") as table:
        cost = LatencyCost(table, backend, progress=False)
        prepared = smcp_fx.prepare(network(), images, target=0.6, cost=cost)
        begun = len(table.rows())
        prepared.train()
        prepared(images).square().sum().backward()
        prepared.pruner.step()
        solve = prepared.pruner.solve()
        assert len(table.rows()) >= begun > 4  # one of them is what a run costs beside its layers
        assert solve.cost <= 0.6 * prepared.pruner.full_cost
        assert {row.fingerprint.precision for row in table.rows()} == {"fp16"}
    rows = [sum("conv" in str(func) for func, *_ in graph.calls) for graph in fake_cuda.CUDAGraph.captured]
    assert max(rows) > 1  # runs of one block in a row


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_row_on_a_gpu_adds_up_to_the_network() -> None:
    module, images = network(), torch.randn(64, 3, 64, 64)
    backend = TorchBackend("cuda", precision="fp16")
    with backend.compile(module, (images,)) as engine:
        (found,) = engine.run([images.numpy()])
        row, alone = engine.in_a_row(TimingConfig()), engine.latency()
    with torch.no_grad():
        expected = module(images).numpy()
    assert np.abs(found - expected).max() <= TOLERANCES["identity", torch.float16] * np.abs(expected).max()
    assert row.median_ms <= alone.median_ms + 0.01
