"""Networks of every kind have a price: blocks that are built and run at any width, and costs that can be solved."""

from __future__ import annotations

import importlib

import pytest
import torch
from free_channels_page import KINDS
from models import AWKWARD, Case

import smcp_fx
from smcp_fx.allocation.problem import tabulate
from smcp_fx.blocks.cutting import cut
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs.flops import FlopsCost
from smcp_fx.costs.parameters import ParamsCost
from smcp_fx.tracing.tracer import Traced

for kind in KINDS:
    importlib.import_module(kind)


class Checked:
    """A cost that builds all blocks and solves for all other costs before it is used."""

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        for block in cut(traced, channels):
            for share in (0.0, 0.5, 1.0) if block.grids else ():
                widths = tuple(grid[int(share * (len(grid) - 1))] for grid in block.grids)
                module, inputs = block.build(widths)
                with torch.no_grad():
                    module(*inputs)
        for cost in (ParamsCost(), FlopsCost()):
            whole = cost.network_cost(traced, channels)
            for counts in (whole.full_counts, whole.smallest_counts):
                near = whole.at(counts)
                tabulate(near)
                assert near.cost(counts) == pytest.approx(whole.cost(counts))
        return whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", AWKWARD, ids=lambda case: case.name)
def test_a_network_has_a_price_at_any_width(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = smcp_fx.PruningConfig(multiple=1)
    smcp_fx.prepare(case.build().eval(), case.inputs(), cost=Checked(), config=config, check=False)
    assert "cannot be built" not in caplog.text
