"""Modules that initialise themselves in their first call, by its data, and raise a flag: ActNorm, quantisers.

    if not self.initialised: self.scale.data.copy_(1 / x.std((0, 2, 3))); self.initialised.fill_(1)

A graph would do so in every call. Until they have, they are called as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.tracing.copying import deep_copy
from smcp_fx.tracing.aliases import memory_of_model
from smcp_fx.tracing.operations import writes_in_place
from smcp_fx.tracing.sentences import listed_paths

#: Why a module's channels stay that initialises itself.
INITIALISES = "initialises itself in its first call: let the model see a batch in train mode, then prepare it"


class InitialisesItselfError(TraceError):
    """The modules of these ``paths`` do in their first call what they never do again."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        super().__init__(f"{listed_paths(sorted(paths))} {INITIALISES}.")


class Flags:
    """The flags of a model before it is traced: truth values, and buffers of integers and truth values."""

    def __init__(self, model: nn.Module) -> None:
        self._before = _flags(model)

    def raised(self, model: nn.Module, graph: fx.Graph) -> set[tuple[str, str]]:
        """Those that are others now, of modules into whose parameters or buffers the graph writes."""
        after = _flags(model)
        changed = {key for key, value in self._before.items() if after.get(key) != value}
        memory = memory_of_model(model, graph) if changed else {}
        written = {
            memory[node.args[0]].rpartition(".")[0]
            for node in graph.nodes
            if changed and node.args and node.args[0] in memory and writes_in_place(node, model)
        }
        return {key for key in changed if key[0] in written}

    def once(
        self,
        raised: set[tuple[str, str]],
        model: nn.Module,
        inputs: tuple[Any, ...],
        modes: Mapping[str, bool],
    ) -> set[str]:
        """The modules whose flags of these a first call changes, and a second does not."""
        copied = deep_copy(model)
        for path, module in copied.named_modules():
            module.training = modes.get(path, False)
        found = [_flags(copied)]
        with torch.no_grad(), torch.random.fork_rng():
            for _ in range(2):
                copied(*pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, inputs))
                found.append(_flags(copied))
        first, second, third = ({key: each.get(key) for key in raised} for each in found)
        return {key[0] for key in raised if first[key] != second[key] and second[key] == third[key]}


def may_be_initialised(model: nn.Module) -> Iterator[Tensor]:
    """The parameters of modules, but torch's own, that hold a flag."""
    for module in model.modules():
        own = type(module).__module__.startswith("torch.")
        if module._parameters and not own and any(path == "" for path, _ in _flags(module)):
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def _flags(model: nn.Module) -> dict[tuple[str, str], Any]:
    plain = {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is bool and name != "training"
    }
    buffers = {
        (path, name): buffer.tolist()
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if type(buffer) is Tensor and not buffer.is_floating_point() and buffer.numel() == 1
    }
    return plain | buffers
