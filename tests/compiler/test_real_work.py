"""The compile command on one's own images and weights: where and how it trains, and what it says of accuracies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colours import run
from PIL import Image
from torch import Tensor

from smcp_fx.compiler import CompileSettings, pipeline
from smcp_fx.compiler.training import is_guessing
from smcp_fx.errors import InputError
from smcp_fx.zoo.image_folder import image_folder
from smcp_fx.zoo.pretrained import Preprocessing

#: A runtime that loads no file, as writing files takes longer than all else.
UNWRITTEN = ("--backend", "torch")


@pytest.mark.slow
def test_images_weights_precision_processes_and_a_collapse(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, found = pipeline.accuracy_of, list[float]()

    def collapsing(*of: Any) -> float:  # where it is the pruned file's
        found.append(0.34 if found else measured(*of))
        return found[-1]

    monkeypatch.setattr(pipeline, "accuracy_of", collapsing)
    flags = ("--weights", "good.pth", "--augment", "strong", "--workers", "1", "--amp", "--device", "cpu")
    assert run(*flags, *UNWRITTEN) == 0
    shown = capsys.readouterr().out
    assert "dense test accuracy 100.00%; its weights are said to reach 100.00%" in shown
    assert shown.index("dense test accuracy") < shown.index("analysing the network")
    report = json.loads((work / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["training"][0]["phase"] == "prune" and report["dense"]["accuracy"] == 1
    assert report["settings"]["settings"]["input_size"] == "32" and report["layers"][0]["in_channels"] == 3
    told = "the pruned network does no better than guessing (34.00%, dense 100.00%)"
    assert told in " ".join(shown.split())


def test_weights_that_are_not_what_they_should_be_are_told(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.load("good.pth")["model"]
    turned = state | {"8.weight": state["8.weight"].roll(1, 0)}  # the classes in another order
    torch.save({"model": turned, "best_acc1": 100.0}, "turned.pth")
    assert run("--weights", "turned.pth", "--dense-epochs", "0", *UNWRITTEN, workers=None) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the weights as they are do no better than guessing (0.00%)" in told
    report = json.loads((work / "out" / "report.json").read_text(encoding="utf-8"))
    assert any("guessing" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "cuda:99"), "--device cuda:99: "),
        (("--device", "nowhere"), "--device nowhere: "),
        (("--pretrained",), "--pretrained knows the weights of torchvision:NAME and timm:NAME"),
        (("--pretrained", "--weights", "good.pth"), "give one of them"),
        (("--workers", "-1"), "--workers must be from 0 to"),
        (("--input-size", "0"), "--input-size must be a side of at least 1 pixel"),
    ],
)
def test_bad_input(work: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str) -> None:
    assert run(*flags) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_weights_are_trained_at_a_lower_rate() -> None:
    assert (
        CompileSettings(weights="w.pt").rate
        == CompileSettings(pretrained=True).rate
        < CompileSettings().rate / 5
    )
    assert CompileSettings(weights="w.pt", lr=0.2).rate == 0.2


def test_guessing() -> None:
    assert [is_guessing(*at) for at in ((0.52, 2), (0.6, 2), (0.12, 10), (0.2, 10), (0.001, 1000), (0.01, 1000))] == [
        True, False, True, False, True, False,
    ]  # fmt: skip


def test_images_are_normalised_cropped_and_varied_as_said(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        picture = np.zeros((40, 60, 3), np.uint8)
        picture[:, 30:] = 255
        Image.fromarray(picture).save(tmp_path / part / "a" / "1.png")
    made = Preprocessing(16, 0.8, (0.5, 0.5, 0.5), (0.25, 0.5, 0.5))
    train, test, classes = image_folder(tmp_path, made, "none")
    image, _ = test[0]
    assert classes == 1 and image.shape == (3, 16, 16) and torch.equal(train[0][0], image)
    assert float(image[0].min()) == -2 and float(image[1].max()) == 1  # (0 - mean) / std, (1 - mean) / std

    def pictures(augment: str) -> set[bytes]:
        torch.manual_seed(0)
        varied: Tensor = image_folder(tmp_path, made, augment)[0]
        return {varied[0][0].numpy().tobytes() for _ in range(5)}

    assert len(pictures("usual")) > 1 and len(pictures("strong") - pictures("usual")) > 1
    with pytest.raises(InputError, match="needs the folders train/"):
        image_folder(tmp_path / "nowhere")
