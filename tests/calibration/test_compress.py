"""Pruning without training in one call, and repair where what it must reach is known exactly."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import chain, randomise
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import smcp_fx
from smcp_fx.calibration.batches import each_batch
from smcp_fx.calibration.candidates import drawn, solve_best
from smcp_fx.calibration.gathering import first_order
from smcp_fx.calibration.objective import Objective
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InfeasibleBudgetError

SMALL = smcp_fx.PruningConfig(multiple=1)

#: Two layers, of whose 8 channels between the last 4 are made linear combinations of the first 4.
PAIRS = {
    "convolutions": (nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 3, stride=2)),
    "one dimension": (nn.Conv1d(3, 8, 1), nn.Conv1d(8, 5, 3, padding=1)),
    "three dimensions": (nn.Conv3d(3, 8, 1), nn.Conv3d(8, 5, (1, 3, 2))),
    "linears": (nn.Linear(3, 8), nn.Linear(8, 5)),
    "a transposed consumer": (nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 5, 3, stride=2, padding=1)),
}
RANK = {"one dimension": 1, "three dimensions": 3, "linears": 0}


@pytest.mark.parametrize("name", PAIRS)
def test_what_follows_from_the_rest_is_made_up_for_exactly(name: str) -> None:
    """Channels that are linear in those that stay can go without any loss, and repair finds how."""
    torch.manual_seed(1)
    first, second = (layer.double() for layer in PAIRS[name])
    mixture = torch.randn(4, 4, dtype=torch.float64)
    with torch.no_grad():
        first.weight[4:] = torch.einsum("ij,j...->i...", mixture, first.weight[:4])
        assert first.bias is not None
        first.bias[4:] = mixture @ first.bias[:4]

    def images() -> Tensor:
        return torch.randn(40, 3, *(6,) * RANK.get(name, 2), dtype=torch.float64)

    model = nn.Sequential(first, second).eval()
    prepared = smcp_fx.prepare(model, images()[:2], config=SMALL)
    (group,) = [group for group in prepared.channels.groups if group.free]
    prepared.set_masks({group.name: torch.arange(8) < 4})
    smaller = smcp_fx.convert(prepared)
    new = images()
    expected = model(new)
    assert (smaller(new) - expected).norm() > 0.1 * expected.norm()
    smcp_fx.repair(smaller, prepared, [images()])
    assert_close(smaller(new), expected, "regression", name)


def _batches(labels: bool) -> list[Any]:
    x = torch.randn(6, 16, 3, 8, 8)
    return [(one, torch.randint(5, (16,))) if labels else one for one in x]


def _flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    return counter.get_total_flops()


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
def test_the_target_is_met_and_repair_brings_the_outputs_nearer(labels: bool) -> None:
    model = randomise(chain(24, 32)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = _batches(labels)
    smaller = smcp_fx.compress(model, batches, target=0.5, config=SMALL, outputs="classes")
    assert _flops(smaller) <= 0.5 * _flops(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    torch.manual_seed(0)
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), target=0.5, config=SMALL)
    smcp_fx.gather_importance(prepared, batches, outputs="classes")
    prepared.pruner.solve()
    sliced = smcp_fx.convert(prepared).eval()
    x = torch.randn(64, 3, 8, 8)
    expected, smaller = model(x), smaller.eval()
    assert (smaller(x) - expected).norm() < (sliced(x) - expected).norm()


@pytest.mark.parametrize(
    "option", [{"mask": "permanent"}, {"batch_norm_scaling": True}, {"width_exponent": 0.0}, {"memory": 0.0}]
)
def test_options_of_training_change_nothing(option: dict[str, Any]) -> None:
    model, batches = randomise(chain(24, 32)).eval(), _batches(True)

    def outputs(config: smcp_fx.PruningConfig) -> Tensor:
        smaller = smcp_fx.compress(model, batches, target=0.5, config=config)
        with torch.no_grad():
            return smaller(batches[0][0])

    assert torch.equal(outputs(MethodConfig(multiple=1, **option)), outputs(SMALL))


def test_progress_is_told_from_nothing_to_all() -> None:
    told: list[float] = []
    batches = _batches(labels=True)
    smcp_fx.compress(randomise(chain(24, 32)).eval(), batches, target=0.5, config=SMALL, progress=told.append)
    assert told == sorted(told) and told[-1] == 1
    # Two gathers of two passes and a first one, an order for each of two groups twice, and two repairs.
    assert len(told) > 3 * len(batches) + 4 and told[0] < 0.1


def test_importances_are_the_mean_over_batches_by_autograd() -> None:
    """Against the shares of |sum of W * dL/dW| over the second layer's input channels, of losses taken by hand."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    batches = _batches(labels=True)
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), config=SMALL)
    first_order(prepared, batches, Objective(prepared))
    expected = torch.zeros(6)
    for x, y in batches:
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model[2].weight)
        expected += (gradient * model[2].weight).sum((0, 2, 3)).abs().detach() / len(batches)
    (found,) = prepared.pruner.importance.values()
    assert_close(found.cpu(), expected / expected.sum(), "importance")
    assert all(parameter.grad is None for parameter in prepared.parameters())


