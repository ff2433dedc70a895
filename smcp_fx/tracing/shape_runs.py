"""Runs of a graph on shapes only, which are fast, to rule out sizes that a network does not accept.

Its assertions often come last. Tensors are on the meta device, where most operations are known by shape alone. A
refusal is believed where the same run gets the example itself right; sizes that come through have yet to be run, as
operations refuse less there (convolutions of other channels).
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.tracing.example_runs import in_all_modes
from smcp_fx.tracing.modes import Choice, conditions, is_by_mode
from smcp_fx.tracing.operations import operation_name, result_of, writes_in_place
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.trees import leaves_of, mapped
from smcp_fx.tracing.values import TensorInfo, held, info_of, plain_lists

#: Values that `==` compares.
_PLAIN = (
    int,
    float,
    str,
    type(None),
    torch.device,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    slice,
    range,
)
_META = torch.device("meta")
#: Comparisons may compare devices; elsewhere a device is the place for a new tensor.
_COMPARISONS = (operator.eq, operator.ne, operator.is_, operator.is_not)
#: Layers that the meta device runs step by step.
_RECURRENT = ("gru", "lstm", "recurrent", "rnn")
#: Operations whose result has the first operand's shape, whatever the shapes of the others.
_OF_ONE = ("normalize", "roll", "to", "typeas")


class _UntoldError(Exception):
    """Only a run of the network itself can decide."""


class ShapeRuns:
    """Runs of one traced network from shapes; ``values`` are those of the example, which is ``given``."""

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any], given: tuple[Any, ...]) -> None:
        self.module, self.known = module, values
        self.when = conditions(module.graph.nodes)
        self.modules = dict(module.named_modules())
        self._copies: dict[str, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}  # those on the meta device, by the ids of the module's own
        try:
            found = self._run(given)
            self._believed = found.keys() == values.keys() and all(
                _alike(values[name], found[name]) for name in found
            )
        except Exception:  # the meta device does not know every operation
            self._believed = False

    def refuse(self, given: tuple[Any, ...]) -> bool:
        """Does the network certainly not accept these inputs?"""
        if not self._believed:
            return False
        try:
            self._run(given)
        except (_UntoldError, NotImplementedError):  # the latter of the meta device
            return False
        except Exception:  # the example itself ran without an error
            return True
        return False

    def _run(self, given: tuple[Any, ...]) -> dict[str, Any]:
        def run(modes: Mapping[str, bool]) -> dict[str, Any]:
            inputs = mapped(lambda v: _on_meta(v) if isinstance(v, Tensor) else v, given)
            return _Run(self, modes).run(inputs)

        with torch.no_grad(), torch.device("meta"):
            return in_all_modes(self.when, run)

    def tensor(self, own: Tensor) -> Tensor:
        """A tensor of the module on the meta device."""
        if id(own) not in self._tensors:
            self._tensors[id(own)] = _on_meta(own)
        return self._tensors[id(own)]

    def copied(self, path: str) -> nn.Module:
        """A module of torch's own with its tensors on the meta device."""
        if path not in self._copies:
            module = self.modules[path]
            memo: dict[int, Any] = {id(t): self.tensor(t) for t in (*module.parameters(), *module.buffers())}
            self._copies[path] = copy.deepcopy(module, memo).eval()
        return self._copies[path]


