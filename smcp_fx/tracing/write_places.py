"""Writes: the part of a tensor that is written, and the written values."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Every:
    """Every ``step``-th index from ``start`` on, of a dimension that ``step`` divides."""

    start: int
    step: int


@dataclass(frozen=True)
class Span:
    """The index of `x.narrow(dim, start, length)`; the input's size gives ``length``: it fits at any size."""

    start: int
    length: fx.Node


def parts_of(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The target, the index and the value of `x[i] = y`, `x[i].copy_(y)`, `x[i].fill_(2)`, `x[i].zero_()`.

    `x.narrow(...)` and `x.select(...)` are such parts, too.
    """
    if node.op == "call_function" and node.target is operator.setitem:
        target, index, source = node.args
        return target, index, source
    if scatters(node):
        return _scattered(node)
    view = node.args[0] if node.op == "call_method" and node.target in ("copy_", "fill_", "zero_") else None
    if not isinstance(view, fx.Node) or node.users or len(view.users) > 1:
        return None
    source = 0.0 if node.target == "zero_" else node.args[1] if len(node.args) == 2 else None
    index = _index_of(view)
    return None if source is None or index is None else (view.args[0], index, source)


def scatters(node: fx.Node) -> bool:
    """Does it write into a copy?"""
    return node.target in ("slice_scatter", "select_scatter", torch.slice_scatter, torch.select_scatter)


def _scattered(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The parts of `x.slice_scatter(y, dim, start, end, step)` and `x.select_scatter(y, dim, index)`."""
    selects = "select" in str(getattr(node.target, "__name__", node.target))
    names = ("input", "src", "dim", "index") if selects else ("input", "src", "dim", "start", "end", "step")
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dim = arguments.get("dim", 0)
    if type(dim) is not int:
        return None
    edges = (arguments.get(name) for name in ("start", "end", "step"))
    part: Any = arguments["index"] if selects else slice(*edges)
    index = (*[slice(None)] * dim, part) if dim >= 0 else (..., part, *[slice(None)] * (-dim - 1))
    return arguments.get("input"), index, arguments.get("src")


def _index_of(view: fx.Node) -> Any:
    """The index that gives this view of its first operand; None for other views."""
    if view.target is operator.getitem:
        return view.args[1]
    name = view.target if view.op == "call_method" else getattr(view.target, "__name__", "")
    if name not in ("narrow", "select") or view.kwargs or not isinstance(view.args[0], fx.Node):
        return None
    dim, start, *length = view.args[1:]
    if type(dim) is not int or type(start) is not int:
        return None
    part: Any = start
    if name == "narrow":
        (count,) = length
        if isinstance(count, fx.Node):
            if start < 0:
                return None
            part = Span(start, count)
        elif type(count) is int:
            part = slice(start, start + count if start >= 0 or start + count else None)
        else:
            return None
    return (*[slice(None)] * dim, part) if dim >= 0 else (..., part, *[slice(None)] * (-dim - 1))


def every_index(part: slice, size: int) -> Every | None:
    """The `Every` of a slice that takes every ``step``-th index of the whole dimension; None for another."""
    edges = (part.start, part.stop, part.step)
    if any(type(edge) not in (int, type(None)) for edge in edges) or (part.step or 1) < 1:
        return None
    start, stop, step = part.indices(size)
    whole = size % step == 0 and start < step and len(range(start, stop, step)) == size // step
    return Every(start, step) if whole else None


def full_index(index: Any, rank: int) -> list[Any] | None:
    """One entry a dimension: slices and integers; None for other indices."""
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    if isinstance(index, list) or any(type(part) not in (int, slice, Span, type(...)) for part in parts):
        return None
    if ... in parts:
        place = parts.index(...)
        parts[place : place + 1] = [slice(None)] * (rank - len(parts) + 1)
    return parts + [slice(None)] * (rank - len(parts)) if len(parts) <= rank else None


def next_place(place: int) -> int | None:
    """The end of the part that one index takes; None for the last index."""
    return None if place == -1 else place + 1
