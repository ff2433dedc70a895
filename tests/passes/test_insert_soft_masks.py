"""Masks go on consumers that have a choice, once a weight and dimension, and nowhere else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, between, chain, conv, free_parameter
from pass_models import change, kinds, traced
from torch import Tensor, nn

from smcp_fx.errors import PassError
from smcp_fx.masking.masks import hard_mask, soft_mask
from smcp_fx.passes.fold_masks import FoldMasks
from smcp_fx.passes.insert_batch_norm_scalers import InsertBatchNormScalers
from smcp_fx.passes.insert_soft_masks import InsertSoftMasks
from smcp_fx.pruning.state import PruningState
from smcp_fx.tracing.own_weights import forward_with_weight


def test_soft_masks_go_on_consumers_with_a_choice_and_nothing_else() -> None:
    module, channels = traced(chain(8, 12))
    before = kinds(module)
    result = InsertSoftMasks(channels)(module)
    assert result.modified and result.module is module
    # Of three consumers the second convolution and the classifier; the first reads the image.
    added = {soft_mask: 2, forward_with_weight: 2, "get_attr": 6, nn.Conv2d: -1, nn.Linear: -1}
    assert change(before, kinds(module)) == added
    assert len(result.report) == 2


@pytest.mark.parametrize(("mode", "function"), [("soft", soft_mask), ("permanent", hard_mask)])
def test_mask_functions(mode: Any, function: Any) -> None:
    module, channels = traced(chain(8))
    InsertSoftMasks(channels, mode)(module)
    assert kinds(module)[function] == 1


def test_a_shared_weight_is_masked_once() -> None:
    module, channels = traced(between(lambda s, h: s.mid(F.relu(s.mid(h))), mid=conv(8, 8)))
    before = kinds(module)
    InsertSoftMasks(channels)(module)
    # One mask for both calls of `mid`, one for `out`; each call reads its module.
    added = {soft_mask: 2, forward_with_weight: 3, "get_attr": 2 + 2 + 3, nn.Conv2d: -3}
    assert change(before, kinds(module)) == added


def test_a_functional_call_only_gets_another_weight() -> None:
    module, channels = traced(
        between(lambda s, h: F.conv2d(h, s.weight, padding=1), weight=free_parameter(8, 8, 3, 3))
    )
    before = kinds(module)
    InsertSoftMasks(channels)(module)
    assert change(before, kinds(module)) == {
        soft_mask: 2,
        forward_with_weight: 1,
        "get_attr": 1 + 3,
        nn.Conv2d: -1,
    }


@pytest.mark.parametrize("kind", [InsertSoftMasks, InsertBatchNormScalers])
def test_inserting_needs_the_state(kind: Any) -> None:
    module, channels = traced(chain(8, 12))
    module.smcp = nn.Module()
    with pytest.raises(PassError, match=r"no buffer smcp\."):
        kind(channels)(module)


def test_a_weight_read_along_two_dimensions_has_a_mask_for_each() -> None:
    """The masks stand before the movement of the weight, and folding multiplies both into it."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.encode(s.stem(x).permute(0, 2, 3, 1))
        return s.out(F.linear(h, s.encode.weight.t()).permute(0, 3, 1, 2))  # type: ignore[no-any-return]

    module, channels = traced(Net(wiring, stem=conv(3, 8), encode=nn.Linear(8, 6), out=conv(8, 4)))
    before = Counter(str(n.target) for n in module.graph.nodes)
    weight = module.get_parameter("encode.weight").detach().clone()
    insert = InsertSoftMasks(channels)
    assert insert(module).modified and not insert(module).modified
    masks = [node for node in module.graph.nodes if node.target is soft_mask]
    assert len(masks) == 3
    assert {str(user.target) for mask in masks for user in mask.users} >= {"t"}
    state = module.get_submodule("smcp")
    assert isinstance(state, PruningState)
    for name, _, _ in state._masked:
        mask = getattr(state, name)
        mask.select(int(mask.shape[0] == 1), 0).zero_()
    assert FoldMasks()(module).modified
    assert Counter(str(n.target) for n in module.graph.nodes) == before
    weight[0], weight[:, 0] = 0, 0
    assert torch.equal(module.get_parameter("encode.weight"), weight)
