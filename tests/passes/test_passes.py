"""Every pass on small networks: the nodes it adds and removes, what it leaves alone, and run twice."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, Residual, between, chain, conv, free_parameter, randomise, run
from tolerances import assert_close
from torch import Tensor, fx, nn

import smcp_fx
from smcp_fx.channels import ChannelGraph, build
from smcp_fx.errors import PassError
from smcp_fx.passes.base import run_pipeline
from smcp_fx.passes.fold_batch_norm_scalers import FoldBatchNormScalers
from smcp_fx.passes.fold_masks import FoldMasks
from smcp_fx.passes.insert_batch_norm_scalers import InsertBatchNormScalers
from smcp_fx.passes.insert_soft_masks import InsertSoftMasks
from smcp_fx.passes.pipelines import convert_pipeline, prepare_pipeline
from smcp_fx.passes.slice_channels import SliceChannels
from smcp_fx.pruning.state import PruningState
from smcp_fx.tracing.masking import forward_with_weight, hard_mask, scale_gamma, scale_gamma_direct, soft_mask
from smcp_fx.tracing.tracer import trace

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def traced(model: nn.Module) -> tuple[fx.GraphModule, ChannelGraph]:
    """A traced model with the state the passes read, and its channel graph."""
    found = trace(randomise(model).eval(), (IMAGE,))
    channels = build(found.module, found.values, multiple=1)
    found.module.add_module("smcp", PruningState(channels))
    return found.module, channels


def kinds(module: fx.GraphModule) -> Counter[Any]:
    """How many nodes of each kind: an operation for calls of functions, the type of module for calls of these."""
    return Counter(
        node.target
        if node.op == "call_function"
        else type(module.get_submodule(str(node.target)))
        if node.op == "call_module"
        else node.op
        for node in module.graph.nodes
    )


def change(before: Counter[Any], after: Counter[Any]) -> dict[Any, int]:
    return {key: after[key] - before[key] for key in before | after if after[key] != before[key]}


def half(channels: ChannelGraph) -> dict[str, Tensor]:
    return {g.name: torch.arange(g.size) % 2 == 0 for g in channels.groups if g.free}


def test_soft_masks_go_on_consumers_with_a_choice_and_nothing_else() -> None:
    module, channels = traced(chain(8, 12))
    before = kinds(module)
    result = InsertSoftMasks(channels)(module)
    assert result.modified and result.module is module
    # Of three consumers the second convolution and the classifier; the first reads the image.
    added = {soft_mask: 2, forward_with_weight: 2, "get_attr": 6, nn.Conv2d: -1, nn.Linear: -1}
    assert change(before, kinds(module)) == added
    assert len(result.report) == 2


@pytest.mark.parametrize(
    ("mode", "function"), [("soft", soft_mask), ("hard", hard_mask), ("permanent", hard_mask)]
)
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


@pytest.mark.parametrize(("gradient", "function"), [("chain", scale_gamma), ("direct", scale_gamma_direct)])
def test_batch_norms_behind_masked_convolutions_are_scaled(gradient: Any, function: Any) -> None:
    module, channels = traced(chain(8, 12, 6))
    before = kinds(module)
    result = InsertBatchNormScalers(channels, gradient)(module)
    # The first batch norm's convolution reads the image, which always stays.
    added = {function: 2, forward_with_weight: 2, "get_attr": 6, nn.BatchNorm2d: -2}
    assert change(before, kinds(module)) == added
    assert len(result.report) == 2


@pytest.mark.parametrize(
    "model",
    [
        between(lambda s, h: s.norm(h + s.mid(h)), mid=conv(8, 8), norm=nn.BatchNorm2d(8)),
        between(lambda s, h: s.norm(s.mid(h)), mid=conv(8, 8, groups=8), norm=nn.BatchNorm2d(8)),
        between(lambda s, h: s.norm(h), norm=nn.BatchNorm2d(8)),
    ],
    ids=["after an addition", "after a depthwise convolution", "of a convolution that reads the image"],
)
def test_batch_norms_left_alone(model: nn.Module) -> None:
    module, channels = traced(model)
    result = InsertBatchNormScalers(channels)(module)
    assert not result.modified and kinds(module)[nn.BatchNorm2d] == 1


def test_a_batch_norm_without_weight_is_left_alone_and_reported() -> None:
    model = between(lambda s, h: s.norm(s.mid(h)), mid=conv(8, 8), norm=nn.BatchNorm2d(8, affine=False))
    module, channels = traced(model)
    result = InsertBatchNormScalers(channels)(module)
    assert not result.modified and result.report == ("norm: has no weight to scale",)


def test_the_scale_is_the_share_of_input_channels_kept() -> None:
    """After a concat each part has its own; the image's channels count among a convolution's inputs."""
    model = Net(
        lambda s, x: s.out(
            s.norm(torch.cat([s.one(s.stem(x)), s.two(x), s.three(torch.cat([x, s.stem(x)], 1))], 1))
        ),
        stem=conv(3, 8),
        one=conv(8, 4),
        two=conv(3, 4),
        three=conv(11, 2),
        norm=nn.BatchNorm2d(10),
        out=conv(10, 4),
    )
    prepared = smcp_fx.prepare(
        model.eval(), IMAGE, config=smcp_fx.PruningConfig(multiple=1, batch_norm_scaling=True)
    )
    prepared.set_masks({"stem": torch.arange(8) < 2})
    (scale,) = (value for name, value in prepared.smcp.named_buffers() if name.startswith("scale_"))
    expected = torch.tensor([2 / 8] * 4 + [1.0] * 4 + [(3 + 2) / 11] * 2)
    assert torch.allclose(scale, expected)


NETWORKS = {
    "chain": lambda: chain(8, 12, 6),
    "residual": Residual,
    "shared": lambda: between(lambda s, h: s.mid(F.relu(s.mid(h))), mid=conv(8, 8)),
    "functional": lambda: between(
        lambda s, h: F.conv2d(h, s.weight, padding=1), weight=free_parameter(8, 8, 3, 3)
    ),
    "moves": lambda: between(
        lambda s, h: (
            torch.cat(s.norm(h).split([4, 4], 1)[::-1], 1).view(h.shape[0], 2, 4, 8, 8).flatten(1, 2)
        ),
        norm=nn.GroupNorm(4, 8),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_run_twice_nothing_changes(name: str) -> None:
    module, channels = traced(NETWORKS[name]())
    state = module.get_submodule("smcp")
    assert isinstance(state, PruningState)
    state.set_masks(half(channels))
    config = smcp_fx.PruningConfig(multiple=1, batch_norm_scaling=True)
    for one in [*prepare_pipeline(channels, config), *convert_pipeline(channels, state.units_kept())]:
        first = one(module)
        code, tensors = module.code, {n: t.clone() for n, t in module.state_dict().items()}
        second = one(module)
        assert not second.modified, one.name
        assert module.code == code
        assert all(torch.equal(t, tensors[n]) for n, t in module.state_dict().items()), one.name
        if one.name in ("InsertSoftMasks", "FoldMasks", "SliceChannels"):
            assert first.modified and first.report
    run(module, (IMAGE,))


@pytest.mark.parametrize("name", NETWORKS)
def test_folding_is_the_inverse_of_inserting(name: str) -> None:
    module, channels = traced(NETWORKS[name]())
    before, code, tensors = kinds(module), module.code, copy.deepcopy(module.state_dict())
    expected = run(module, (IMAGE,))
    run_pipeline(module, prepare_pipeline(channels, smcp_fx.PruningConfig(batch_norm_scaling=True)))
    assert kinds(module) != before
    run_pipeline(module, [FoldMasks(), FoldBatchNormScalers()])
    assert kinds(module) == before
    assert [line.split() for line in module.code.splitlines()] == [line.split() for line in code.splitlines()]
    assert all(torch.equal(t, tensors[n]) for n, t in module.state_dict().items())
    assert torch.equal(run(module, (IMAGE,)), expected)


def test_folding_puts_masks_and_scales_into_the_parameters() -> None:
    module, channels = traced(chain(8, 12))
    state = module.get_submodule("smcp")
    assert isinstance(state, PruningState)
    run_pipeline(module, prepare_pipeline(channels, smcp_fx.PruningConfig(batch_norm_scaling=True)))
    weight, gamma = (module.get_parameter(n).detach().clone() for n in ("1.0.weight", "1.1.weight"))
    state.set_masks({"0.0": torch.arange(8) < 2})
    masked = run(module, (IMAGE,))
    run_pipeline(module, [FoldMasks(), FoldBatchNormScalers()])
    weight[:, 2:] = 0
    assert torch.equal(module.get_parameter("1.0.weight"), weight)
    assert torch.equal(module.get_parameter("1.1.weight"), gamma * 0.25)
    assert_close(run(module, (IMAGE,)), masked, "identity")


def test_slicing_adds_and_removes_no_node() -> None:
    module, channels = traced(Residual())
    before = kinds(module)
    keep = torch.ones(channels.free_units.numel(), dtype=torch.bool)
    keep[channels["conv1"].units[5:]] = False
    assert not SliceChannels(channels, torch.ones_like(keep))(copy.deepcopy(module)).modified
    result = SliceChannels(channels, keep)(module)
    assert kinds(module) == before
    assert tuple(module.get_parameter("conv1.weight").shape) == (5, 16, 3, 3)
    assert tuple(module.get_parameter("conv2.weight").shape) == (16, 5, 3, 3)
    assert tuple(module.get_parameter("conv3.weight").shape) == (24, 16, 3, 3)
    assert any("(24, 16, 3, 3) -> (5, 16, 3, 3)" in line for line in result.report)
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert getattr(module.bn1, name).shape == (5,)


def test_slicing_refuses_masks_in_the_graph_and_empty_groups() -> None:
    module, channels = traced(chain(8, 12))
    nothing = torch.zeros(channels.free_units.numel(), dtype=torch.bool)
    with pytest.raises(PassError, match="keep nothing"):
        SliceChannels(channels, nothing)(module)
    InsertSoftMasks(channels)(module)
    with pytest.raises(PassError, match="FoldMasks"):
        SliceChannels(channels, ~nothing)(module)


@pytest.mark.parametrize("kind", [InsertSoftMasks, InsertBatchNormScalers])
def test_inserting_needs_the_state(kind: Any) -> None:
    module, channels = traced(chain(8, 12))
    module.smcp = nn.Module()
    with pytest.raises(PassError, match=r"no buffer smcp\."):
        kind(channels)(module)


def test_modules_that_are_read_but_not_called_get_their_new_sizes() -> None:
    """A convolution's subclass is traced through; where it is a region of its own, it is there after slicing."""

    class Shift(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(3, 3, 1)
            self.requires_grad_(False)

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.out = Shift(), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.shift(x)) if float(x.sum()) < 1e9 else x  # type: ignore[no-any-return]

    image = torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(Branching().eval(), image)
    prepared.set_masks(
        {g.name: torch.tensor([True, False, True]) for g in prepared.channels.groups if g.free}
    )
    sliced = smcp_fx.convert(prepared)
    assert sliced.get_submodule("shift").out_channels == 2
    assert_close(sliced(image), prepared(image), "slicing")


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
