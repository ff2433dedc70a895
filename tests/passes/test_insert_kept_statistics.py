"""Operations that mix channels with a choice get their mask, and see the kept channels alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import between, chain, check_slicing, randomise
from pass_models import IMAGE, change, kinds, traced
from tolerances import assert_close
from torch import fx, nn

import smcp_fx
from smcp_fx.errors import PassError
from smcp_fx.masking.kept_statistics import IN_PLACE_OF, as_it_was, module_over_kept
from smcp_fx.passes.insert_kept_statistics import InsertKeptStatistics
from smcp_fx.pruning.state import PruningState


def mixing() -> nn.Module:
    """A norm over channels, and a gate by their mean."""
    return between(lambda s, h: s.norm(h) * h.mean(1, keepdim=True), norm=nn.GroupNorm(1, 8))


def test_norms_and_means_get_masks() -> None:
    module, channels = traced(mixing())
    before = kinds(module)
    result = InsertKeptStatistics(channels)(module)
    assert result.modified and len(result.report) == 2
    changed = change(before, kinds(module))
    # Each reads a mask, and the norm its module too.
    assert (
        changed.pop(module_over_kept) == 1
        and changed.pop(nn.GroupNorm) == -1
        and changed.pop("get_attr") == 3
    )
    assert list(changed.values()) == [1]  # what stands before the mean


def test_a_functional_norm_is_called_in_another_form() -> None:
    module, channels = traced(between(lambda s, h: torch.nn.functional.normalize(h, dim=1)))
    before = kinds(module)
    InsertKeptStatistics(channels)(module)
    assert change(before, kinds(module)) == {
        torch.nn.functional.normalize: -1,
        IN_PLACE_OF["normalize"]: 1,
        "get_attr": 1,
    }


def test_what_mixes_no_channels_is_left_alone() -> None:
    module, channels = traced(chain(8, 12))
    before = kinds(module)
    assert not InsertKeptStatistics(channels)(module).modified
    assert change(before, kinds(module)) == {}


def test_inserting_needs_the_state() -> None:
    module, channels = traced(mixing())
    module.smcp = nn.Module()
    with pytest.raises(PassError, match=r"no buffer smcp\."):
        InsertKeptStatistics(channels)(module)


def test_statistics_are_those_of_the_kept_channels() -> None:
    """The mean that the graph computes is that of the kept channels, taken by hand."""
    module, channels = traced(between(lambda s, h: h * h.mean(1, keepdim=True)))
    InsertKeptStatistics(channels)(module)
    state = module.get_submodule("smcp")
    assert isinstance(state, PruningState)
    kept = torch.arange(8) < 3
    state.set_masks({channels.groups[0].name: kept})
    found: dict[str, Any] = {}

    class Reader(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found[str(n.target)] = super().run_node(n)
            return found[str(n.target)]

    Reader(module).run(IMAGE)
    assert_close(found["mean"], found["stem"][:, kept].mean(1, keepdim=True), "identity")


def test_what_is_written_into_later_is_copied_for_the_gradient_of_its_mask() -> None:
    """A mean that no layer's weights score keeps its operand, the other half of which is then written into."""

    def wiring(s: Any, h: torch.Tensor) -> torch.Tensor:
        own = h * 1.0
        one, other = own[:, :4], own[:, 4:]
        other.sub_(one.mean(1, keepdim=True))
        return other

    model = randomise(between(wiring, 8, 4)).double()
    image = IMAGE.double()
    prepared = check_slicing(model, (image,))
    prepared.train()(image).sum().backward()
    assert prepared.channels.free_share == 1
    assert not [node for node in smcp_fx.convert(prepared).graph.nodes if node.target is as_it_was]
