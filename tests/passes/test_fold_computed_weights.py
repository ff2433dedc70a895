"""Weights that are computed from parameters: masked as any other, folded into plain parameters when converted."""

from __future__ import annotations

import copy
from typing import Any

import models_weights
import pytest
import torch
import torch.nn.functional as F
from models import check_slicing, random_masks, randomise, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.pruning.importance import TaylorImportance

KINDS = [
    "weight_norm_by_hook", "weight_norm_parametrised_in_groups", "spectral_norm_by_hook",
    "spectral_norm_parametrised", "parametrisation_of_ones_own", "weight_by_a_hook_of_ones_own", "pruned_by_torch",
]  # fmt: skip
IMAGE = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CONFIG = smcp_fx.PruningConfig(multiple=1)


def prepared_and_model(kind: str) -> tuple[smcp_fx.PreparedModel, nn.Module]:
    model = randomise(getattr(models_weights, kind)()).double().eval()
    return smcp_fx.prepare(model, IMAGE, config=CONFIG), model


@pytest.mark.parametrize("kind", KINDS)
def test_masked_as_if_the_channels_were_zero(kind: str) -> None:
    """Held against the model itself, with hooks that put zeros where channels are masked."""
    prepared, model = prepared_and_model(kind)
    masks = random_masks(prepared, 1)
    prepared.set_masks(masks)
    before = run(model, (IMAGE,))
    model = copy.deepcopy(model)
    for layer, name in ((model.stem, "stem"), (model.mid, "mid.weight")):
        mask = next(m for group, m in masks.items() if group == name).double()
        mask = mask.repeat(8 // mask.numel())  # groups of a grouped convolution's channels
        layer.register_forward_hook(lambda _m, _i, out, mask=mask: out * mask.view(-1, 1, 1))
    expected = run(model, (IMAGE,))
    assert not torch.allclose(expected, before)
    assert_close(run(prepared, (IMAGE,)), expected, "slicing", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_names_before_and_after(kind: str) -> None:
    """Checkpoints of the model load into what is prepared; what is converted has plain weights, and saves."""
    prepared, model = prepared_and_model(kind)
    names = {name for name in prepared.state_dict() if not name.startswith("smcp.")}
    assert names == set(model.state_dict())
    prepared.set_masks(random_masks(prepared, 2))
    converted = smcp_fx.convert(prepared)
    plain = {"stem.weight", "stem.bias", "mid.weight", "mid.bias", "out.weight", "out.bias"}
    assert set(converted.state_dict()) == plain
    count = prepared.plan.parameters.cost({name: int(mask.sum()) for name, mask in prepared.masks.items()})
    assert count == sum(parameter.numel() for parameter in converted.parameters())
    own = smcp_fx.convert(prepared, into=model)
    assert type(own.mid) is nn.Conv2d and not own.mid._forward_pre_hooks
    assert_close(run(own, (IMAGE,)), run(prepared, (IMAGE,)), "slicing", kind)
    assert set(model.state_dict()) == names, "the model that it was made from"


def test_a_file_holds_them(tmp_path: object) -> None:
    prepared, _ = prepared_and_model("spectral_norm_by_hook")
    prepared.set_masks(random_masks(prepared, 0))
    converted = smcp_fx.convert(prepared)
    smcp_fx.save(converted, f"{tmp_path}/model.safetensors")
    assert_close(
        run(smcp_fx.load(f"{tmp_path}/model.safetensors"), (IMAGE,)), run(converted, (IMAGE,)), "slicing"
    )


@pytest.mark.parametrize("kind", ["spectral_norm_by_hook", "spectral_norm_parametrised"])
def test_spectral_norm_trains_as_it_did(kind: str) -> None:
    """Each training step takes the model's own step towards the singular vectors."""
    prepared, model = prepared_and_model(kind)
    for network in (prepared.train(), model.train()):
        for _ in range(3):
            run(network, (IMAGE,))
    expected, found = model.state_dict(), prepared.state_dict()
    for name in expected:
        assert_close(found[name], expected[name], "slicing", name)
    assert_close(run(prepared.eval(), (IMAGE,)), run(model.eval(), (IMAGE,)), "identity", kind)


@pytest.mark.parametrize("kind", ["weight_norm_by_hook", "weight_norm_parametrised_in_groups"])
def test_importance_is_that_of_the_computed_weight(kind: str) -> None:
    """Sum of weight times gradient, by autograd on the weight that the convolution reads."""
    prepared, model = prepared_and_model(kind)
    prepared.train()
    prepared(IMAGE).square().sum().backward()
    units = TaylorImportance(prepared.channels, prepared.smcp, "abs_of_sum")(prepared)
    found = prepared.smcp.of_group(units, "stem")
    run(model, (IMAGE,))
    weight: Tensor = model.mid.weight.detach().requires_grad_()
    middle = F.conv2d(model.stem(IMAGE), weight, model.mid.bias, padding=1, groups=model.mid.groups).relu()
    model.out(middle).square().sum().backward()
    slots = (weight * weight.grad).sum((0, 2, 3))
    assert_close(found, slots.abs().float(), "importance", kind)


def test_a_frozen_weight_stays_frozen() -> None:
    model = models_weights.weight_norm_by_hook().double().eval()
    model.mid.requires_grad_(False)
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    converted = smcp_fx.convert(prepared)
    assert not converted.mid.weight.requires_grad and converted.stem.weight.requires_grad


@pytest.mark.parametrize("kind", ["slimmable", "factors_of_a_weight", "weight_norm_by_hook"])
def test_layer_pruning_of_networks_that_compute_weights(kind: str) -> None:
    check_slicing(getattr(models_weights, kind)(), (IMAGE,), seeds=(0, 1), layer_pruning=True)


COSINES: dict[str, Any] = {
    "linear": lambda x, w: F.linear(F.normalize(x), F.normalize(w)),
    "matmul": lambda x, w: F.normalize(x) @ F.normalize(w.T, dim=0) * 8,
    "einsum": lambda x, w: torch.einsum("bk,ok->bo", F.normalize(x), F.normalize(w)),
    "divided": lambda x, w: F.linear(x / x.norm(dim=1, keepdim=True), w / w.norm(dim=1, keepdim=True)),
}


class Cosines(nn.Module):
    """A head of cosines, read from the weight of a layer that is not called."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form, self.stem, self.head = form, nn.Conv2d(3, 16, 3), nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.form(self.stem(x).relu().mean((2, 3)), self.head.weight)
        return y


@pytest.mark.parametrize("form", COSINES)
def test_cosines_are_those_of_the_kept_channels(form: str) -> None:
    """Held against the formula at the kept channels, and against the model's own class."""
    model = randomise(Cosines(COSINES[form])).double().eval()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    mask = torch.arange(16) % 3 > 0
    prepared.set_masks({"stem": mask})
    features = model.stem(IMAGE).relu().mean((2, 3))[:, mask]
    expected = COSINES[form](features, model.head.weight[:, mask])
    own, converted = smcp_fx.convert(prepared, into=model), smcp_fx.convert(prepared)
    for network in (prepared, own, converted):
        assert_close(run(network, (IMAGE,)), expected.detach(), "slicing", form)
    assert own.head.weight.shape == converted.state_dict()["head.weight"].shape == (5, 10)


def test_a_weight_that_is_read_otherwise_is_folded() -> None:
    """Beside cosines the matrix is read as it is: the value is stored, and the class is refused with the reason."""
    model = randomise(
        Cosines(lambda x, w: F.linear(F.normalize(x), F.normalize(w)) + F.linear(x, F.normalize(w)))
    )
    prepared = smcp_fx.prepare(model.double().eval(), IMAGE, config=CONFIG)
    prepared.set_masks(random_masks(prepared, 1))
    assert_close(run(smcp_fx.convert(prepared), (IMAGE,)), run(prepared, (IMAGE,)), "slicing")
    with pytest.raises(smcp_fx.errors.InputError, match="weight of 'head' itself"):
        smcp_fx.convert(prepared, into=model)
