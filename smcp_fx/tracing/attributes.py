"""The attributes of modules, and the values that forward assigns to them during a trace.

self.mean = self.mean.type_as(x)      the attribute is the traced tensor until the call ends
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy

from smcp_fx.errors import TraceError
from smcp_fx.tracing.in_place import PLAIN

_CASTS = {
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "cpu",
    "cuda",
    "contiguous",
    "detach",
}

#: A module, and the name of an attribute of it.
Attribute = tuple[nn.Module, str]


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold as parameters, as buffers and as plain attributes, by path."""
    for path, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            if isinstance(value, Tensor):
                yield f"{path}.{name}" if path else name, value


def refuse_state(module: nn.Module, submodules: Container[nn.Module]) -> None:
    """Refuse a called module that is none of the model's ``submodules`` and has tensors of its own.

    Tensors of submodules in it are the model's: forward may put its layers into a `Sequential`.
    """
    parts = [(path, part) for path, part in module.named_modules() if part not in submodules]
    held = [
        f"{path}.{name}".lstrip(".")
        for path, part in parts
        for name, _ in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    ]
    if held:
        raise TraceError(
            f"a {type(module).__name__} that is called is not a submodule of the model, so its {held[0]!r} is not "
            "in the state dict: make it in __init__, and keep it as an attribute or in an nn.ModuleList"
        )


@dataclass(frozen=True)
class _Held:
    """A module's attributes, and the content of its lists and dicts; many are empty."""

    module: nn.Module
    attributes: dict[str, Any]
    contents: list[tuple[Any, Any]]
    empty: list[Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Held:
        attributes = vars(module).copy()
        containers = [value for value in attributes.values() if isinstance(value, (list, dict))]
        return cls(
            module, attributes, [(value, _copied(value)) for value in containers if value],
            [value for value in containers if not value],
        )  # fmt: skip

    def restore(self, constants: bool) -> None:
        """Undo the changes of a traced forward to the module: a cache would hold proxies now.

        The ``constants`` that the tracer adds stay: the graph reads them. A list or dict that forward has assigned
        stays as it is, since forward may have returned it.
        """
        now = vars(self.module)
        if not _same(now, self.attributes):
            for name, value in list(now.items()):
                if name not in self.attributes and not (constants and isinstance(value, Tensor)):
                    del now[name]
            now.update(self.attributes)
        filled: list[tuple[Any, Any]] = [(value, {}) for value in self.empty if value]
        for value, content in self.contents + filled:
            if isinstance(value, list):
                value[:] = content  # the same object, since others may hold it
            elif type(value).update in (dict.update, OrderedDict.update) and not _same(value, content):
                value.clear()  # (frozen ones cannot change)
                value.update(content)


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dicts hold the same objects, in the same order."""
    return (
        len(one) == len(other) and all(map(is_, one.values(), other.values())) and all(map(is_, one, other))
    )


def _copied(value: list[Any] | dict[Any, Any]) -> list[Any] | dict[Any, Any]:
    """A copy, by a shorter way than `copy.copy`'s for the usual types."""
    return value.copy() if type(value) in (list, dict, OrderedDict) else copy.copy(value)


class Attributes:
    """The attributes of a model's modules, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._held = [_Held.of(module) for module in modules]
        scripted = (module for module in modules if isinstance(module, torch.jit.ScriptModule))
        self._modes = [(module, module.training) for module in scripted]

    def restore(self, constants: bool = True) -> None:
        """Undo all assignments since then."""
        for held in self._held:
            held.restore(constants)
        for module, mode in self._modes:  # a scripted module stores its mode elsewhere
            module.training = mode


def numbers_of(model: nn.Module) -> dict[Attribute, Any]:
    """The numbers that modules keep as plain attributes."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def flags_of(model: nn.Module) -> dict[Attribute, Any]:
    """The truth values that modules keep as plain attributes, and the values of buffers of one integer."""
    return {key: value for module in model.modules() for key, value in _flags(module)}


def _flags(module: nn.Module) -> Iterator[tuple[Attribute, Any]]:
    for name, value in vars(module).items():
        if type(value) is bool and name != "training":
            yield (module, name), value
    for name, buffer in module._buffers.items():
        if type(buffer) is Tensor and not buffer.is_floating_point() and buffer.numel() == 1:
            yield (module, name), buffer.tolist()


def may_be_initialised(model: nn.Module) -> Iterator[Tensor]:
    """The parameters of modules with a flag, without torch's own modules: their first call may set them."""
    for module in model.modules():
        own = type(module).__module__.startswith("torch.")
        if module._parameters and not own and any(True for _ in _flags(module)):
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)


class Assignments:
    """While it is entered, forward may assign computed tensors to buffers.

    The value goes into the module's dict, where it shadows the buffer; the tracer removes it again. A `finished`
    graph writes it into the buffer at the end, so that earlier readers still see the old values.
    ``assigned`` is called at every other assignment.
    """

    def __init__(self, tracer: Any, held: dict[str, Tensor], assigned: Callable[[], None]) -> None:
        self.tracer, self.held, self.assigned = tracer, held, assigned
        self._names = {id(tensor): name for name, tensor in held.items()}
        self._writes: list[fx.Node] = []
        self._original = nn.Module.__setattr__

    def __enter__(self) -> Assignments:
        original = self._original

        def assign(module: nn.Module, name: str, value: Any) -> None:
            buffer = vars(module).get("_buffers", {}).get(name)
            if isinstance(value, Proxy) and id(buffer) in self._names and self._keeps(buffer, value):
                vars(module)[name] = value
            else:
                self.assigned()
                original(module, name, value)

        nn.Module.__setattr__ = assign  # type: ignore[method-assign, assignment]
        return self

    def _keeps(self, buffer: Any, value: Proxy) -> bool:
        """Is the value the buffer itself, or a tensor of its shape and type, which is written at the end?"""
        if _memory_of(value.node, self.held) is buffer:
            return True
        read = self.tracer.create_proxy("get_attr", self._names[id(buffer)], (), {})
        held, new = (self.tracer.value(one.node) for one in (read, value))
        if (held.shape, held.dtype) != (new.shape, new.dtype):
            return False
        self._writes.append(self.tracer.create_proxy("call_method", "copy_", (read, value.detach()), {}).node)
        return True

    def finish(self, graph: fx.Graph) -> None:
        """Write the assigned values into their buffers at the end of the graph."""
        for write in self._writes:
            graph.output_node().prepend(write)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        nn.Module.__setattr__ = self._original  # type: ignore[method-assign]


def _memory_of(node: Any, held: dict[str, Tensor]) -> Tensor | None:
    """The model's tensor that the node casts, or writes into (`self.mean *= 0.9`)."""
    while isinstance(node, fx.Node) and (
        (node.op == "call_method" and (node.target in _CASTS or str(node.target).endswith("_")))
        or node.target in PLAIN
    ):
        node = node.args[0]
    return held.get(str(node.target)) if isinstance(node, fx.Node) and node.op == "get_attr" else None
