"""Runs a graph node by node over all batches, so that a layer can be fitted to its inputs before it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.calibration.batches import Batch, refused
from smcp_fx.errors import SmcpError
from smcp_fx.tracing.modes import ModeInterpreter
from smcp_fx.tracing.values import plain_lists

Values = dict[fx.Node, Any]
T = TypeVar("T")


class Frontier(ModeInterpreter):
    """A graph in eval mode, and for each batch the values that later nodes will read.

    ``at`` is the index of the next node. No gradients are kept.
    """

    def __init__(self, module: fx.GraphModule, batches: Iterable[Batch]) -> None:
        super().__init__(module)
        self.nodes = list(module.graph.nodes)
        self.by_name = {node.name: node for node in self.nodes}
        self._place = {node: index for index, node in enumerate(self.nodes)}
        self._signature = inspect.signature(module.forward)
        self.batches = list(batches)
        self.values: list[Values] = [{} for _ in self.batches]
        self._inputs = [self._bound(batch) for batch in self.batches]
        self.at = 0

    def advance(self, node: fx.Node, past: bool = True) -> None:
        """Run all batches up to a node, and the node itself if ``past``, unless they are there already."""
        stop = self._place[node] + past
        while self.at < stop:
            current = self.nodes[self.at]
            for index, values in enumerate(self.values):
                self._run(index, values, current)
            self.at += 1

    def ahead(
        self, index: int, nodes: set[fx.Node], read: Callable[[fx.Node, Values], T]
    ) -> dict[fx.Node, T]:
        """Run a copy of a batch ahead, and return ``read(node, values)`` at each of ``nodes``.

        The batch itself does not advance.
        """
        results: dict[fx.Node, T] = {}
        last = max(self._place[node] for node in nodes)
        values = {node: pytree.tree_map(_copied, value) for node, value in self.values[index].items()}
        for node in self.nodes[self.at : last + 1]:
            self._run(index, values, node, keep=nodes)
            if node in nodes:
                results[node] = read(node, values)
        return results

    def join(self, batch: Batch) -> None:
        """Add another batch, and run it as far as the others."""
        self.batches.append(batch)
        self.values.append({})
        self._inputs.append(self._bound(batch))
        for node in self.nodes[: self.at]:
            self._run(-1, self.values[-1], node)

    def still_to_hold(self, batch: Batch) -> dict[str, int]:
        """Return, for each node's name, the peak bytes of the batch's values from there on."""
        values: Values = {}
        self._inputs.append(self._bound(batch))
        self.batches.append(batch)
        held, sizes = list[int](), dict[fx.Node, dict[tuple[torch.device, int], int]]()
        for node in self.nodes:
            self._run(-1, values, node)
            if node in values:
                sizes[node] = _sizes(values[node])
            sizes_of = dict[tuple[torch.device, int], int]()
            for value in values:
                sizes_of.update(sizes[value])
            held.append(sum(sizes_of.values()))
        self._inputs.pop()
        self.batches.pop()
        most = list(accumulate(reversed(held), max))[::-1]
        return {node.name: size for node, size in zip(self.nodes, most, strict=True)}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Pass lists as the generated code does: functions may write into them."""
        return plain_lists(super().fetch_args_kwargs_from_env(n))

    def _run(self, index: int, values: Values, node: fx.Node, keep: set[fx.Node] | None = None) -> None:
        self.env = values
        if node.op == "placeholder":
            self.args_iter = iter(pytree.tree_map(_copied, self._inputs[index][node]))  # may be written into
        try:
            with torch.no_grad():
                values[node] = self.run_node(node)
        except (SmcpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise refused(self.module, self.batches[index], error) from error
        for dead in self.user_to_last_uses.get(node, ()):
            if not (keep and any(dead in reader.all_input_nodes for reader in keep)):
                values.pop(dead, None)

    def _bound(self, batch: Batch) -> dict[fx.Node, list[Any]]:
        """Return the argument of each placeholder."""
        try:
            bound = self._signature.bind(*batch.args, **batch.kwargs)
        except TypeError as error:
            raise refused(self.module, batch, error) from error
        bound.apply_defaults()
        graph: Any = self.module.graph
        inputs = list(graph.process_inputs(*bound.args, **bound.kwargs))
        places = [node for node in self.nodes if node.op == "placeholder"]
        return {
            node: inputs[place:] if str(node.target).startswith("*") else inputs[place : place + 1]
            for place, node in enumerate(places)
        }


def _sizes(value: Any) -> dict[tuple[torch.device, int], int]:
    """Return the bytes of each storage that a value occupies, by device and address."""
    return {
        (leaf.device, leaf.untyped_storage().data_ptr()): leaf.untyped_storage().nbytes()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and not leaf.requires_grad
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) else value
