"""smcp-train: plans, runs of every network on generated data, resumption, ranks, and what it refuses."""

from __future__ import annotations

import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import generated_data
import pytest
import torch
from processes import Running, ranks
from torch import nn

import smcp_fx
from smcp_fx.backends import BlockLatency, Measurement
from smcp_fx.backends.pytorch import TorchBackend
from smcp_fx.backends.timing.measuring import TimingConfig
from smcp_fx.cli.train import main
from smcp_fx.recipes import plan, pricing, run
from smcp_fx.recipes.recipe import load_recipe, recipe_names
from smcp_fx.recipes.settings import RunSettings
from smcp_fx.training import loop

#: A network that trains in no time; recipes may name a file's factory.
TINY = """
from torch import nn

def build():
    def block(i, o, s):
        return [nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*block(3, 16, 2), *block(16, 32, 2), *block(32, 32, 2),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))
"""
#: A run of four epochs: one of warm-up, one of ramp, one at the target, and one of cooldown.
SMALL = (
    "--cost", "flops", "--weights", "none", "--workers", "0", "--set", "method.tolerance=0", "--set",
    "training.epochs=4", "--set", "training.rate_warmup=1", "--set", "pruning.warmup=1", "--set", "pruning.ramp=1",
    "--set", "pruning.cooldown=1", "--set", "training.evaluate_every=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the costs that targets come to, compute two."""
    monkeypatch.setattr(plan, "_EXPECTED", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_data.image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def devkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_data.voc(tmp_path_factory.mktemp("voc"))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "network.py").write_text(TINY)
    file = tmp_path / "tiny.toml"
    file.write_text(
        f'base = "imagenet"\nnetwork = "{tmp_path / "network.py"}:build"\nweights = "none"\nsize = 32\n'
        "[pruning]\ntarget = 0.5\n[training]\nbatch = 8\n[latency]\nbatch = 2\n"
    )
    return str(file)


def words(text: str) -> str:
    return " ".join(text.split())


# ---- plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet50-30", "ssd512-resnet50-25"])
def test_dry_run_prints_the_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = "64" if "ssd" in name else "32"
    assert main([name, "--dry-run", "--cost", "flops", "--ranks", "8", "--set", f"size={size}"]) == 0
    printed = capsys.readouterr().out
    said = words(printed)
    if "ssd" in name:
        assert "128 in all" in said and "103200: 800 epochs of 129 steps on 16551 images" in said
        assert (
            "warm-up to step 7740, ramp to 39990, refinement to 58050, cooldown to 103200; every 100 steps"
            in said
        )
        assert "biases at 2 times the rate" in said
        assert "Groups 57, 41 of them free" in said and "Target 25% of it" in said
        targets = {113: 0.25 ** (53 / 250), 209: 0.25 ** (149 / 250), 601: 0.25}
    else:
        assert "2048 in all" in said and "56250: 90 epochs of 625 steps on 1281167 images" in said
        assert (
            "warm-up to step 6250, ramp to 25000, refinement to 28125, cooldown to 56250; every 80 steps"
            in said
        )
        assert "peak learning rate 2.048" in said
        assert "Groups 39, 36 of them free" in said and "Target 30% of it" in said
        targets = {10: 1.0, 17: 0.3 ** (7 / 30), 39: 0.3 ** (29 / 30), 40: 0.3, 90: 0.3}
    assert "stays: excluded by the user" in said  # the first convolution's outputs
    lines = {line.split()[0]: line for line in printed.splitlines() if line[:1].isdigit()}
    for epoch, target in targets.items():  # at its end
        assert f" {100 * target:.1f}% " in lines[str(epoch)], lines[str(epoch)]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_plan(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small network in the real one's place, so that all can be planned in no time."""
    stand_in = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), *(
        nn.Sequential(nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)
    ), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))  # fmt: skip
    monkeypatch.setattr(run, "starting_network", lambda *_, **__: stand_in)
    recipe = load_recipe(name)
    target = max(recipe.pruning.target, 0.5)
    assert (
        main([name, "--dry-run", "--cost", "flops", "--set", "size=32", "--set", f"pruning.target={target}"])
        == 0
    )
    said = words(capsys.readouterr().out)
    assert f"Recipe {name}, for the paper's {recipe.row}" in said
    assert ("no masks" if target == 1 else f"{round(100 * target)}% of it") in said


