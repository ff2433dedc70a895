"""Joins that join nothing any more go, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from branch_removal import IMAGE, without
from models import between, conv, run
from tolerances import assert_close
from torch import Tensor, nn

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


def part_of_another(s: Any, h: Tensor) -> Tensor:
    part = h[:, :4]
    return torch.cat([(part + s.branch(part)).mul_(2), h[:, 2:6]], 1)


def read_by_gradients(s: Any, h: Tensor) -> Tensor:
    h = h.relu()
    return (h[:, 4:].tanh() + s.branch(h[:, :4])).relu_().tile(1, 2, 1, 1)


@pytest.mark.parametrize("wiring", [part_of_another, read_by_gradients])
def test_what_is_written_into_stays_a_tensor_of_its_own(wiring: Callable[[Any, Tensor], Tensor]) -> None:
    """The sum was; its operand is memory that others read, or that the backward does."""
    branch = nn.Sequential(conv(4, 6, bias=False), conv(6, 4, bias=False))
    module, channels, keep = without(between(wiring, branch=branch), "branch.0")
    expected = run(module, (IMAGE,))
    for one in (RemoveBranches(channels, keep), SliceChannels(channels, keep)):
        one(module)
    assert not DropIdleJoins()(module).modified
    assert_close(run(module, (IMAGE,)), expected, "slicing")
    module(IMAGE).sum().backward()
