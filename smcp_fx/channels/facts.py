"""Facts about a traced network, found before any channel is followed and shared by all runs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from smcp_fx.channels.computed_weights import computed_weights
from smcp_fx.channels.made_tensors import made_tensors
from smcp_fx.channels.mixed_weights import MixedWeight, MixedWeights
from smcp_fx.channels.trail import Computed
from smcp_fx.channels.weight_statistics import WeightStatistics, read_alike, weight_statistics
from smcp_fx.channels.weight_views import Dims, weight_views
from smcp_fx.tracing.aliases import written_buffers
from smcp_fx.tracing.values import TensorInfo, canonical_names

#: The rules for nodes that read a weight computed from the input, and for nodes that end a weight statistic.
MIXTURE, STATISTIC = "mixture", "statistic"


class Facts:
    """Which nodes compute, move or mix weights, and which of them the rules skip (``hidden``).

    Made from the values at any size of the images; `at` adds the facts that depend on the size.
    """

    statistics: dict[fx.Node, WeightStatistics]  # by the nodes that they end in
    mixed: dict[fx.Node, MixedWeight]  # weights computed from the input, by their layers
    kinds: dict[fx.Node, str]  # the rules of these nodes

    def __init__(self, module: fx.GraphModule, values: dict[str, Any]) -> None:
        def shape(node: fx.Node) -> tuple[int, ...] | None:
            value = values.get(node.name)
            return value.shape if isinstance(value, TensorInfo) and value.is_continuous else None

        self.module = module
        self.names = canonical_names(module)
        self.written = written_buffers(module)
        self.learned = {name for name, _ in module.named_parameters()}
        self.views: dict[str, tuple[str, Dims]] = {}  # nodes that move a weight's dimensions
        for node, view in weight_views(module, shape).items():
            self.views[node.name] = str(view.source.target), view.dims
        # The rules skip nodes that only an assertion reads, and nodes that only compute weights.
        self.hidden = _only_asserted(module.graph)
        self.made = made_tensors(module, values, self.hidden)
        self.computed: dict[str, str] = {}  # nodes that compute a weight -> its name
        self.described: dict[str, Computed] = {}  # by that name
        for weight in computed_weights(module, shape):
            name = self.computed[weight.result.name] = self.names.get(weight.name, weight.name)
            self.described[name] = Computed(weight.shape, weight.source(module), weight.unread)
            self.hidden.update(node.name for node in weight.alone)

    def at(
        self,
        values: dict[str, Any],
        turned: Collection[str] = (),
        beside: Mapping[str, tuple[int, int]] | None = None,
    ) -> Facts:
        """The facts at the size of these values. ``turned``, ``beside``: as in `Trail`, where they are known."""
        facts, excluded = copy.copy(self), {*self.computed, *self.views}
        statistics = weight_statistics(self.module, values, {*self.hidden, *self.views}, beside or {})
        while True:
            apart = {node for one in statistics for node in (*one.parts, *one.ends)}
            mixed = MixedWeights(self.module, values, self.computed, apart, turned).by_layer(excluded)
            alike = [one for one in statistics if read_alike(one, mixed)]
            if len(alike) == len(statistics):
                break
            statistics = alike
        facts.mixed, facts.statistics = mixed, {end: one for one in statistics for end in one.ends}
        facts.kinds = dict.fromkeys(facts.statistics, STATISTIC) | dict.fromkeys(mixed, MIXTURE)
        facts.hidden = self.hidden.union(n.name for one in (*statistics, *mixed.values()) for n in one.parts)
        return facts


def _only_asserted(graph: fx.Graph) -> set[str]:
    """Nodes that only an assertion reads. It checks the kept channels as it checked all of them."""
    asserted: set[str] = set()
    for node in reversed(graph.nodes):
        read = bool(node.users) and all(user.name in asserted for user in node.users)
        if node.target is torch._assert or (read and node.op in ("call_function", "call_method")):
            asserted.add(node.name)
    return asserted
