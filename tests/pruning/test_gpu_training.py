"""Training on an NVIDIA GPU: no waiting for the device between solves, the same importances, precision, graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_training import SOLVES, batch, prepared_model
from tolerances import assert_close
from torch import nn

import smcp_fx

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Full float32 in convolutions and products."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    with (
        warnings.catch_warnings()
    ):  # of PyTorch's own: its check is a prototype, its compiler is made of old parts
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
        yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def on(device: str) -> smcp_fx.PreparedModel:
    return prepared_model().to(device)


def loss_of(call: Any, step: int, device: str = "cuda") -> torch.Tensor:
    x, labels = batch(step)
    return nn.functional.cross_entropy(call(x.to(device)), labels.to(device))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_device_is_asked_only_at_solves(scaled: bool) -> None:
    """PyTorch's own check raises wherever a step would wait for the device."""
    prepared = on("cuda")
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(loss_of(prepared, step)).backward()
        solves = step + 1 in SOLVES
        waits = solves or step == 0  # the first step reads where the schedule stands
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            solve = prepared.pruner.step(scaler)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (solve is not None) is solves
        scaler.step(optimizer)
        scaler.update()
    assert prepared.pruner.cost.cost(prepared.pruner.counts) <= prepared.pruner.target


def test_the_importances_are_those_of_the_cpu() -> None:
    on_cpu, on_gpu = on("cpu"), on("cuda")
    for prepared, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
        loss_of(prepared, 0, device).backward()
        prepared.pruner.step()
    assert_close(on_gpu.smcp.gathered.cpu(), on_cpu.smcp.gathered, "accumulation")


def test_half_precision_with_a_scaler_that_starts_too_high() -> None:
    prepared = on("cuda").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60)
    taken = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", smcp_fx.TrainingWarning)  # most of the first steps are skipped
        while taken < 12:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(prepared, taken)
            scaler.scale(loss).backward()
            before = prepared.get_parameter("fc.weight").detach().clone()
            prepared.pruner.step(scaler)
            scaler.step(optimizer)
            scaler.update()
            taken += not torch.equal(before, prepared.get_parameter("fc.weight"))
            assert int(prepared.smcp.steps) == taken
    assert float(scaler.get_scale()) < 2.0**60
    assert [solve.step for solve in prepared.pruner.history] == SOLVES


def test_compiled_and_resumed(tmp_path: Any) -> None:
    """One graph for all masks; a checkpoint of a GPU run, and its generator, come back."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prepared = on("cuda")
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(prepared, fullgraph=True)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(compiled, step).backward()
            prepared.pruner.step()
            optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    path = smcp_fx.save_checkpoint(tmp_path / "gpu.safetensors", compiled, optimizer)
    drawn = torch.rand(3, device="cuda")
    other = on("cuda")
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    smcp_fx.load_checkpoint(path, other, second)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    for name, tensor in prepared.state_dict().items():
        found = other.state_dict()[name]
        assert found.device == tensor.device and torch.equal(found, tensor), name
    x = torch.randn(2, 3, 8, 8, device="cuda")
    assert_close(copy.deepcopy(other).eval()(x), prepared.eval()(x), "identity")
