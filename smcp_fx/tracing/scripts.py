"""Modules compiled by TorchScript become Python again, so that they are traced as any other.

    before   self.body = torch.jit.script(body)        after   self.body, of modules of torch.nn where they were some,
             self.body = torch.jit.load("body.pt")             and others whose forward does what the script says

A script holds the modules, parameters and attributes by name, and each method as a graph of operations, branches and
loops. A graph that holds something else stays what it is: a call of unknown effect.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from smcp_fx.tracing.example_runs import run_eager, same_values
from smcp_fx.tracing.script_operations import (
    UnknownOperationError,
    called,
    is_number,
    number_operation,
    plain_name,
    plain_operation,
)

#: One of several methods of a name, by the types of what they are given.
_OVERLOAD = re.compile(r"__\d+$")
_LAYERS = "torch.nn.modules."
_CONTAINERS = "torch.nn.modules.container."
#: What layers of torch.nn hold beside their constants, where they do.
_OPTIONAL = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
#: What others hold that their `__constants__` do not name.
_UNNAMED = ("transposed", "_reversed_padding_repeated_twice", "num_parameters", "elementwise_affine", "name")

_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
#: What the constructors of others take, by the names of their attributes.
_ARGUMENTS = {
    "MultiheadAttention": (
        "embed_dim",
        "num_heads",
        "dropout",
        "add_zero_attn",
        "kdim",
        "vdim",
        "batch_first",
    ),
    "LSTM": (*_RECURRENT, "proj_size"),
    "GRU": _RECURRENT,
}


def without_scripts(model: nn.Module, inputs: tuple[Any, ...], leaves: Collection[str] = ()) -> nn.Module:
    """Put Python in the place of the model's scripted modules, where it computes the same on the example inputs.

    The parameters stay those of the scripts. ``leaves`` names modules that stay as they are.
    """
    if isinstance(model, torch.jit.ScriptModule):
        plain = _written(model)
        return plain if plain is not None and _same(model, plain, inputs) else model
    places = [path for path in _places(model) if path not in leaves]
    before = {path: model.get_submodule(path) for path in places}
    plain_ones = {path: plain for path, script in before.items() if (plain := _written(script)) is not None}
    if not plain_ones:
        return model
    expected = _output(model, inputs)
    for path, plain in plain_ones.items():
        _put(model, path, plain)
    if not same_values(expected, _output(model, inputs)):
        for path in plain_ones:
            _put(model, path, before[path])
    return model


def _places(model: nn.Module, path: str = "") -> Iterator[str]:
    for name, child in model.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            yield path + name
        else:
            yield from _places(child, f"{path}{name}.")


def _put(model: nn.Module, path: str, part: nn.Module) -> None:
    home, _, name = path.rpartition(".")
    model.get_submodule(home)._modules[name] = part


def _output(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    try:
        return run_eager(model, inputs)
    except Exception as error:  # whatever the model says; the trace will tell
        return repr(error)


def _same(model: nn.Module, other: nn.Module, inputs: tuple[Any, ...]) -> bool:
    return same_values(_output(model, inputs), _output(other, inputs))


def _written(script: Any) -> nn.Module | None:
    """The script as Python; None where it holds what cannot be written so."""
    try:
        return _module(script)
    except (UnknownOperationError, AttributeError, RuntimeError):
        return None


def _module(script: Any) -> nn.Module:
    kind = plain_name(script._c._type().qualified_name())
    plain: nn.Module | None = None
    if kind.rpartition(".")[2] in _ARGUMENTS and kind.startswith(_LAYERS):
        plain = _constructed(script, kind.rpartition(".")[2])
    elif kind.startswith(_LAYERS) and not kind.startswith(_CONTAINERS):
        plain = _layer(script, kind)
    return _class_of(script)(script) if plain is None else plain


def _class_of(script: Any) -> type[Written]:
    """A class whose forward has the names and defaults of the script's, which others and `torch.fx` read."""
    has_forward = "forward" in script._c._method_names()
    arguments = script._c._get_method("forward").schema.arguments[1:] if has_forward else []
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in arguments
    ]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([own, *parameters])

    def forward(self: Written, *given: Any, **named: Any) -> Any:
        bound = signature.bind(self, *given, **named)
        bound.apply_defaults()
        return self.call("forward", bound.args[1:])

    forward.__signature__, forward.__wrapped__ = signature, Written.call  # type: ignore[attr-defined]
    return type(str(script.original_name), (Written,), {"forward": forward, "__module__": __name__})


def _layer(script: Any, kind: str) -> nn.Module | None:
    """The layer of torch.nn that was compiled, where all is known that makes it; None for others."""
    cls = getattr(nn, kind.rpartition(".")[2], None)
    if cls is None or f"{cls.__module__}.{cls.__name__}" != kind or [*script.named_children()]:
        return None
    constants = getattr(cls, "__constants__", [])
    if not all(hasattr(script, name) for name in constants):  # a trace has none
        return None
    layer: nn.Module = cls.__new__(cls)
    nn.Module.__init__(layer)
    for name in (*constants, *(name for name in _UNNAMED if hasattr(script, name))):
        setattr(layer, name, getattr(script, name))
    _hold(layer, script)
    for name in _OPTIONAL:
        if name not in (*layer._parameters, *layer._buffers) and getattr(script, name, 0) is None:
            (layer.register_parameter if name in _OPTIONAL[:2] else layer.register_buffer)(name, None)
    return layer


