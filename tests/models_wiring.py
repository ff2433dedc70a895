"""Small networks that share modules, wire them in unusual ways, or have unusual inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models import IMAGE, Net, Net2, Residual, awkward, between, conv, conv_bn, free_parameter
from torch import Tensor, nn


@awkward(1.0)
def shared_module() -> nn.Module:
    return between(lambda s, h: s.mid(F.relu(s.mid(h))), mid=conv_bn(8, 8))


@awkward(1.0)
def shared_parameter() -> nn.Module:
    net = between(lambda s, h: s.two(F.relu(s.one(h))), one=conv(8, 8), two=conv(8, 8))
    net.two.weight = net.one.weight
    return net


@awkward(1.0)
def shared_functional_parameter() -> nn.Module:
    return between(
        lambda s, h: F.conv2d(F.relu(F.conv2d(h, s.weight, padding=1)), s.weight, padding=1),
        weight=free_parameter(8, 8, 3, 3),
    )


@awkward(1.0)
def residual_chain() -> nn.Module:
    return Residual(8, 12)


@awkward(1.0)
def dense_concats() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        a = s.one(x)
        b = torch.cat([a, s.two(a)], 1)
        c = torch.cat([b, s.three(b)], 1)
        return s.out(torch.cat([c, b], 1))  # type: ignore[no-any-return]

    return Net(wiring, one=conv_bn(3, 8), two=conv_bn(8, 6), three=conv_bn(14, 5), out=conv(33, 4))


@awkward(1.0)
def u_net() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        a = s.down1(x)
        b = s.down2(F.max_pool2d(a, 2))
        c = s.bottom(F.max_pool2d(b, 2))
        b = s.up2(
            torch.cat([b, F.interpolate(c, size=b.shape[-2:], mode="bilinear", align_corners=False)], 1)
        )
        a = s.up1(torch.cat([a, s.widen(b)], 1))
        return s.out(a)  # type: ignore[no-any-return]

    return Net(
        wiring,
        down1=conv_bn(3, 6),
        down2=conv_bn(6, 8),
        bottom=conv_bn(8, 10),
        up2=conv_bn(18, 7),
        widen=nn.ConvTranspose2d(7, 5, 2, 2),
        up1=conv_bn(11, 6),
        out=conv(6, 2),
    )


@awkward(1.0)
def deep_layer_aggregation() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        x = s.stem(x)
        a = s.left(x) + x
        b = s.right(a) + a
        root = F.relu(s.root(torch.cat([b, a], 1)) + b)
        return s.out(torch.cat([root, b, x], 1))  # type: ignore[no-any-return]

    return Net(
        wiring,
        stem=conv_bn(3, 8),
        left=conv_bn(8, 8),
        right=conv_bn(8, 8),
        root=conv(16, 8, 1),
        out=conv(24, 4),
    )


@awkward(1.0, IMAGE, (2, 2, 8, 8))
def two_inputs() -> nn.Module:
    return Net2(
        lambda s, x, y: s.out(torch.cat([s.one(x), s.two(y)], 1)),
        one=conv(3, 8),
        two=conv(2, 6),
        out=conv(14, 4),
    )


@awkward(1.0)
def dict_output() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Any:
        h = F.relu(s.stem(x))
        return {"maps": [s.one(h), s.two(h)], "more": (s.one(h),)}

    return Net(wiring, stem=conv(3, 8), one=conv(8, 4), two=conv(8, 2))


@awkward(1.0)
def in_place() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.one(x)
        h.add_(s.two(x))  # the result is not used, what it did to h is
        return s.out(F.relu_(h))  # type: ignore[no-any-return]

    return Net(wiring, one=conv(3, 8), two=conv(3, 8), out=conv(8, 4))


@awkward(1.0)
def gated_linear_unit() -> nn.Module:
    return between(lambda s, h: F.glu(h, 1), 16, 8)


@awkward(1.0)
def constants_in_forward() -> nn.Module:
    return Net(
        lambda s, x: s.out(F.relu(s.stem(x * torch.tensor([0.5, 1.0, 2.0]).view(1, 3, 1, 1)))),
        stem=conv(3, 8),
        out=conv(8, 4),
    )


@awkward(0.0)
def weight_read_as_a_tensor() -> nn.Module:
    """A weight that is also read outside its convolution must stay whole, whichever comes first."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        early = torch.matmul(x.flatten(1), s.first.weight.t())
        hidden = F.relu(s.first(x.flatten(1)))
        return torch.cat([early, s.second(hidden)], 1)

    return Net(wiring, first=nn.Linear(192, 12), second=nn.Linear(12, 4))


@awkward(0.5)
def shared_linear_met_again_along_another_dimension() -> nn.Module:
    """A transform of rows and then of columns by one matrix, which tells its channels apart the second time only."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        x = x * s.scale
        x = torch.stack([x[:, 0] + x[:, 1], x[:, 1] - x[:, 2]], 1)
        rows = F.linear(x, s.turn)
        both = F.linear(rows.transpose(2, 3), s.turn)
        return s.out(s.mid(both.amax(2).amax(1)))  # type: ignore[no-any-return]

    parts = {"turn": free_parameter(8, 8), "mid": nn.Linear(8, 8), "out": nn.Linear(8, 4)}
    return Net(wiring, scale=free_parameter(3, 1, 1), **parts)


@dataclass
class Maps:
    """Two outputs."""

    large: Tensor
    small: Tensor


@awkward(1.0)
def dataclass_output() -> nn.Module:
    """What an object holds that is not looked into stays."""

    def wiring(s: Any, x: Tensor) -> Any:
        h = F.relu(s.stem(x))
        maps = Maps(s.one(h), s.two(h))
        return maps.large, maps.small

    return Net(wiring, stem=conv(3, 8), one=conv(8, 4), two=conv(8, 2))


@awkward(1.0)
def dimensions_changed_in_place() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        h.unsqueeze_(2)
        h.squeeze_(2)
        h.unsqueeze_(2)
        return s.out(h)  # type: ignore[no-any-return]

    return Net(wiring, stem=conv(3, 8), out=nn.Conv3d(8, 4, (1, 3, 3)))


@awkward(1.0)
def strided_slice_filled_in_place() -> nn.Module:
    """Nothing else holds the view."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h[:, ::2].zero_()
        return h

    return between(wiring)


@awkward(0.0)
def strided_slice_of_an_alias_written_in_place() -> nn.Module:
    """Dropout returns its input itself in `eval()`."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        F.relu(s.drop(h)[:, ::2], True)
        return h

    return between(wiring, drop=nn.Dropout(0.5))


@awkward(1.0, IMAGE, IMAGE)
def two_images_in_one_batch() -> nn.Module:
    """Stereo and optical flow: one encoder, called once."""

    def wiring(s: Any, x: Tensor, y: Tensor) -> Tensor:
        left, right = s.encoder(torch.cat([2 * x - 1, 2 * y - 1])).split([len(x), len(y)])
        return s.out(torch.abs(left - right))  # type: ignore[no-any-return]

    return Net2(wiring, encoder=nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 6)), out=conv(6, 4))
