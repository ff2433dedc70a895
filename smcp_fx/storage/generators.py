"""The states of the random generators: torch (CPU and the current GPU), Python's, NumPy's global one."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcp_fx.storage.tensor_file import raw


def capture() -> str:
    """Return the states of this process's generators as JSON."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return json.dumps(state)


def restore(text: str) -> None:
    """Set this process's generators to states from `capture`."""
    state = json.loads(text)
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(raw(state).tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
