"""What the ranks of a distributed job tell each other: one solves, all hold the same masks.

Messages are tensors (JSON as bytes among them), so nothing is unpickled and every backend can carry them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from smcp_fx.errors import TrainingError
from smcp_fx.storage.tensor_file import raw

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds that the others have to answer when one rank is lost: they notice when they next exchange something.
_ROLL_CALL = 5.0


def distributed() -> bool:
    """Is there more than one process?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's number, 0 where training is not distributed."""
    return dist.get_rank() if distributed() else 0


def broadcast(tensor: Tensor) -> Tensor:
    """Rank 0's values, in place; without other ranks nothing happens."""
    if distributed():
        with _explained():
            dist.broadcast(tensor, src=0)
    return tensor


def broadcast_json(message: Any, device: torch.device) -> Any:
    """Rank 0's message (what JSON holds), on all ranks; ``device`` is one that the job's backend reaches."""
    if not distributed():
        return message
    content = json.dumps(message).encode() if rank() == 0 else b""
    length = broadcast(torch.tensor([len(content)], device=device))
    carried = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if rank() == 0:
        carried.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return json.loads(bytes(raw(broadcast(carried))))


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean of every rank's tensor, in place."""
    if distributed():
        with _explained():
            dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensor


def gather_bytes(content: bytes, device: torch.device) -> list[bytes]:
    """Every rank's bytes, in the ranks' order."""
    if not distributed():
        return [content]
    world = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    with _explained():
        dist.all_gather(lengths, torch.tensor([len(content)], device=device))
    longest = max(int(length) for length in lengths)
    padded = bytearray(content.ljust(longest, b"\0"))
    every = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    with _explained():
        dist.all_gather(every, torch.frombuffer(padded, dtype=torch.uint8).to(device))
    return [bytes(raw(one)[: int(length)]) for one, length in zip(every, lengths, strict=True)]


def digest(tensors: Iterable[Tensor]) -> str:
    """A sha256 of the tensors' values, 16 hexadecimal digits of it."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(raw(tensor))
    return hasher.hexdigest()[:16]


def check_same(code: str, what: str, device: torch.device) -> None:
    """Raise `TrainingError` on every rank unless all have the same ``code``, which sums up ``what``."""
    every = [found.decode() for found in gather_bytes(code.encode(), device)]
    if len(set(every)) > 1:
        listed = ", ".join(f"rank {index}: {found}" for index, found in enumerate(every))
        raise TrainingError(
            f"the ranks hold different {what} ({listed}). All ranks must prepare the same model in the same way, "
            "load the same checkpoint, and call prepared.pruner.step() equally often."
        )


@contextmanager
def _explained() -> Iterator[None]:
    """A collective that fails means that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} cannot reach the others: {_lost()} "
            f"({str(error).splitlines()[0]}). Start the job again: it goes on from the last checkpoint "
            "(smcp_fx.load_checkpoint), with this or another number of ranks."
        ) from error


def _lost() -> str:
    """Who is lost: whoever does not answer a roll call, which every rank that lost another holds through the store.

    Without the store, the rank that kept it is gone; it may have ended for the same reason as this one, though.
    """
    own, world = dist.get_rank(), dist.get_world_size()
    silent = [other for other in range(world) if other != own]
    try:
        if world > 2:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"smcp_fx/here/{own}", "1")
            end = time.monotonic() + _ROLL_CALL
            while silent and time.monotonic() < end:
                silent = [other for other in silent if not store.check([f"smcp_fx/here/{other}"])]
                time.sleep(0.1)
    except (RuntimeError, OSError):
        if own != 0:
            return "rank 0 has died or hangs, or has ended because another rank had died"
    names = ", ".join(map(str, silent))
    who = {0: "one", 1: f"rank {names}"}.get(len(silent), f"one of the ranks {names} that do not answer")
    return f"{who} has died or hangs"
