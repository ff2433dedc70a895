"""Stacks of matrices that are one parameter: what they cost, and complex ones."""

from __future__ import annotations

from collections.abc import Callable

import models_stacks
import pytest
import torch
from models import random_masks
from tolerances import assert_close
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import smcp_fx


@pytest.mark.parametrize(
    "made",
    [
        models_stacks.linears_in_groups,
        models_stacks.heads_from_one_parameter,
        models_stacks.experts,
    ],
)
def test_stacks_cost_what_is_left_of_them(made: Callable[[], nn.Module]) -> None:
    """Held against torch's own counter, on the sliced network."""
    x = torch.randn((1, 6) if made is models_stacks.linears_in_groups else (1, 5, 6))
    prepared = smcp_fx.prepare(made().eval(), x, config=smcp_fx.PruningConfig(multiple=1))
    masks = random_masks(prepared, 0)
    prepared.set_masks(masks)
    told = prepared.plan.flops.cost({name: int(mask.sum()) for name, mask in masks.items()})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        smcp_fx.convert(prepared, check=False).eval()(x)
    assert told == counter.get_total_flops() / 2


def test_bilinear_layers_cost_their_weight_at_each_position() -> None:
    model, x = models_stacks.bilinear_layers().eval(), torch.randn(1, 5, 6)
    prepared = smcp_fx.prepare(model, x, config=smcp_fx.PruningConfig(multiple=1))
    masks = random_masks(prepared, 0)
    prepared.set_masks(masks)
    told = prepared.plan.flops.cost({name: int(mask.sum()) for name, mask in masks.items()})
    sliced = smcp_fx.convert(prepared)
    assert told == 5 * sum(
        parameter.numel() for name, parameter in sliced.named_parameters() if "weight" in name
    )
    assert sliced.get_submodule("pair").in1_features == sliced.get_submodule("one").out_features


def test_complex_weights_are_sliced_and_scored_by_both_parts() -> None:
    """Their importance is that which their mask's gradient tells, as it does of frozen ones."""
    image = torch.randn(2, 3, 8, 8)
    model = models_stacks.spectral(nn.Parameter(torch.randn(8, 6, 3, 3, dtype=torch.complex64)))
    scores = []
    for frozen in (False, True):
        model.get_parameter("weight").requires_grad_(not frozen)
        prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1))
        prepared(image).square().mean().backward()
        prepared.pruner.step()
        scores.append(prepared.smcp.gathered)
    assert float(scores[0].min()) > 0
    assert_close(scores[1], scores[0], "accumulation")
    prepared.set_masks({"stem": torch.arange(8) % 3 > 0, "weight": torch.arange(6) > 2})
    sliced = smcp_fx.convert(prepared)
    assert sliced.get_parameter("weight").shape == (5, 3, 3, 3)
    with torch.no_grad():
        assert_close(sliced(image), prepared(image), "slicing")
