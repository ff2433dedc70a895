"""Processes that begin with torch and this library loaded: as separate as others, and seconds faster."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["smcp_fx", "smcp_fx.latency.table", "torch.distributed"])


class Running:
    """A function of a module, running in a process of its own; its standard error goes into the file ``errors``."""

    def __init__(
        self, errors: Path, function: Callable[..., None], *arguments: Any, **environment: str
    ) -> None:
        self._errors = errors
        self._process = _CONTEXT.Process(target=_run, args=(errors, environment, function, arguments))
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
        """Its exit code and what it wrote to standard error; after five minutes it is killed."""
        self._process.join(300)
        return self.ended() if self.ended() is not None else self.kill(), self._errors.read_text()


def _run(errors: Path, environment: Mapping[str, str], function: Callable[..., None], arguments: Any) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    os.environ.update(environment)
    function(*arguments)
