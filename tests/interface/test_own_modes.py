"""What a model's own `train()` freezes stays frozen; what cannot be prepared by its names or weights is told."""

from __future__ import annotations

import copy

import pytest
import torch
from models import randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError

IMAGE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CONFIG = smcp_fx.PruningConfig(multiple=1)


class Freezes(nn.Module):
    """Keeps its first norm in eval mode, as detectors' backbones do."""

    def __init__(self, traceable: bool = True) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
        self.traceable = traceable

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W]."""
        y = self.second(self.first(x))
        return y if self.traceable or float(y.detach().abs().amax()) < 1e9 else -y

    def train(self, mode: bool = True) -> Freezes:
        """All but the first norm."""
        super().train(mode)
        self.first[1].eval()
        return self


@pytest.mark.parametrize("traceable", [True, False])
def test_frozen_norms_stay_frozen(traceable: bool) -> None:
    model = randomise(Freezes(traceable))
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    for one in (prepared, copy.deepcopy(prepared)):
        before = copy.deepcopy(model)
        for trained in (before, one):
            trained.eval().train()
            for _ in range(2):
                found = trained(IMAGE)
        assert_close(found, before(IMAGE), "identity")
        buffers = dict(one.named_buffers())
        for name, buffer in before.named_buffers():
            if not name.startswith("second.1.") or "num" in name:
                continue
            assert not torch.equal(buffer, dict(model.named_buffers())[name])
        assert torch.equal(buffers["first.1.running_mean"], model.first[1].running_mean)
        assert [one.get_submodule(n).training for n in ("first.1", "second.1")] == [False, True]


def test_a_converted_graph_says_that_its_modes_are_plain() -> None:
    prepared = smcp_fx.prepare(Freezes(), IMAGE, config=CONFIG)
    with pytest.warns(smcp_fx.TrainingWarning, match=r"Freezes.*'first.1'"):
        converted = smcp_fx.convert(prepared.train())
    assert not converted.get_submodule("first.1").training  # as it was, until `train()` is called


class ClearsACache(nn.Conv2d):
    """Has a `train()` of its own that leaves the usual modes."""

    cached: Tensor | None = None

    def train(self, mode: bool = True) -> ClearsACache:
        """Forget what was computed in the other mode."""
        super().train(mode)
        self.cached = None
        return self


def test_a_train_that_freezes_nothing_is_the_usual_one() -> None:
    """No warning: warnings are errors here."""
    model = nn.Sequential(ClearsACache(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
    converted = smcp_fx.convert(smcp_fx.prepare(model, IMAGE, config=CONFIG).train())
    for mode in (False, True):
        assert {part.training for part in converted.train(mode).modules()} == {mode}


def test_weights_without_numbers_are_refused() -> None:
    with pytest.raises(InputError, match=r"'0.weight' has no shape yet: call the model once"):
        smcp_fx.prepare(nn.Sequential(nn.LazyConv2d(8, 3), nn.Conv2d(8, 4, 1)), IMAGE)
    with pytest.raises(InputError, match=r"'0.weight' is on the meta device"):
        smcp_fx.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to("meta"), IMAGE)


@pytest.mark.parametrize("name", ["masks", "pruner", "code", "graph", "smcp"])
def test_names_that_prepared_models_need_are_refused(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    model.add_module(name, nn.Conv2d(8, 4, 1))
    with pytest.raises(InputError, match=f"'{name}'.*rename it"):
        smcp_fx.prepare(model, IMAGE)
