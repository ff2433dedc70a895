"""Repair and re-estimation without training: against what is known exactly, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import chain, random_masks, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.calibration.consumers import by_weight
from smcp_fx.errors import InputError

LAYERS = [
    nn.Conv1d(6, 4, 3, stride=2, padding=1),
    nn.Conv2d(6, 4, 3, padding=2, dilation=2, groups=2),
    nn.Conv2d(6, 6, 3, padding=1, groups=6),
    nn.Conv2d(6, 4, 3, padding="same", padding_mode="circular"),
    nn.Conv3d(6, 4, (1, 3, 2), stride=(1, 2, 1)),
    nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, groups=2, dilation=2),
    nn.ConvTranspose3d(6, 4, (2, 3, 1), stride=(1, 2, 1)),
    nn.Linear(6, 4),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_rows_times_matrix_is_the_layer(layer: nn.Module) -> None:
    """Whatever its kind: what a regression is about is what the layer computes, also where y has more channels."""
    layer = layer.double()
    rank = 0 if isinstance(layer, nn.Linear) else layer.weight.dim() - 2
    x = torch.randn(3, 6, *(7,) * rank, dtype=torch.float64) if rank else torch.randn(3, 5, 6).double()
    traced = torch.fx.symbolic_trace(nn.Sequential(layer))
    (consumer,) = by_weight(traced)[0][0]
    y = layer(x).detach()
    _, positions = consumer.positions(y)
    matrix = consumer.matrix(layer.weight)
    assert torch.equal(consumer.unmatrix(matrix), layer.weight)
    assert layer.bias is not None
    chosen, images = torch.randperm(positions)[: positions // 2 + 1], torch.tensor([2, 0])
    apart = (y.flatten(2).transpose(1, 2) if rank else y)[images][:, chosen]
    wider, order = torch.cat([y, -y], y.dim() - 1 - rank), torch.arange(y.shape[-1 - rank])
    for inputs, outputs in [
        *consumer.rows(x, y, images, chosen), *consumer.rows(x, wider, images, chosen, order)
    ]:  # fmt: skip
        found = torch.einsum("npgi,gio->npgo", inputs, matrix).flatten(2) + layer.bias
        assert_close(found.detach(), outputs.flatten(2), "slicing")
        assert torch.equal(outputs.flatten(2), apart)


def test_recalibrate_is_exact_over_all_the_data() -> None:
    norm = nn.BatchNorm2d(3, momentum=0.01).double()
    batches = [2 * torch.randn(n, 3, 4, 5, dtype=torch.float64) + 1 for n in (2, 7, 3)]
    smcp_fx.recalibrate(nn.Sequential(norm), batches)
    every = torch.cat(batches)
    assert_close(norm.running_mean, every.mean((0, 2, 3)), "slicing")
    assert_close(norm.running_var, every.var((0, 2, 3)), "slicing")
    assert norm.training and norm.momentum == 0.01


def _prepared(model: nn.Module) -> smcp_fx.PreparedModel:
    config = smcp_fx.PruningConfig(multiple=1)
    return smcp_fx.prepare(randomise(model).double().eval(), torch.randn(2, 3, 8, 8).double(), config=config)


def test_nothing_removed_changes_nothing() -> None:
    prepared = _prepared(chain(8, 12))
    smaller = smcp_fx.convert(prepared)
    before = {name: t.clone() for name, t in smaller.state_dict().items()}
    report = smcp_fx.repair(smaller, prepared, [torch.randn(16, 3, 8, 8).double()])
    assert not any(layer.repaired for layer in report.layers)
    for name, tensor in smaller.state_dict().items():
        assert_close(tensor, before[name], "slicing", name)


def test_no_layer_is_worse_and_the_output_is_nearer() -> None:
    prepared = _prepared(chain(16, 24))
    x = torch.randn(64, 3, 8, 8).double()
    expected = prepared(x)
    prepared.set_masks(random_masks(prepared, 0, 0.7))
    smaller = smcp_fx.convert(prepared)
    before = (smaller(x) - expected).norm()
    report = smcp_fx.repair(smaller, prepared, [x[:32], x[32:]])
    assert all(layer.after <= layer.before for layer in report.layers)
    assert (smaller(x) - expected).norm() < before


@pytest.mark.parametrize(
    "batches", [[], 3, [torch.randn(2, 5, 8, 8)], [torch.full((2, 3, 8, 8), torch.nan)], ["a"]]
)
@pytest.mark.parametrize("what", ["repair", "recalibrate"])
def test_bad_batches_are_refused_and_change_nothing(what: str, batches: Any) -> None:
    prepared = _prepared(chain(8, 12))
    smaller = smcp_fx.convert(prepared)
    before = {name: t.clone() for name, t in smaller.state_dict().items()}
    rest = (prepared, batches) if what == "repair" else (batches,)
    with pytest.raises(InputError):
        getattr(smcp_fx, what)(smaller, *rest)
    assert all(torch.equal(tensor, before[name]) for name, tensor in smaller.state_dict().items())


def test_labels_dicts_and_generators_are_taken() -> None:
    norm, x = nn.Sequential(nn.BatchNorm1d(3)), torch.randn(8, 3)
    found: list[Tensor] = []
    for batches in (x, [x], [(x, torch.arange(8))], [[x]], [{"input": x}], (one for one in [x])):
        smcp_fx.recalibrate(norm, batches)
        found.append(norm[0].running_mean.clone())  # type: ignore[union-attr,operator]
    assert all(torch.equal(one, found[0]) for one in found)


class _Twice(nn.Module):
    """One convolution before and behind layers that are narrowed: fitted behind, it has changed before as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.wide, self.narrow, self.head = nn.Conv2d(8, 24, 3), nn.Conv2d(24, 8, 1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(x)).relu()
        return self.head(self.twice(self.narrow(self.wide(x).relu())).relu())


