"""A stand-in for a CUDA device in PyTorch: tensors stay on the CPU, and graphs note the operations.

Time passes by work: a replay takes 1e-6 ms for each number that its operations read, an event 0.001 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Capture(TorchDispatchMode):
    """Notes every operation on its way to the CPU's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class CUDAGraph:
    """A graph; ``captured`` holds all there are, in order."""

    captured: list[CUDAGraph] = []  # noqa: RUF012 - reset by `pretend`
    now_ms = 0.0

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.captured.append(self)

    def replay(self) -> None:
        for _, args, _ in self.calls:
            numbers = sum(each.numel() for each in tree_leaves(args) if isinstance(each, torch.Tensor))
            CUDAGraph.now_ms += 1e-6 * numbers


class Event:
    """A moment of the stand-in's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        CUDAGraph.now_ms += 0.001
        self.at = CUDAGraph.now_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@contextmanager
def graph(into: CUDAGraph) -> Iterator[None]:
    with Capture() as capture:
        yield
    into.calls = capture.calls


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "cuda" be a device here, whose tensors are the CPU's."""
    CUDAGraph.captured = []
    plain = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        there = (torch.device("cuda"), "cuda")
        args = tuple("cpu" if isinstance(a, (str, torch.device)) and a in there else a for a in args)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    for name, stand_in in {
        "is_available": lambda: True, "get_device_name": lambda device=None: "Stand-in GPU",
        "get_device_properties": lambda device=None: properties, "synchronize": lambda device=None: None,
        "Stream": lambda device=None: stream, "current_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(), "CUDAGraph": CUDAGraph, "graph": graph, "Event": Event,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
