"""The order in which channels go: against least squares by hand, and where it is known."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import chain, randomise
from sklearn.covariance import OAS
from torch import Tensor, nn

import smcp_fx
from smcp_fx.allocation import allocate
from smcp_fx.calibration.batches import each_batch
from smcp_fx.calibration.elimination import Elimination
from smcp_fx.calibration.gathering import first_order
from smcp_fx.calibration.objective import Objective
from smcp_fx.calibration.regression import Gram

SMALL = smcp_fx.PruningConfig(multiple=1)


def _first_order(prepared: smcp_fx.PreparedModel, batches: Any) -> None:
    first_order(prepared, batches, Objective(prepared))


def _order(model: nn.Module, x: Tensor) -> Tensor:
    prepared = smcp_fx.prepare(model, x[:2], config=SMALL)
    elimination = Elimination(prepared, 1)
    for batch in each_batch(x):
        elimination.add(batch)
    (name,) = [group.name for group in prepared.channels.groups if group.free]
    found = elimination.order(name)
    assert found is not None
    return found.units


def test_each_channel_goes_when_the_others_make_up_for_it_best() -> None:
    """Two layers that read one group; least squares solved anew for every candidate, in each output's scale."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 7, 3)
            self.one, self.two = nn.Conv2d(7, 4, 3, stride=2), nn.Conv2d(7, 6, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x).relu()
            return self.one(y), self.two(y)

    torch.manual_seed(3)
    model = Two().double().eval()
    x = torch.randn(8, 3, 9, 9).double()
    y = model.first(x).relu().detach()
    systems = []
    for layer in (model.one, model.two):
        size = layer.kernel_size[0]
        rows = F.unfold(y, size, stride=layer.stride[0]).transpose(1, 2).flatten(0, 1)
        covariance = torch.cov(rows.T, correction=0)
        share = OAS().fit(rows.numpy()).shrinkage_
        ridge = max(1e-3, share / (1 - share)) * covariance.diagonal().mean()
        weight = layer.weight.detach().flatten(1).T
        variance = (rows @ weight).var(0, correction=0) + ridge * weight.square().sum(0)
        systems.append((covariance + ridge * torch.eye(len(covariance)).double(), weight, variance, size**2))

    def error(gone: list[int]) -> float:
        total = 0.0
        for matrix, weight, variance, size in systems:
            out = torch.zeros(7, dtype=torch.bool)
            out[gone] = True
            out = out.repeat_interleave(size)
            change = weight.clone()  # what is lost of the rest is chosen freely
            change[~out] = -torch.linalg.solve(matrix[~out][:, ~out], matrix[~out][:, out] @ weight[out])
            total += float(((change * (matrix @ change)).sum(0) / variance).sum())
        return total

    expected: list[int] = []
    while len(expected) < 6:
        rest = [unit for unit in range(7) if unit not in expected]
        expected.append(min(rest, key=lambda unit: error([*expected, unit])))
    assert _order(model, x)[:6].tolist() == expected


def test_copies_go_first_and_then_what_is_left_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3, stride=2)).double()
    with torch.no_grad():
        model[0].weight[4:], model[0].bias[4:] = model[0].weight[:4].clone(), model[0].bias[:4].clone()
    order = _order(model, torch.randn(8, 3, 9, 9).double())
    assert sorted(order.tolist()) == list(range(8))
    assert sorted(unit % 4 for unit in order[:4].tolist()) == [0, 1, 2, 3]


def test_importances_are_what_each_channel_adds_to_the_rise_in_the_order_they_go() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 3, 8, 8)
    prepared = smcp_fx.prepare(randomise(chain(8, 12)).eval(), x[:2], config=SMALL)
    smcp_fx.gather_importance(prepared, [(x, torch.arange(32) % 5)])
    rises = prepared.pruner.rises
    assert rises is not None
    for name, importances in prepared.pruner.importance.items():
        steps = torch.from_numpy(-np.diff(rises[name])[::-1].copy())
        ordered = importances.sort().values
        assert (ordered.diff() > 0).all()
        assert (ordered.double() / ordered[-1] >= 0.999 * steps / steps.max()).all()


def _gathered(batches: list[Any]) -> smcp_fx.PreparedModel:
    torch.manual_seed(0)
    prepared = smcp_fx.prepare(randomise(chain(24, 32, 24)).eval(), torch.randn(2, 3, 8, 8), config=SMALL)
    smcp_fx.gather_importance(prepared, batches, outputs="classes")
    return prepared


