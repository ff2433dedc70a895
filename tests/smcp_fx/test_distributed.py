"""Two processes train on different data: every rank ends with the same masks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = """
import sys
import smcp_fx
import torch
import torch.distributed as dist

rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
    torch.nn.Conv2d(16, 24, 3, padding=1), torch.nn.BatchNorm2d(24), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(24, 5),
)
schedule = smcp_fx.Schedule(epochs=1, steps_per_epoch=8, warmup=0.25, ramp=0.25, cooldown=0.25, every=2)
config = smcp_fx.PruningConfig(multiple=1)
prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), target=0.4, schedule=schedule, config=config)
wrapped = torch.nn.parallel.DistributedDataParallel(prepared) if sys.argv[4] == "ddp" else prepared
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
torch.manual_seed(1 + rank)
prepared.train()
for _ in range(8):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(wrapped(torch.randn(4, 3, 8, 8)), torch.randint(5, (4,)))
    loss.backward()
    prepared.pruner.step()
    optimizer.step()
names = ("keep", "remembered", "gathered")
state = {name: getattr(prepared.smcp, name) for name in names}
state["weight"] = prepared.get_parameter("0.weight").detach()
torch.save(state, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("kind", ["ddp", "gradients of its own"])
def test_every_rank_holds_the_same_masks(kind: str, tmp_path: Path) -> None:
    """Also where the ranks' gradients differ, which tells a broadcast from equal inputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), port, str(tmp_path), kind],
            env=environment,
            cwd="/",
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first["keep"], second["keep"])
    assert torch.equal(first["remembered"], second["remembered"])
    assert not bool(first["keep"].all())
    same = kind == "ddp"
    assert torch.equal(first["weight"], second["weight"]) is same
    assert torch.equal(first["gathered"], second["gathered"]) is same