def _returned(prepared: smcp_fx.PreparedModel) -> None:
    """Train a step under masks, and take all but one away: the weights have never seen what returns."""
    every = {name: torch.ones_like(mask) for name, mask in prepared.masks.items()}
    every[list(prepared.smcp.free_masks())[-1]][-1] = False
    prepared.set_masks(random_masks(prepared, 0, 0.5))
    with torch.enable_grad():
        prepared.train()(torch.randn(16, 3, 8, 8).double()).square().mean().backward()
    prepared.pruner.step()
    prepared.set_masks(every)
    prepared.eval()


def _one_group(prepared: smcp_fx.PreparedModel) -> None:
    """Narrow the widest group, which stands in the middle; what comes before it computes what it did."""
    name, mask = max(prepared.smcp.free_masks().items(), key=lambda entry: entry[1].numel())
    prepared.set_masks({name: torch.arange(mask.numel()) % 6 == 0})


@pytest.mark.parametrize("narrowed", [_one_group, _returned])
@pytest.mark.parametrize("model", [lambda: chain(16, 24, 12), _Twice], ids=["chain", "twice"])
@torch.no_grad()
def test_layers_that_nothing_removed_reaches_need_no_fit(
    model: Any, narrowed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a repair that fits every layer."""
    torch.manual_seed(0)
    prepared = _prepared(model())
    narrowed(prepared)
    x, found, changed = torch.randn(48, 3, 8, 8).double(), [], []
    for every in (False, True):
        if every:
            monkeypatch.setattr("smcp_fx.calibration.side_by_side._Fit._exact", lambda self: set())
        smaller = smcp_fx.convert(prepared).eval()
        before = smaller(x)
        report = smcp_fx.repair(smaller, prepared, x)
        changed.append([layer.path for layer in report.layers if layer.repaired])
        found.append(smaller(x))
        assert float((found[-1] - before).norm()) > 1e-3 * float(before.norm())
    assert changed[0] == changed[1]
    assert_close(found[0], found[1], "regression")


def _normed() -> nn.Module:
    """Normalised over channels, of which masks hide some."""
    layers = (nn.Conv2d(3, 12, 3), nn.GroupNorm(1, 12), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.BatchNorm2d(16))
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


@pytest.mark.parametrize("model", [lambda: chain(16, 24), _normed], ids=["chain", "normed"])
def test_what_was_trained_under_masks_is_what_repair_goes_back_to(model: Any) -> None:
    """With every channel on, such weights compute what no training ever saw."""
    prepared = _prepared(model())
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    masks = random_masks(prepared, 0, 0.5)
    prepared.set_masks(masks)
    prepared.train()
    for x in torch.randn(8, 16, 3, 8, 8).double():
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        prepared.pruner.step()
        optimizer.step()
    prepared.eval()
    x = torch.randn(64, 3, 8, 8).double()
    expected = prepared(x)
    same = smcp_fx.convert(prepared).eval()
    report = smcp_fx.repair(same, prepared, x)
    assert not any(layer.repaired for layer in report.layers)
    assert_close(same(x), expected, "slicing")
    # Fewer channels than it was trained with.
    fewer = random_masks(prepared, 1, 0.7)
    prepared.set_masks(
        {name: masks[name] & fewer[name] for name in masks if bool((masks[name] & fewer[name]).any())}
    )
    loaded = _prepared(model())
    loaded.load_state_dict(prepared.state_dict())
    smaller = smcp_fx.convert(loaded.eval())
    before = (smaller(x) - expected).norm()
    smcp_fx.repair(smaller, loaded, x)
    assert (smaller(x) - expected).norm() < 0.9 * before
