"""A cost that checks what a network's price rests on, while the network is prepared with it."""

from __future__ import annotations

import warnings

import pytest
import torch

from smcp_fx.allocation.problem import tabulate
from smcp_fx.blocks.cutting import cut
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs.flops import FlopsCost
from smcp_fx.costs.parameters import ParamsCost
from smcp_fx.tracing.tracer import Traced

#: Signatures of blocks that were built already: they stand for all blocks that have them, as in a latency table.
_BUILT: set[str] = set()


class CheckedCost:
    """Builds and runs all blocks, and solves for all other costs, before it counts multiply-adds.

    Blocks at their smallest widths: `cut` tries one between.
    """

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        for block in cut(traced, channels):
            if block.signature in _BUILT:
                continue
            if block.grids:
                module, inputs = block.build(tuple(grid[0] for grid in block.grids))
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a deviation of one channel
                    module(*inputs)
            _BUILT.add(block.signature)
        for cost in (ParamsCost(), FlopsCost()):
            whole = cost.network_cost(traced, channels)
            for counts in (whole.full_counts, whole.smallest_counts):
                near = whole.at(counts)
                tabulate(near)
                assert near.cost(counts) == pytest.approx(whole.cost(counts))
        return whole
