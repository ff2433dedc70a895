"""Checkpoints: what comes back is bit by bit what was, also after kill -9; what does not fit says so."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import killed_training
import numpy as np
import pytest
import torch
from models import Residual, randomise
from processes import Running
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import CheckpointError

IMAGE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def prepared_model(**options: Any) -> smcp_fx.PreparedModel:
    torch.manual_seed(0)
    config = MethodConfig(**{"multiple": 2, "batch_norm_scaling": True, **options})
    schedule = smcp_fx.Schedule(epochs=1, steps_per_epoch=12, warmup=0.25, ramp=0.34, cooldown=0.25, every=2)
    model = randomise(Residual(16, 24)).train()
    return smcp_fx.prepare(model, IMAGE, schedule=schedule, config=config)


def train(prepared: smcp_fx.PreparedModel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(prepared(torch.randn(4, 3, 8, 8)), torch.randint(5, (4,)))
        loss.backward()
        prepared.pruner.step()
        optimizer.step()


def assert_same(left: Any, right: Any) -> None:
    """Two state dicts of any depth, bit by bit and type by type."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key, value in left.items():
            assert_same(value, right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize(("mask", "kind"), [("soft", "sgd"), ("permanent", "adamw")])
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, mask: str, tmp_path: Path) -> None:
    """Stopped before, between and after the solves; masks, importances, history, optimiser and generators."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    whole = prepared_model(mask=mask)
    optimizer = optimizer_of(whole)
    paths = []
    for stop in range(0, 12, 3):
        paths.append(
            smcp_fx.save_checkpoint(tmp_path / f"{stop}.safetensors", whole, optimizer, extras={"n": stop})
        )
        train(whole, optimizer, 3)
    drawn = torch.rand(3)
    assert len(whole.pruner.history) == 3
    for path in paths:
        resumed = prepared_model(mask=mask)
        second = optimizer_of(resumed)
        stop = smcp_fx.load_checkpoint(path, resumed, second)["n"]
        assert [s.step for s in resumed.pruner.history] == [s for s in (5, 7, 9) if s <= stop]
        train(resumed, second, 12 - stop)
        assert_same(whole.state_dict(), resumed.state_dict())
        assert_same(optimizer.state_dict(), second.state_dict())
        assert torch.equal(torch.rand(3), drawn)
        untimed = [[{**vars(s), "seconds": 0.0} for s in model.pruner.history] for model in (whole, resumed)]
        assert_same(*untimed)


def test_schedulers_scalers_averages_and_extras(tmp_path: Path) -> None:
    prepared = prepared_model()
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.1, betas=(0.8, 0.9))
    rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    average = torch.optim.swa_utils.AveragedModel(prepared)
    train(prepared, optimizer, 2)
    rates.step()
    average.update_parameters(prepared)
    scaler.scale(torch.ones(()))
    extras = {
        "epoch": 3,
        "best": float("inf"),
        "names": ("a", "b"),
        "nested": {"sizes": [1, None, True], 7: Counter("abca")},
        "tensor": torch.arange(5, dtype=torch.int16),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.float64(0.25),
    }
    everything = (optimizer, rates, plateau, scaler, average)
    path = smcp_fx.save_checkpoint(tmp_path / "new" / "all.ckpt", prepared, *everything, extras=extras)
    states = [one.state_dict() for one in (prepared, *everything)]

    fresh = prepared_model()
    other = torch.optim.Adam(fresh.parameters(), lr=0.5)
    others = (
        other,
        torch.optim.lr_scheduler.MultiStepLR(other, [9]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(other, factor=0.5),
        torch.amp.GradScaler("cpu"),
        torch.optim.swa_utils.AveragedModel(fresh),
    )
    found = smcp_fx.load_checkpoint(path, fresh, *others)
    for state, one in zip(states, (fresh, *others), strict=True):
        assert_same(dict(one.state_dict()), dict(state))
    assert list(found) == list(extras)
    for name in ("epoch", "best", "names", "nested"):
        assert found[name] == extras[name] and type(found[name]) is type(extras[name])
    assert_same([found["tensor"], found["half"]], [extras["tensor"], extras["half"]])
    assert found["array"].dtype == np.float32 and np.array_equal(found["array"], extras["array"])
    assert found["scalar"] == 0.25


def test_wrapped_models_and_generators_left_alone(tmp_path: Path) -> None:
    prepared = prepared_model()
    train(prepared, torch.optim.SGD(prepared.parameters(), lr=0.1), 6)
    compiled = torch.compile(prepared, backend="eager")
    path = smcp_fx.save_checkpoint(tmp_path / "c", compiled)
    other = prepared_model()
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    assert smcp_fx.load_checkpoint(path, nn.DataParallel(other), generators_too=False) == {}
    assert (torch.rand(1), random.random()) == expected
    assert_same(other.state_dict(), prepared.state_dict())
    plain = nn.Linear(3, 4)
    smcp_fx.save_checkpoint(tmp_path / "plain", plain)
    again = nn.Linear(3, 4)
    smcp_fx.load_checkpoint(tmp_path / "plain", again)
    assert torch.equal(again.weight, plain.weight)


def test_the_state_dict_alone_resumes_the_masks_and_the_schedule(tmp_path: Path) -> None:
    """For users who keep files of their own."""
    prepared = prepared_model()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    train(prepared, optimizer, 6)
    prepared.pruner.correction = 1.25
    torch.save({"model": prepared.state_dict()}, tmp_path / "mine.pt")
    other = prepared_model()
    other.load_state_dict(torch.load(tmp_path / "mine.pt", weights_only=True)["model"])
    assert other.pruner.counts == prepared.pruner.counts
    assert other.pruner.correction == 1.25
    train(other, torch.optim.SGD(other.parameters(), lr=0.01), 1)
    assert [solve.step for solve in other.pruner.history] == [7]


# ---- kill -9 -----------------------------------------------------------------------------------------------


def run(folder: Path, pause: str = "") -> Running:
    return Running(folder.with_name("errors"), killed_training.main, folder, pause)


def finish(folder: Path) -> dict[str, Any]:
    code, errors = run(folder).wait()
    assert code == 0, errors
    found: dict[str, Any] = torch.load(folder / "final.pt", weights_only=True)
    return found


def wait_for(file: Path, process: Running, until: Any = None) -> None:
    """Until the file is there (and ``until(text)`` holds)."""
    while process.ended() is None:
        if file.exists() and (until is None or until(file.read_text() or "0")):
            return
        time.sleep(0.005)
    pytest.fail(f"the run ended by itself: {process.wait()}")


def kill(process: Running) -> None:
    assert process.kill() == -signal.SIGKILL


@pytest.mark.slow
def test_killed_at_random_moments_and_while_saving_it_ends_the_same(tmp_path: Path) -> None:
    """Each run is killed three times: at a random step, in the write, and before the rename."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = finish(whole)
    assert len(expected["history"]) > 2
    moments = random.Random(int.from_bytes(os.urandom(4), "big"))
    at = moments.randint(1, 11)
    process = run(cut, "step")  # which waits at step 12, however fast the core is
    wait_for(cut / "progress", process, lambda text: int(text) >= at)
    time.sleep(moments.random() * 0.05)
    kill(process)
    (cut / "paused").unlink(missing_ok=True)
    for pause in ("write", "rename"):
        process = run(cut, pause)
        wait_for(cut / "paused", process)
        assert [file.suffix for file in cut.iterdir() if file.name.startswith(".")] == [".tmp"]
        kill(process)
        (cut / "paused").unlink()
    assert (cut / "progress").read_text() == "11"  # of 24: what step 12 wrote is not there
    found = finish(cut)
    assert_same(found, expected)
    assert not [file for file in cut.iterdir() if file.name.startswith(".")], "leftovers of the killed runs"


