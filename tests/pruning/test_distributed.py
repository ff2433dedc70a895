"""Two and three processes (gloo): every rank holds the same masks, errors reach all, a dead rank ends the job."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp_training
import pytest
import torch
from processes import ranks

SCRIPT = Path(__file__).with_name("ddp_training.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]


def torchrun(folder: Path, world: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the script with torchrun, which ends the other ranks when one dies."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), *more],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )


def run(folder: Path, world: int, *more: str) -> list[tuple[int | None, str]]:
    return ranks(folder, world, ddp_training.main, [str(folder), *more])


def results(folder: Path, world: int, *more: str) -> list[dict[str, Any]]:
    for code, errors in run(folder, world, *more):
        assert code == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def test_every_rank_has_the_prices_of_the_rows_that_rank_0_asked_for(tmp_path: Path) -> None:
    first, second = results(tmp_path, 2, "own", "--latency")
    assert first["masks"] == second["masks"] and len(first["masks"]) == 4
    assert torch.equal(first["state"]["as_of"], second["state"]["as_of"])
    assert torch.equal(first["state"]["cost"], second["state"]["cost"])


@pytest.mark.parametrize(("world", "kind"), [(2, "own"), (3, "ddp")])
def test_every_rank_holds_the_same_masks(world: int, kind: str, tmp_path: Path) -> None:
    """After every solve; also where the ranks' gradients differ, which tells a broadcast from equal inputs."""
    every = results(tmp_path, world, kind)
    first = every[0]
    assert [step for step, _, _ in first["masks"]] == [4, 6, 8, 10]
    assert len({masks for _, masks, _ in first["masks"]}) > 1
    assert not bool(first["state"]["keep"].all())
    for rank in every[1:]:
        assert rank["masks"] == first["masks"]
        assert torch.equal(rank["state"]["keep"], first["state"]["keep"])
        assert torch.equal(rank["state"]["remembered"], first["state"]["remembered"])
        same = kind == "ddp"
        assert torch.equal(rank["state"]["weight"], first["state"]["weight"]) is same
        assert torch.equal(rank["state"]["gathered"], first["state"]["gathered"]) is same
        assert not torch.equal(rank["draw"], first["draw"])


@pytest.mark.parametrize("skipped", ["0", "2"])
def test_a_rank_that_skips_a_step_solves_with_the_others(skipped: str, tmp_path: Path) -> None:
    """Its own gradients were not finite once; rank 0's count decides when a solve is due."""
    first, second = results(tmp_path, 2, "own", "--skip", skipped)
    assert first["masks"] == second["masks"]
    assert [step for step, _, _ in first["masks"]] == [4, 6, 8, 10]
    assert int(first["state"]["steps"]) == int(second["state"]["steps"]) == 12


def test_a_target_out_of_reach_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 finds out; the others raise the same error instead of waiting for its masks."""
    for code, errors in run(tmp_path, 2, "ddp", "--target", "0.0001"):
        assert code != 0
        assert "InfeasibleBudgetError: the target of" in errors


def test_a_dead_rank_ends_the_job_which_resumes_with_as_many_ranks_or_more(tmp_path: Path) -> None:
    """Killed at step 7, resumed from step 5: with two ranks bit by bit the uninterrupted run."""
    whole = results(tmp_path / "whole", 2)
    done = torchrun(tmp_path / "cut", 2, "ddp", "--die", "7")
    assert done.returncode != 0
    assert re.search(r"rank *: 1 \(local_rank: 1\)\s+exitcode *: -9 ", done.stderr)  # torchrun names it
    assert not (tmp_path / "cut" / "0.pt").exists()
    for world in (2, 3):
        folder = tmp_path / f"cut {world}"
        shutil.copytree(tmp_path / "cut", folder)
        resumed = results(folder, world)
        assert [step for step, _, _ in resumed[0]["masks"]] == [6, 8, 10]
        for rank in resumed:
            assert torch.equal(rank["state"]["keep"], resumed[0]["state"]["keep"])
            assert int(rank["state"]["steps"]) == 12
        if world == 2:
            for rank, expected in zip(resumed, whole, strict=True):
                assert rank["masks"] == expected["masks"][1:]
                assert torch.equal(rank["draw"], expected["draw"])
                for name, tensor in expected["state"].items():
                    assert torch.equal(rank["state"][name], tensor), name


def test_a_rank_that_dies_before_a_solve_is_named(tmp_path: Path) -> None:
    """Without gradients to exchange, the solve is where the others notice; nobody but they end the job."""
    (first, errors), (second, _) = run(tmp_path, 2, "own", "--die", "3")
    assert second == -signal.SIGKILL
    assert first != 0
    assert "rank 0 of 2 cannot reach the others: rank 1 has died or hangs" in errors
    assert "goes on from the last checkpoint" in errors


def test_frozen_layers_on_several_ranks(tmp_path: Path) -> None:
    """Their importances come from the masks' gradients, of which all ranks take the mean."""
    first, second = results(tmp_path, 2, "ddp", "--freeze")
    assert first["masks"] == second["masks"]
    assert torch.equal(first["state"]["gathered"], second["state"]["gathered"])
    assert float(first["state"]["remembered"].min()) > 0
