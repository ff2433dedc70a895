"""Try one entry of the model lists in a process of its own, under a limit of memory."""

from __future__ import annotations

import re
import resource
import traceback
import warnings
from typing import Any

from model_lists import Entry
from try_detector import attempt_detector
from try_model import attempt


def work(entry: Entry, gigabytes: int, onnx: bool, strength: float | None) -> dict[str, Any]:
    """Try one model; its row. ``strength`` of its batch norms, by default as deep as it is."""
    resource.setrlimit(resource.RLIMIT_DATA, (gigabytes << 30, gigabytes << 30))
    row: dict[str, Any] = {"key": entry.key, "status": "failed", "stage": "build"}
    warnings.simplefilter("ignore")
    try:
        if entry.family == "detection":
            attempt_detector(entry, row)
        else:
            attempt(entry, row, onnx, strength)
    except Exception as error:
        from smcp_fx import SmcpError

        if row["stage"] == "prepare" and isinstance(error, SmcpError):
            row["status"] = "refused"
        row["why"] = f"{row['stage']}: {type(error).__name__}: {_anywhere(str(error))[:600]}"
        row["where"] = _anywhere(traceback.format_exc(limit=-4))[-1500:]
    return row


def _anywhere(text: str) -> str:
    """The text with a file's name and its folder's in the place of its path on this machine."""
    return re.sub(r"/\S*/(?=[\w.-]+/[\w.-]+\.py)", "", text)
