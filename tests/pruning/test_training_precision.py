"""The pruner with autocast, gradient scalers and models of other types."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_training import batch, loss_of, network, prepared_model, pruned_to_target
from tolerances import assert_close
from torch import nn

import smcp_fx
from smcp_fx.pruning.gradients import all_finite, loss_scale, norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    prepared = prepared_model()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01, momentum=0.9)
    for step in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(prepared, step)
        loss.backward()
        prepared.pruner.step()
        optimizer.step()
    pruned_to_target(prepared)


def scaled_training(prepared: smcp_fx.PreparedModel, scaler: Any, unscale: bool, steps: int = 12) -> None:
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(prepared, step)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        prepared.pruner.step(scaler)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled before"])
def test_importances_do_not_depend_on_the_loss_scale(unscale: bool) -> None:
    """Powers of two multiply without rounding, whichever of the two the pruner is given."""
    plain = prepared_model()
    scaled = copy.deepcopy(plain)
    scaled_training(plain, torch.amp.GradScaler("cpu", enabled=False), unscale, 4)
    scaled_training(scaled, torch.amp.GradScaler("cpu", init_scale=2.0**12), unscale, 4)
    assert float(plain.smcp.gathered.max()) > 0
    assert_close(scaled.smcp.gathered, plain.smcp.gathered, "importance")


@pytest.mark.parametrize("where", ["conv2.weight", "fc.bias"], ids=["in a masked weight", "elsewhere"])
def test_steps_that_the_scaler_skips_are_not_counted(where: str) -> None:
    """Also where only a parameter that has no mask overflows: the optimiser's step falls out for all."""
    prepared = prepared_model()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    taken = []
    for step in range(15):
        optimizer.zero_grad()
        scaler.scale(loss_of(prepared, step)).backward()
        if step in (2, 5, 6):
            gradient = prepared.get_parameter(where).grad
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")
        before = prepared.get_parameter("fc.weight").detach().clone()
        gathered = prepared.smcp.gathered.clone()
        prepared.pruner.step(scaler)
        scaler.step(optimizer)
        scaler.update()
        taken.append(not torch.equal(before, prepared.get_parameter("fc.weight")))
        assert int(prepared.smcp.steps) == sum(taken)
        assert taken[-1] or torch.equal(gathered, prepared.smcp.gathered)
    assert taken.count(False) == 3
    assert float(scaler.get_scale()) == 2.0**9
    assert bool(torch.isfinite(prepared.smcp.remembered).all())
    pruned_to_target(prepared)
    assert [solve.skipped for solve in prepared.pruner.history] == [3, 0, 0]


def test_gradients_as_a_whole() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    assert norm([a, b]) is None
    assert bool(all_finite([a, b]))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert norm([a, b]) == pytest.approx(5.0)
    assert norm([a, b], torch.tensor(2.0)) == pytest.approx(2.5)
    assert bool(all_finite([a, b]))
    for value in (float("nan"), float("-inf")):
        b.grad = torch.tensor([0.0, value])
        assert not bool(all_finite([a, b]))


def test_the_loss_scale_is_read_from_the_scaler() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert loss_scale(None) is None
    assert loss_scale(torch.amp.GradScaler("cpu", enabled=False)) is None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    assert loss_scale(scaler) == 8.0
    scaler.unscale_(optimizer)
    assert loss_scale(scaler) == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert loss_scale(scaler) == 8.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_another_type(dtype: torch.dtype) -> None:
    """Prepared before or after the conversion: masks follow the weights, importances stay in float32."""
    before = smcp_fx.prepare(network().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype))
    after = smcp_fx.prepare(network(), torch.randn(2, 3, 8, 8)).to(dtype)
    for prepared in (before, after):
        prepared.train()
        x, labels = batch(0)
        nn.functional.cross_entropy(prepared(x.to(dtype)), labels).backward()
        prepared.pruner.step()
        assert prepared.smcp.gathered.dtype == torch.float32
        assert float(prepared.smcp.gathered.max()) > 0
        assert prepared.smcp.mask_conv2.dtype == dtype
        prepared.pruner.solve(0.5)
        assert prepared.pruner.counts["stem.0"] == int(prepared.smcp.mask_conv1[0, :, 0, 0].sum())
