"""Run a model whose regions are graphs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import InputError, PassError
from smcp_fx.regions.finding import Region
from smcp_fx.regions.wiring import Source
from smcp_fx.tracing import block_hooks
from smcp_fx.tracing.copying import TABLES, sharing
from smcp_fx.tracing.graph_pickle import check_pickles, listed, rebuilt
from smcp_fx.tracing.modes import with_branches

#: In a node's meta: the number of the region's call it belongs to.
CALL = "smcp_call"


@dataclass(frozen=True)
class Joined:
    """Plain data about a joined graph, shared by copies of a model.

    The graph's output is a tuple with a tuple of tensors for each call. ``first[i]`` is the number of region i's
    first call; ``sources[i]`` says where that call's inputs come from: outputs of other calls, or the placeholders
    that ``names[i]`` lists in the same order. ``calls``: every call's region, and its placeholders with their
    positions among its tensors.
    """

    regions: tuple[Region, ...]
    first: tuple[int, ...]
    sources: tuple[tuple[Source, ...], ...]
    names: tuple[tuple[str, ...], ...]
    stopped: dict[str, str]
    calls: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


class RegionForward:
    """Replaces a module's forward: flattens its arguments, runs the graph, and restores the output's structure.

    The graph's modules and tensors are found in ``owner``, which is the module itself or the model.
    """

    def __init__(
        self, owner: nn.Module, graph: fx.Graph, region: Region, signature: inspect.Signature
    ) -> None:
        self.owner = owner
        self.path, self.form, self.output = region.path, region.form, region.output
        plain = (p.replace(annotation=p.empty) for p in signature.parameters.values())
        self.signature = inspect.Signature(list(plain))
        self.module = sharing(owner, graph)
        self.busy = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; raises `InputError` for arguments of another structure than it was traced with."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        leaves, structure = pytree.tree_flatten((bound.args, bound.kwargs))
        constants = tuple((place, leaf) for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        if structure != self.form.structure or constants != self.form.constants:
            traced_with = _told(self.form.structure, self.form.constants)
            called_with = _told(structure, constants)
            raise InputError(
                f"{self.path!r} runs as a graph, traced with {traced_with}; it is now called with {called_with}. "
                "Prepare the model with example inputs for which it is called in this way, or with "
                f"leaves=[{self.path!r}]."
            )
        if self.busy:  # the graph of a layer calls the layer itself, with another weight
            plain = self.owner.get_submodule(self.path)
            return type(plain).forward(plain, *args, **kwargs)
        self.module.training = self.owner.training
        self.busy, root = True, "" if vars(self.owner).get("forward") is self else self.path
        try:
            output = block_hooks.call(self.module, self.module, self.form.tensors(leaves), {}, root)
        finally:
            self.busy = False
        return output[0] if self.output is None else pytree.tree_unflatten(list(output), self.output)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionForward:
        copied = RegionForward.__new__(RegionForward)
        memo[id(self)] = copied
        # The owner's copy may not have its tables yet; the memo makes them the same objects.
        kept, graph = copy.deepcopy(self._kept(), memo), copy.deepcopy(self.module.graph)
        copied._set(kept, graph)
        return copied

    def __getstate__(self) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        """Raises `CheckpointError` for a graph that calls a function that no module holds by name."""
        where = f"region {self.path!r}"
        check_pickles((self.form, self.output, self.signature), where)
        return self._kept(), listed(self.module.graph, where)

    def __setstate__(self, state: tuple[dict[str, Any], list[tuple[Any, ...]]]) -> None:
        kept, nodes = state
        self._set(kept, rebuilt(nodes))

    def _kept(self) -> dict[str, Any]:
        """All attributes but the graph, and the owner's tables: a copy's owner may not have them yet."""
        rest = {name: value for name, value in vars(self).items() if name not in ("module", "busy")}
        return {**rest, "tables": {table: self.owner.__dict__[table] for table in TABLES}}

    def _set(self, kept: dict[str, Any], graph: fx.Graph) -> None:
        tables = nn.Module()
        tables.__dict__.update(kept.pop("tables"))
        self.__dict__.update(kept, module=sharing(tables, graph), busy=False)


def _told(structure: pytree.TreeSpec, constants: tuple[tuple[int, Any], ...]) -> str:
    fixed = dict(constants)
    leaves = [repr(fixed[place]) if place in fixed else "tensor" for place in range(structure.num_leaves)]
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    words = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
    return f"({', '.join(words)})".replace("'tensor'", "tensor")


def runs_in_regions(model: nn.Module) -> bool:
    """Whether `run_by_graphs` was applied to the model or a part of it."""
    return any(isinstance(vars(module).get("forward"), RegionForward) for module in model.modules())


def graph_of(module: nn.Module) -> nn.Module:
    """A region's graph, which takes and returns its tensors one by one; any other module itself."""
    forward = vars(module).get("forward")
    return forward.module if isinstance(forward, RegionForward) else module


def run_by_graphs(model: nn.Module, graph: fx.Graph, joined: Joined, *, alone: bool = False) -> None:
    """Make the model's regions run the joined graph.

    ``alone``: each region's graph refers only to what is inside its module, so that the module can be taken out of
    the model; otherwise it refers to the whole model (where masks are).
    """
    for index, region in enumerate(joined.regions):
        module = model.get_submodule(region.path)
        module.__dict__.pop("forward", None)
        part = _extract(graph, joined, index)
        if any(node.op == "call_module" and node.target == region.path for node in part.nodes):
            continue  # a layer, whose graph is a call to itself
        owner = model
        if alone:
            _relative(part, region.path)
            owner = module
        module.__dict__["forward"] = RegionForward(owner, part, region, inspect.signature(module.forward))


def _extract(graph: fx.Graph, joined: Joined, index: int) -> fx.Graph:
    """The part of the joined graph that is a region's first call."""
    nodes = {node.name: node for node in graph.nodes}
    end = next(node for node in graph.nodes if node.op == "output")
    number = joined.first[index]
    every: Any = end.args[0]
    results = every[number]
    part = fx.Graph()
    placed: dict[fx.Node, fx.Node] = {}
    for place, (source, name) in enumerate(zip(joined.sources[index], joined.names[index], strict=True)):
        start = part.placeholder(f"tensor_{place}")
        start_node = nodes[name] if source.call is None else every[source.call][source.place]
        placed.setdefault(start_node, start)
        block_hooks.merge_numbers(start, [start_node])
    wanted = [node for node in graph.nodes if node.meta.get(CALL) == number]
    needed = set(_reaching([*wanted, *pytree.tree_leaves(results)], placed))
    for node in graph.nodes:
        if node in needed:
            if node.op == "placeholder":
                raise PassError(
                    f"region {joined.regions[index].path!r} needs {node.name!r}, which is not its input"
                )
            placed[node] = part.node_copy(node, lambda n: placed[n])
    part.output(fx.node.map_arg(results, lambda n: placed[n]))
    part.lint()
    return with_branches(part)


def _reaching(ends: list[Any], ours: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """The nodes that ``ends`` depend on, back to ``ours``."""
    seen: set[fx.Node] = set(ours)
    stack = [node for node in ends if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
            yield node


def _relative(graph: fx.Graph, path: str) -> None:
    """Name modules and tensors relative to the module at ``path``."""
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            target = str(node.target)
            if not target.startswith(path + "."):
                raise PassError(f"region {path!r} reads {target!r}, which is not inside it")
            node.target = target.removeprefix(path + ".")
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {
            key: (name.removeprefix(path + "."), kind) for key, (name, kind) in stack.items()
        }
