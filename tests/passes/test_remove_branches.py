"""The passes that remove branches: what goes, what is reported, run twice; refusals and units that come back."""

from __future__ import annotations

import pytest
import torch
from branch_removal import IMAGE, without
from models import Residual, between, conv, run
from tolerances import assert_close
from torch import nn

from smcp_fx.errors import PassError
from smcp_fx.masking.masks import META, Constant
from smcp_fx.passes.drop_idle_joins import DropIdleJoins
from smcp_fx.passes.insert_soft_masks import InsertSoftMasks
from smcp_fx.passes.remove_branches import RemoveBranches
from smcp_fx.passes.slice_channels import SliceChannels


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


@pytest.mark.parametrize(
    ("model", "group"),
    [
        (between(lambda s, h: s.mid(h), after=6, mid=conv(8, 6)), "mid"),  # it would cut the network
        (  # the empty piece of a split is not read apart
            between(
                lambda s, h: torch.cat(torch.cat([s.a(h), s.b(h)], 1).chunk(2, 1)[::-1], 1), 8,
                a=conv(8, 4), b=conv(8, 4),
            ),
            "a",
        ),
    ],
    ids=["cut", "piece"],
)  # fmt: skip
def test_a_group_that_cannot_go_keeps_a_unit(model: nn.Module, group: str) -> None:
    module, channels, keep = without(model, group)
    expected = run(module, (IMAGE,))
    result = RemoveBranches(channels, keep)(module)
    assert not result.modified and any("keeps a unit" in line for line in result.report)
    assert keep[channels[group].units].sum() == 1
    SliceChannels(channels, keep)(module)
    assert_close(run(module, (IMAGE,)), expected, "slicing")


def test_masks_must_have_been_folded() -> None:
    module, channels, keep = without(Residual(), "conv3")
    InsertSoftMasks(channels)(module)
    with pytest.raises(PassError, match="FoldMasks"):
        RemoveBranches(channels, keep)(module)
