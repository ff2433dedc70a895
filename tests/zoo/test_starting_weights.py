"""Weights as training scripts save them, and as libraries publish them (stood in for here)."""

from __future__ import annotations

import argparse
import pathlib
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torchvision import models

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.zoo import pretrained
from smcp_fx.zoo.pretrained import preprocessing_of, pretrained_weights
from smcp_fx.zoo.weights import load_weights, read_weights


def network(classes: int = 5, width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width * 36, classes)
    )


class Wrapped(nn.Module):
    """As Lightning modules and detectors hold networks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(5))


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def loads(path: Path, source: nn.Module, classes: int = 5) -> tuple[str, ...]:
    """The file's weights arrive in a fresh network, all of them; what is noted."""
    fresh = network(classes)
    notes = load_weights(fresh, read_weights(path), classes).notes
    for name, value in source.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    return notes


@pytest.mark.parametrize("key", ["model", "ema", "model_state", "state_dict", "model_ema", "net", None])
def test_checkpoints_of_training_scripts_load(tmp_path: Path, key: str | None) -> None:
    source = network()
    content: Any = source.state_dict()
    if key is not None:
        content = {
            key: content, "optimizer": torch.optim.Adam(source.parameters()).state_dict(), "epoch": 3,
            "args": argparse.Namespace(lr=0.1, out=pathlib.Path("x")), "best_acc1": np.float64(71.5),
        }  # fmt: skip
    path = saved(tmp_path / "w.pth", content)
    notes = loads(path, source)
    assert [key in note for note in notes] == [True] * (key is not None)
    assert read_weights(path).accuracy == (None if key is None else pytest.approx(0.715))


def test_averaged_weights_are_taken_first_and_that_is_said(tmp_path: Path) -> None:
    plain, averaged = network(), torch.optim.swa_utils.AveragedModel(network())
    path = saved(tmp_path / "w.pth", {"model": plain.state_dict(), "model_ema": averaged.state_dict()})
    notes = loads(path, averaged.module)
    assert "'model_ema'" in notes[0] and "'module.'" in notes[1]


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, torch.compile, Wrapped, lambda m: nn.DataParallel(Wrapped(m))]
)
def test_prefixes_of_wrappers_are_taken_off(tmp_path: Path, wrap: Any) -> None:
    source = network()
    loads(saved(tmp_path / "w.pt", wrap(source).state_dict()), source)
    compiled_inside = network()
    compiled_inside[0] = torch.compile(compiled_inside[0])
    loads(saved(tmp_path / "inside.pt", compiled_inside.state_dict()), network_of(compiled_inside))


def network_of(compiled_inside: nn.Module) -> nn.Module:
    plain = network()
    state = {n.replace("_orig_mod.", ""): v for n, v in compiled_inside.state_dict().items()}
    plain.load_state_dict(state)
    return plain


def test_prefixes_that_the_model_has_are_put_on(tmp_path: Path) -> None:
    source, model = network(), Wrapped(network())
    del model.criterion
    weights = read_weights(saved(tmp_path / "w.pt", source.state_dict()))
    assert load_weights(model, weights).notes == ("names with 'model.' in front",)
    assert torch.equal(model.model[0].weight, source[0].weight)


def test_safetensors(tmp_path: Path) -> None:
    source = network()
    safetensors.torch.save_file(source.state_dict(), tmp_path / "w.safetensors")
    assert loads(tmp_path / "w.safetensors", source) == ()


def test_a_head_of_other_classes_starts_anew(tmp_path: Path) -> None:
    source, fresh = network(1000), network(5)
    before = fresh[3].weight.clone()
    path = saved(tmp_path / "w.pt", {"state_dict": source.state_dict(), "best_acc1": 80.0})
    found = load_weights(fresh, read_weights(path), classes=5)
    assert "last layer (3.weight, 3.bias) of 1000 classes is left out" in found.notes[-1]
    assert torch.equal(fresh[3].weight, before) and torch.equal(fresh[0].weight, source[0].weight)
    assert found.accuracy is None  # which was that of the other head
    headless = {n: v for n, v in source.state_dict().items() if not n.startswith("3.")}
    load_weights(fresh, read_weights(saved(tmp_path / "headless.pt", headless)), classes=5)
    with pytest.raises(CheckpointError, match=r"3\.weight is 1000x288, the model's 5x288"):
        load_weights(fresh, read_weights(path))  # where the classes are not known


