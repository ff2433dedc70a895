"""Batch norms behind masked convolutions are scaled by the share of input channels kept; others are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Net, between, chain, conv
from pass_models import IMAGE, change, kinds, traced
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.masking.masks import scale_gamma, scale_gamma_direct
from smcp_fx.passes.insert_batch_norm_scalers import InsertBatchNormScalers
from smcp_fx.tracing.own_weights import forward_with_weight


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


class Activated(nn.BatchNorm2d):
    """With an activation, as timm's: torch.fx looks into it, and sees the function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Written(nn.Module):
    """Of no class of torch's, with a weight of another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("variance", torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.get_buffer("mean"), self.get_buffer("variance")
        return F.batch_norm(x, mean, variance, self.gain, training=self.training)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Activated, Written])
def test_a_batch_norm_is_one_however_it_is_written(kind: Any) -> None:
    """It is scaled in training, and ``kept`` tells of it: its class says nothing."""
    model = Net(lambda s, x: s.out(s.norm(s.mid(s.stem(x)))), stem=conv(3, 8), mid=conv(8, 8), norm=kind(8),
                out=conv(8, 4))  # fmt: skip
    prepared = smcp_fx.prepare(model.eval(), IMAGE, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    assert torch.equal(prepared(IMAGE), model(IMAGE))
    prepared.set_masks({name: torch.arange(8) % 4 == 1 for name in ("stem", "mid")})
    assert [value.tolist() for name, value in prepared.smcp.named_buffers() if "scale_" in name] == [
        [0.25] * 8
    ]
    smaller = smcp_fx.convert(prepared)
    assert smaller.kept["norm"] == ([1, 5], [1, 5]) and smaller.kept["mid"][1] == [1, 5]
    assert_close(smaller(IMAGE), prepared(IMAGE), "slicing")
    weight = dict(model.norm.named_parameters())
    for name, value in dict(smaller.get_submodule("norm").named_parameters()).items():
        assert torch.allclose(value, weight[name][[1, 5]] * (0.25 if name != "bias" else 1))


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
    prepared = smcp_fx.prepare(model.eval(), IMAGE, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    prepared.set_masks({"stem": torch.arange(8) < 2})
    (scale,) = (value for name, value in prepared.smcp.named_buffers() if name.startswith("scale_"))
    expected = torch.tensor([2 / 8] * 4 + [1.0] * 4 + [(3 + 2) / 11] * 2)
    assert torch.allclose(scale, expected)