def test_a_solve_without_a_schedule_takes_the_best_choice() -> None:
    """Masks that change little are for training: there is none here, whatever the tolerance."""
    model, batches, found = randomise(chain(24, 32, 24)).eval(), _batches(labels=True), []
    for tolerance in (0.0, 0.5):
        config = MethodConfig(multiple=1, tolerance=tolerance)
        prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), target=0.4, config=config)
        smcp_fx.gather_importance(prepared, batches)
        prepared.pruner.solve()
        found.append(prepared.masks)
    assert all(torch.equal(found[0][name], mask) for name, mask in found[1].items())


def test_a_frozen_model_is_pruned_like_another() -> None:
    batches = _batches(labels=True)
    model, found = randomise(chain(24, 32)).eval(), []
    for learns in (True, False):
        model.requires_grad_(learns)
        prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), config=SMALL)
        smcp_fx.gather_importance(prepared, batches)
        found.append(prepared.pruner.importance)
        assert all(parameter.requires_grad is learns for parameter in prepared.parameters())
    assert_close(found[1], found[0], "importance")
    smcp_fx.compress(model, batches, config=SMALL)


class Outputs(nn.Module):
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.net, self.outputs = chain(8, 12), outputs

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self.net(x))


def test_a_loss_of_ones_own_takes_any_outputs_and_labels() -> None:
    model = randomise(Outputs(lambda y: {"scores": y})).eval()
    smcp_fx.compress(
        model,
        _batches(labels=True),
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs["scores"], labels),
        config=SMALL,
    )


