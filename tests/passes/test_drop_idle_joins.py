"""Joins that join nothing any more go, once."""

from __future__ import annotations

from branch_removal import IMAGE, without
from models import between, conv, run
from tolerances import assert_close
from torch import nn

from smcp_fx.passes.drop_idle_joins import DropIdleJoins
from smcp_fx.passes.remove_branches import RemoveBranches
from smcp_fx.passes.slice_channels import SliceChannels


def test_idle_joins_are_dropped_once() -> None:
    branch = nn.Sequential(conv(8, 6, bias=False), conv(6, 8, bias=False))
    module, channels, keep = without(between(lambda s, h: h + s.branch(h), branch=branch), "branch.0")
    expected = run(module, (IMAGE,))
    for one in (RemoveBranches(channels, keep), SliceChannels(channels, keep)):
        one(module)
    result = DropIdleJoins()(module)
    assert result.report == ("add: nothing but stem",)
    assert not DropIdleJoins()(module).modified
    assert_close(run(module, (IMAGE,)), expected, "slicing")
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
