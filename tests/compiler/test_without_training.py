"""The compile command without training: with labels and without, one target and a trade-off curve."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from colours import run

import smcp_fx
from smcp_fx.cli.compile import main
from smcp_fx.cli.flags import fractions
from smcp_fx.compiler import compile_model
from smcp_fx.compiler.settings import CompileSettings, as_record
from smcp_fx.config import MethodConfig, PruningConfig
from smcp_fx.errors import InputError
from smcp_fx.training import TrainingLoop
from smcp_fx.zoo.data import load_data
from smcp_fx.zoo.pretrained import Preprocessing

TRAINED = ("--weights", "good.pth", "--epochs", "0", "--calibration", "16")
#: A runtime that loads no file: writing four of them takes longer than all else.
UNWRITTEN = ("--backend", "torch")


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_one_target(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TRAINED, "--target", "0.6") == 0
    shown = capsys.readouterr().out
    assert "accuracy 100.00% -> " in shown and "layers repaired" in shown
    report = report_of(work)
    assert report["pruned"]["flops"] <= 0.6 * report["dense"]["flops"] and not report["training"]
    calibration = report["calibration"]
    assert calibration["images"] == 16 and calibration["labels"]
    assert calibration["dense"] == 1 and 0 <= calibration["sliced"] <= 1
    assert calibration["repaired"] == pytest.approx(report["pruned"]["accuracy"])
    assert [layer["path"] for layer in calibration["layers"]] == ["0", "3", "8"]
    assert calibration["worth"]
    kept = {row["name"]: row["kept"] for row in report["groups"]}
    for group in calibration["worth"]:
        assert kept[group["name"]] == group["kept"] in group["counts"]
        assert group["counts"][-1] == group["size"] and group["rises"][-1] == 0
        assert sorted(group["rises"], reverse=True) == group["rises"]
    loaded = smcp_fx.load(work / "out" / "pruned.safetensors").eval()
    session = ort.InferenceSession(str(work / "out" / "pruned.onnx"), providers=["CPUExecutionProvider"])
    images, _ = next(load_data("imagefolder:images", images=Preprocessing(32), workers=0).tests(4, 3, 32))
    (emitted,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    assert np.abs(emitted - loaded(images).detach().numpy()).max() <= 1e-4 * np.abs(emitted).max()


def test_a_curve_without_labels(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All images lie in one folder; what counts is whether the dense network would have said the same."""
    assert run(*TRAINED, "--data", "images:images", "--targets", "50%,0.9") == 0
    assert "agreement 100.00% -> " in capsys.readouterr().out
    report = report_of(work)
    curve = report["targets"]
    assert report["target"] == "0.5"
    assert [point["target"] for point in curve] == pytest.approx([0.9, 0.5])
    for point in curve:
        assert point["flops"] <= point["target"] * report["dense"]["flops"]
        assert (work / "out" / point["file"]).is_file()
    assert [point["file"] for point in curve] == ["pruned-0.9.onnx", "pruned.onnx"]
    assert all((work / "out" / file).is_file() for file in report["files"].values())
    assert (work / "out" / "pruned-0.9.safetensors").is_file()
    assert report["agreement"] and not report["calibration"]["labels"] and report["dense"]["accuracy"] == 1
    page = (work / "out" / "report.html").read_text(encoding="utf-8")
    assert "What each target costs" in page and "Repaired layers" in page
    assert "agreement with the dense network" in page
    assert run(*TRAINED, "--target", "0.8", *UNWRITTEN) == 0
    assert not list((work / "out").glob("pruned-*"))  # of the run that this one replaces


def test_a_runtime_that_loads_no_file_names_none(work: Path) -> None:
    assert run(*TRAINED, "--backend", "torch", "--targets", "0.9,0.5") == 0
    report = report_of(work)
    assert [point["file"] for point in report["targets"]] == ["pruned-0.9.safetensors", "pruned.safetensors"]
    assert all((work / "out" / file).is_file() for file in report["files"].values())


