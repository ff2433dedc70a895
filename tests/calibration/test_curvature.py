"""Rises of the loss: the Fisher form against gradients by hand, and divergences that were measured."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.calibration.batches import each_batch
from smcp_fx.calibration.curvature import Curvature
from smcp_fx.calibration.elimination import Elimination, Order
from smcp_fx.calibration.objective import Objective
from smcp_fx.calibration.readers import watching

SMALL = smcp_fx.PruningConfig(multiple=1)


class _Two(nn.Module):
    """One group that a module, a function and a module that runs twice read."""

    def __init__(self, functional: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.one, self.two, self.twice = nn.Conv2d(8, 6, 3, 2), nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)
        self.head, self.functional = nn.Linear(12, 5), functional

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        two = F.conv2d(y, self.two.weight, bias=self.two.bias) if self.functional else self.two(y)
        two = two + self.twice(y) + self.twice(y.flip(-1))
        return self.head(torch.cat([self.one(y).relu().mean((2, 3)), two.relu().mean((2, 3))], 1))


def _order(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[Elimination, Order, str]:
    prepared = smcp_fx.prepare(model, x[:2], config=SMALL)
    elimination = Elimination(prepared, 1)
    (batch,) = each_batch([(x, labels)])
    elimination.add(batch, partial(Objective(nn.Identity()), batch=batch))
    name = next(group.name for group in prepared.channels.groups if group.free and group.size == 8)
    order = elimination.order(name)
    assert order is not None and order.rises is not None
    return elimination, order, name


def test_rises_are_the_quadratic_form_of_gradients_by_hand() -> None:
    """Each image on its own: the derivative of its loss along the changed weights, squared."""
    torch.manual_seed(1)
    model, x, labels = (
        randomise(_Two()).double().eval(),
        torch.randn(6, 3, 9, 9).double(),
        torch.arange(6) % 5,
    )
    elimination, order, name = _order(model, x, labels)
    curvature = Curvature(elimination.whole, {name: order.refits})
    (batch,) = each_batch([(x, labels)])
    counted = torch.tensor([True, True, False, True, False, True])
    curvature.add(batch, partial(Objective(nn.Identity()), batch=batch), counted)
    found = curvature.rises(name)
    assert sorted(found) == sorted(refit.count for refit in order.refits) and len(found) > 2
    for refit in order.refits:
        total = 0.0
        for image in counted.nonzero().flatten():
            scale = torch.zeros((), dtype=torch.float64, requires_grad=True)

            def moved(run, scale=scale, refit=refit):  # type: ignore[no-untyped-def]
                change, offset = refit.changes[run.reader]
                return run.y + scale * (run.product(change) - offset.reshape(-1, 1, 1))

            with watching(elimination.whole, list(refit.changes), moved):
                outputs = elimination.whole(x[image : image + 1])
            (along,) = torch.autograd.grad(F.cross_entropy(outputs, labels[image : image + 1]), scale)
            total += 0.5 * float(along) ** 2 / int(counted.sum())
        assert_close(*(torch.tensor(v, dtype=torch.float64) for v in (found[refit.count], total)), "rises")


def test_layers_called_as_functions_are_valued_as_modules_are() -> None:
    torch.manual_seed(2)
    x, found = torch.randn(32, 3, 9, 9), []
    for functional in (True, False):
        torch.manual_seed(3)
        prepared = smcp_fx.prepare(randomise(_Two(functional)).eval(), x[:2], config=SMALL)
        smcp_fx.gather_importance(prepared, [(x, torch.arange(32) % 5)])
        found.append(prepared.pruner.rises)
    assert found[0] is not None and found[1] is not None
    for rises, others in zip(found[0].values(), found[1].values(), strict=True):
        assert_close(torch.from_numpy(rises), torch.from_numpy(others), "rises")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_head_that_reads_more_than_there_are_images_is_worth_what_narrowing_it_costs(seed: int) -> None:
    """Its fit remembers the images that it has seen; others tell."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 96, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(96, 40),
    ).eval()  # fmt: skip
    with torch.no_grad():
        x, unseen = (torch.randn(n, 3, 8, 8) * torch.rand(n, 3, 1, 1) * 3 for n in (64, 512))
        features = model[:-1](x)
        model[-1].weight.mul_(6 / (features @ model[-1].weight.T).std())
    prepared = smcp_fx.prepare(model, x[:2], config=SMALL)
    smcp_fx.gather_importance(prepared, x.split(8), outputs="classes")
    rises, masks = prepared.pruner.rises, prepared.pruner.importance
    assert rises is not None
    name = next(group.name for group in prepared.channels.groups if group.free and group.size == 96)
    keep = torch.zeros(96, dtype=torch.bool)
    keep[masks[name].argsort(descending=True)[:48]] = True
    prepared.set_masks({name: keep})
    smaller = smcp_fx.convert(prepared)
    smcp_fx.repair(smaller, prepared, x.split(8))
    with torch.no_grad():
        log_p, log_q = (m.eval()(unseen).log_softmax(1) for m in (model, smaller))
    measured = float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"))
    assert 1 / 3 < rises[name][48] / measured < 3
