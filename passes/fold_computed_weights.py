"""Replace weights and biases that are computed from parameters by their values.

    before   w = weight_norm(weight_v, weight_g);  conv2d(x, w, bias)
    after    conv2d(x, weight, bias), weight holding what was computed

Normalising a sliced weight would not give the slice of the normalised weight: the function has to go before channels
do. Parameters and buffers that only it read go with it.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from smcp_fx.channels.computed_weights import ComputedWeight, computed_weights
from smcp_fx.masking.masks import EVERY_MASK, SCALES
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.tracing.constant_values import ancestors, computed_value
from smcp_fx.tracing.own_weights import settle
from smcp_fx.tracing.values import held, is_continuous


class FoldComputedWeights(GraphPass):
    """Stores each computed weight under its name in the channel graph; ``cosines``: those of cosines, too."""

    def __init__(self, cosines: bool = False) -> None:
        self.cosines = cosines

    def apply(self, module: fx.GraphModule) -> PassResult:
        """Fold, then delete the parameters and buffers that nothing reads any more."""
        values: dict[fx.Node, torch.Tensor] = {}

        def shape_of(node: fx.Node) -> tuple[int, ...] | None:
            way = ancestors(node)
            with torch.no_grad():
                value = computed_value(module, tuple(one for one in module.graph.nodes if one in way))
            if not isinstance(value, torch.Tensor) or not is_continuous(value):
                return None
            values[node] = value
            return tuple(value.shape)

        every = computed_weights(module, shape_of, (*EVERY_MASK, *SCALES.values()), cosines=self.cosines)
        learning = {
            weight.name: any(held(module, name).requires_grad for name in weight.sources) for weight in every
        }
        for weight in every:
            _fold(module, weight, values[weight.result], learning[weight.name])
        report = [f"{weight.name}: now holds what was computed" for weight in every]
        for name in sorted({name for weight in every for name in weight.unread} - {f.name for f in every}):
            _drop(module, name)
            report.append(f"{name}: read by nothing any more, deleted")
        return PassResult(module, bool(report), tuple(report))


def _fold(module: fx.GraphModule, computed: ComputedWeight, value: torch.Tensor, learns: bool) -> None:
    path, _, name = computed.name.rpartition(".")
    stored = nn.Parameter(value.detach().clone(memory_format=torch.preserve_format), learns)
    settle(module.get_submodule(path), name, stored)
    with module.graph.inserting_before(computed.result):
        weight = module.graph.create_node("get_attr", computed.name)
    computed.result.replace_all_uses_with(weight)
    for node in reversed(computed.through):
        if not (node.users or node._erased):
            module.graph.erase_node(node)


def _drop(module: nn.Module, name: str) -> None:
    """Delete a parameter or buffer if it is still there."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:  # a parametrisation, which went with its weight
        return
    if attribute in owner._parameters or attribute in owner._buffers:
        delattr(owner, attribute)
