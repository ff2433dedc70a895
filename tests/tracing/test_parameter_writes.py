"""Forwards that write into parameters: what is written, when, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models_overwritten
import pytest
import torch
import torch.nn.functional as F
from models import IMAGE, between, conv, random_masks, randomise, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import TraceError
from smcp_fx.tracing.tracer import trace


def image() -> Tensor:
    return torch.randn(IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


BUILDERS: list[Callable[[], nn.Module]] = [
    models_overwritten.masked_by_an_assignment,
    models_overwritten.weight_and_scale_clipped_from_outside,
    models_overwritten.fused_in_eval_mode,
]


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: str(build.__name__))
def test_training_leaves_what_the_original_leaves(build: Callable[[], nn.Module]) -> None:
    """Parameters are written as before: steps of an optimiser with weight decay lead to the same state."""
    model = randomise(build()).double()
    prepared = smcp_fx.prepare(copy.deepcopy(model).eval(), image())
    for one in (model, prepared):
        optimiser = torch.optim.SGD(one.parameters(), 0.1, weight_decay=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            one.train()(image()).square().mean().backward()
            optimiser.step()
        one.eval()(image())
    held = prepared.state_dict()
    for name, value in model.state_dict().items():
        assert_close(held[name], value, "identity", name)


class FusedNorms(nn.Module):
    """RepVGG: two branches with batch norms in training, one kernel in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.one = conv(8, 8, bias=False), conv(8, 8, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    def forward(self, x: Tensor) -> Tensor:
        """The same in both modes, while statistics stay."""
        branches = list(zip((self.wide, self.one), self.norms, strict=True))
        if self.training:
            return sum(norm(part(x)) for part, norm in branches)  # type: ignore[return-value]
        slopes: list[Any] = [norm.weight / (norm.running_var + norm.eps).sqrt() for _, norm in branches]
        bias = sum(
            norm.bias - norm.running_mean * slope for (_, norm), slope in zip(branches, slopes, strict=True)
        )
        wide, one = (
            part.weight * slope.view(-1, 1, 1, 1) for (part, _), slope in zip(branches, slopes, strict=True)
        )
        return F.conv2d(x, wide + F.pad(one, (1, 1, 1, 1)), bias, padding=1)


@pytest.mark.parametrize("build", [models_overwritten.FusedInEval, FusedNorms])
def test_what_fuses_in_eval_mode_leaves_out_what_training_leaves_out(build: Callable[[], nn.Module]) -> None:
    """Masks and scales of the branches are in the fused kernel, too, before and after slicing; `convert` warns."""
    model = randomise(models_overwritten.through(nn.Sequential(build(), nn.ReLU(), build()))).double().eval()
    config = MethodConfig(multiple=1, batch_norm_scaling=True)
    prepared = smcp_fx.prepare(model, image(), config=config)
    prepared.set_masks(random_masks(prepared, 3))
    with pytest.warns(smcp_fx.TrainingWarning, match="fuses weights in one mode alone"):
        sliced = smcp_fx.convert(prepared)
    expected = run(prepared.eval(), (image(),))
    for one in (prepared.train(), sliced.train(), sliced.eval()):
        for part in one.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
        assert_close(run(one, (image(),)), expected, "slicing", type(one).__name__)


def doubled(s: Any, h: Tensor) -> Tensor:
    s.mid.weight.data = s.mid.weight.data * 2
    return s.mid(h)  # type: ignore[no-any-return]


def of_the_input(s: Any, h: Tensor) -> Tensor:
    s.mid.weight.data = s.mid.weight.data * 0 + h.mean()
    return s.mid(h)  # type: ignore[no-any-return]


def after_it_is_read(s: Any, h: Tensor) -> Tensor:
    y: Tensor = s.mid(h)
    s.mid.weight.data = s.mid.weight.data.clamp(-1, 1)
    return y


def read_before(s: Any, h: Tensor) -> Tensor:
    before = s.mid.weight.data
    s.mid.weight.data = s.mid.weight.data.clamp(-0.01, 0.01)
    return F.conv2d(s.mid(h), before, padding=1)


@pytest.mark.parametrize(
    ("wiring", "why"),
    [
        (doubled, "by another value at each call"),
        (of_the_input, "by what follows from the input"),
        (after_it_is_read, "and not read afterwards"),
        (read_before, "and what it held before is read afterwards"),
    ],
)
def test_a_write_that_makes_no_weight_is_refused_with_its_reason(wiring: Any, why: str) -> None:
    with pytest.raises(
        TraceError, match=rf"'mid\.weight' is overwritten in forward, {why}: fuse weights once"
    ):
        trace(between(wiring, mid=conv(8, 8)).eval(), (torch.randn(IMAGE),))
