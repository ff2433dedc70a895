"""Shared by the tests of saved files: models that are hard to save, and a complete comparison."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

import smcp_fx
from smcp_fx.serialization.saving import load, render, save

Manifest = dict[str, Any]


def prune_and_convert(model: nn.Module, inputs: Tensor | tuple[Any, ...], seed: int = 0) -> fx.GraphModule:
    """Convert with random masks on every free group, the first unit always kept."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            # The defaults 0 and 1 would hide that they were lost.
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    prepared = smcp_fx.prepare(model, inputs)
    masks = {}
    for group in prepared.channels.groups:
        if group.free:
            masks[group.name] = torch.rand(group.size, generator=generator) > 0.4
            masks[group.name][0] = True
    assert masks
    prepared.set_masks(masks)
    return smcp_fx.convert(prepared)


def assert_same_module(left: fx.GraphModule, right: fx.GraphModule, *inputs: Any) -> None:
    """State, modes, graph and outputs (bit by bit, in eval and train mode) are equal."""
    state, loaded = left.state_dict(), right.state_dict()
    assert list(state) == list(loaded)
    for name, value in state.items():
        assert value.dtype == loaded[name].dtype
        assert value.stride() == loaded[name].stride()
        assert torch.equal(value, loaded[name]), name
    for kind in ("named_parameters", "named_buffers"):
        expected = [(name, tensor.requires_grad) for name, tensor in getattr(left, kind)()]
        assert [(name, tensor.requires_grad) for name, tensor in getattr(right, kind)()] == expected
    expected_modes = [(name, module.training) for name, module in left.named_modules()]
    assert [(name, module.training) for name, module in right.named_modules()] == expected_modes
    assert repr(left) == repr(right)
    assert [node.name for node in left.graph.nodes] == [node.name for node in right.graph.nodes]
    code, loaded_code = (
        [line for line in module.code.splitlines() if line and not line.startswith("def forward")]
        for module in (left, right)
    )
    assert code == loaded_code
    for mode in (False, True):
        outputs = []
        for module in (left, right):
            module = copy.deepcopy(module).train(mode)
            torch.manual_seed(0)  # dropout and stochastic depth draw the same numbers
            outputs.append(module(*inputs))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)


def round_trip(module: fx.GraphModule, folder: Path) -> fx.GraphModule:
    return load(save(module, folder / "model.safetensors"))


class FunctionalNetwork(nn.Module):
    """Weights used through F, a batch norm that reads `training`, and constants of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(12, 3, 3, 3))
        self.second = nn.Parameter(torch.randn(8, 12, 1, 1))
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("variance", torch.ones(12))
        self.register_buffer("shift", torch.randn(1, 1, 1, 1), persistent=False)

    def forward(self, x: Tensor, scale: float = math.inf) -> tuple[Any, ...]:
        x = F.conv2d(x, self.first, None, stride=(2, 2), padding=1)
        x = F.batch_norm(x, self.mean, self.variance, training=self.training)
        x = F.hardswish(F.conv2d(x, self.second)) + self.shift
        x = x.contiguous(memory_format=torch.channels_last).clamp(max=scale)
        corner = x[..., 1:, None, -1].to(torch.float64)
        return (x, corner.masked_fill(corner < 0, -math.inf)), x.shape[0]


class SharedModules(nn.Module):
    """One module under two names, one parameter in two modules, and parameters over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.again = self.block
        self.left, self.right, self.memory = (nn.Conv2d(8, 8, 1, bias=index != 1) for index in range(3))
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.block(self.stem(x)))
        return self.left(x) + self.right(x) + self.memory(x)


class ChannelShuffle(nn.Module):
    """A shuffle whose channels thin out, which conversion turns into index_select with an index buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 16, 3, padding=1)
        self.narrow = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.channel_shuffle(self.wide(x), 2))


class LeavesWithChildren(nn.Module):
    """Leaf modules of torch.nn that have children, functions and lists of parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, activation=F.gelu, batch_first=True)
        self.recurrent = nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.upsample = nn.Upsample(scale_factor=2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.attention(x, x, x, need_weights=False)[0])
        return self.upsample(self.recurrent(x)[0])


def resnet_model() -> fx.GraphModule:
    """A pruned ResNet-18; the same object every time."""
    return _made("resnet")


def small_model() -> fx.GraphModule:
    """`SharedModules`, pruned; the same object every time."""
    return _made("small")


@lru_cache
def _made(name: str) -> fx.GraphModule:
    torch.manual_seed(0)
    if name == "small":
        return prune_and_convert(SharedModules(), torch.randn(2, 3, 8, 8))
    return prune_and_convert(torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 32, 32))


def edit_manifest(path: Path, edit: Callable[[Manifest], Any]) -> None:
    """Change the manifest beside a tensor file by ``edit``."""
    manifest = json.loads(path.with_suffix(".json").read_text())
    edit(manifest)
    path.with_suffix(".json").write_bytes(render(manifest))
