"""Every script of examples/ runs, and prunes what it says."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Scripts and what they need; the Accelerate one is tested beside its precisions.
SCRIPTS = {"plain_training": None, "mixed_precision_training": None, "without_training": None,
           "latency_target": None, "lightning_training": "lightning"}  # fmt: skip


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("toy")


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("default")  # the frameworks have warnings of their own
def test_an_example(name: str, toy: Any, tmp_path: Path) -> None:
    if needed := SCRIPTS[name]:
        pytest.importorskip(needed)
    script = importlib.import_module(name)
    if name == "latency_target":  # what it prints is judged by no test
        script.compare = lambda *engines: "not compared"
    smaller = script.main(tmp_path) if name == "latency_target" else script.main()
    dense = sum(p.numel() for p in toy.network().parameters())
    assert sum(p.numel() for p in smaller.parameters()) < dense
    assert smaller.eval()(torch.randn(3, 1, 12, 12)).shape == (3, 2)
    assert toy.accuracy(smaller) > 0.9


def test_the_example_on_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               str(EXAMPLES / "ddp_training.py")]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "accuracy" in ended.stdout


def test_every_script_is_run() -> None:
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert there == {*SCRIPTS, "toy", "accelerate_training", "ddp_training"}