def test_solves_take_the_counts_of_the_least_rise() -> None:
    """Against the allocation of the rises themselves; what is trained on is worth its importances again."""
    prepared = _gathered([torch.randn(48, 3, 8, 8)])
    pruner, cost = prepared.pruner, prepared.pruner.cost
    assert pruner.rises is not None
    for name, rises in pruner.rises.items():
        assert rises[-1] == 0
        assert (np.diff(rises) <= 0).all()
        assert rises.size == prepared.masks[name].numel() + 1
    values = {name: -pruner.rises[name][list(permitted)] for name, permitted in cost.permitted.items()}
    expected = allocate(values, cost, 0.4 * pruner.full_cost)
    again = _gathered([torch.randn(4, 3, 8, 8)])  # what was gathered is kept with the model's state
    again.load_state_dict(prepared.state_dict())
    for other in (again.pruner.rises, copy.deepcopy(prepared.half()).pruner.rises):
        assert other is not None
        assert all((other[name] == rises).all() for name, rises in pruner.rises.items())
    prepared.float()
    pruner.solve(0.4)
    assert pruner.counts == expected.counts
    prepared.train()(torch.randn(2, 3, 8, 8)).sum().backward()
    pruner.step()
    assert pruner.rises is None


def test_labels_and_labels_drawn_from_the_model_tell_the_same() -> None:
    """Where labels are as likely as the model says, the two are estimates of one quantity."""
    images = torch.randn(48, 64, 3, 8, 8)
    torch.manual_seed(0)
    model = randomise(chain(24, 32, 24)).eval()
    with torch.no_grad():
        labels = [torch.multinomial(model(x).softmax(1), 1)[:, 0] for x in images]
    with_labels = _gathered(list(zip(images, labels, strict=True))).pruner.rises
    without = _gathered(list(images)).pruner.rises
    assert with_labels is not None and without is not None
    for name, rises in with_labels.items():
        half = rises.size // 2
        assert 0.7 < rises[half] / without[name][half] < 1.4


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3)
        self.cls, self.box = nn.Conv2d(12, 5, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.two(self.one(x).relu()).relu()
        return {"cls": self.cls(y), "box": self.box(y)}


def test_a_head_that_is_not_named_weighs_nothing() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(32, 3, 8, 8), randomise(_Heads()).eval()
    alone = nn.Sequential(model.one, nn.ReLU(), model.two, nn.ReLU(), model.cls)
    found = []
    for network, outputs in ((model, {"cls": "classes"}), (alone, "classes")):
        prepared = smcp_fx.prepare(network, x[:2], config=SMALL)
        torch.manual_seed(1)  # the same labels are drawn
        smcp_fx.gather_importance(prepared, [x], outputs=outputs)
        assert prepared.pruner.rises is not None
        found.append([*prepared.pruner.rises.values()])
    for both, one in zip(*found, strict=True):
        np.testing.assert_allclose(both, one, rtol=1e-3, atol=1e-3 * one.max())


class _Gated(nn.Module):
    """Of three groups, the second is read by a layer whose weight depends on the images."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3), nn.Conv2d(12, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x).relu()).relu()
        weight = self.three.weight * (1 + y.mean())
        return self.head(F.conv2d(y, weight, self.three.bias).relu().mean((2, 3)))


def test_groups_that_are_not_known_are_told_and_valued_on_the_scale_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(64, 3, 8, 8), torch.randint(5, (64,)), randomise(_Gated()).eval()
    known, plain = (smcp_fx.prepare(model, x[:2], config=SMALL) for _ in range(2))
    with caplog.at_level("WARNING", logger="smcp_fx"):
        smcp_fx.gather_importance(known, [(x, y)])
    assert "1 of 3 groups are valued by first-order importances" in caplog.text
    assert "two" in caplog.text
    first_order(plain, [(x, y)], Objective(plain))
    rises = known.pruner.rises
    assert rises is not None
    importance = plain.smcp.gathered
    lost = {name: plain.smcp.of_group(importance, name).double().sort().values for name in rises}
    others = [name for name in rises if name != "two"]
    scale = sum(rises[name][6] for name in others) / sum(float(lost[name][:6].sum()) for name in others)
    expected = [scale * float(lost["two"][: 12 - kept].sum()) for kept in range(13)]
    np.testing.assert_allclose(rises["two"], expected, rtol=1e-5, atol=1e-9)


def test_the_covariance_of_a_wide_layer_is_made_of_halves() -> None:
    rows, gram = torch.randn(60, 1, 1100, dtype=torch.float64), Gram()
    for some in rows.split(25):
        gram.add(some)
    wanted = np.cov(rows[:, 0].numpy(), rowvar=False, bias=True)
    torch.testing.assert_close(gram.covariance()[0], torch.from_numpy(wanted))
