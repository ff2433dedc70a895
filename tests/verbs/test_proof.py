"""`prepare` and `convert` refuse what would compute something else, and name where."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import random_masks, randomise, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx import outcomes, proof
from smcp_fx.config import MethodConfig
from smcp_fx.errors import PassError, TraceError

CONFIG = smcp_fx.PruningConfig(multiple=1)
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    return randomise(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        )
    )


def ready(model: nn.Module) -> smcp_fx.PreparedModel:
    return smcp_fx.prepare(model, IMAGE, config=CONFIG)


def _other_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("3").weight += 0.5


def _frozen(model: nn.Module) -> None:
    model.get_submodule("3").weight.requires_grad_(False)


def _other_momentum(model: nn.Module) -> None:
    model.get_submodule("1").momentum = 0.5


def _fixed_batch(model: nn.Module) -> None:
    model.get_submodule("2").register_forward_hook(lambda _m, _i, out: out.reshape(2, -1, 6, 6))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_weight, "train mode: its output differs.*first module that differs is '3'"),
        (_frozen, "gradient of '3.weight' differs"),
        (_other_momentum, "buffer '1.running_mean' after a call differs"),
        (_fixed_batch, "eval mode: it does not run"),
    ],
)
def test_a_prepared_model_that_is_another_is_refused(change: Any, said: str) -> None:
    model = network()
    prepared = ready(model)
    change(prepared)
    with pytest.raises(TraceError, match=f"(?s){said}"):
        proof.check_prepared(model, prepared, (IMAGE,))


def test_a_sliced_model_that_is_another_is_refused() -> None:
    prepared = ready(network())
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    proof.check_converted(prepared, sliced, (IMAGE,))
    _other_weight(sliced)
    with pytest.raises(PassError, match="first operation that differs is '3'"):
        proof.check_converted(prepared, sliced, (IMAGE,))


class Blocks(nn.Module):
    """Two scaled batch norms; ``python``: a branch on a value, so that it is traced in regions."""

    def __init__(self, python: bool) -> None:
        super().__init__()
        self.python = python
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(inplace=True),
            nn.Conv2d(12, 9, 1), nn.BatchNorm2d(9), nn.ReLU(inplace=True), nn.Conv2d(9, 4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.python and float(x.sum()) == 0.123:
            return x
        return self.body(x)


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("gradient", ["chain", "direct"])
def test_what_folding_rounds_is_no_fault(
    python: bool, gradient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled weights are rounded once, where they are folded: in double precision that is no longer small."""
    config = MethodConfig(multiple=1, batch_norm_scaling=True, gamma_gradient=gradient)
    prepared = smcp_fx.prepare(randomise(Blocks(python)), IMAGE, config=config)
    assert bool(prepared.regions) is python
    prepared.set_masks(random_masks(prepared, 1))
    assert any(float(scale.min()) < 1 for scale in prepared.smcp.scales.values())
    sliced = smcp_fx.convert(prepared)
    found, rounded = (
        run(copy.deepcopy(sliced).double(), (IMAGE.double(),)),
        proof._widened_as_folded(prepared),
    )
    assert_close(found, run(rounded, (IMAGE.double(),)), "slicing")
    if python:  # the same comparison, of what its region gives
        return
    monkeypatch.setitem(outcomes._TOLERANCE, torch.float32, -1.0)  # judged in double precision always
    smcp_fx.convert(prepared)
    with torch.no_grad():
        sliced.get_submodule("body.4").weight *= 1 + 1e-3
    with pytest.raises(PassError, match="differs by"):
        proof.check_converted(prepared, sliced, (IMAGE,))


def test_the_operation_at_fault_is_named_although_later_ones_write_into_its_input() -> None:
    prepared = smcp_fx.prepare(randomise(Blocks(python=False)), IMAGE, config=CONFIG)
    prepared.set_masks(random_masks(prepared, 1))
    sliced = smcp_fx.convert(prepared)
    with torch.no_grad():
        sliced.get_submodule("body.6").weight += 0.5
    with pytest.raises(PassError, match=r"first operation that differs is 'body\.6'"):
        proof.check_converted(prepared, sliced, (IMAGE,))


