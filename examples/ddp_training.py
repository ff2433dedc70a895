"""Pruning on several processes with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_training.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from toy import accuracy, data, network

import smcp_fx

EPOCHS, BATCH = 4, 8


def main() -> nn.Module:
    """Train and prune to half of the FLOPs; returns the smaller model, the same on every rank."""
    torch.manual_seed(0)
    # --8<-- [start:loop]
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    sampler = DistributedSampler(data())
    batches = DataLoader(data(), BATCH, sampler=sampler)
    schedule = smcp_fx.Schedule.scaled(EPOCHS, steps_per_epoch=len(batches))
    image = torch.randn(2, 1, 12, 12)
    prepared = smcp_fx.prepare(network(), image, target=0.5, schedule=schedule)
    wrapped = nn.parallel.DistributedDataParallel(prepared.to(device))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        wrapped.train()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(images.to(device)), labels.to(device))
            loss.backward()
            prepared.pruner.step()  # on every rank
            optimizer.step()
    smaller = smcp_fx.convert(prepared)
    # --8<-- [end:loop]
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy(smaller.cpu()):.1%}")
    dist.destroy_process_group()
    return smaller


if __name__ == "__main__":
    main()