def _constructed(script: Any, kind: str) -> nn.Module | None:
    """A layer whose constructor prepares more than it holds; None where the script lacks what it takes."""
    if not all(hasattr(script, name) for name in _ARGUMENTS[kind]):  # a trace has none
        return None
    held = dict(script.named_parameters())
    options = {name: getattr(script, name) for name in _ARGUMENTS[kind]}
    if kind == "MultiheadAttention":
        options |= {"bias": "in_proj_bias" in held, "add_bias_kv": "bias_k" in held}
    layer: nn.Module = getattr(nn, kind)(**options)
    if held.keys() != dict(layer.named_parameters()).keys():
        return None
    for name, parameter in held.items():
        home, _, attribute = name.rpartition(".")
        setattr(
            layer.get_submodule(home), attribute, nn.Parameter(parameter.detach(), parameter.requires_grad)
        )
    for path, part in script.named_modules():
        layer.get_submodule(path).training = part.training
    return layer


def _hold(module: nn.Module, script: Any) -> None:
    kept = script.state_dict()
    for name, parameter in script._parameters.items():
        # A loaded script's parameters are no `nn.Parameter`.
        module.register_parameter(name, nn.Parameter(parameter.detach(), parameter.requires_grad))
    for name, buffer in script._buffers.items():
        module.register_buffer(name, buffer, persistent=name in kept)
    module.training = script.training


class _Graphs(dict[str, Any]):
    """Graphs are read alone, and copies of the module share them."""

    def __deepcopy__(self, memo: Any) -> _Graphs:
        return self


class Written(nn.Module):
    """A scripted module, whose methods are carried out operation by operation."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        _hold(self, script)
        for name, child in script.named_children():
            self.add_module(name, _module(child))
        names = script._c._method_names()
        self._graphs = _Graphs((name, script._c._get_method(name).graph) for name in names)
        for graph in self._graphs.values():
            for node in _nodes(graph):
                self._check(node, script)

    def _check(self, node: Any, script: Any) -> None:
        """Know the operation, and hold the attribute that it reads."""
        if node.kind() == "prim::GetAttr":
            name = node.s("name")
            first = next(node.inputs())
            mine = first.type().str() == script._c._type().str()
            if mine and not hasattr(self, name):
                setattr(self, name, getattr(script, name))
        elif node.kind() == "prim::CallFunction":
            called(next(node.inputs()))
        else:
            plain_operation(node)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """What one of its methods computes."""
        return _Run(self).graph(self._graphs[method], (self, *args))


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


class _Run:
    """One call of a graph."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.values: dict[str, Any] = {}
        self.numbers: set[str] = set()  # the names of tensors that are numbers of Python here

    def graph(self, graph: Any, args: tuple[Any, ...]) -> Any:
        """Carry it out; returns its output."""
        names = [value.debugName() for value in graph.inputs()]
        self.values.update(zip(names, args, strict=False))
        self.block(graph)
        found = [self.values[value.debugName()] for value in graph.outputs()]
        return found[0] if len(found) == 1 else tuple(found)

    def block(self, block: Any) -> list[Any]:
        """Carry out a block; returns its outputs."""
        for node in block.nodes():
            given = [self.values[value.debugName()] for value in node.inputs()]
            outputs = [value.debugName() for value in node.outputs()]
            tensors = {v.debugName() for v in node.inputs() if v.type().kind() == "TensorType"}
            numeric = bool(tensors) and tensors <= self.numbers and node.kind().startswith("aten::")
            if numeric or is_number(node):
                self.numbers.update(outputs)
            found = number_operation(node.kind()[6:])(*given) if numeric else self.node(node, given)
            if len(outputs) == 1 and node.kind() not in _SEVERAL:
                self.values[outputs[0]] = found
            else:
                self.values.update((name, found[place]) for place, name in enumerate(outputs))
        return [self.values[value.debugName()] for value in block.outputs()]

    def node(self, node: Any, given: list[Any]) -> Any:
        """What a node gives: one value, or several of them for `_SEVERAL`."""
        kind = node.kind()
        if kind == "prim::GetAttr":
            return getattr(given[0], node.s("name"))
        if kind == "prim::SetAttr":
            return setattr(given[0], node.s("name"), given[1])
        if kind == "prim::CallMethod":
            return self._method(given[0], node.s("name"), given[1:])
        if kind == "prim::CallFunction":
            function = called(next(node.inputs()))
            if isinstance(function, torch.jit.ScriptFunction):
                return _Run(self.owner).graph(function.graph, tuple(given[1:]))
            return function(*given[1:])
        if kind == "prim::If":
            return self.block([*node.blocks()][not given[0]])
        if kind == "prim::Loop":
            return self._loop(node, given)
        return plain_operation(node)(*given)

    def _method(self, owner: Any, name: str, args: list[Any]) -> Any:
        if _OVERLOAD.sub("", name) == "forward":
            return owner(*args)
        return owner.call(name, tuple(args)) if isinstance(owner, Written) else getattr(owner, name)(*args)

    def _loop(self, node: Any, given: list[Any]) -> list[Any]:
        """Its inputs: how often at most, whether to begin, and what each round hands on to the next."""
        most, going, *carried = given
        (block,) = node.blocks()
        names = [value.debugName() for value in block.inputs()]
        turn = 0
        while turn < most and going:
            self.values.update(zip(names, (turn, *carried), strict=True))
            going, *carried = self.block(block)
            turn += 1
        return carried


#: Nodes whose outputs are counted, even if there is one.
_SEVERAL = ("prim::If", "prim::Loop", "prim::ListUnpack", "prim::TupleUnpack")
