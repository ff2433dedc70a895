"""What a recipe starts from: torchvision's weights (stood in for here), files, chance."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import models

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.recipes.recipe import load_recipe
from smcp_fx.recipes.weights import starting_network


class Stored:
    """What torchvision's weight enumerations offer."""

    url = "https://example.org/resnet50.pth"
    meta: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, state: dict[str, Tensor] | None) -> None:
        self.state = state

    def get_state_dict(self, **_: Any) -> dict[str, Tensor]:
        if self.state is None:
            raise urllib.error.URLError("no network")
        return self.state


def offer(monkeypatch: pytest.MonkeyPatch, state: dict[str, Tensor] | None) -> list[str]:
    asked: list[str] = []

    def found(name: str) -> dict[str, Stored]:
        asked.append(name)
        return {"IMAGENET1K_V1": Stored(state)}

    monkeypatch.setattr(models, "get_model_weights", found)
    return asked


def test_a_detector_takes_the_first_three_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    resnet = models.resnet50()
    asked = offer(monkeypatch, resnet.state_dict())
    network = starting_network(load_recipe("ssd512-resnet50-25"), 21, None, dense=True)
    assert asked == ["resnet50"]
    with torch.no_grad():
        images, expected = torch.randn(1, 3, 64, 64), resnet.eval()
        for block in expected.layer3:  # ends at an eighth of the image, as the detector's does
            block.conv2.stride = (1, 1)
        expected.layer3[0].downsample[0].stride = (1, 1)
        features = images
        for name in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3"):
            features = getattr(expected, name)(features)
        assert torch.equal(network.eval().backbone(images), features)


def test_a_classifier_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("resnet50-30")
    resnet = models.resnet50(num_classes=5)
    offer(monkeypatch, resnet.state_dict())
    network = starting_network(recipe, 5, None, dense=False)
    assert torch.equal(network.fc.weight, resnet.fc.weight)
    with pytest.raises(CheckpointError, match=r"fc.weight is 5x2048, the model's 4x2048.*--weights none"):
        starting_network(recipe, 4, None, dense=False)


def test_no_network_says_what_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, None)
    with pytest.raises(InputError, match=r"fetch https://example.org/resnet50.pth"):
        starting_network(load_recipe("resnet50-30"), 3, None, dense=False)


def test_files_of_data_parallel_models_load(tmp_path: Path) -> None:
    recipe = load_recipe("mobilenet-v1-60")
    network = starting_network(recipe, 3, "none", dense=False)
    state = {f"module.{name}": value for name, value in network.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "checkpoint.pth")
    loaded = starting_network(recipe, 3, str(tmp_path / "checkpoint.pth"), dense=False)
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
