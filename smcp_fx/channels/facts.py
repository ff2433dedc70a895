"""What a traced network says before any channel is followed: the same for every run."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from smcp_fx.channels.assertions import only_asserted
from smcp_fx.channels.computed_weights import computed_weights
from smcp_fx.channels.made_tensors import made_tensors
from smcp_fx.channels.mixed_weights import MixedWeight
from smcp_fx.channels.trail import Computed
from smcp_fx.channels.weight_statistics import WeightStatistics, followed_weights
from smcp_fx.channels.weight_views import Dims, weight_views
from smcp_fx.tracing.aliases import written_buffers
from smcp_fx.tracing.values import TensorInfo, canonical_names


class Facts:
    """Which nodes compute, move or mix weights, and which of them the rules do not see (``hidden``).

    Made from the values at any size; `at` adds what depends on it.
    """

    statistics: dict[fx.Node, WeightStatistics]
    mixed: dict[fx.Node, MixedWeight]

    def __init__(self, module: fx.GraphModule, values: dict[str, Any]) -> None:
        def shape(node: fx.Node) -> tuple[int, ...] | None:
            value = values.get(node.name)
            return value.shape if isinstance(value, TensorInfo) and value.is_continuous else None

        self.module = module
        self.names = canonical_names(module)
        self.written = written_buffers(module)
        self.learned = {name for name, _ in module.named_parameters()}
        self.views: dict[str, tuple[str, Dims]] = {}  # nodes that move a weight's dimensions
        for view in weight_views(module).values():
            places = zip(view.chain, view.dims, strict=True)
            self.views.update((node.name, (str(view.source.target), dims)) for node, dims in places)
        # The rules see neither what only an assertion reads nor what only computes weights.
        self.hidden = only_asserted(module.graph)
        self.made = made_tensors(module, values, self.hidden)
        self.computed: dict[str, str] = {}  # nodes that compute a weight -> the parameter that stands for it
        self.described: dict[str, Computed] = {}  # by that parameter
        for found in computed_weights(module, shape):
            name = self.computed[found.result.name] = self.names.get(found.name, found.name)
            self.described[name] = Computed(found.shape, found.source(module), found.unread)
            self.hidden.update(node.name for node in found.alone)

    def at(
        self,
        values: dict[str, Any],
        turned: Collection[str] = (),
        beside: Mapping[str, tuple[int, int]] | None = None,
    ) -> Facts:
        """The facts at the size of these values. ``turned``, ``beside``: as in `Trail`, where they are known."""
        facts = copy.copy(self)
        facts.hidden = set(self.hidden)
        given = self.computed, self.views, facts.hidden, turned, beside or {}
        facts.statistics, facts.mixed = followed_weights(self.module, values, *given)
        return facts