def test_the_models_are_left_as_they_were() -> None:
    """Buffers, modes, gradients, the generator, attributes that forward sets."""

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """Any shape."""
            self.seen = x.shape
            return x

    model = nn.Sequential(network(), Counts()).train()
    model[0][1].eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    smcp_fx.convert(prepared)
    assert torch.equal(torch.get_rng_state(), state)
    assert not hasattr(model[1], "seen")
    for found in (model.state_dict(), prepared.state_dict()):
        assert all(torch.equal(found[name], value) for name, value in before.items())
    assert all(p.grad is None for one in (model, prepared) for p in one.parameters())
    for one in (model, prepared):
        assert [m.training for m in (one.get_submodule("0.0"), one.get_submodule("0.1"))] == [True, False]


def test_the_check_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("check_prepared", "check_converted"):
        monkeypatch.setattr(sys.modules["smcp_fx.prepare"], name, lambda *_, name=name: called.append(name))
    smcp_fx.convert(smcp_fx.prepare(network(), IMAGE, check=False), check=False)
    assert not called
    smcp_fx.convert(smcp_fx.prepare(network(), IMAGE))
    assert called == ["check_prepared", "check_converted"]


def test_modes_that_the_model_does_not_take_are_left_out() -> None:
    class NeedsTargets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
            """[2, 3, H, W]."""
            if self.training and target is None:
                raise ValueError("targets, please")
            return self.body(x)

    assert smcp_fx.prepare(NeedsTargets(), IMAGE, config=CONFIG).regions == ("body",)


def test_a_model_that_is_not_the_same_twice_is_told() -> None:
    count = iter(range(1000))

    class Restless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """Any shape."""
            return x + next(count) if self.training else x

    with pytest.warns(UserWarning, match="something else in each call in train mode"):
        assert ready(nn.Sequential(network(), Restless())).channels.free_share == 1.0


class ChannelsLast(nn.LayerNorm):
    """A layer norm over channels, computed otherwise once prepared."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_means_that_are_zero_but_for_rounding_are_no_fault() -> None:
    """A batch norm behind another's channels gathers means of about 1e-17, of which no digit is the same."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), ChannelsLast(16), nn.GELU(), nn.BatchNorm2d(16),
        nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.GELU(), nn.Conv2d(32, 4, 1),
    )  # fmt: skip
    assert smcp_fx.prepare(model, torch.randn(1, 3, 8, 8)).channels.free_share == 1


class Logistic(nn.Module):
    """The logistic map at given rates, in one of two ways; at a rate of 4 it doubles an error in each step."""

    def __init__(self, factored: bool, off: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.2, 0.9, 8))
        self.factored, self.off = factored, off

    def forward(self, rate: Tensor) -> Tensor:
        x, rate = self.weight, rate + self.off
        for _ in range(80):
            x = rate * x * (1 - x) if self.factored else rate * (x - x * x)
        return x


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_a_model_that_is_chaotic_on_few_images_is_judged_on_others(off: float) -> None:
    one, other = Logistic(True), Logistic(False, off)
    chaotic, calm = (torch.full((2, 8), 3.99),), (torch.full((5, 8), 2.5),)
    expected = outcomes.outcome_of(one, chaotic, False)
    assert outcomes.differs(one, other, chaotic, False, expected) is not None
    assert (outcomes.differs(one, other, chaotic, False, expected, more=calm) is not None) is bool(off)


