"""How long a solve takes on several ranks: all solving the same, or rank 0 alone, which then tells the others.

    torchrun --nproc-per-node 3 tools/bench/distributed_solve.py

Times are rank 0's, from a common start until every rank has its masks; ResNet-50, FLOPs, random importances.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torchvision

import smcp_fx
from smcp_fx.pruning import ranks

ROUNDS = 7


def main() -> None:
    """Measure both in turns and print the medians."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prepared = smcp_fx.prepare(torchvision.models.resnet50(), torch.randn(1, 3, 64, 64))
    pruner, state = prepared.pruner, prepared.smcp
    full = state.keep.clone()

    def everyone(scores: torch.Tensor, target: float) -> None:
        state.keep.copy_(pruner._selector.settled(scores, pruner.cost, target).keep)

    def rank_zero(scores: torch.Tensor, target: float) -> None:
        pruner._chosen(scores, target, 0)

    found: dict[str, list[float]] = {"all ranks": [], "rank 0, then broadcast": []}
    for round_ in range(ROUNDS):
        scores = ranks.broadcast(torch.rand(state.keep.numel()))
        for name, way in zip(found, (everyone, rank_zero), strict=True):
            state.keep.copy_(full)
            found[name].append(once(way, scores, (0.9 - 0.08 * round_) * pruner.full_cost))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {torch.get_num_threads()} thread each")
        for name, seconds in found.items():
            print(f"{name:24s} {statistics.median(seconds) * 1e3:8.0f} ms")
    dist.destroy_process_group()


def once(way: Callable[[torch.Tensor, float], None], scores: torch.Tensor, target: float) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    began = time.perf_counter()
    way(scores, target)
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
