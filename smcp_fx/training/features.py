"""Compares the outputs of a student's blocks with its teacher's, on the channels that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.errors import InputError
from smcp_fx.kept_channels import Kept, kept_channels
from smcp_fx.output_kinds import spread
from smcp_fx.prepared import PreparedModel

#: Operations that keep the order of channels.
_IN_PLACE = {
    *("add", "iadd", "add_", "sub", "isub", "mul", "imul", "mul_", "contiguous", "clone", "float", "to"),
    *(
        "relu",
        "relu_",
        "relu6",
        "leaky_relu",
        "elu",
        "gelu",
        "silu",
        "hardswish",
        "sigmoid",
        "tanh",
        "dropout",
    ),
    *(
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "interpolate",
        "batch_norm",
        "group_norm",
        "layer_norm",
    ),
}
#: Modules that move channels.
_MOVING = (nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle, nn.Flatten, nn.Unflatten)


class _Watching(fx.Interpreter):
    """Runs a graph and keeps the values of some of its nodes."""

    def __init__(self, student: fx.GraphModule, nodes: Mapping[fx.Node, str]) -> None:
        super().__init__(student)
        self._nodes = nodes
        self.found: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._nodes:
            self.found[self._nodes[n]] = _as_it_is(value)
        return value


class Student:
    """Calls a network without changing its results, and keeps the outputs of the named blocks."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        self.network, self.names = network, list(names)
        self.found: dict[str, Any] = {}
        graph = isinstance(network, fx.GraphModule)
        self._ends = {name: _end(network, name) for name in names} if graph else {}
        self._masks: tuple[Tensor, Kept] | None = None
        if not graph:
            require_modules(network, names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        if not self._ends:
            with hooked(self.network, self.names) as self.found:
                return self.network(*args, **kwargs)
        if kwargs:
            raise InputError(
                "a watched student takes positional inputs: give them in the order of its forward"
            )
        running = _Watching(self.network, {node: name for name, node in self._ends.items()})  # type: ignore[arg-type]
        outputs = running.run(*args)
        self.found = running.found
        return outputs

    def kept(self, name: str) -> list[int] | None:
        """Return the teacher's channels that a block keeps, in its order; None without a record of them."""
        if name not in self._ends:
            return None
        return _positions(self.network, self._ends[name], self._record(), name)

    def _record(self) -> Kept:
        if not isinstance(self.network, PreparedModel):
            return getattr(self.network, "kept", {})
        keep = self.network.smcp.keep
        if self._masks is None or not torch.equal(self._masks[0], keep):
            units = self.network.smcp.units_kept()
            self._masks = keep.clone(), kept_channels(self.network.channels, units)
        return self._masks[1]

    def distances(self, teacher: Mapping[str, Any]) -> list[Tensor]:
        """Return each block's squared error relative to the variance of the teacher's output.

        Outputs count once: the next distances need another call of the student.
        """
        own, self.found = self.found, {}
        return [_distance(name, own[name], teacher[name], self.kept(name)) for name in self.names]


def require_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Raise `InputError` if a model lacks one of these modules."""
    have = dict(model.named_modules())
    if lacking := [name for name in names if name not in have or not name]:
        near = [name for name in have if name and name.count(".") == 0]
        raise InputError(
            f"features= names {lacking[0]!r}, which is no module; the model has {', '.join(near)}, ..."
        )


@contextmanager
def hooked(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a dict that collects the outputs of the named modules inside the context."""
    features: dict[str, Any] = {}

    def keeping(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: features.update({name: _as_it_is(output)})

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keeping(name)).remove)
        yield features


def _as_it_is(value: Any) -> Any:
    """Return a copy of a tensor: later nodes may write into it."""
    return value.clone() if isinstance(value, Tensor) else value


def _end(network: nn.Module, name: str) -> fx.Node:
    """Return the last node of a block."""
    assert isinstance(network, fx.GraphModule)
    inside = [node for node in network.graph.nodes if name in _paths(node)]
    if not inside:
        raise InputError(f"features= names {name!r}, of which the student has nothing")
    last: fx.Node = inside[-1]
    return last


def _paths(node: fx.Node) -> list[str]:
    """Return the paths of the modules that hold a node, outermost first."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _positions(network: nn.Module, node: fx.Node, kept: Kept, name: str) -> list[int]:
    """Search back for a layer whose outputs a node holds; return its kept output channels."""
    waiting = [node]
    while waiting:
        here = waiting.pop(0)
        path = (_paths(here) or [""])[-1]
        if path in kept:
            return kept[path][1]
        target = here.target if isinstance(here.target, str) else getattr(here.target, "__name__", "")
        module = network.get_submodule(target) if here.op == "call_module" else None
        if target in _IN_PLACE or not (module is None or isinstance(module, _MOVING)):
            waiting += here.all_input_nodes
    raise InputError(
        f"which channels of {name!r} are kept cannot be told, as they are put together anew in it: name a "
        "convolution, linear or batch norm in features="
    )


def _distance(name: str, student: Any, teacher: Any, kept: list[int] | None) -> Tensor:
    if not isinstance(student, Tensor) or not isinstance(teacher, Tensor):
        raise InputError(f"features= names {name!r}, whose output is no tensor: name a module inside it")
    index = None if kept is None else torch.tensor(kept, device=teacher.device)
    for dim in ([1] if teacher.dim() != 3 else [2, 1])[: teacher.dim() - 1]:
        if index is not None and index.numel() and int(index.max()) < teacher.shape[dim]:
            ours = teacher.index_select(dim, index)
            whole = student.shape == teacher.shape  # a prepared model, which has all channels
            theirs = student.index_select(dim, index) if whole else student
            if ours.shape == theirs.shape:
                student, teacher = theirs, ours
                break
    if student.shape != teacher.shape:
        raise InputError(
            f"{name!r} gives {list(student.shape)} in the student, {list(teacher.shape)} in the teacher, and which "
            "channels are kept is not known: watch the graph that convert(prepared) returns"
        )
    student, teacher = student.float(), teacher.float()
    error: Tensor = (student - teacher).square().mean()
    return error / spread(teacher).clamp_min(torch.finfo(torch.float32).tiny)