@pytest.mark.parametrize(
    ("batches", "options", "said"),
    [
        ([], {}, "no batches"),
        ([{"x": torch.randn(2, 3, 8, 8)}], {}, "by the names in forward"),
        ([torch.randn(2, 4, 8, 8)], {}, "4"),
        ([(torch.randn(2, 3, 8, 8), "label")], {}, "labels are a str"),
        ([torch.randn(2, 3, 8, 8)], {"progress": True}, "progress must be a function"),
        ([torch.randn(2, 3, 8, 8)], {"loss": "mse"}, "loss must be a function of .outputs, labels."),
        ([{"input": torch.randn(2, 3, 8, 8), "label": torch.ones(2)}], {}, "labels go beside the inputs"),
        ([torch.randn(2, 3, 8, 8)], {"loss": lambda o, y: o}, "one finite real number"),
        ([torch.randn(2, 3, 8, 8)], {"loss": lambda o, y: o.sum() * 1j}, "one finite real number"),
        ([torch.randn(2, 3, 8, 8).numpy()], {}, r"no tensor, but ndarray [^\n]*: give tensors"),
        ([torch.randn(2, 3, 8, 8)], {"loss": lambda o, y: o.sum() * torch.nan}, "one finite real number"),
        ([torch.randn(2, 3, 8, 8)], {"loss": lambda o, y: 1 / 0}, "ZeroDivisionError: division by zero"),
        ([torch.randn(2, 3, 8, 8)], {"loss": lambda o, y: torch.ones(())}, "has no gradient"),
        ([torch.zeros(2, 3, 8, 8)], {"loss": lambda o, y: 0 * o.sum()}, "no channel matters"),
        ([torch.full((2, 3, 8, 8), 3e38)], {}, "NaN or infinite"),
        ([torch.full((2, 3, 8, 8), 3e38)], {"outputs": "classes"}, "NaN or infinite"),
        ([torch.randn(2, 3, 8, 8)], {"outputs": "boxes"}, "outputs= must be"),
        (
            [torch.randn(2, 3, 8, 8)],
            {"outputs": {"box": "values"}},
            "names 'box'; the model's output has one tensor",
        ),
        ([torch.randn(2, 3, 8, 8)], {"outputs": "classes:4"}, "along dimension 4"),
        ([torch.randn(2, 3, 8, 8)], {"outputs": "values", "loss": lambda o, y: o.sum()}, "not both"),
        ([(torch.randn(2, 3, 8, 8), torch.tensor([1, 5]))], {}, "go from 1 to 5"),
        ([(torch.randn(2, 3, 8, 8), torch.randn(2, 3))], {}, "do not fit the output"),
        ([torch.randn(2, 3, 8, 8)], {"target": "-3%"}, "target"),
        (torch.randn(1, 3, 8, 8), {"outputs": "values"}, "two images or more"),
    ],
)
def test_bad_input_is_told(batches: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(smcp_fx.SmcpError, match=said):
        smcp_fx.compress(randomise(chain(8, 12)).eval(), batches, config=SMALL, **options)


def test_a_target_out_of_reach_is_told() -> None:
    with pytest.raises(InfeasibleBudgetError):
        smcp_fx.compress(
            randomise(chain(8, 12)).eval(), _batches(labels=False), target=0.001, outputs="values"
        )


def test_batches_that_come_once_are_kept() -> None:
    smaller = smcp_fx.compress(
        randomise(chain(8, 12)).eval(), iter(_batches(labels=False)), config=SMALL, outputs="values"
    )
    assert _flops(smaller) <= 0.5 * _flops(chain(8, 12))


def test_nearly_uniform_widths_are_taken_where_the_worths_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is said to be worth nothing, so that the choice by what is said ruins it."""
    module = importlib.import_module("smcp_fx.calibration.compress")
    torch.manual_seed(0)
    model, images = randomise(chain(16, 24, 16)).eval(), list(torch.randn(8, 16, 3, 8, 8))

    def wrong(prepared: smcp_fx.PreparedModel, *args: Any, **options: Any) -> None:
        smcp_fx.gather_importance(prepared, *args, **options)
        rises = prepared.smcp.rises
        assert rises is not None
        prepared.smcp.rises = {n: 0 * r if i == 1 else 1e6 * r for i, (n, r) in enumerate(rises.items())}

    monkeypatch.setattr(module, "gather_importance", wrong)
    smaller = smcp_fx.compress(model, images, target=0.5, config=SMALL, outputs="classes")
    widths = [layer.out_channels for layer in smaller.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert all(0.55 < kept / size < 0.85 for kept, size in zip(widths[:3], (16, 24, 16), strict=True))


def test_rises_are_drawn_to_those_of_uniform_widths() -> None:
    torch.manual_seed(0)
    prepared = smcp_fx.prepare(randomise(chain(16, 24, 16)).eval(), torch.randn(2, 3, 8, 8), config=SMALL)
    smcp_fx.gather_importance(prepared, torch.randn(64, 3, 8, 8), outputs="classes")
    rises, cost = prepared.pruner.rises, prepared.pruner.cost
    assert rises is not None
    none, half, whole = (drawn(rises, cost, trust) for trust in (0.0, 0.5, 1.0))
    for name, curve in rises.items():
        assert np.allclose(whole[name], curve, rtol=1e-6)
        mean = np.sqrt(none[name] * whole[name])[: curve.size // 2] / half[name][: curve.size // 2]
        assert np.allclose(mean, mean[0], rtol=1e-3)
        assert (np.diff(half[name]) <= 0).all() and half[name][-1] == 0
    before = {name: curve.copy() for name, curve in rises.items()}
    prepared.smcp.rises = none
    assert all((rises[name] == curve).all() for name, curve in before.items())
    for target in (0.7, 0.5, 0.3):
        prepared.pruner.solve(target)
        shares = [count / cost.permitted[name][-1] for name, count in prepared.pruner.counts.items()]
        assert max(shares) - min(shares) < 0.2, shares


def test_distances_of_outputs_are_divergences_and_relative_errors() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    (batch,) = each_batch(torch.randn(6, 3))
    kinds = {"classes": F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
             "values": (a - b).square().mean() / b.var(0, correction=0).mean()}  # fmt: skip
    p, q = b.sigmoid(), a.sigmoid()
    kinds["binary"] = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    for kind, expected in kinds.items():
        found = Objective(torch.nn.Identity(), outputs=kind).distance(a, b, batch)
        assert abs(found - float(expected)) < 1e-5 * float(expected)
    assert Objective(torch.nn.Identity(), lambda o, y: o.sum()).distance(a, b, batch) == float(a.sum())


class Tagger(nn.Module):
    """Numbers in, so that nothing before the recurrent layer, which cannot be fitted, has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = (
            nn.Embedding(9, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, words: Tensor) -> Tensor:
        tags: Tensor = self.head(self.cell(self.embedding(words))[0])
        return tags


def test_networks_whose_groups_cannot_be_fitted_are_valued_by_gradients() -> None:
    model, words = Tagger(), torch.randint(9, (6, 5))
    smaller = smcp_fx.compress(model, [words] * 2, target=0.5, outputs="classes", config=SMALL)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, smaller)]
    assert sizes[1] < 0.7 * sizes[0]


@pytest.mark.parametrize("verb", [smcp_fx.gather_importance, solve_best])
def test_the_steps_need_a_prepared_model(verb: Any) -> None:
    with pytest.raises(
        smcp_fx.InputError, match=f"{verb.__name__} needs what prepare returned, not Sequential"
    ):
        verb(chain(8, 12), torch.randn(2, 3, 8, 8))
