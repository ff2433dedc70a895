"""How inputs were written: as ONNX Runtime's own optimised graph has it, and in real networks."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import vgg

from smcp_fx.backends.onnx.export import export_model_proto
from smcp_fx.blocks.cutting import cut
from smcp_fx.blocks.feeding import ACTIVATION, CONVOLUTION, MOVEMENT, how_written
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.channels import build
from smcp_fx.tracing.tracer import trace


class Mixed(nn.Module):
    """A convolution behind each way of writing: a convolution, SiLU, a gate, a concatenation, a shuffle, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.squeeze = nn.Conv2d(32, 16, 1)
        self.excite = nn.Conv2d(16, 32, 1)
        self.project = nn.Conv2d(32, 32, 1)
        self.part = nn.Conv2d(32, 20, 1)
        self.joined = nn.Conv2d(52, 32, 1)
        self.shuffled = nn.Conv2d(32, 32, 1)
        self.last = nn.Conv2d(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = nn.functional.silu(self.depthwise(x))
        gate = torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        x = self.project(x * torch.sigmoid(self.excite(gate)))
        x = self.joined(torch.cat([x, self.part(x)], 1))
        n, c, h, w = x.shape
        x = self.shuffled(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)) + x
        return self.last(x)


def blocks_of(network: nn.Module, side: int = 32) -> list[FusedBlock]:
    traced = trace(network.eval(), (torch.randn(1, 3, side, side),))
    return cut(traced, build(traced.module, traced.values))


def test_what_movement_wrote_is_what_the_runtime_converts(tmp_path: Path) -> None:
    network, image = Mixed().eval(), torch.randn(1, 3, 8, 8)
    ways = {
        block.name: block.fed_by[0] if block.fed_by else CONVOLUTION
        for block in blocks_of(network, 8)
        if isinstance(getattr(network, block.name, None), nn.Conv2d)
    }
    assert ways == {
        "stem": CONVOLUTION,
        "depthwise": CONVOLUTION,
        "squeeze": CONVOLUTION,
        "excite": CONVOLUTION,
        "project": MOVEMENT,
        "part": CONVOLUTION,
        "joined": MOVEMENT,
        "shuffled": MOVEMENT,
        "last": CONVOLUTION,
    }
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    model = export_model_proto(network, (image,), dynamic_batch=False)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    if "ReorderInput" not in made_by.values():
        pytest.skip("ONNX Runtime has no blocked layout on this processor")
    converted = [made_by.get(n.input[0]) == "ReorderInput" for n in graph.node if n.op_type == "Conv"]
    assert converted == [way == MOVEMENT for way in ways.values()]


def test_an_unfused_activation_wrote_what_depthwise_layers_read_and_a_gate_what_is_projected() -> None:
    blocks = {block.name: block for block in blocks_of(torchvision.models.efficientnet_b0())}
    assert blocks["features.2.0.block.0.0"].fed_by == ()  # behind a projection
    assert blocks["features.2.0.block.1.0"].fed_by == (ACTIVATION,)
    assert blocks["features.2.0.block.3.0"].fed_by == (MOVEMENT,)
    assert blocks["features.2.1.block.3.0"].fed_by == (MOVEMENT, CONVOLUTION)  # and what is added
    pooled = blocks["features.2.0.block.2.avgpool"]
    assert (pooled.fed_by, pooled.read_before) == ((ACTIVATION,), (0,))  # the gate pays for its conversion
    assert blocks["features.2.0.block.2.fc2"].read_before == ()
    assert f'"fed by":["{ACTIVATION}"]' in blocks["features.2.0.block.1.0"].signature


def test_concatenations_and_shuffles_leave_a_plain_layout_through_what_is_elementwise() -> None:
    dense = {block.name: block for block in blocks_of(torchvision.models.DenseNet(32, (3, 2), 64))}
    assert dense["features.denseblock1.denselayer2.conv1"].fed_by == (MOVEMENT,)  # behind norm and ReLU
    assert dense["features.denseblock1.denselayer2.conv2"].fed_by == ()
    joined = dense["features.denseblock1.denselayer2.norm1"]
    assert (len(joined.nodes), len(joined.inputs)) == (3, 2)
    shuffled = {block.name: block for block in blocks_of(torchvision.models.shufflenet_v2_x0_5())}
    assert shuffled["stage2.1.branch2.0"].fed_by == (MOVEMENT,)
    assert shuffled["stage2.1.branch2.3"].fed_by == ()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vgg11_bn"])
def test_networks_of_fused_convolutions_are_fed_by_these_alone(name: str) -> None:
    network = (
        torchvision.models.get_model(name) if name != "vgg11_bn" else vgg.make_layers(vgg.cfgs["A"], True)
    )
    blocks = blocks_of(network)  # (VGG without its classifier, which is large)
    assert not any(block.fed_by or block.read_before for block in blocks)
    assert not any("fed by" in block.signature for block in blocks)


class Scaled(nn.Module):
    """What changes nothing about how a tensor lies, and what makes it plain."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, 8, 1, 1))
        self.first, self.up = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2, 2)
        self.norm, self.last, self.drop = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1), nn.Dropout2d()

    def forward(self, x: Tensor) -> Tensor:
        scaled = nn.functional.pad(self.first(x) * self.gamma, (1, 1, 1, 1)).contiguous()
        pooled = scaled.mean((2, 3), keepdim=True)
        return self.last(self.norm(self.up(self.drop(scaled)))) + pooled


def test_parameters_padding_and_copies_leave_the_layout_and_are_no_gates() -> None:
    traced = trace(Scaled().eval(), (torch.randn(1, 3, 6, 6),))
    found = {node.name: way for node, way in how_written(traced).items()}
    plain = {name for name, way in found.items() if way == MOVEMENT}
    assert plain == {"up", "norm", "add"}, found  # the sum: of a tensor and one number a channel
    assert ACTIVATION not in found.values()
    assert not any(block.read_before for block in blocks_of(Scaled(), 6))


def test_only_tensors_with_four_axes_are_told() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 16, 4), nn.SiLU())
    traced = trace(network.eval(), (torch.randn(1, 3, 4, 4),))
    assert sorted(how_written(traced).values()) == [ACTIVATION, CONVOLUTION]


def test_networks_may_be_deeper_than_the_recursion_limit() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), *(nn.SiLU() for _ in range(sys.getrecursionlimit())))
    traced = trace(network.eval(), (torch.randn(1, 3, 4, 4),))
    ways = list(how_written(traced).values())
    assert ways == [CONVOLUTION] + [ACTIVATION] * sys.getrecursionlimit()
