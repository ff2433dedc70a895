"""Models in regions trained, copied, saved, exported and moved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_masks, randomise
from region_models import CONFIG, IMAGES, Split, check_exact, conv, outputs, prepare
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.config import MethodConfig
from smcp_fx.errors import BackendError


def test_training_solving_and_converting() -> None:
    prepared = prepare(Split(), config=MethodConfig(multiple=4, batch_norm_scaling=True), target=0.5)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    prepared.train()
    for _ in range(3):
        loss = prepared(IMAGES).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert prepared.pruner.step() is None
        optimizer.step()
    solve = prepared.pruner.solve()
    assert solve.cost <= 0.5 * prepared.pruner.full_cost
    smaller = check_exact_as_it_is(prepared)
    smaller.train()
    smaller(IMAGES).sum().backward()
    assert all(parameter.grad is not None for parameter in smaller.parameters())


def check_exact_as_it_is(prepared: smcp_fx.PreparedModel) -> nn.Module:
    prepared.eval()
    sliced = smcp_fx.convert(prepared)
    assert_close(outputs(sliced, (IMAGES,)), outputs(prepared, (IMAGES,)), "slicing", "solved masks")
    return sliced


def test_modes_reach_the_regions() -> None:
    class Drops(Split):
        def __init__(self) -> None:
            super().__init__()
            self.stem.append(Halves())

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, self.training)

    prepared = prepare(Drops())
    assert "stem" in prepared.regions
    for model in (prepared, smcp_fx.convert(prepared)):
        model.eval()
        assert torch.equal(outputs(model, (IMAGES,)), outputs(model, (IMAGES,)))
        model.train()
        mean = model.get_buffer("stem.1.running_mean").clone()
        assert not torch.equal(outputs(model, (IMAGES,)), outputs(model, (IMAGES,)))
        assert not torch.equal(model.get_buffer("stem.1.running_mean"), mean)
        model.get_submodule("stem").eval()  # frozen
        mean = model.get_buffer("stem.1.running_mean").clone()
        outputs(model, (IMAGES,))
        assert torch.equal(model.get_buffer("stem.1.running_mean"), mean)


def test_state_and_copies() -> None:
    model = Split()
    prepared = prepare(model)
    assert set(model.state_dict()) == {n for n in prepared.state_dict() if not n.startswith("smcp.")}
    prepared.load_state_dict(model.state_dict(), strict=False)
    prepared.set_masks(random_masks(prepared, 3))
    expected = outputs(prepared, (IMAGES,))
    copied = copy.deepcopy(prepared)
    fresh = prepare(Split())
    fresh.load_state_dict(prepared.state_dict())
    converted = smcp_fx.convert(prepared)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.zero_()
    for other in (copied, smcp_fx.convert(copied), smcp_fx.convert(fresh), copy.deepcopy(converted)):
        assert_close(outputs(other, (IMAGES,)), expected, "slicing", type(other).__name__)


class Exports(nn.Module):
    """What looks at values does so in eager mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(3, 8), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        return y if torch.compiler.is_compiling() or y.mean() > -1e6 else -y


def test_onnx_and_checkpoints(tmp_path: Path) -> None:
    model = randomise(Exports()).eval()
    images = IMAGES.float()
    prepared = smcp_fx.prepare(model, (images,), config=CONFIG)
    assert prepared.regions == ("one", "two")
    prepared.set_masks(random_masks(prepared, 1))
    prepared.train()
    prepared(images).sum().backward()
    prepared.pruner.step()
    save_checkpoint(tmp_path / "run.safetensors", prepared)
    resumed = smcp_fx.prepare(model, (images,), config=CONFIG)
    load_checkpoint(tmp_path / "run.safetensors", resumed)
    assert torch.equal(resumed.smcp.gathered, prepared.smcp.gathered)
    smaller = smcp_fx.convert(resumed).eval()
    # The export runs the file in ONNX Runtime and compares.
    path = smcp_fx.export_onnx(smaller, (images,), tmp_path / "model.onnx")
    import onnx

    sizes = {tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    assert tuple(smaller.one[0].weight.shape) in sizes
    with pytest.raises(BackendError, match="cannot capture Split"):
        smcp_fx.export_onnx(smcp_fx.convert(prepare(Split())).float(), (images,), tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_a_converted_region_works_alone_and_moves() -> None:
    sliced = check_exact(prepare(Split()), (IMAGES,), 4)
    whole = outputs(sliced.stem, (IMAGES,))
    alone = copy.deepcopy(sliced.stem).float()
    assert_close(outputs(alone, (IMAGES.float(),)), whole.float(), "slicing", "a region taken out")
    assert outputs(sliced.float(), (IMAGES.float(),)).dtype == torch.float32


class Scaled(nn.Module):
    """Keeps a scale that is neither parameter nor buffer; what holds it moves it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(20, 20, 1)
        self.scale = torch.linspace(0.5, 1.5, 20).view(-1, 1, 1).double()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.scale = fn(self.scale)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() * self.scale


def test_plain_tensors_of_a_region_are_read_there_as_they_are() -> None:
    model = Split()
    model.body = nn.Sequential(conv(12, 16), conv(16, 20))
    model.stem = nn.Sequential(conv(3, 20), Scaled(), nn.Conv2d(20, 12, 1))
    nested = check_exact(prepare(model), (IMAGES,), 4)
    model.stem, model.body = conv(3, 20), Scaled()  # the region is the module that holds it
    sliced = check_exact(prepare(model), (IMAGES,), 4)
    for each in (nested, sliced):
        expected = outputs(each, (IMAGES,))
        found = outputs(copy.deepcopy(each).float(), (IMAGES.float(),))
        assert_close(found, expected.float(), "slicing", "in another precision")
