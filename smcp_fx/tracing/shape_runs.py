"""Runs of a graph on shapes only, which are fast, to rule out sizes that a network does not accept.

A network's assertions often come last. Tensors are on the meta device, where most operations need shapes only. The
refusal of a size is believed if the same run gets the example itself right. An accepted size must still be run, as
the meta device refuses less.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.tracing.example_runs import in_all_modes
from smcp_fx.tracing.known_results import known_result, on_meta
from smcp_fx.tracing.modes import Choice, conditions, is_by_mode
from smcp_fx.tracing.operations import operation_name, result_of
from smcp_fx.tracing.trees import mapped
from smcp_fx.tracing.values import held, info_of, plain_lists

_META = torch.device("meta")
#: Comparisons may compare devices; elsewhere a device is the place for a new tensor.
_COMPARISONS = (operator.eq, operator.ne, operator.is_, operator.is_not)
#: Layers that the meta device runs step by step.
_RECURRENT = ("gru", "lstm", "recurrent", "rnn")


class _UntoldError(Exception):
    """Only a run of the network itself can decide."""


class ShapeRuns:
    """Runs of one traced network on shapes; ``values``: those of the example ``inputs``."""

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any], inputs: tuple[Any, ...]) -> None:
        self.module, self.values = module, values
        self.when = conditions(module.graph.nodes)
        self.modules = dict(module.named_modules())
        self._copies: dict[str, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}  # those on the meta device, by the ids of the module's own
        try:
            shapes = self._run(inputs)
            recorded, there = (
                pytree.tree_flatten({name: run[name] for name in values}) for run in (values, shapes)
            )
            self._believed = recorded == there
        except Exception:  # the meta device does not know every operation
            self._believed = False

    def refuse(self, inputs: tuple[Any, ...]) -> bool:
        """Does the network certainly not accept these inputs?"""
        if not self._believed:
            return False
        try:
            self._run(inputs)
        except (_UntoldError, NotImplementedError):  # NotImplementedError: of the meta device
            return False
        except Exception:  # the example itself ran without an error
            return True
        return False

    def _run(self, example: tuple[Any, ...]) -> dict[str, Any]:
        def run(modes: Mapping[str, bool]) -> dict[str, Any]:
            inputs = mapped(lambda v: on_meta(v) if isinstance(v, Tensor) else v, example)
            return _Run(self, modes).run(inputs)

        with torch.no_grad(), torch.device("meta"):
            return in_all_modes(self.when, run)

    def tensor(self, own: Tensor) -> Tensor:
        """A tensor of the module on the meta device."""
        if id(own) not in self._tensors:
            self._tensors[id(own)] = on_meta(own)
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
        self._devices = False  # devices are replaced
        self._results: dict[fx.Node, Any] = {}

    def run(self, tensors: tuple[Any, ...]) -> dict[str, Any]:
        """The values of the nodes that run."""
        inputs, values = iter(tensors), {}
        for node in self.runs.module.graph.nodes:
            if not self.choice.runs(node):
                self._results[node] = None
                continue
            result = self._result(node, inputs)
            if isinstance(result, torch.device):
                result, self._devices = self.runs.values[node.name], True
            self._results[node] = result
            values[node.name] = info_of(result)
        return values

    def _result(self, node: fx.Node, inputs: Any) -> Any:
        if node.op == "placeholder":
            return next(inputs, node.args[0] if node.args else None)
        if node.op == "get_attr":
            value = held(self.runs.module, str(node.target))
            if type(value) is bool:  # a module's mode, which the example run has set
                return self.runs.values[node.name]
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
        made = known_result(node, module, args, kwargs)
        if made is not None:
            return made
        if module is not None and name is None:
            raise _UntoldError
        copied = None if module is None else self.runs.copied(str(node.target))
        return result_of(node, copied, args, kwargs)