class _Run:
    """One run, in eval mode except for ``modes``."""

    def __init__(self, runs: ShapeRuns, modes: Mapping[str, bool]) -> None:
        self.runs = runs
        self.choice = Choice(runs.when, modes=modes)
        self._devices = False  # are there devices to be replaced?
        self._results: dict[fx.Node, Any] = {}

    def run(self, given: tuple[Any, ...]) -> dict[str, Any]:
        """The values of the nodes that run."""
        inputs, values = iter(given), {}
        for node in self.runs.module.graph.nodes:
            if not self.choice.runs(node):
                self._results[node] = None
                continue
            result = self._result(node, inputs)
            if isinstance(result, torch.device):
                result, self._devices = self.runs.known[node.name], True
            self._results[node] = result
            values[node.name] = info_of(result)
        return values

    def _result(self, node: fx.Node, inputs: Any) -> Any:
        if node.op == "placeholder":
            return next(inputs, node.args[0] if node.args else None)
        if node.op == "get_attr":
            value = held(self.runs.module, str(node.target))
            if type(value) is bool:  # a module's mode, which the example run has set
                return self.runs.known[node.name]
            return mapped(lambda v: self.runs.tensor(v) if isinstance(v, Tensor) else v, value)
        if is_by_mode(node):
            return fx.node.map_arg(self.choice.taken(node), self._results.__getitem__)
        args, kwargs = plain_lists(fx.node.map_arg((node.args, node.kwargs), self._results.__getitem__))
        if node.op == "output":
            return args[0]
        module = self.runs.modules[str(node.target)] if node.op == "call_module" else None
        name = operation_name(node, module)
        if name in _RECURRENT:
            raise _UntoldError
        if self._devices and node.target not in _COMPARISONS:
            args, kwargs = mapped(lambda v: _META if isinstance(v, torch.device) else v, (args, kwargs))
        made = self._known(node, name, module, args, kwargs)
        if made is not None:
            return made
        if module is not None and name is None:
            raise _UntoldError
        copied = None if module is None else self.runs.copied(str(node.target))
        return result_of(node, copied, args, kwargs)

    def _known(self, node: fx.Node, name: str | None, module: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Results of operations that are slow on the meta device; None for others, and if they would fail."""
        info = self.runs.known.get(node.name)
        if not isinstance(info, TensorInfo) or "out" in kwargs:
            return None
        given = args[0] if args else None
        if has(name, Trait.ELEMENTWISE) and name not in _OF_ONE:
            operands = [v for v in leaves_of((args, kwargs)) if isinstance(v, Tensor)]
            shape = torch.broadcast_shapes(*(v.shape for v in operands))  # type: ignore[no-untyped-call]
            alike = next((v for v in operands if v.shape == shape), None)
            if not operands or (operands[0].shape != shape and writes_in_place(node, self.runs.module)):
                return None
            return torch.empty(shape, dtype=info.dtype) if alike is None else _like(alike, info)
        if not isinstance(given, Tensor):
            return None
        if name in ("conv1d", "conv2d", "conv3d"):  # the meta device does not check their channels
            weight = args[1] if module is None and len(args) > 1 else getattr(module, "weight", None)
            groups = kwargs.get("groups", args[6] if len(args) > 6 else getattr(module, "groups", 1))
            if weight is None or given.shape[1 - weight.dim()] != weight.shape[1] * groups:
                raise ValueError("the weight is for other channels")
        if name == "identity":
            return given
        if name in _OF_ONE:
            return _like(given, info)
        if name == "batchnorm":
            mean = args[1] if module is None and len(args) > 1 else getattr(module, "running_mean", None)
            fits = isinstance(mean, Tensor) and given.dim() > 1 and given.shape[1] == len(mean)
            return _like(given, info) if fits else None
        if name == "groupnorm":
            groups = args[1] if module is None and len(args) > 1 else getattr(module, "num_groups", 0)
            return _like(given, info) if groups and given.shape[1] % groups == 0 else None
        if name == "interpolate":
            sizes = _interpolated(given, *args[1:3], **kwargs) if module is None else None
            return None if sizes is None else torch.empty((*given.shape[:2], *sizes), dtype=info.dtype)
        if name == "layernorm":
            given_sizes = (
                args[1] if module is None and len(args) > 1 else getattr(module, "normalized_shape", ())
            )
            fits = bool(given_sizes) and given.shape[-len(given_sizes) :] == tuple(given_sizes)
            return torch.empty(given.shape, dtype=info.dtype) if fits else None
        if name == "linear":
            weight = args[1] if module is None and len(args) > 1 else getattr(module, "weight", None)
            if weight is None or weight.dim() != 2 or given.shape[-1] != weight.shape[1]:
                return None
            return torch.empty((*given.shape[:-1], weight.shape[0]), dtype=info.dtype)
        if name == "scaleddotproductattention" and len(args) >= 3:
            query, key, value = args[:3]
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            alike = (
                query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and key.shape[-2] == value.shape[-2]
            )
            scores = torch.Size((*query.shape[:-1], key.shape[-2]))
            fits = mask is None or torch.broadcast_shapes(mask.shape, scores) == scores  # type: ignore[no-untyped-call]
            if alike and fits and query.shape[-1] == key.shape[-1]:
                return torch.empty((*query.shape[:-1], value.shape[-1]), dtype=info.dtype)
        return None


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _like(operand: Tensor, info: TensorInfo) -> Tensor:
    """A tensor with the operand's memory layout."""
    if operand.is_contiguous():
        return torch.empty(operand.shape, dtype=info.dtype)
    return torch.empty_like(operand, dtype=info.dtype)


def _interpolated(given: Tensor, size: Any = None, scale_factor: Any = None, **_: Any) -> list[int] | None:
    sides = given.shape[2:]
    told = scale_factor if size is None else size
    each = told if isinstance(told, (tuple, list)) else [told] * len(sides)
    if len(each) != len(sides) or not all(type(one) in (int, float) for one in each):
        return None
    if size is not None:
        return [int(one) for one in each]
    return [math.floor(side * one) for side, one in zip(sides, each, strict=True)]


def _alike(known: Any, found: Any) -> bool:
    """Are two recorded values the same?"""
    if type(known) is type(found) is TensorInfo:
        return bool(known == found)
    left, right = pytree.tree_flatten(known), pytree.tree_flatten(found)
    return left[1] == right[1] and all(map(_same, left[0], right[0]))


def _same(known: Any, found: Any) -> bool:
    return type(known) is type(found) and isinstance(known, (TensorInfo, *_PLAIN)) and bool(known == found)