class Variance(nn.Module):
    """A variance in one of two ways, of numbers far from zero, in a type that forward names."""

    def __init__(self, centred: bool, named: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.centred, self.named = nn.Parameter(torch.rand(8, 8)), centred, named

    def forward(self, x: Tensor) -> Tensor:
        h = self.named(x) @ self.weight + torch.full((8,), 3000.0) @ torch.eye(8)
        mean = h.mean(1, keepdim=True)
        return ((h - mean) ** 2).mean(1) if self.centred else (h * h).mean(1) - mean[:, 0] ** 2


@pytest.mark.parametrize(
    "named",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x + torch.zeros(8, dtype=torch.float32),
        lambda x: x * torch.ones_like(x, dtype=torch.float32),
    ],
)
def test_rounding_is_told_from_faults_where_forward_names_a_type(named: Callable[[Tensor], Tensor]) -> None:
    one, other = Variance(True, named), Variance(False, named)
    other.load_state_dict(one.state_dict())
    images = (torch.randint(9, (2, 8)).float(),)
    expected = outcomes.outcome_of(one, images, False)
    assert outcomes.difference(expected, outcomes.outcome_of(other, images, False), outcomes.LOOSE)
    assert outcomes.differs(one, other, images, False, expected) is None
    with torch.no_grad():
        other.weight *= 1 + 1e-3
    assert outcomes.differs(one, other, images, False, expected) is not None
    assert torch.get_default_dtype() is torch.float32


def test_a_trace_that_holds_its_example_s_batch_is_not_judged_on_that() -> None:
    for images in (1, 4, 5):
        (many,) = proof.more_images((torch.ones(images, 3, 2, 2),))
        assert len(many) in {4, 5} - {images}
        assert len({float(image.mean()) for image in many}) == -(
            -len(many) // images
        )  # repeated ones are weaker


class Spread(nn.Module):
    """A dropout behind what tracing lays out otherwise: it leaves `expand_as` out."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.body, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).transpose(1, 2).contiguous().transpose(1, 2)
        x = self.gate(x).expand_as(x).sigmoid() + x
        return self.last(self.draw(x) if self.training else x)


@pytest.mark.parametrize(
    "draw",
    [
        F.dropout,
        F.alpha_dropout,
        lambda x: x * torch.rand_like(x),
        lambda x: x + torch.empty_like(x).normal_(),
    ],
)
def test_what_is_drawn_for_another_memory_layout_is_no_fault(draw: Any) -> None:
    model = Spread(draw)
    found = outcomes.outcome_of(ready(model), (IMAGE,), True)
    assert outcomes.difference(outcomes.outcome_of(model, (IMAGE,), True), found, None) is None


def test_a_model_that_gives_no_number_is_told() -> None:
    model = network()
    with torch.no_grad():
        model.get_submodule("4").weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="Sequential gives NaN or infinity alone"):
        ready(model)


def test_too_little_memory_is_no_fault() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 110436736 bytes"
            )

    one = nn.Identity()
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        outcomes.differs(one, Large(), (IMAGE,), False, outcomes.outcome_of(one, (IMAGE,), False))


def test_too_little_memory_to_judge_rounding_is_told() -> None:
    """Double precision takes twice the memory: without it nothing tells rounding from faults.

    It is asked for more images than there are; where these do not fit, the few there are judged.
    """

    class Rounding(nn.Module):
        def __init__(self, by: float, fitting: int = 0) -> None:
            super().__init__()
            self.by, self.fitting = by, fitting

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64 and len(x) > self.fitting:
                raise RuntimeError(
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 110436736 bytes"
                )
            return x * self.by

    inputs = (torch.ones(2, 3),)
    expected = outcomes.outcome_of(Rounding(1.0), inputs, False)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        outcomes.differs(Rounding(1.0), Rounding(1.002), inputs, False, expected)
    more = (torch.ones(5, 3),)
    found = outcomes.differs(Rounding(1.0, 2), Rounding(1.002, 2), inputs, False, expected, more=more)
    assert found is not None and "differs" in found
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        outcomes.differs(Rounding(1.0, 1), Rounding(1.002, 1), inputs, False, expected, more=more)
