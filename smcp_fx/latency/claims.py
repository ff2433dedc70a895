"""Claims of rows: which process measures a row, and whether it is still running."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

#: A claim from another machine, whose process cannot be looked up, is void after this long. Chosen: no row takes
#: longer.
_REMOTE_CLAIM_SECONDS = 600.0


def is_alive(owner: Any, claimed: Any, this: str) -> bool:
    """Whether the process that claimed a row is running; ``this`` process's own old claims do not count.

    ``claimed``: when, in seconds since 1970.
    """
    host, _, rest = str(owner).partition("/")
    pid = rest.partition("/")[0]
    if not pid.isdecimal():
        return False
    if host != socket.gethostname():
        return isinstance(claimed, float) and 0 <= time.time() - claimed < _REMOTE_CLAIM_SECONDS
    return bool(owner != this and process_name(int(pid)) == owner)


def process_name(pid: int) -> str:
    """Return host/pid/start: a reused pid has another start; 0 if the process is gone."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "0"
    return f"{socket.gethostname()}/{pid}/{started}"
