"""The compile run on a tiny network: its files, its report, and resuming."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from tiny_compile import MODEL, arguments, compare_briefly

import smcp_fx
from smcp_fx.backends import Measurement
from smcp_fx.backends.base import BlockLatency
from smcp_fx.backends.pytorch import TorchBackend
from smcp_fx.cli.compile import build_parser, main
from smcp_fx.cli.table import main as table_main
from smcp_fx.compiler import CompileSettings, measuring, seeking
from smcp_fx.training import TrainingLoop
from smcp_fx.zoo.data import load_data


@pytest.fixture(autouse=True)
def _timed_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network this small is timed badly beside other tests, which is not judged but where it is meant."""
    _judge_no_latency(monkeypatch)


def _judge_no_latency(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(measuring, "FAR", math.inf)
    patch.setattr(seeking, "TRIES", 1)  # a target that is missed by noise is sought no further


#: What the shared runs below are asked for.
ASKED = {"latency": ("--target", "0.95"), "flops": ("--target", "0.6", "--cost", "flops", "--epochs", "3")}
#: A runtime that loads no file, for what is no matter of files: writing them takes longer than all else.
UNWRITTEN = ("--backend", "torch")


@pytest.fixture(scope="module")
def finished(model_file: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Runs to their end, one for each of `ASKED`, when first asked for: the folder, and what was printed."""

    @functools.cache
    def run(asked: str) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp(asked) / "out"
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
            _judge_no_latency(patch)
            compare_briefly(patch)
            assert main([*arguments(f"{model_file}:build", out, *ASKED[asked]), "--allow-missed"]) == 0
        return out, shown.getvalue()

    return run


#: Tests that share those runs stay in one process.
together = pytest.mark.xdist_group("compile runs")


@pytest.mark.slow
@together
@pytest.mark.parametrize("cost", list(ASKED))
def test_the_whole_way(cost: str, finished: Callable[[str], tuple[Path, str]]) -> None:
    """A network this small is not timed well: the measured latency is not judged here."""
    out, shown = finished(cost)
    target = ASKED[cost][1]
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    for key in ("target_fraction", "predicted_fraction", "measured_fraction", "seed", "backend"):
        assert key in report
    assert report["measured_fraction_q1"] <= report["measured_fraction"] <= report["measured_fraction_q3"]
    for side in ("dense", "pruned"):
        assert {"accuracy", "latency_ms", "params", "flops"} <= report[side].keys()
    assert report["target_fraction"] == pytest.approx(float(target))
    if cost == "flops":
        assert 0.4 < report["predicted_fraction"] <= 0.6 + 1e-9
        assert report["pruned"]["flops"] <= 0.6 * report["dense"]["flops"]
    assert "measured" in shown
    assert all((out / file).is_file() for file in report["files"].values())
    assert not list(out.rglob("*.part"))
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")

    loaded = smcp_fx.load(out / "pruned.safetensors").eval()
    images, labels = next(load_data("digits").tests(64, 1, 32))
    session = ort.InferenceSession(str(out / "pruned.onnx"), providers=["CPUExecutionProvider"])
    emitted = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    with torch.no_grad():
        expected = loaded(images).numpy()
    assert np.abs(emitted - expected).max() <= 1e-4 * np.abs(expected).max()
    assert sum(p.numel() for p in loaded.parameters()) == report["pruned"]["params"]

    data = load_data("digits")
    right = sum(
        int((session.run(None, {session.get_inputs()[0].name: x.numpy()})[0].argmax(1) == y.numpy()).sum())
        for x, y in data.tests(64, 1, 32)
    )
    assert report["pruned"]["accuracy"] == pytest.approx(right / 719)
    assert labels.numel() == 64


def test_a_table_of_a_busy_machine_is_told_before_anything_is_trained(
    model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows are many times what the network takes."""
    out, flags = tmp_path / "out", ("--target", "0.95", "--epochs", "1", "--allow-missed", *UNWRITTEN)
    monkeypatch.setattr(measuring, "FAR", 1.5)
    row = Measurement(10.0, 10.0, 10.0, 3, stable=True)

    def untrained(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(TorchBackend, "block_latency", lambda *_: BlockLatency(row, row))
    monkeypatch.setattr(TrainingLoop, "run", untrained)
    assert main(arguments(f"{model_file}:build", out, *flags)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "differ by more than 1.5 times" in said
    assert "table.sqlite" in said


def test_a_latency_out_of_reach_is_told_before_anything_is_trained(
    model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every width of every block takes as long: nothing that is pruned makes it faster."""
    row = Measurement(10.0, 10.0, 10.0, 3, stable=True)

    def untrained(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(measuring, "FAR", 1e9)
    monkeypatch.setattr(TorchBackend, "block_latency", lambda *_: BlockLatency(row, row))
    monkeypatch.setattr(TrainingLoop, "run", untrained)
    flags = ("--target", "0.5", "--epochs", "1", *UNWRITTEN)
    assert main(arguments(f"{model_file}:build", tmp_path / "out", *flags)) == 2
    assert "cannot be reached" in capsys.readouterr().err


@together
@pytest.mark.parametrize("prune", [(), ("--prune", "during", "--every", "4")], ids=["before", "during"])
def test_an_interrupted_run_is_resumed_to_the_same_end(
    model_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prune: tuple[str, ...],
    finished: Callable[[str], tuple[Path, str]],
) -> None:
    """Ctrl-C in the second epoch; the resumed run's weights, and its report, equal the uninterrupted one's."""
    flags = (*ASKED["flops"], *prune, *UNWRITTEN)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    if prune:
        assert main(arguments(f"{model_file}:build", whole, *flags)) == 0
    else:
        whole, _ = finished("flops")
    original = TrainingLoop._check
    seen = {"steps": 0}

    def interrupt(self: TrainingLoop, *told: Any) -> None:
        seen["steps"] += 1
        if seen["steps"] == 17 * 2 + 8:  # one dense epoch, one of pruning, and a half
            raise KeyboardInterrupt
        original(self, *told)

    monkeypatch.setattr(TrainingLoop, "_check", interrupt)
    assert main(arguments(f"{model_file}:build", cut, *flags)) == 130
    assert "and --resume (state in" in capsys.readouterr().err
    monkeypatch.setattr(TrainingLoop, "_check", original)
    assert not (cut / "pruned.safetensors").exists()
    assert main(arguments(f"{model_file}:build", cut, *flags, "--resume")) == 0
    left = smcp_fx.load(whole / "pruned.safetensors").state_dict()
    right = smcp_fx.load(cut / "pruned.safetensors").state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    reports = [json.loads((out / "report.json").read_text(encoding="utf-8")) for out in (whole, cut)]
    for part in ("calibration", "solves", "training"):
        (first, second) = (_untimed(report[part]) for report in reports)
        assert first == second and (first or part == "calibration")


def _untimed(part: Any) -> Any:
    if isinstance(part, list):
        return [_untimed(item) for item in part]
    return {k: v for k, v in part.items() if k != "seconds"} if isinstance(part, dict) else part


WANDERING = """
import os
import torch
from torch import nn

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(i)), i % 2

def data():
    os.chdir("/")
    return Noise(), Noise()

def unsavable():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2),
    )
    model[2].place = os.stat("/")  # what no file of ours holds
    model[0].register_forward_hook(lambda module, inputs, output: None)
    return model
"""


def test_a_model_that_cannot_be_saved_and_a_factory_that_changes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `save` refuses is told before training, and the ONNX file is written into the folder that was named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(WANDERING)
    flags = ["--model", "own.py:unsavable", "--data", "own.py:data", "--out", "a [/b] ü", "--cost", "flops",
             "--target", "0.6", "--epochs", "1", "--dense-epochs", "0", "--batch", "4",
             "--train-batch", "16"]  # fmt: skip
    assert main(flags) == 0, capsys.readouterr().err
    shown, out = " ".join(capsys.readouterr().out.split()), tmp_path / "a [/b] ü"
    told = shown.index("the weights get no file of their own (pruned.safetensors), only the ONNX file:")
    assert told < shown.index("gathering importances") < shown.index("fine-tuning") and "a [/b] ü" in shown
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert any("only the ONNX file" in note for note in report["notes"])
    assert "weights" not in report["files"] and "manifest" not in report["files"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*report["files"].values(), "state"])

    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(flags) == 2
    assert "--resume, replace it by --overwrite" in " ".join(capsys.readouterr().err.split())
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@together
def test_other_settings_are_not_resumed(
    model_file: str, finished: Callable[[str], tuple[Path, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = finished("flops")
    again = arguments(f"{model_file}:build", out, *ASKED["flops"], "--allow-missed")
    assert main([*again, "--seed", "3", "--resume"]) == 2
    assert "seed: 0 -> 3" in " ".join(capsys.readouterr().err.split())


@together
def test_a_table_of_another_device_is_refused_or_used_as_it_is(
    model_file: str,
    tmp_path: Path,
    finished: Callable[[str], tuple[Path, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its rows are this machine's under another name, so that they hold for every block."""
    flags = ("--target", "0.98", "--epochs", "1")
    first, _ = finished("latency")
    rows = tmp_path / "rows.json"
    assert table_main(["export", str(first.parent / "table.sqlite"), str(rows)]) == 0
    told = json.loads((first / "report.json").read_text())
    device, facts = told["backend"]["device"], told["table"]
    assert facts["measured"] + 1 == facts["rows"]  # and a run's own cost
    assert 0 <= facts["for_solves"] < facts["measured"] and facts["seconds"] > 0
    rows.write_text(rows.read_text().replace(json.dumps(device), '"a toaster"'))
    other = tmp_path / "toaster.sqlite"
    assert table_main(["import", str(rows), str(other)]) == 0
    capsys.readouterr()

    again = arguments(f"{model_file}:build", tmp_path / "second", *flags, "--table", str(other))
    assert main(again) == 2
    said = " ".join(capsys.readouterr().err.split())
    for text in ("holds no rows of", "a toaster", f"device: a toaster and {device}", "--allow-fingerprint"):
        assert text in said
    assert (
        main([*again, "--allow-fingerprint"]) == 0
    )  # however long it takes here: the target is the toaster's
    report = json.loads((tmp_path / "second" / "report.json").read_text())
    assert report["table"]["foreign"] is True
    assert report["table"]["fingerprint"]["device"] == "a toaster"
    assert report["table"]["measured"] == 0
    assert report["correction"] == 1
    assert {point["name"] for point in report["validation"]} == {"dense", "emitted"}  # no engine corrected it
    assert report["predicted_fraction"] <= 0.98
    assert any("a toaster" in note for note in report["notes"])
    assert "for a toaster, measured here" in " ".join(capsys.readouterr().out.split())
    assert "a toaster" in (tmp_path / "second" / "report.html").read_text()


def test_the_help_names_every_setting_with_its_default() -> None:
    text = " ".join(build_parser().format_help().split())
    for name in ("--target", "--cost", "--backend", "--train-batch", "--layer-pruning", "--widths"):
        assert name in text
    assert f"(default: {CompileSettings().target})" in text


def test_batch_norms_are_estimated_anew_before_the_file_is_written(tmp_path: Path) -> None:
    """Running averages that hardly move are as they began; the emitted network has those of the data."""
    model = tmp_path / "slow.py"
    model.write_text(MODEL.replace("BatchNorm2d(16)", "BatchNorm2d(16, momentum=1e-6)"), encoding="utf-8")
    out = tmp_path / "out"
    options = ("--target", "0.6", "--cost", "flops", "--epochs", "1", "--allow-missed", *UNWRITTEN)
    assert main(arguments(f"{model}:build", out, *options)) == 0
    smaller = smcp_fx.load(out / "pruned.safetensors")
    norm = smaller.get_submodule("1")
    assert float(norm.running_mean.abs().max()) > 0.01  # type: ignore[union-attr,operator]
    assert float((norm.running_var - 1).abs().max()) > 0.1  # type: ignore[union-attr,operator]
