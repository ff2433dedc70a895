"""What a traced network and its recorded values say before any channel is followed: the same for every run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from smcp_fx.channels.assertions import only_asserted
from smcp_fx.channels.computed_weights import computed_weights
from smcp_fx.channels.made_tensors import made_tensors
from smcp_fx.channels.trail import Computed
from smcp_fx.channels.weight_statistics import followed_weights
from smcp_fx.channels.weight_views import Dims, weight_views
from smcp_fx.tracing.values import TensorInfo, canonical_names


class Facts:
    """Which nodes compute, move or mix weights, and which of them the rules do not see (``hidden``).

    ``turned``, ``beside``: as in `Trail`, where they are known.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: dict[str, Any],
        turned: Collection[str] = (),
        beside: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        def shape(node: fx.Node) -> tuple[int, ...] | None:
            value = values.get(node.name)
            return value.shape if isinstance(value, TensorInfo) and value.is_continuous else None

        self.names = canonical_names(module)
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
        told = self.computed, self.views, self.hidden, turned, beside or {}
        self.statistics, self.mixed = followed_weights(module, values, *told)