def test_epochs_follow_what_is_repaired(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With labels and without: the network that learns is the repaired one, and the dense one teaches it."""
    for data in ("imagefolder:images", "images:images"):
        flags = ("--data", data, "--epochs", "1", *UNWRITTEN)
        assert run("--weights", "good.pth", *flags) == 0
        shown = capsys.readouterr().out
        assert shown.index("slicing and repairing") < shown.index("fine-tuning") < shown.index("emitting")
        report = report_of(work)
        assert report["calibration"]["layers"] and len(report["training"]) == 1 and len(report["solves"]) == 1
        assert report["pruned"]["accuracy"] >= report["calibration"]["repaired"] - 0.1


def test_who_teaches(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense network, by nine tenths of the loss, or all of it without labels; none that only guesses."""
    seen: list[Any] = []

    def interrupted(loop: TrainingLoop, **hooks: Any) -> None:
        seen.append(loop)
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingLoop, "run", interrupted)
    state = torch.load("good.pth")["model"]
    torch.save(state | {"8.weight": state["8.weight"].roll(1, 0)}, "turned.pth")  # classes in another order
    for flags in (("good.pth",), ("good.pth", "--data", "images:images"), ("good.pth", "--taught", "0"),
                  ("good.pth", "--prune", "during"), ("turned.pth",)):  # fmt: skip
        assert run("--weights", *flags, *UNWRITTEN) == 130
    assert [loop.taught for loop in seen] == [0.9, 1, 0, 0.9, 0]
    weight = seen[0].teacher.model.state_dict()["8.weight"]
    assert torch.equal(weight, state["8.weight"]) and seen[2].teacher is None and seen[4].teacher is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--targets", "0.5"), "give --epochs 0, too"),
        (("--epochs", "0", "--calibration", "1"), "--calibration must be at least 2"),
        (("--epochs", "0", "--resume"), "not resumed"),
        (("--data", "images:images", "--prune", "during"), "images without labels train only"),
        (("--data", "images:images", "--taught", "0"), "images without labels train only"),
        (("--taught", "1.5"), "--taught must be a share"),
        (("--warmup", "1"), "--warmup is of soft masks: give --prune during"),
        (("--epochs", "0", "--prune", "during", "--every", "1"), "--every is of soft masks"),
        (("--data", "images:images", "--epochs", "0"), "give --weights or --pretrained"),
        (
            ("--data", "images:nowhere", "--epochs", "0", "--weights", "good.pth"),
            "there are 0 images below it",
        ),
    ],
)
def test_bad_input(
    work: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    said: str,
) -> None:
    without = [flag for flag in flags if flag != "--overwrite"]
    assert (
        main(["--model", "torchvision:resnet18", "--data", "imagefolder:images", "--cost", "flops", *without])
        == 2
    )
    assert said in " ".join(capsys.readouterr().err.split())


def test_images_are_drawn_once_and_the_same(work: Path) -> None:
    data = load_data("imagefolder:images", images=Preprocessing(16), augment="none", workers=0)
    drawn = [data.drawn(6, 3), data.drawn(6, 3), data.drawn(6, 4)]
    first, again, others = (torch.stack([x for x, _ in one.train]) for one in drawn)
    assert torch.equal(first, again) and not torch.equal(first, others) and len(first) == 6


def test_targets_are_fractions_or_percentages() -> None:
    assert fractions("90%, 0.7,50%") == (0.9, 0.7, 0.5)
    for wrong in ("0.5,2", "0%", "120%", "half", "50%%,", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=r"give fractions in \(0, 1\]"):
            fractions(wrong)
    with pytest.raises(InputError, match="--targets must be fractions"):
        CompileSettings(targets=(0.5, 2.0), epochs=0)


def test_options_of_learnt_masks_need_them_and_are_in_every_record() -> None:
    """A run of before the options moved can be resumed: its record has all fifteen."""
    for config in (MethodConfig(mask="permanent"), MethodConfig(memory=0.5)):
        with pytest.raises(InputError, match="is of masks that are learnt: set prune='during'"):
            compile_model(CompileSettings(), config)
    record = as_record(CompileSettings(), PruningConfig())["config"]
    assert record == as_record(CompileSettings(), MethodConfig())["config"] and len(record) == 15
