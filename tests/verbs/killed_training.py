"""A training run that a test kills: resumes from its checkpoint, saves every step, and writes its last state.

``pause`` ("step", "write", "rename", or none) stops halfway (before the step is saved, before its file is synced, or
before it is renamed), says so by a file named "paused", and waits to be killed. The file "progress" holds the step of
the last checkpoint.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig

STEPS = 24


def main(folder: Path, pause: str) -> None:
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip
    schedule = smcp_fx.Schedule(epochs=1, steps_per_epoch=STEPS, warmup=0.2, ramp=0.4, cooldown=0.2, every=3)
    config = MethodConfig(multiple=1, batch_norm_scaling=True)
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 6, 6), schedule=schedule, config=config)
    prepared.train()
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    average = torch.optim.swa_utils.AveragedModel(prepared)
    checkpoint = folder / "checkpoint.safetensors"
    everything = (prepared, optimizer, rates, average)
    step = 0
    if checkpoint.exists():
        step = smcp_fx.load_checkpoint(checkpoint, *everything)["step"]
        (folder / "progress").write_text(str(step))  # it may have been killed between the two files
    while step < STEPS:
        # Data, dropout and noise come from all three generators.
        x = torch.randn(8, 3, 6, 6) + random.random() + torch.from_numpy(np.random.rand(8, 3, 6, 6)).float()
        optimizer.zero_grad()
        nn.functional.cross_entropy(prepared(x), torch.randint(5, (8,))).backward()
        prepared.pruner.step()
        optimizer.step()
        rates.step()
        average.update_parameters(prepared)
        step += 1
        if pause and step == STEPS // 2:
            wait_in(pause, folder)
        smcp_fx.save_checkpoint(checkpoint, *everything, extras={"step": step})
        (folder / "progress").write_text(str(step))
    final = {**prepared.state_dict(), **{f"average.{k}": v for k, v in average.state_dict().items()}}
    history = [
        (solve.step, solve.cost, solve.importance_kept, solve.masks) for solve in prepared.pruner.history
    ]
    torch.save({"state": final, "history": history, "draw": torch.rand(3)}, folder / "final.pt")


def wait_in(pause: str, folder: Path) -> None:
    def stop(*_: Any) -> None:
        (folder / "paused").touch()
        time.sleep(600)

    if pause == "step":
        stop()
    setattr(os, {"write": "fsync", "rename": "replace"}[pause], stop)
