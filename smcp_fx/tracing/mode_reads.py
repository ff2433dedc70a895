"""The reads of modules' `training` in a forward: the log of one trace.

Each call of a module is a frame. A read belongs to the frame whose forward reads. A node, or a call of another frame,
depends on what its frame has read so far. The result of a frame is marked during the trace:

    before   y = self.drop(h)                 after    y = passed(x), where x is what drop's frame returned
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import fx, nn
from torch.fx.proxy import Proxy
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.tracing.values import LINE

#: In a node's meta: the frame that made it, and when.
FRAME = "smcp_frame"
#: By an argument's place among the leaves: the node, and the frames that returned it, the last first, each with the
#: value's place in its result.
VIA = "smcp_via"
_RETURNED_BY = "smcp_returned_by"


@dataclass
class Frame:
    """One call of a module; times are those of the log's clock."""

    path: str
    parent: int | None
    entered: int
    left: int = 0
    reads: list[tuple[int, str, bool]] = field(default_factory=list)
    assigns: bool = False  # it assigns attributes of modules
    returned: str = ""  # its result, without the tensors


class ModeLog:
    """The frames of one trace, the model's own first."""

    def __init__(self) -> None:
        self.frames = [Frame("", None, 0)]
        self.closed = False
        self.asked = False  # a part of the model read a mode
        self._clock = 0
        self._open = [0]

    def read(self, path: str, value: bool) -> None:
        """The running forward has read `training` of the module at ``path``."""
        if not self.closed:
            self.frames[self._open[-1]].reads.append((self._tick(), path, value))
            self.asked |= len(self._open) > 1

    def assigned(self) -> None:
        """The running forward has assigned an attribute, which others may read."""
        self.frames[self._open[-1]].assigns = True

    @contextmanager
    def frame(self, path: str) -> Iterator[Frame]:
        """Entered while a module's forward runs."""
        frame = Frame(path, self._open[-1], self._tick())
        self._open.append(len(self.frames))
        self.frames.append(frame)
        try:
            yield frame
        finally:
            self._open.pop()
            frame.left = self._tick()

    def note(self, node: fx.Node) -> None:
        """Record on a new node where it was made."""
        node.meta[FRAME] = self._open[-1], self._tick()

    def mark(self, frame: Frame, output: Any, tracer: Any) -> Any:
        """The frame's result, marked as such if the frame has read a mode."""
        frame.returned = _plainly(output)
        if self.closed or not frame.reads:
            return output
        number = next(index for index, other in enumerate(self.frames) if other is frame)
        places = count()

        def marked(value: Any) -> Any:
            if not isinstance(value, Proxy):
                return value
            proxy = tracer.create_proxy("call_function", passed, (value,), {})
            proxy.node.meta[_RETURNED_BY] = number, next(places)
            return proxy

        return pytree.tree_map(marked, output)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def passed(value: Any) -> Any:
    """A mark around a frame's result; it is in the graph only during the trace."""
    return value


def unmarked(node: fx.Node) -> fx.Node:
    """The node inside these marks."""
    while node.target is passed and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def drop_marks(graph: fx.Graph) -> None:
    """Remove the marks from a finished trace, and record them on their readers."""
    marks = [node for node in graph.nodes if node.target is passed]
    if not marks:
        return
    for node in graph.nodes:
        via: dict[int, tuple[fx.Node, tuple[tuple[int, int], ...]]] = {}
        for index, leaf in enumerate(leaves(node)):
            frames = []
            while isinstance(leaf, fx.Node) and leaf.target is passed:
                frames.append(leaf.meta[_RETURNED_BY])
                leaf = leaf.args[0]
            if frames:
                via[index] = leaf, tuple(frames)
        if via and node.target is not passed:
            node.meta[VIA] = via
    for mark in reversed(marks):
        mark.replace_all_uses_with(unmarked(mark))
        graph.erase_node(mark)


def made_beside(node: fx.Node, made: fx.Node) -> None:
    """Treat ``made`` in a finished trace as if ``node``'s frame had made it at that time."""
    made.meta |= {key: node.meta[key] for key in (FRAME, LINE, "nn_module_stack") if key in node.meta}


def returned_instead(reader: fx.Node, operand: fx.Node, other: fx.Node) -> None:
    """Treat the reader's argument ``other`` as returned by the frames that returned ``operand``."""
    if VIA in reader.meta:
        reader.meta[VIA] = {
            index: (other if source is operand else source, frames)
            for index, (source, frames) in reader.meta[VIA].items()
        }


def leaves(node: fx.Node) -> list[Any]:
    """The leaves of a node's arguments, also those inside slices."""
    values: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), values.append)
    return values


class ReadsOfTraining:
    """While it is entered, ``note`` gets each read of a module's `training`; forward may not write it."""

    def __init__(self, model: nn.Module, note: Any, evaluating: Any) -> None:
        self._note, self._evaluating = note, evaluating
        self._paths = {id(module): path for path, module in model.named_modules()}

    def __enter__(self) -> ReadsOfTraining:
        def read(module: nn.Module) -> bool:
            try:
                value: bool = vars(module)["training"]
            except KeyError:  # a scripted module stores it elsewhere
                raise AttributeError("training") from None
            if id(module) in self._paths and not self._evaluating():
                self._note(self._paths[id(module)], value)
            return value

        def write(module: nn.Module, value: bool) -> None:
            if id(module) in self._paths and not self._evaluating() and vars(module)["training"] != value:
                raise TraceError(
                    f"forward puts {self._paths[id(module)]!r} into {'train' if value else 'eval'} mode, which a "
                    "graph does not do; do so in the train() method of the module that holds it."
                )
            vars(module)["training"] = value

        nn.Module.training = property(read, write)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        del nn.Module.training


def _plainly(output: Any) -> str:
    """The structure of what a forward returned, and the numbers in it."""
    parts, structure = pytree.tree_flatten(output)
    words = [
        "tensor"
        if isinstance(v, Proxy)
        else repr(v)
        if isinstance(v, (bool, int, float, str))
        else type(v).__name__
        for v in parts
    ]
    return f"{structure} {words}"
