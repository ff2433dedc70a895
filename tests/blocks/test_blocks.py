"""Blocks: every operation in one, any width buildable, and their shapes those of the pruned network."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from models import Net, free_parameter, random_masks, without_repeats
from models_attention import (
    channels_attend_to_channels,
    channels_attend_to_fewer,
    channels_attend_to_those_of_other_layers,
)
from models_generated import (
    demodulated_beside_the_convolution,
    hypernetwork_of_two_layers,
    linear_of_each_image,
    mixed_linears_of_each_image,
)
from models_layers import groups_that_are_heads, one_output_a_group, transposed_one_output_a_group
from models_mixed import (
    mixture_behind_a_turn,
    mixture_by_four_attentions,
    mixture_of_flat_kernels,
    modulated_demodulated_and_transposed,
)
from torch import fx, nn

import smcp_fx
from smcp_fx.blocks.cutting import cut
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.channels import ChannelGraph, build
from smcp_fx.tracing.tracer import Traced, trace

#: Networks are cut once: tests that share them stay in one process.
pytestmark = pytest.mark.xdist_group("blocks")


def _short_densenet() -> nn.Module:
    """Two dense blocks: those of DenseNet-121 are alike, and of up to 24 layers."""
    return torchvision.models.DenseNet(32, (6, 4), 64)


@functools.cache
def blocks_of(name: str) -> tuple[Traced, ChannelGraph, list[FusedBlock]]:
    torch.manual_seed(0)
    network = _short_densenet() if name == "densenet" else torchvision.models.get_model(name)
    if name not in ("densenet", "resnet18"):  # whose blocks are counted
        network = without_repeats(network)
    traced = trace(network, (torch.randn(2, 3, 64, 64),))
    channels = build(traced.module, traced.values)
    return traced, channels, cut(traced, channels)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5", "densenet", "mobilenet_v3_small"])
def test_every_operation_is_in_one_block(name: str) -> None:
    traced, _, blocks = blocks_of(name)
    inside = [node for block in blocks for node in block.nodes]
    assert len(inside) == len(set(inside))
    tensors = {
        node.name
        for node in traced.module.graph.nodes
        if node.op == "call_module"
        or (node.op in ("call_function", "call_method") and "size" not in node.name)
    }
    assert all(
        "TensorInfo" not in repr(traced.values[n]) for n in tensors - set(inside)
    )  # sizes and the like


def test_what_is_worked_out_from_weights_and_sizes_is_no_block() -> None:
    class Anchors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.shift = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.zeros(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.conv(x)
            places = torch.arange(h.shape[2], device=h.device) + 0.5
            return h + places[:, None] * torch.ones_like(places) + self.shift.exp()[:, :, None]

    traced = trace(Anchors(), (torch.randn(2, 3, 8, 8),))
    blocks = cut(traced, build(traced.module, traced.values))
    assert [block.nodes for block in blocks] == [("conv", "add_1", "add_2")]


def test_resnet_blocks_are_what_an_engine_fuses() -> None:
    _, _, blocks = blocks_of("resnet18")
    nodes = {block.name: block.nodes for block in blocks}
    assert nodes["conv1"] == ("conv1", "bn1", "relu")
    assert nodes["layer1.0.conv2"] == ("layer1_0_conv2", "layer1_0_bn2", "add", "layer1_0_relu_1")
    assert len(blocks) == 23
    by_name = {block.name: block for block in blocks}
    assert by_name["conv1"].grids == ((8, 16, 24, 32, 40, 48, 56, 64),)
    assert [grid[-1] for grid in by_name["layer2.0.conv1"].grids] == [64, 128]
    json.loads(by_name["conv1"].signature)


def test_padding_is_in_the_block_of_what_reads_the_image() -> None:
    """Engines make zeros a convolution's own padding; of channels, or for two readers, they are apart."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
            self.zeros, self.mirror = nn.ZeroPad2d(1), nn.ReflectionPad2d(1)
            self.left, self.right = nn.Conv2d(24, 16, 1), nn.Conv2d(24, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(self.zeros(self.zeros(x))).relu()
            h = self.second(self.mirror(h)).relu()
            h = nn.functional.max_pool2d(nn.functional.pad(h, (0, 1, 0, 1)), 3, 2)
            h = nn.functional.pad(h, (0, 0, 0, 0, 4, 4))
            h = nn.functional.pad(h, (1, 1))
            return self.left(h) + self.right(h)

    traced = trace(Padded(), (torch.randn(2, 3, 8, 8),))
    blocks = cut(traced, build(traced.module, traced.values))
    assert [block.nodes for block in blocks] == [
        ("zeros", "zeros_1", "first", "relu"),
        ("mirror", "second", "relu_1"),
        ("pad", "max_pool2d"),
        ("pad_1",),
        ("pad_2",),
        ("left",),
        ("right", "add"),
    ]
    names = ["first", "second", "max_pool2d", "pad_1", "pad_2", "left", "right"]
    assert [block.name for block in blocks] == names
    module, inputs = blocks[1].build((8, 8))
    assert inputs[0].shape == (2, 8, 10, 10) and module(*inputs).shape == (2, 8, 10, 10)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5", "densenet", "mobilenet_v3_small"])
def test_blocks_are_built_at_any_width(name: str) -> None:
    """The channels of a block's inputs and outputs are those asked for."""
    _, _, blocks = blocks_of(name)
    seen = set()
    for block in blocks:
        if block.signature in seen:
            continue
        seen.add(block.signature)
        for share in (0.0, 0.5, 1.0):
            widths = tuple(grid[int(share * (len(grid) - 1))] for grid in block.grids)
            module, inputs = block.build(widths)
            with torch.no_grad():
                output = module(*inputs)
            outputs = output if isinstance(output, tuple) else (output,)
            if len(block.widths) == 2:
                assert outputs[0].shape[1] == widths[1], block.name
                assert inputs[0].shape[1] == widths[0], block.name
            elif len(block.widths) == 1 and len(inputs) == 1 and inputs[0].dim() == 4 and len(outputs) == 1:
                assert widths[0] in (inputs[0].shape[1], outputs[0].shape[1]), block.name


@pytest.mark.parametrize(
    "made", [channels_attend_to_channels, channels_attend_to_those_of_other_layers, channels_attend_to_fewer]
)
def test_attention_among_channels_is_one_block(made: Callable[[], nn.Module]) -> None:
    """It cannot be cut where a tensor has channels along two dimensions; its width is that of the maps it reads."""
    traced = trace(made().eval(), (torch.randn(2, 3, 8, 8),))
    blocks = cut(traced, build(traced.module, traced.values, multiple=1))
    (block,) = (block for block in blocks if any("softmax" in name for name in block.nodes))
    assert block.widths
    module, inputs = block.build(tuple(grid[len(grid) // 2] for grid in block.grids))
    full, before = block.build(block.full_widths)
    assert module(*inputs).shape[1] < full(*before).shape[1]


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(
    "made",
    [
        mixture_of_flat_kernels,
        mixture_by_four_attentions,
        mixture_behind_a_turn,
        modulated_demodulated_and_transposed,
    ],
)
def test_a_mixture_of_kernels_is_one_block(made: Callable[[], nn.Module], images: int) -> None:
    """The images that are written as one, and the mixing, run with the convolution; only channels are widths."""
    traced = trace(made().eval(), (torch.randn(images, 3, 8, 8),))
    blocks = cut(traced, build(traced.module, traced.values, multiple=1))
    (block,) = (block for block in blocks if {"conv2d", "conv_transpose2d"} & {*block.nodes})
    assert len(block.widths) == 2
    for share in (0.0, 0.5, 1.0):
        widths = tuple(grid[int(share * (len(grid) - 1))] for grid in block.grids)
        module, inputs = block.build(widths)
        with torch.no_grad():
            output = module(*inputs)
        axis = output.dim() - 3
        assert output.shape[0] * output.shape[axis] == widths[1]


def _swin_v2() -> nn.Module:
    return torchvision.models.SwinTransformer(
        [4, 4], 16, [2], [2], [4, 4], num_classes=5,
        block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
    )  # fmt: skip


def _vision_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 1, 2, 32, 64)


def _weight_norms() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        norm(nn.Conv2d(3, 16, 3)), nn.ReLU(), norm(nn.Conv2d(16, 24, 3)), nn.Flatten(), nn.Linear(24 * 784, 5)
    )


def test_norms_in_groups_lose_what_they_lose_in_the_network() -> None:
    """In each group as many channels, where a concat is normed in other groups than its parts: not whole groups."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 24, 1), nn.Conv2d(32, 4, 1)
            self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in (8, 24, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.norms[0](self.one(x))
            return self.last(self.norms[2](torch.cat([self.norms[1](self.two(one)), one], 1)))

    traced = trace(Norms(), (torch.randn(2, 3, 4, 4),))
    blocks = cut(traced, build(traced.module, traced.values, multiple=1))
    grids = [block.grids for block in blocks if "norms" in block.name]
    assert grids == [((4, 8),), ((12, 24),), ((16, 32),)]
    for block in blocks:
        for widths in itertools.product(*block.grids):
            module, inputs = block.build(widths)
            with torch.no_grad():
                module(*inputs)
            assert all(part.num_groups == 4 for part in module.modules() if isinstance(part, nn.GroupNorm))


def test_norms_that_lose_whole_groups_share_no_row_with_others() -> None:
    """At 8 of their channels, one has two of its groups of four, the other one of eight; a third has all of two."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (8, 16, 64)
            self.convs = nn.ModuleList(nn.Conv2d(3, width, 1) for width in widths)
            self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in widths)
            self.last = nn.ModuleList(nn.Conv2d(width, 4, 1) for width in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(c(b(a(x))) for a, b, c in zip(self.convs, self.norms, self.last, strict=True))

    traced = trace(Norms(), (torch.randn(2, 3, 4, 4),))
    norms = [b for b in cut(traced, build(traced.module, traced.values, multiple=1)) if "norms" in b.name]
    assert [block.grids for block in norms] == [((2, 4, 6, 8),), ((4, 8, 12, 16),), (tuple(range(4, 65, 4)),)]
    assert len({block.signature for block in norms}) == 3


@pytest.mark.parametrize("made", [one_output_a_group, groups_that_are_heads, transposed_one_output_a_group])
def test_convolutions_lose_the_groups_that_they_lose_in_the_network(made: Callable[[], nn.Module]) -> None:
    traced = trace(made(), (torch.randn(2, 3, 8, 8),))
    blocks = cut(traced, build(traced.module, traced.values, multiple=1))
    (block,) = (block for block in blocks if block.name == "mid")
    shapes = set()
    for widths in itertools.product(*block.grids):
        module, inputs = block.build(widths)
        with torch.no_grad():
            module(*inputs)
        (conv,) = (part for part in module.modules() if isinstance(part, nn.Conv2d | nn.ConvTranspose2d))
        shapes.add((conv.in_channels // conv.groups, conv.out_channels // conv.groups))
    assert len(shapes) == 1 and len(block.grids[0]) > 1


@pytest.mark.parametrize("made", [_vision_transformer, _swin_v2, _weight_norms])
def test_what_follows_from_parameters_is_no_block_of_its_own(made: Callable[[], nn.Module]) -> None:
    """Engines compute it when they load: tokens, biases of positions, normed weights are inside what reads them."""
    torch.manual_seed(0)
    traced = trace(made().eval(), (torch.randn(1, 3, 32, 32),))
    blocks = cut(traced, build(traced.module, traced.values))
    assert all(block.inputs for block in blocks)
    by_parameters = {node.name for node in traced.module.graph.nodes if node.op == "get_attr"}
    read = {port.node for block in blocks for port in block.inputs}
    for node in traced.module.graph.nodes:  # in order: what only comes from parameters
        sources = {source.name for source in node.all_input_nodes}
        if node.op.startswith("call") and sources and sources <= by_parameters:
            by_parameters.add(node.name)
    assert not read & by_parameters
    for block in blocks:
        for widths in ([grid[0] for grid in block.grids], [grid[-1] for grid in block.grids]):
            module, inputs = block.build(tuple(widths))
            with torch.no_grad():
                module(*inputs)


def test_equal_blocks_have_equal_signatures() -> None:
    _, _, blocks = blocks_of("resnet18")
    by_name = {block.name: block.signature for block in blocks}
    assert by_name["layer1.0.conv1"] == by_name["layer1.1.conv1"]
    assert by_name["layer1.0.conv1"] != by_name["layer2.1.conv1"]  # another image size
    assert by_name["layer1.0.conv1"] != by_name["layer1.0.conv2"]  # an addition behind it


def test_functional_convolutions_are_told_apart_by_their_kernels() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.thin = (nn.Parameter(torch.randn(8, 3, k, k)) for k in (3, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(x, self.wide).mean((2, 3)) - nn.functional.conv2d(x, self.thin).mean(
                (2, 3)
            )

    traced = trace(Two(), (torch.randn(2, 3, 8, 8),))
    signatures = {b.nodes[0]: b.signature for b in cut(traced, build(traced.module, traced.values))}
    assert signatures["conv2d"] != signatures["conv2d_1"]


def test_stacks_are_told_apart_by_their_number_of_matrices() -> None:
    traced = trace(
        Net(
            lambda s, x: s.out((s.stem(x)[:, None] @ s.two).sum(1) + (s.stem(x)[:, None] @ s.three).sum(1)),
            stem=nn.Linear(6, 8),
            two=free_parameter(2, 8, 8),
            three=free_parameter(3, 8, 8),
            out=nn.Linear(8, 4),
        ),
        (torch.randn(2, 5, 6),),
    )
    blocks = cut(traced, build(traced.module, traced.values, multiple=1))
    signatures = [block.signature for block in blocks if "matmul" in block.signature]
    assert len(signatures) == len(set(signatures)) == 2


def test_blocks_know_how_many_bytes_their_weights_are() -> None:
    traced, _, blocks = blocks_of("resnet18")
    everything = sum(4 * weight.numel() for weight in traced.module.parameters())
    assert sum(block.weight_bytes for block in blocks) == everything
    by_name = {block.name: block.weight_bytes for block in blocks}
    assert by_name["layer4.1.conv2"] == 4 * (512 * 512 * 9 + 2 * 512)  # batch norm's, too
    assert by_name["maxpool"] == 0


def test_a_dense_blocks_concatenations_read_one_new_input_each() -> None:
    _, _, blocks = blocks_of("densenet")
    cats = {block.nodes[0]: block for block in blocks if block.nodes[0].startswith("cat")}
    assert len(cats) == 12
    assert all(len(block.nodes) == 3 for block in cats.values())  # batch norm and ReLU behind it
    assert cats["cat"].read_before == ()
    assert len(cats["cat_3"].inputs) == 4
    assert cats["cat_3"].read_before == (0, 1, 2)
    assert cats["cat_2"].signature != cats["cat_3"].signature
    assert not any(block.read_before for block in blocks if block not in cats.values())
    assert not any(block.read_before for block in blocks_of("shufflenet_v2_x0_5")[2])


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(
    "made",
    [
        demodulated_beside_the_convolution,
        hypernetwork_of_two_layers,
        linear_of_each_image,
        mixed_linears_of_each_image,
        mixture_of_flat_kernels,
    ],
)
def test_blocks_of_computed_weights_are_as_wide_as_what_the_network_keeps(
    made: Callable[[], nn.Module], images: int
) -> None:
    """Each runs at the widths of random masks, and gives tensors of the pruned network's shapes."""
    x = torch.randn(images, 3, 8, 8)
    prepared = smcp_fx.prepare(made().eval(), x, config=smcp_fx.PruningConfig(multiple=1))
    traced = trace(made().eval(), (x,))
    blocks = cut(traced, prepared.channels)
    prepared.set_masks(random_masks(prepared, 0))
    counts, shapes = prepared.pruner.counts, _Shapes(smcp_fx.convert(prepared))
    shapes.run(x)
    for block in blocks:
        widths = tuple(w.constant + sum(n * counts[group] for group, n in w.groups) for w in block.widths)
        module, inputs = block.build(widths)
        with torch.no_grad():
            output = module(*inputs)
        assert shapes.found.get(block.nodes[-1], output.shape) == output.shape


class _Shapes(fx.Interpreter):
    """The shapes of all tensors of a run, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.found[n.name] = value.shape
        return value


class _TwoImages(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Linear(8, 2)
        self.nested = nested

    def forward(self, first: Any, second: Any = None) -> torch.Tensor:
        x, y = (first["x"], first["more"][0]["y"]) if self.nested else (first, second)
        both: torch.Tensor = self.head((self.one(x) + self.two(y)).mean((2, 3)))
        return both


def test_tensors_in_lists_and_dicts_are_inputs_like_others() -> None:
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    found = []
    for nested, inputs in ((True, ({"x": x, "more": [{"y": y}]},)), (False, (x, y))):
        traced = trace(_TwoImages(nested), inputs)
        found.append([b.signature for b in cut(traced, build(traced.module, traced.values))])
    assert found[0] == found[1]
