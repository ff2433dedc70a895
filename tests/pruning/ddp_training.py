"""Training on several ranks, started by torchrun or by `rank`; each rank writes what it ended with.

    torchrun --nproc-per-node 2 ddp_training.py FOLDER [ddp|own] [--die STEP] [--skip STEP] [--freeze] [...]

"own": no `DistributedDataParallel`, every rank has gradients of its own. ``--die``: rank 1 kills itself there.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable
from smcp_fx.pruning.ranks import digest

sys.path.append(str(Path(__file__).parents[1]))
from fake_latencies import FakeBackend

STEPS = 12


def measured(table: Path) -> LatencyCost:
    backend = FakeBackend(latency=lambda *widths: 0.001 + 1e-4 * math.prod(w + w % 3 for w in widths))
    return LatencyCost(LatencyTable(table), backend, progress=False)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=["ddp", "own"], nargs="?", default="ddp")
    parser.add_argument("--die", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.4)
    parser.add_argument("--skip", type=int, default=-1, help="rank 1 has gradients that are not finite here")
    parser.add_argument("--freeze", action="store_true", help="the second convolution does not learn")
    parser.add_argument("--latency", action="store_true", help="prices are measured, into the folder's table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(24, 5),
    )  # fmt: skip
    model[3].requires_grad_(not options.freeze)
    schedule = smcp_fx.Schedule(epochs=1, steps_per_epoch=STEPS, warmup=0.2, ramp=0.3, cooldown=0.2, every=2)
    config = MethodConfig(multiple=1, batch_norm_scaling=True)
    image = torch.randn(2, 3, 8, 8)
    cost = measured(options.folder / "t.sqlite") if options.latency else "flops"
    prepared = smcp_fx.prepare(
        model, image, target=options.target, cost=cost, schedule=schedule, config=config
    )
    wrapped = nn.parallel.DistributedDataParallel(prepared) if options.kind == "ddp" else prepared
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    checkpoint = options.folder / "checkpoint.safetensors"
    step = 0
    torch.manual_seed(1 + rank)
    if checkpoint.exists():
        step = smcp_fx.load_checkpoint(checkpoint, wrapped, optimizer)["step"]
    prepared.train()
    masks = []
    while step < STEPS:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(torch.randn(4, 3, 8, 8)), torch.randint(5, (4,)))
        loss.backward()
        if rank == 1 and step == options.skip:
            prepared.get_parameter("3.weight").grad[0, 0, 0, 0] = float("nan")
        solve = prepared.pruner.step()
        if solve is not None:
            held = [mask for name, mask in prepared.smcp.named_buffers() if name.startswith("mask_")]
            masks.append([solve.step, solve.masks, digest(held)])
        optimizer.step() if rank != 1 or step != options.skip else None
        step += 1
        if step % 5 == 0:
            smcp_fx.save_checkpoint(checkpoint, wrapped, optimizer, extras={"step": step, "world": world})
        if rank == 1 and step == options.die:
            os.kill(os.getpid(), signal.SIGKILL)
    state = {
        name: getattr(prepared.smcp, name) for name in ("keep", "remembered", "gathered", "steps", "as_of")
    }
    state["cost"] = torch.tensor(prepared.pruner.present_cost)
    state["weight"] = prepared.get_parameter("0.weight").detach()
    torch.save({"state": state, "masks": masks, "draw": torch.rand(2)}, options.folder / f"{rank}.pt")
    dist.destroy_process_group()
    # Without the interpreter's own end: gloo's threads may drop their last tensors during it, which then aborts the
    # process now and then ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
