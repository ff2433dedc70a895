"""Processes that begin with torch and this library loaded: as separate as others, and seconds faster."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Processes begin as spawned ones do, of what is pickled for them.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["smcp_fx", "smcp_fx.latency.table", "torch.distributed"])


class Running:
    """A function of a module, running in a process of its own; all that it writes goes into the file ``told``."""

    def __init__(self, told: Path, function: Callable[..., Any], *arguments: Any, **environment: str) -> None:
        self._told = told
        self._process = CONTEXT.Process(target=_run, args=(told, environment, function, arguments))
        self._process.start()

    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def kill(self) -> int | None:
        """Kill it, as nothing can be caught or cleaned up."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode

    def wait(self) -> tuple[int | None, str]:
        """Its exit code and what it wrote; after five minutes it is killed."""
        self._process.join(300)
        return self.ended() if self.ended() is not None else self.kill(), self._told.read_text()


def ranks(
    folder: Path, world: int, function: Callable[..., Any], *arguments: Any
) -> list[tuple[int | None, str]]:
    """Call the function in each rank of a job, as torchrun does, but that none is ended when another dies."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = [
        Running(folder / f"{rank}.told", function, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **job)
        for rank in range(world)
    ]
    return [rank.wait() for rank in running]


def _run(told: Path, environment: Mapping[str, str], function: Callable[..., Any], arguments: Any) -> None:
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment)
    sys.exit(function(*arguments))
