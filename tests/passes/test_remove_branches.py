"""The passes that remove branches: what goes, what is reported, run twice; refusals and units that come back."""

from __future__ import annotations

import pytest
import torch
from models import Residual, between, conv, randomise, run
from tolerances import assert_close
from torch import Tensor, fx, nn

from smcp_fx.channels import ChannelGraph, build
from smcp_fx.errors import PassError
from smcp_fx.passes.drop_idle_joins import DropIdleJoins
from smcp_fx.passes.insert_soft_masks import InsertSoftMasks
from smcp_fx.passes.remove_branches import RemoveBranches
from smcp_fx.passes.slice_channels import SliceChannels
from smcp_fx.pruning.state import PruningState
from smcp_fx.tracing.masking import META, Constant
from smcp_fx.tracing.tracer import trace

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def without(model: nn.Module, *groups: str) -> tuple[fx.GraphModule, ChannelGraph, Tensor]:
    """A traced model, its channel graph, and the units kept: none of these groups, whose readers have zeros."""
    found = trace(randomise(model).eval(), (IMAGE,))
    channels = build(found.module, found.values, multiple=1)
    found.module.add_module("smcp", PruningState(channels))
    keep = torch.ones(channels.free_units.numel(), dtype=torch.bool)
    for name in groups:
        keep[channels[name].units] = False
        for path in channels[name].consumers:
            nn.init.zeros_(found.module.get_parameter(f"{path}.weight"))
    return found.module, channels, keep


def test_a_branch_goes_and_the_widths_stay() -> None:
    module, channels, keep = without(Residual(), "conv3")
    expected = run(module, (IMAGE,))
    result = RemoveBranches(channels, keep)(module)
    assert_close(run(module, (IMAGE,)), expected, "slicing")
    assert result.modified
    assert {f"{name}: removed" for name in ("conv3", "bn3", "conv4", "bn4")} <= set(result.report)
    assert "bn4: constant, now (1, 16, 1, 1) numbers" in result.report
    (constant,) = (node for node in module.graph.nodes if META in node.meta)
    assert constant.meta[META] == Constant("bn4")
    assert not hasattr(module, "conv3") and hasattr(module, "conv1")
    assert not RemoveBranches(channels, keep)(module).modified
    keep[channels["stem.0"].units[::2]] = False
    SliceChannels(channels, keep)(module)
    assert tuple(module.get_parameter("constant_bn4").shape) == (1, 8, 1, 1)
    assert not SliceChannels(channels, keep)(module).modified
    run(module, (IMAGE,))


def test_nothing_to_remove_changes_nothing() -> None:
    module, channels, keep = without(Residual())
    code = module.code
    assert not RemoveBranches(channels, keep)(module).modified
    assert not DropIdleJoins()(module).modified
    assert module.code == code


def test_what_would_cut_the_network_keeps_a_unit() -> None:
    module, channels, keep = without(between(lambda s, h: s.mid(h), after=6, mid=conv(8, 6)), "mid")
    expected = run(module, (IMAGE,))
    result = RemoveBranches(channels, keep)(module)
    assert not result.modified and any("keeps a unit" in line for line in result.report)
    assert keep[channels["mid"].units].sum() == 1
    SliceChannels(channels, keep)(module)
    assert_close(run(module, (IMAGE,)), expected, "slicing")


def test_masks_must_have_been_folded() -> None:
    module, channels, keep = without(Residual(), "conv3")
    InsertSoftMasks(channels)(module)
    with pytest.raises(PassError, match="FoldMasks"):
        RemoveBranches(channels, keep)(module)


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
