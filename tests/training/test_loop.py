"""The training loop against the loop that one writes by hand, and what it does when training diverges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smcp_fx.checkpoint import save_checkpoint
from smcp_fx.errors import CheckpointError, TrainingError
from smcp_fx.training import TrainingLoop

STEPS, EPOCHS = 5, 2


def batches(epoch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Five batches, told by their seed."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield torch.randn(4, 3, generator=draws), torch.randn(4, 2, generator=draws)


def loop_of(checkpoint: Path, **changed: Any) -> TrainingLoop:
    torch.manual_seed(3)
    network = nn.Linear(3, 2)
    groups = [{"params": [network.weight]}, {"params": [network.bias], "rate_factor": 2.0}]
    given = {
        "batches": batches, "loss": F.mse_loss, "rate": lambda step: 0.1 / (step + 1),
        "evaluate": lambda step: {"step": float(step)}, "steps_per_epoch": STEPS, "total_steps": STEPS * EPOCHS,
        "checkpoint": checkpoint, "seed": 7,
    }  # fmt: skip
    return TrainingLoop(network, torch.optim.SGD(groups, lr=1.0), **{**given, **changed})


def test_it_trains_as_a_loop_by_hand(tmp_path: Path) -> None:
    loop = loop_of(tmp_path / "c.safetensors")
    seen: list[float] = []
    loop.run(stepped=lambda done, _: seen.append(done))
    torch.manual_seed(3)
    by_hand = nn.Linear(3, 2)
    step, losses = 0, []
    for epoch in range(EPOCHS):
        for inputs, targets in batches(epoch, (7 * 100_003 + epoch) * 1009):
            loss = F.mse_loss(by_hand(inputs), targets)
            slopes = torch.autograd.grad(loss, [by_hand.weight, by_hand.bias])
            with torch.no_grad():
                for parameter, slope, factor in zip(by_hand.parameters(), slopes, (1, 2), strict=True):
                    parameter -= 0.1 / (step + 1) * factor * slope
            losses.append(float(loss.detach()))
            step += 1
    torch.testing.assert_close(loop.network.state_dict(), by_hand.state_dict())
    assert seen == [(n + 1) / (STEPS * EPOCHS) for n in range(STEPS * EPOCHS)]
    assert [r.loss for r in loop.results] == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5])
    assert [r.values for r in loop.results] == [{"step": 5.0}, {"step": 10.0}]


def test_a_resumed_run_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    whole = loop_of(tmp_path / "whole.safetensors")
    whole.run()

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    cut = loop_of(tmp_path / "cut.safetensors")
    with pytest.raises(KeyboardInterrupt):
        cut.run(finished=stop)
    again = loop_of(tmp_path / "cut.safetensors")
    assert again.load() and again.step == STEPS and again.results == cut.results
    again.run()
    assert all(map(torch.equal, whole.network.parameters(), again.network.parameters()))


def test_diverging_is_told_with_what_to_do(tmp_path: Path) -> None:
    loop = loop_of(
        tmp_path / "c.safetensors", loss=lambda a, b: F.mse_loss(a, b) * float("nan"), advice="Rest"
    )
    with pytest.raises(TrainingError, match=r"nan at step 1 of 10.*Rest"):
        loop.run()
    assert not loop.load()


def test_another_loops_checkpoint_is_refused(tmp_path: Path) -> None:
    loop = loop_of(tmp_path / "c.safetensors")
    extras = {"step": 1, "results": [[1]]}
    save_checkpoint(loop.checkpoint, loop.network, loop.optimizer, loop.scaler, extras=extras)
    with pytest.raises(CheckpointError, match="not a checkpoint of this version"):
        loop.load()