# ---- runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mobilenet-v1-40", ("size=32", "training.batch=8", "pruning.every=1")),
        pytest.param(
            "ssd512-resnet50-25", ("size=64", "training.batch=4", "pruning.every=2"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_recipe_runs_to_its_end(
    name: str,
    options: tuple[str, ...],
    folder: Path,
    devkit: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    narrow_detector: None,
) -> None:
    data = devkit if "ssd" in name else folder
    changes = [word for option in options for word in ("--set", option)]
    out = tmp_path / "run"
    assert main([name, *SMALL, *changes, "--data", str(data), "--out", str(out)]) == 0, (
        capsys.readouterr().err
    )
    record = json.loads((out / "record.json").read_text())
    target = load_recipe(name).pruning.target
    share = record["values"]["flops"] / record["dense"]["flops"]
    assert target - 0.02 <= share <= target + 1e-9
    assert not record["complete"]
    assert set(record["values"]) >= ({"mAP"} if "ssd" in name else {"top1"})
    targets = [solve["target"] / record["dense"]["flops"] for solve in record["solves"]]
    assert len(targets) >= 2 and targets == sorted(targets, reverse=True)
    assert targets[-1] == pytest.approx(target)
    smaller = smcp_fx.load(out / "pruned.safetensors").eval()
    size = 64 if "ssd" in name else 32
    with torch.no_grad():
        outputs = smaller(torch.randn(1, 3, size, size))
    if "ssd" in name:
        assert [tuple(part.shape[1:]) for part in outputs] == [(396, 4), (396, 21)]
    else:
        assert outputs.shape == (1, 3)
    first = next(m for m in smaller.modules() if isinstance(m, nn.Conv2d))
    assert first.out_channels == (64 if "ssd" in name else 32)  # the first convolution is whole


def test_a_recipe_learns(tiny: str, folder: Path, tmp_path: Path) -> None:
    options = ("training.epochs=12", "training.rate=2.0", "pruning.every=2")
    changes = [word for option in options for word in ("--set", option)]
    assert main([tiny, *SMALL, *changes, "--data", str(folder), "--out", str(tmp_path / "run")]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["values"]["top1"] == 100.0  # classes of one colour each


def test_the_baseline_is_trained_and_taken(
    tiny: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [tiny, *SMALL, "--data", str(folder), "--set", "pruning.every=2"]
    common.remove("--weights")
    common.remove("none")
    assert main([*common, "--dense", "--out", str(tmp_path / "dense"), "--set", "training.rate=2.0"]) == 0
    dense = json.loads((tmp_path / "dense" / "record.json").read_text())
    assert dense["solves"] == []
    baseline = tmp_path / "dense" / "dense.safetensors"
    capsys.readouterr()
    assert main([*common, "--weights", str(baseline), "--out", str(tmp_path / "run")]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["dense"]["top1"] == dense["values"]["top1"]
    assert "The unpruned network: top1" in capsys.readouterr().out


class Priced(TorchBackend):
    """PyTorch, with a formula for what a block costs."""

    def block_latency(self, block: Any, widths: tuple[int, ...], config: Any = None) -> BlockLatency:
        ms = 0.01 + 1e-4 * math.prod(widths)
        return BlockLatency(Measurement(ms, ms, ms, 1, True))


def test_a_latency_table_is_measured_used_and_needed(
    tiny: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pricing, "get_backend", lambda _, **options: Priced(**options))
    once = TimingConfig(min_repeats=1, max_repeats=1, budget_ms=0.0, warmup_ms=0.0, attempts=1)
    monkeypatch.setattr(run, "measure_interleaved", functools.partial(run.measure_interleaved, config=once))
    table = str(tmp_path / "t.sqlite")
    common = [tiny, *SMALL[2:], "--set", "pruning.every=2", "--table", table]
    assert main([*common, "--dry-run"]) == 0
    assert "unpruned at batch 2, PyTorch" in capsys.readouterr().out
    rows = len(smcp_fx.LatencyTable(table).rows())
    assert rows > 10
    assert main([*common, "--data", str(folder), "--out", str(tmp_path / "run")]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    known = len(smcp_fx.LatencyTable(table).rows())
    assert rows <= known < 2 * rows  # solves ask for what they lack
    share = record["values"]["predicted_ms"] / record["dense"]["predicted_ms"]
    assert 0.4 < share <= 0.5 + 1e-9
    for part in ("values", "dense"):
        assert record[part]["fps"] == pytest.approx(2000 / record[part]["latency_ms"])
    # The unpruned network, trained by itself, is timed by the same runtime.
    assert main([*common, "--dense", "--data", str(folder), "--out", str(tmp_path / "dense")]) == 0
    record = json.loads((tmp_path / "dense" / "record.json").read_text())
    assert record["values"]["fps"] == pytest.approx(2000 / record["values"]["latency_ms"])
    assert "1 thread" in record["device"]
    # Rows of another device are taken as they are; what is missing of them cannot be measured here.
    capsys.readouterr()
    assert main([*common, "--threads", "3", "--dry-run"]) == 0
    assert ", 1 thread," in capsys.readouterr().out
    assert len(smcp_fx.LatencyTable(table).rows()) == known
    assert main([*common, "--threads", "3", "--dry-run", "--set", "size=48"]) == 2
    assert "is not measured" in words(capsys.readouterr().err)


# ---- interrupted, and on several ranks ------------------------------------------------------------------------


def waiting(arguments: list[str]) -> int:
    """``smcp-train`` that gets no further than its third checkpoint, however late somebody looks."""
    save, saved = loop.save_checkpoint, []

    def save_and_wait(*given: Any, **options: Any) -> None:
        save(*given, **options)
        saved.append(given)
        if len(saved) == 3:
            time.sleep(600)

    loop.save_checkpoint = save_and_wait
    return main(arguments)


def test_killed_and_resumed_is_uninterrupted(tiny: str, folder: Path, tmp_path: Path) -> None:
    def arguments(out: Path) -> list[str]:
        more = ["--set", "training.epochs=8", "--set", "pruning.every=2", "--seed", "3"]
        return [tiny, *SMALL, *more, "--data", str(folder), "--out", str(out)]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = Running(tmp_path / "told", waiting, arguments(killed))
    checkpoint = killed / "checkpoint.safetensors"
    while not checkpoint.exists() and process.ended() is None:
        time.sleep(0.002)
    process.kill()
    assert not (killed / "record.json").exists()
    assert main(arguments(killed)) == 2  # a run is not overwritten
    assert main([*arguments(killed), "--resume"]) == 0
    assert main(arguments(whole)) == 0
    one, other = (smcp_fx.load(out / "pruned.safetensors").state_dict() for out in (killed, whole))
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    first, second = (json.loads((out / "record.json").read_text()) for out in (killed, whole))
    for key in ("values", "solves", "dense"):
        assert first[key] == second[key]


def test_a_resumed_run_has_the_same_settings(
    tiny: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [tiny, *SMALL, "--set", "pruning.every=2", "--data", str(folder), "--out", str(tmp_path / "run")]
    assert main(common) == 0
    capsys.readouterr()
    assert main([*common, "--resume", "--seed", "7"]) == 2
    assert "seed: 0 -> 7" in words(capsys.readouterr().err)


@pytest.mark.slow
def test_two_ranks_train_one_network(tiny: str, folder: Path, tmp_path: Path) -> None:
    more = [
        "--set",
        "training.batch=4",
        "--set",
        "pruning.every=2",
        "--data",
        str(folder),
        "--out",
        str(tmp_path / "run"),
    ]
    found = ranks(tmp_path / "ranks", 2, main, [tiny, *SMALL, *more])
    assert [code for code, _ in found] == [0, 0], found
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["ranks"], record["total_batch"]) == (2, 8)
    assert ["Recipe " in told for _, told in found] == [True, False]  # rank 0 speaks
    assert 100 * round(record["values"]["top1"] * 12 / 100) == pytest.approx(record["values"]["top1"] * 12)
    assert record["values"]["flops"] <= 0.5 * record["dense"]["flops"]


# ---- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet50-31", "--dry-run"], "did you mean resnet50-30"),
        ([], "which recipe"),
        (["resnet50-30", "--dry-run"], "--cost flops prunes FLOPs instead"),
        (["resnet50-30", "--cost", "flops"], "needs --data"),
        (["resnet50-30", "--cost", "flops", "--data", "NOWHERE"], "needs the folders train/ and val/"),
        (
            ["ssd512-resnet50-25", "--cost", "flops", "--weights", "none", "--data", "NOWHERE"],
            "VOCdevkit/VOC2007",
        ),
        (["resnet50-eagleeye-30", "--cost", "flops", "--data", "FOLDER"], "baseline of EagleEye"),
        (["mobilenet-v1-60", "--cost", "flops", "--data", "FOLDER"], "--dense trains one"),
        (["resnet50-30", "--dry-run", "--set", "training.bacth=1"], "did you mean training.batch"),
        (["resnet50-30", "--dry-run", "--cost", "flops", "--fraction", "2"], "must be in (0, 1]"),
        (["resnet50-30", "--cost", "flops", "--ranks", "2"], "torchrun starts the ranks"),
        (["resnet50-30", "--dry-run", "--cost", "flops", "--table", "x"], "needs no --table"),
        (["resnet50-30", "--dry-run", "--cost", "flops", "--data", "FOLDER"], "fewer than one batch"),
        (["TINY", *SMALL, "--weights", "WRONG", "--data", "FOLDER"], "cannot be read as weights"),
        (["TINY", *SMALL, "--weights", "MISSING", "--data", "FOLDER"], "no weights at"),
        (["TINY", *SMALL, "--weights", "OTHER", "--data", "FOLDER"], "do not fit"),
        (
            ["TINY", *SMALL, "--set", "pruning.target=0.001", "--data", "FOLDER"],
            "the smallest reachable cost",
        ),
        (["TINY", *SMALL, "--device", "cuda", "--data", "FOLDER"], "sees no GPU"),
    ],
)
def test_refusals_are_one_paragraph(
    arguments: list[str],
    message: str,
    tiny: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "wrong.safetensors").write_bytes(b"no weights")
    torch.save({"conv.weight": torch.zeros(1)}, tmp_path / "other.pt")
    places = {
        "NOWHERE": str(tmp_path / "nowhere"), "FOLDER": str(folder), "TINY": tiny,
        "WRONG": str(tmp_path / "wrong.safetensors"), "OTHER": str(tmp_path / "other.pt"),
        "MISSING": str(tmp_path / "missing.pt"),
    }  # fmt: skip
    out = ["--out", str(tmp_path / "run")]
    assert main([*(places.get(word, word) for word in arguments), *out]) == 2
    said = capsys.readouterr().err
    assert message in words(said)
    assert said.startswith("smcp-train: ") and "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


def test_settings_are_checked() -> None:
    with pytest.raises(smcp_fx.SmcpError, match="threads"):
        RunSettings(threads=0)
