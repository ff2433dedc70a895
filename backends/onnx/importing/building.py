"""Builds the graph of a network: folds constants, and tracks each value's sizes at two examples."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.file import OnnxFile
from smcp_fx.backends.onnx.importing.interface import Shapes
from smcp_fx.backends.onnx.importing.sizes import Size, SizeArray
from smcp_fx.errors import InputError, first_line

#: Most elements of one computed value, and of all computed constants together: 1 and 4 GiB of float32.
_MOST_VALUE, _MOST_CONSTANTS = 2**28, 2**30


#: Most elements of a value that follows from sizes alone and is computed at the examples.
_MOST_KNOWN = 2**20


class SizesError(InputError):
    """The network does not accept values of these sizes; it may accept others."""


class Builder:
    """A graph, the modules and tensors that it reads, and the counterpart of each value of the file.

    A value is a tensor if it is constant; else an `fx.Node`, a `SizeArray`, or a list of values (a sequence).
    """

    def __init__(self, file: OnnxFile, shapes: tuple[Shapes, Shapes], opened: bool = False) -> None:
        self.file = file
        self._batches = (shapes[0][0][0], shapes[1][0][0]) if opened else None
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.values: dict[str, Any] = {"": None}
        self.examples: dict[fx.Node, tuple[Any, Any]] = {}
        #: Layers' parameters by the ids of the layer's matrix and of the value, both kept with it.
        self.shared: dict[tuple[int, int], tuple[Tensor, Tensor, nn.Parameter]] = {}
        self._named: dict[int, tuple[str, Tensor]] = {}  # constants that the file names
        self._placed: dict[int, fx.Node] = {}  # constants that the graph reads
        self._paths: set[str] = set()
        self._computed = 0
        for index, port in enumerate(file.interface.inputs):
            node = self.graph.placeholder(identifier(port.name))
            at = tuple(torch.empty(shape[index], dtype=port.dtype, device="meta") for shape in shapes)
            self.examples[node] = (at[0], at[1])
            self.values[port.name] = node
        self.first = self.values[file.interface.inputs[0].name]

    # ---- what rules emit ----------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function: now if all its arguments are constant, in the graph otherwise."""
        return self._called("call_function", function, function, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tensor's method; the tensor is the first argument."""

        def function(tensor: Tensor, *rest: Any, **named: Any) -> Any:
            return getattr(tensor, name)(*rest, **named)

        return self._called("call_method", name, function, args, kwargs)

    def module(self, path: str, module: nn.Module, *args: Any) -> fx.Node:
        """Call a module, placed at this path or at a similar free one."""
        tensors = {
            name: torch.empty_like(value, device="meta")
            for name, value in (*module.named_parameters(), *module.named_buffers())
        }

        def function(*rest: Any) -> Any:
            return torch.func.functional_call(module, tensors, pytree.tree_map_only(Tensor, _on_meta, rest))

        at = [self._at(function, (args, {}), which) for which in (0, 1)]
        return self._added("call_module", self.place(path, module.eval()), (args, {}), at)

    def given_examples(
        self, function: Callable[..., Any], args: tuple[Any, ...], at: tuple[Any, Any]
    ) -> fx.Node:
        """Call a function in the graph whose result's sizes depend on data; ``at``: example results."""
        return self._added("call_function", function, (args, {}), list(at))

    def item(self, node: fx.Node, index: int) -> Any:
        """Return an element of a node's result."""
        return self.call(operator.getitem, node, index)

    def full(self, sizes: Sequence[Any], value: float | bool, dtype: torch.dtype) -> Any:
        """Return a tensor of one value, on the device of the first input."""
        if not self._varies(tuple(sizes)):
            return self.call(torch.full, tuple(sizes), value, dtype=dtype)
        return self.method("new_full", self.first, tuple(sizes), value, dtype=dtype)

    def tensor(self, sizes: SizeArray) -> fx.Node:
        """Return sizes as a tensor, on the device of the first input."""
        nested = sizes.values.tolist()
        return self.call(torch.tensor, nested, dtype=sizes.dtype, device=self.device)  # type: ignore[no-any-return]

    @property
    def device(self) -> fx.Node:
        """The device of the first input, for calls that make tensors."""
        node = self.graph.call_function(getattr, (self.first, "device"))
        self.examples[node] = (torch.device("cpu"),) * 2
        return node

    # ---- what rules ask -----------------------------------------------------------------------------------

    def shapes(self, value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a tensor's sizes at both examples."""
        if isinstance(value, fx.Node):
            at = self.examples[value]
            return tuple(at[0].shape), tuple(at[1].shape)
        if isinstance(value, SizeArray):
            return (value.values.shape,) * 2
        return (tuple(value.shape),) * 2

    def rank(self, value: Any) -> int | None:
        """Return how many axes a value has; None if it is no tensor."""
        if value is None or isinstance(value, (list, int)):
            return None
        if isinstance(value, fx.Node) and not isinstance(self.examples[value][0], Tensor):
            return None
        return len(self.shapes(value)[0])

    def dtype(self, value: Any) -> torch.dtype:
        """Return a value's type."""
        result: torch.dtype = (self.examples[value][0] if isinstance(value, fx.Node) else value).dtype
        return result

    def size(self, value: Any, axis: int) -> Any:
        """Return a size of a tensor: a number if both examples agree, else a `Size`."""
        at = tuple(shape[axis] for shape in self.shapes(value))
        if at[0] == at[1]:
            return at[0]
        return Size(self.graph.call_method("size", (value, axis)), (at[0], at[1]))

    def known(self, value: Any) -> tuple[Tensor, Tensor] | None:
        """Return a tensor's values at both examples if they follow from sizes alone; else None."""
        at: tuple[Tensor, Tensor] = self.examples[value]
        return None if any(tensor.is_meta for tensor in at) else at

    def has_opened_batch(self, value: Any) -> bool:
        """Is a value's first axis the batch, which the file fixes to one sample and the import opened?"""
        at = self.shapes(value)
        return self._batches is not None and bool(at[0]) and (at[0][0], at[1][0]) == self._batches

    # ---- constants, modules and names ---------------------------------------------------------------------

    def name(self, tensor: Tensor, name: str) -> Tensor:
        """Remember the file's name of a constant."""
        self._named[id(tensor)] = (name, tensor)
        return tensor

    def name_of(self, value: Any) -> str:
        """Return the file's name of a constant; "" if it has none."""
        return self._named[id(value)][0] if id(value) in self._named else ""

    def place(self, path: str, content: nn.Module | Tensor) -> str:
        """Put a module or tensor at a path, or at a similar free one; return the path used."""
        *folders, last = path.split(".")
        owner, prefix = self.root, ""
        for folder in folders:
            while f"{prefix}{folder}" in self._paths or (
                hasattr(owner, folder) and folder not in owner._modules
            ):
                folder += "_"  # a layer, or a name of nn.Module's own
            if folder not in owner._modules:
                owner.add_module(folder, nn.Module())
            owner, prefix = owner.get_submodule(folder), f"{prefix}{folder}."
        free, number = last, 1
        while hasattr(owner, free):
            number += 1
            free = f"{last}_{number}"
        if isinstance(content, nn.Module):
            owner.add_module(free, content)
        elif isinstance(content, nn.Parameter):
            owner.register_parameter(free, content)
        else:
            owner.register_buffer(free, content)
        self._paths.add(prefix + free)
        return prefix + free

    def make_room(self, path: str) -> None:
        """Free the path of a folder of weights for the layer made of them, if each weight has one user."""
        folder = dict(self.root.named_modules()).get(path)
        if folder is None or path in self._paths or list(folder.children()):
            return
        names = [f"{path}.{name}" for name in folder._parameters]
        readers = [node for node in self.graph.nodes if node.op == "get_attr" and node.target in names]
        if all(len(node.users) == 1 for node in readers):
            owner, _, last = path.rpartition(".")
            del self.root.get_submodule(owner)._modules[last]
            self._paths -= set(names)

    def placed(self, tensor: Tensor) -> fx.Node:
        """Return the node that reads a constant: a parameter if the file names it and it holds floats."""
        if id(tensor) not in self._placed:
            name = self.name_of(tensor)
            weight = bool(name) and tensor.is_floating_point() and tensor.numel() > 1
            held = nn.Parameter(tensor) if weight else tensor
            path = self.place(attribute_path(name) or "constant", held)
            node = self.graph.get_attr(path)
            meta = torch.empty_like(tensor, device="meta")
            self.examples[node] = (meta, meta)
            self._placed[id(tensor)] = node
            self._named.setdefault(id(tensor), ("", tensor))  # keeps the tensor, so that its id stays unique
        return self._placed[id(tensor)]

    # ---- inside -------------------------------------------------------------------------------------------

    def _called(self, op: str, target: Any, function: Callable[..., Any], *args: Any) -> Any:
        if not self._varies(args):
            return self._folded(function, *args)
        return self._added(op, target, args, [self._at(function, args, which) for which in (0, 1)])

    def _varies(self, args: Any) -> bool:
        nodes = []
        map_aggregate(args, lambda leaf: nodes.append(leaf) if isinstance(leaf, (fx.Node, Size)) else None)
        return bool(nodes)

    def _at(self, function: Callable[..., Any], given: Any, which: int) -> Any:
        """Return a function's result at an example: sizes, or a small result's values if they are known."""

        def example(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return self.examples[leaf][which]
            return leaf.at[which] if isinstance(leaf, Size) else leaf

        known = map_aggregate(given, example)
        args, kwargs = pytree.tree_map_only(Tensor, _on_meta, known)
        try:
            with torch.device("meta"), torch.no_grad():
                found = function(*args, **kwargs)
            self._check_size(found)
            read = [leaf for leaf in pytree.tree_leaves(known) if isinstance(leaf, Tensor)]
            made = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
            small = sum(leaf.numel() for leaf in made) <= _MOST_KNOWN
            if small and self._varies(given) and not any(leaf.is_meta for leaf in read):
                with torch.no_grad():
                    found = function(*known[0], **known[1])
        except InputError:
            raise
        except Exception as error:
            told = [tuple(leaf.shape) for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            why = first_line(error).rstrip(".")
            raise SizesError(f"values of sizes {told} do not go through it: {why}") from error
        return found

    def _check_size(self, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() > _MOST_VALUE:
                raise SizesError(
                    f"it makes a value of sizes {tuple(leaf.shape)}: more than {_MOST_VALUE} elements"
                )

    def _folded(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self._at(function, (args, kwargs), 0)
        except SizesError as error:
            if "elements" in str(error):
                raise
        try:
            with torch.no_grad():
                result = function(*args, **kwargs)
        except Exception as error:
            raise InputError(f"constants do not go through it: {error}") from error
        self._computed += sum(v.numel() for v in pytree.tree_leaves(result) if isinstance(v, Tensor))
        if self._computed > _MOST_CONSTANTS:
            raise SizesError(f"constants of more than {_MOST_CONSTANTS} elements are computed")
        return result

    def _added(self, op: str, target: Any, given: Any, at: Sequence[Any]) -> fx.Node:
        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Size):
                return leaf.node
            return self.placed(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_aggregate(given, argument)
        node = self.graph.create_node(op, target, args, kwargs)
        self.examples[node] = (at[0], at[1])
        return node


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def identifier(name: str) -> str:
    """Return a name of the file as a Python identifier."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return f"_{plain}" if not plain or plain[0].isdigit() else plain


def attribute_path(name: str) -> str:
    """Return a name of the file as a path of modules and attributes; "" if nothing is left of it."""
    parts = [re.sub(r"\W+", "_", part, flags=re.ASCII).strip("_") for part in re.split(r"[./]+|::", name)]
    return ".".join(part for part in parts if part)


def module_path(call: Call, weight: str) -> str:
    """Return a layer's path: its weight's, or else the module path in the node's name.

    TorchScript's exporter writes /layer1/layer1.0/conv1/Conv for layer1.0.conv1.
    """
    for ending in (".weight", ".w_0", "_weight", ".W"):
        if weight.endswith(ending) and "::" not in weight:
            return attribute_path(weight.removesuffix(ending))
    if call.proto.name.startswith("/"):
        parts: list[str] = []
        for part in call.proto.name.split("/")[1:-1]:
            parts = (
                [part] if parts and part.startswith(f"{parts[-1]}.") and len(parts) == 1 else [*parts, part]
            )
            if len(parts) > 1 and parts[-1].startswith(f"{parts[-2]}."):
                parts = [*parts[:-2], parts[-1]]
        if path := attribute_path(".".join(parts)):
            return path
    return attribute_path(call.name) or call.kind.lower()
