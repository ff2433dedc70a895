"""Text for messages about a trace: the expression of a node, and the line of code that asked for it."""

from __future__ import annotations

import operator
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from smcp_fx.tracing.frames import in_library
from smcp_fx.tracing.mode_reads import unmarked

INFIX = {
    operator.gt: ">", operator.ge: ">=", operator.lt: "<", operator.le: "<=", operator.eq: "==",
    operator.ne: "!=", operator.add: "+", operator.sub: "-", operator.mul: "*", operator.mod: "%",
    operator.floordiv: "//", operator.truediv: "/", operator.pow: "**", operator.and_: "&",
    operator.or_: "|",
}  # fmt: skip
_CALLS = frozenset(
    """
size dim numel split unbind chunk tensor_split type is_floating_point is_complex is_contiguous stride element_size
storage_offset startswith endswith
""".split()
)
#: Most names in one sentence. Chosen, not measured.
_READ = 6
#: What every assumption starts with, and how it ends when an input breaks it.
TAKEN, AGAIN = "traced for inputs where ", "; prepare the model again with an example input like this one"


def express(computed: Any, depth: int = 0) -> str:
    """The node's expression as a reader would write it, back to the tensors that it depends on."""
    if isinstance(computed, slice):
        start, stop = (
            "" if edge is None else express(edge, depth) for edge in (computed.start, computed.stop)
        )
        return f"{start}:{stop}"
    if not isinstance(computed, fx.Node):
        return repr(computed)
    node: Any = unmarked(computed)
    if depth > 12:
        return str(node.name)
    parts = [express(arg, depth + 1) for arg in node.args]
    named = [f"{name}={express(value, depth + 1)}" for name, value in node.kwargs.items()]
    if node.op == "call_function":
        if node.target is getattr:
            return f"{parts[0]}.{node.args[1]}"
        if node.target is operator.getitem:
            return f"{parts[0]}[{parts[1]}]"
        if node.target is operator.contains:
            return f"{parts[1]} in {parts[0]}"
        if node.target in INFIX and len(parts) == 2:
            text = f"{parts[0]} {INFIX[node.target]} {parts[1]}"
            return text if depth == 0 else f"({text})"
        name = getattr(node.target, "__name__", "")
        if getattr(node.target, "__module__", "") in ("math", "builtins") or name in _CALLS:
            return f"{name}({', '.join(parts + named)})"
    if node.op == "call_method" and node.target in _CALLS:
        return f"{parts[0]}.{node.target}({', '.join(parts[1:] + named)})"
    return str(node.name)


def listed_paths(paths: list[str]) -> str:
    """Modules by their paths; a long list is shortened."""
    names = [repr(path) if path else "the model" for path in paths]
    return ", ".join(names[:_READ]) + (f" and {len(names) - _READ} others" if len(names) > _READ else "")


def is_ours(filename: str) -> bool:
    """Is this a file of the tracer, or of torch, and not of the model?"""
    path = Path(filename)
    return path.parent == Path(__file__).parent or Path(torch.__file__).parent in path.parents


def asking_line(otherwise: str = "unknown place") -> str:
    """The line of the model's code that asks or calls; ``otherwise`` where torch's own containers do."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not fx.Tracer.trace.__code__:
        if not in_library(frame):
            return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
        frame = frame.f_back
    return otherwise
