"""The processes of a run: torchrun's ranks, each on its device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from smcp_fx.errors import InputError


def world() -> int:
    """Return the number of ranks that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined_ranks(device: str) -> Iterator[torch.device]:
    """Join the other ranks, if any, and give this one its device ("auto": a GPU if there is one)."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no GPU here; train with --device cpu")
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    own = torch.device("cpu")
    if cuda:
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if own.index >= torch.cuda.device_count():
            raise InputError(
                f"rank {own.index} of this machine has no GPU of its own: there are {torch.cuda.device_count()}. "
                f"Start torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(own)
    if world() == 1:
        yield own
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield own
    finally:
        dist.destroy_process_group()