def test_what_does_not_fit_is_told_in_a_line_and_changes_nothing(tmp_path: Path) -> None:
    resnet = models.resnet18()
    other = read_weights(saved(tmp_path / "other.pt", models.squeezenet1_1().state_dict()))
    before = resnet.conv1.weight.clone()
    with pytest.raises(CheckpointError, match=r"conv1.weight, .* and \d+ more are not there; it has") as told:
        load_weights(resnet, other, 1000)
    assert len(str(told.value)) < 400 and "\n" not in str(told.value)
    with pytest.raises(CheckpointError, match=r"0\.weight is 4x3x3x3, the model's 8x3x3x3; "):
        load_weights(network(), read_weights(saved(tmp_path / "narrow.pt", network(5, 4).state_dict())), 5)
    bad = resnet.state_dict() | {"conv1.weight": torch.full_like(before, float("nan"))}
    with pytest.raises(CheckpointError, match=r"conv1.weight holds NaN or infinity"):
        load_weights(resnet, read_weights(saved(tmp_path / "nan.pt", bad)), 1000)
    assert torch.equal(resnet.conv1.weight, before)


@pytest.mark.filterwarnings("ignore:`torch.jit.s", "ignore:The TorchScript type system")
def test_files_that_hold_no_weights_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("hello")
    torch.jit.save(torch.jit.script(network()), tmp_path / "script.pt")
    for name, told in {
        "": "is a folder", "no.pt": "there are no weights", "empty.pt": "is empty", "text.pt": "of another kind",
        "script.pt": "is a TorchScript model",
    }.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=told) as error:
            read_weights(tmp_path / name)
        assert len(str(error.value)) < 300 and not str(error.value).endswith(":")


def test_whole_models_are_refused_in_a_sentence_and_not_unpickled(tmp_path: Path) -> None:
    path = saved(tmp_path / "whole.pt", Wrapped(network()))
    with pytest.raises(
        CheckpointError, match=r"holds objects of .*Wrapped, not weights alone.*state_dict\(\)"
    ):
        read_weights(path)
    with pytest.raises(CheckpointError, match="holds no weights by name: its keys are epoch"):
        read_weights(saved(tmp_path / "none.pt", {"epoch": 3}))


class Published:
    """What torchvision's weight enumerations offer."""

    url = "https://example.org/resnet18.pth"
    meta = {"_metrics": {"ImageNet-1K": {"acc@1": 69.758}}}  # noqa: RUF012

    def __init__(self, state: dict[str, Tensor] | None) -> None:
        self.state = state

    def get_state_dict(self, **_: Any) -> dict[str, Tensor]:
        if self.state is None:
            raise urllib.error.URLError("no network")
        return self.state


def test_torchvisions_weights_come_with_their_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    resnet = models.resnet18()
    published = Published(resnet.state_dict())
    monkeypatch.setattr(models, "get_model_weights", lambda name: {"DEFAULT": published})
    fresh = models.resnet18(num_classes=1000)
    found = load_weights(fresh, pretrained_weights("torchvision:resnet18"), 1000)
    assert found.accuracy == pytest.approx(0.69758) and torch.equal(fresh.fc.weight, resnet.fc.weight)
    published.state = None
    with pytest.raises(InputError, match=r"could not be fetched .* give it by --weights"):
        pretrained_weights("torchvision:resnet18")


def test_without_a_network_timms_weights_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(pretrained.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(pretrained.urllib.request, "getproxies", dict)
    with pytest.raises(InputError, match=r"cannot be reached \(Name or service.* by --weights"):
        pretrained_weights("timm:resnet18.a1_in1k")
    with pytest.raises(InputError, match="give a file by --weights"):
        pretrained_weights("model.py:build")


def test_images_are_made_as_for_the_published_weights() -> None:
    assert preprocessing_of("torchvision:inception_v3").size == 299
    lite = preprocessing_of("timm:tf_efficientnet_lite0")
    assert (lite.mean, lite.interpolation, lite.crop) == ((0.5, 0.5, 0.5), "bicubic", 0.875)
    assert preprocessing_of("model.py:build") == preprocessing_of("torchvision:resnet18_that_is_none")