# ---- what does not fit -------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    prepared = prepared_model()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1, momentum=0.9)
    train(prepared, optimizer, 1)
    return smcp_fx.save_checkpoint(tmp_path / "saved.safetensors", prepared, optimizer)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_files_of_another_run_are_refused(saved: Path) -> None:
    prepared = prepared_model()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        smcp_fx.load_checkpoint(saved.with_name("none"), prepared)
    with pytest.raises(CheckpointError, match=r"states of SGD and was to be loaded into nothing"):
        smcp_fx.load_checkpoint(saved, prepared)
    with pytest.raises(CheckpointError, match=r"SGD and was to be loaded into Adam"):
        smcp_fx.load_checkpoint(saved, prepared, torch.optim.Adam(prepared.parameters()))
    other = smcp_fx.prepare(Residual(8, 8), IMAGE)
    with pytest.raises(CheckpointError, match=r"does not belong to this run: .*size mismatch"):
        smcp_fx.load_checkpoint(saved, other, sgd(other))


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "empty", "foreign", "version"])
def test_damaged_files_are_refused(saved: Path, damage: str) -> None:
    import safetensors.torch

    content = bytearray(saved.read_bytes())
    if damage == "cut":
        saved.write_bytes(content[:-7])
    elif damage == "flip":
        content[-1] ^= 1
        saved.write_bytes(content)
    elif damage == "text":
        saved.write_text("hello")
    elif damage == "empty":
        saved.write_bytes(b"")
    elif damage == "foreign":
        safetensors.torch.save_file({"a": torch.ones(2)}, saved)
    else:
        saved.write_bytes(content.replace(b'\\"version\\": 3', b'\\"version\\": 4'))
    prepared = prepared_model()
    said = "is of version 4" if damage == "version" else "is damaged"
    with pytest.raises(CheckpointError, match=said):
        smcp_fx.load_checkpoint(saved, prepared, sgd(prepared))


@pytest.mark.parametrize(
    "value",
    [{1, 2}, lambda: 0, object(), torch.eye(2).to_sparse()],
    ids=["set", "function", "object", "sparse"],
)
def test_what_a_file_cannot_hold_is_named_and_the_old_file_stays(saved: Path, value: Any) -> None:
    before = saved.read_bytes()
    with pytest.raises(CheckpointError, match=r"extras\.mine"):
        smcp_fx.save_checkpoint(saved, prepared_model(), extras={"mine": value})
    assert saved.read_bytes() == before


def test_a_full_disk_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = saved.read_bytes()
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"smcp_fx.storage.tensor_file.os.{function}", full)
            with pytest.raises(CheckpointError, match="No space left"):
                smcp_fx.save_checkpoint(saved, prepared_model())
        assert saved.read_bytes() == before
        assert [file.name for file in saved.parent.iterdir()] == [saved.name]


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename
    gone = tmp_path / f".a[1].ckpt.{host}.{dead.pid}.tmp"
    living = tmp_path / f".a[1].ckpt.{host}.{os.getppid()}.tmp"
    elsewhere = tmp_path / f".a[1].ckpt.other-machine.{dead.pid}.tmp"
    for file in (gone, living, elsewhere):
        file.touch()
    smcp_fx.save_checkpoint(tmp_path / "a[1].ckpt", nn.Linear(2, 2))
    assert not gone.exists()
    assert living.exists() and elsewhere.exists()
