"""Models traced in parts, saved and put into a new model of their class."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_masks, randomise
from saved_models import edit_manifest
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import CheckpointError, InputError

sys.path.append(str(Path(__file__).parent.parent / "regions"))
from region_models import IMAGES, Split, conv, outputs
from test_regions import Pyramid


class Scale(nn.Module):
    """A class of the user's with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((12, 1, 1), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if x.amax() < 1e6 else x


class Mixed(Split):
    """A region, a layer and a tensor outside of regions, a module of two places, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        same = conv(12, 12)
        self.body, self.scale = nn.Sequential(same, same, conv(12, 16), conv(16, 20)), Scale()
        self.unused = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(1), persistent=False)

    def between(self, f: Tensor) -> Tensor:
        return self.scale(f)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.offset


NETWORKS: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
    "tensors": (Split, (IMAGES,)),
    "dicts, lists and strings": (Pyramid, ([IMAGES[0], IMAGES[1]],)),
    "layers and tensors beside": (Mixed, (IMAGES,)),
}


def new(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return randomise(kind()).double().eval()


def pruned(kind: type[nn.Module], inputs: tuple[Any, ...]) -> nn.Module:
    config = smcp_fx.PruningConfig(multiple=1)
    prepared = smcp_fx.prepare(new(kind), inputs, config=config, target=1.0)
    assert prepared.regions
    prepared.set_masks(random_masks(prepared, 0))
    return smcp_fx.convert(prepared)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return smcp_fx.save(pruned(*NETWORKS["tensors"]), tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", NETWORKS)
def test_it_comes_back_the_same(name: str, tmp_path: Path) -> None:
    kind, inputs = NETWORKS[name]
    model, fresh = pruned(kind, inputs), new(kind, seed=7)
    model.train()
    next(model.children()).eval()
    before = copy.deepcopy(fresh.state_dict())
    loaded = smcp_fx.load(smcp_fx.save(model, tmp_path / "model.safetensors"), into=fresh)
    assert type(loaded) is kind
    assert_close(fresh.state_dict(), before, "identity", "the model that it was loaded into")
    assert_close(loaded.state_dict(), model.state_dict(), "identity")
    assert [m.training for m in loaded.modules()] == [m.training for m in model.modules()]
    for mode in (False, True):
        expected = outputs(copy.deepcopy(model).train(mode), inputs)
        assert_close(outputs(copy.deepcopy(loaded).train(mode), inputs), expected, "identity")
    for parameter in loaded.parameters():  # what is trained is what its regions read
        nn.init.zeros_(parameter)
    assert not any(t.any() for t in loaded.state_dict().values() if t.is_floating_point() and t.dim() > 1)
    again = smcp_fx.save(model, tmp_path / "again.safetensors")
    assert again.read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_a_part_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = pruned(*NETWORKS["tensors"]).float()
    file = smcp_fx.export_onnx(model.get_submodule("stem"), IMAGES.float(), tmp_path / "stem.onnx")
    assert file.stat().st_size


class Other(Split):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(20, 5))


class Wider(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.scale.factor = nn.Parameter(torch.ones(13, 1, 1))


@pytest.mark.parametrize(("kind", "original"), [(Other, Split), (Wider, Mixed)])
def test_another_model_is_refused(kind: type[nn.Module], original: type[nn.Module], tmp_path: Path) -> None:
    file = smcp_fx.save(pruned(original, (IMAGES,)), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"was saved from a {original.__name__}"):
        smcp_fx.load(file, into=new(kind))
    kind.__name__ = original.__name__
    with pytest.raises(CheckpointError, match="is not the model that the file was saved from"):
        smcp_fx.load(file, into=new(kind))


def test_what_is_missing_or_too_much_is_told(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="into=model"):
        smcp_fx.load(saved)
    whole = smcp_fx.convert(smcp_fx.prepare(new(lambda: conv(3, 8)), IMAGES, target=1.0))  # type: ignore[arg-type]
    file = smcp_fx.save(whole, tmp_path / "whole.safetensors")
    with pytest.raises(InputError, match=r"smcp_fx\.resize"):
        smcp_fx.load(file, into=new(Split))


HOSTILE: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "code in a region": lambda m, evil: m["regions"][0]["graph"][0].update(target=f"x=({evil})"),
    "code in its path": lambda m, evil: m["regions"][0].update(path=evil),
    "a function as a value": lambda m, _: m["regions"][0].update(arguments={"function": "os.system"}),
    "leaves out of order": lambda m, _: m["regions"][0].update(output={"tuple": [1, 0]}),
    "a class of a layer": lambda m, _: m["layers"][0]["modules"][1].update({"class": "torch.fx.GraphModule"}),
    "a tensor of a table": lambda m, _: m["rest"].update({"_modules": m["tensors"][0]["name"]}),
    "a tensor of a class": lambda m, _: m["rest"].update({"__class__": m["tensors"][0]["name"]}),
    "regions that are none": lambda m, _: m.update(regions=7),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(saved: Path, name: str) -> None:
    evil = saved.parent / "evil"
    edit_manifest(saved, lambda manifest: HOSTILE[name](manifest, f"open({str(evil)!r}, 'w').close()"))
    with pytest.raises(CheckpointError):
        smcp_fx.load(saved, into=new(Split))
    assert not evil.exists()
