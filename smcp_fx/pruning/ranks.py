"""Messages between the ranks of a distributed job: one rank solves, and all hold the same masks.

Messages are tensors (some hold JSON as bytes), so nothing is unpickled and every backend can carry them.
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

#: Seconds for others to answer when a rank is lost: they notice at the next exchange. Chosen, not measured.
_ROLL_CALL = 5.0


def distributed() -> bool:
    """Whether there is more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return this process's number, 0 if training is not distributed."""
    return dist.get_rank() if distributed() else 0


def broadcast(tensor: Tensor) -> Tensor:
    """Overwrite with rank 0's values, in place; without other ranks, do nothing."""
    if distributed():
        with _explained():
            dist.broadcast(tensor, src=0)
    return tensor


def broadcast_json(message: Any, device: torch.device) -> Any:
    """Return rank 0's message (JSON values) on all ranks; the job's backend must reach ``device``."""
    if not distributed():
        return message
    content = json.dumps(message).encode() if rank() == 0 else b""
    length = broadcast(torch.tensor([len(content)], device=device))
    carried = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if rank() == 0:
        carried.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return json.loads(bytes(raw(broadcast(carried))))


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """Average every rank's tensor, in place."""
    if distributed():
        with _explained():
            dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensor


def gather_bytes(content: bytes, device: torch.device) -> list[bytes]:
    """Return every rank's bytes, in order of rank."""
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
    """Return 16 hexadecimal digits of the sha256 of the tensors' values."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(raw(tensor))
    return hasher.hexdigest()[:16]


def check_same(code: str, content: str, device: torch.device) -> None:
    """Raise `TrainingError` on every rank unless all have the same ``code``, a digest of ``content``."""
    every = [one.decode() for one in gather_bytes(code.encode(), device)]
    if len(set(every)) > 1:
        listed = ", ".join(f"rank {index}: {one}" for index, one in enumerate(every))
        raise TrainingError(
            f"the ranks hold different {content} ({listed}). All ranks must prepare the same model in the same way, "
            "load the same checkpoint, and call prepared.pruner.step() equally often."
        )


@contextmanager
def _explained() -> Iterator[None]:
    """Explain a failing collective: another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise TrainingError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} cannot reach the others: {_lost()} "
            f"({first}). Start the job again: it goes on from the last checkpoint "
            "(smcp_fx.load_checkpoint), with this or another number of ranks."
        ) from error


def _lost() -> str:
    """Say which ranks are lost: the ranks that do not answer a roll call through the store.

    Without the store, rank 0, which kept it, is gone; it may have ended for the same reason as this one.
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
