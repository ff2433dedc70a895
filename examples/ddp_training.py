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


def main() -> nn.Module:
    """Train and prune to half of the FLOPs; returns the smaller model, the same on every rank."""
    torch.manual_seed(0)
    model, dataset = network(), data()
    # --8<-- [start:loop]
    epochs = 4
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    sampler = DistributedSampler(dataset)
    batches = DataLoader(dataset, 8, sampler=sampler)
    schedule = smcp_fx.Schedule.scaled(epochs, steps_per_epoch=len(batches))
    example = next(iter(batches))[0]
    prepared = smcp_fx.prepare(model, example, target=0.5, schedule=schedule)
    wrapped = nn.parallel.DistributedDataParallel(prepared.to(device))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    for epoch in range(epochs):
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
