"""Tiny models, and what tests do to any model: randomise it, mask it at random, slice it and compare.

`AWKWARD` lists small networks that are hard to prune, each with the share of its input channels that must be
free. More of them, those that move data, are in `models_movement.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smcp_fx

# ---- what tests do to any model -------------------------------------------------------------------------


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Make every channel matter: no weight, statistic or shift keeps the value it was initialised to.

    Weights keep their scale (so that deep nets neither die nor explode), zero-initialised ones get a new one.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not tensor.is_floating_point():
                    continue
                noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                if name == "running_var":
                    tensor.copy_(0.5 + noise.abs())
                elif tensor.dim() > 1 and float(tensor.std()) > 0:
                    tensor.mul_(1 + 0.3 * noise)
                elif name == "weight":
                    tensor.copy_(1 + 0.3 * noise)
                else:
                    tensor.copy_(0.3 * noise)
    return model


def random_masks(prepared: smcp_fx.PreparedModel, seed: int, share: float = 0.5) -> dict[str, Tensor]:
    """A random mask for every free group: each unit kept with probability ``share``, at least one kept."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for group in prepared.channels.groups:
        if group.free:
            mask = torch.rand(group.size, generator=generator) < share
            mask[int(torch.randint(group.size, (1,), generator=generator))] = True
            masks[group.name] = mask
    return masks


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The model's output, without gradients; the inputs are copied (some models work in place)."""
    with torch.no_grad():
        return model(*(i.clone() if isinstance(i, Tensor) else i for i in inputs))


def check_slicing(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    seeds: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float64,
    share: float = 0.5,
) -> smcp_fx.PreparedModel:
    """Assert that the prepared model computes what the model does, and under random masks what it slices to.

    Also: converting leaves the prepared model as it was, and the sliced one trains (forward and backward in
    `train()`), holds no name of this library and is smaller wherever a channel went.
    """
    model = randomise(model).to(dtype).eval()
    inputs = tuple(i.to(dtype) if i.is_floating_point() else i for i in inputs)
    expected = run(model, inputs)
    prepared = smcp_fx.prepare(model, inputs, config=smcp_fx.PruningConfig(multiple=1))
    assert_close(run(prepared, inputs), expected, "identity", "all channels kept")
    for seed in seeds:
        masks = random_masks(prepared, seed, share)
        prepared.set_masks(masks)
        masked = run(prepared, inputs)
        assert any(float(t.abs().max()) > 0 for t in pytree.tree_leaves(masked) if isinstance(t, Tensor))
        sliced = smcp_fx.convert(prepared)
        assert_close(run(sliced, inputs), masked, "slicing", f"masks of seed {seed}")
        assert_close(run(prepared, inputs), masked, "identity", "the prepared model after convert")
        assert not [n for n, _ in sliced.named_modules() if n.split(".")[0] == "smcp"]
        assert not [n for n in sliced.state_dict() if n.startswith("smcp.")]
        gone = sum(int((~mask).sum()) for mask in masks.values())
        if gone:
            assert size_of(sliced) < size_of(model), f"{gone} units went, yet nothing is smaller"
        check_trains(sliced, inputs)
    return prepared


def check_trains(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Forward in `train()` and backward reach every parameter that takes gradients, with finite values."""
    model.train()
    outputs = [t for t in pytree.tree_leaves(model(*(i.clone() for i in inputs))) if isinstance(t, Tensor)]
    loss = sum((t.double() ** 2).mean() for t in outputs if t.is_floating_point())
    assert isinstance(loss, Tensor)
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            assert bool(torch.isfinite(parameter.grad).all()), f"{name}'s gradient is not finite"
    model.eval()


def size_of(model: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


# ---- tiny models ----------------------------------------------------------------------------------------


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    """A convolution that keeps the resolution."""
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def conv_bn(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    """Conv-BN-ReLU."""
    return nn.Sequential(
        conv(inputs, outputs, kernel, bias=False, **options), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def chain(*widths: int, classes: int = 5) -> nn.Sequential:
    """Conv-BN-ReLU blocks of these widths on three input channels, then a linear classifier."""
    blocks = [conv_bn(i, o) for i, o in zip((3, *widths), widths, strict=False)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class Residual(nn.Module):
    """Two residual blocks on one stream: one group spans the stem and both blocks' outputs."""

    def __init__(self, stream: int = 16, inner: int = 24, classes: int = 5) -> None:
        super().__init__()
        self.stem = conv_bn(3, stream)
        self.conv1, self.bn1 = conv(stream, inner, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = conv(inner, stream, bias=False), nn.BatchNorm2d(stream)
        self.conv3, self.bn3 = conv(stream, inner, bias=False), nn.BatchNorm2d(inner)
        self.conv4, self.bn4 = conv(inner, stream, bias=False), nn.BatchNorm2d(stream)
        self.fc = nn.Linear(stream, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        x = self.stem(x)
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        x = F.relu(x + self.bn4(self.conv4(F.relu(self.bn3(self.conv3(x))))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A network given by its wiring, a function of the module and its input, and its parts."""

    def __init__(self, wiring: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        """What the wiring says."""
        return self.wiring(self, x)


class Net2(Net):
    """The same with two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        """What the wiring says."""
        return self.wiring(self, x, y)


def free_parameter(*shape: int) -> nn.Parameter:
    """A parameter of random values."""
    return nn.Parameter(torch.randn(shape))


# ---- networks that are hard to prune --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A network, its inputs, and the share of its input channels that must be free."""

    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    free: float

    def inputs(self) -> tuple[Tensor, ...]:
        """Random inputs, the same every time."""
        generator = torch.Generator().manual_seed(1)
        return tuple(torch.randn(shape, generator=generator) for shape in self.shapes)


IMAGE = (2, 3, 8, 8)
AWKWARD: list[Case] = []


def awkward(
    free: float, *shapes: tuple[int, ...]
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a function that builds a network; the default input is an image."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        AWKWARD.append(Case(build.__name__, build, shapes or (IMAGE,), free))
        return build

    return register


def between(wiring: Callable[..., Any], hidden: int = 8, after: int | None = None, **parts: Any) -> Net:
    """A network ``out(wiring(stem(x)))`` of two 3x3 convolutions with ``hidden`` channels between them.

    ``after``: how many channels the wiring leaves, where it changes that.
    """
    return Net(
        lambda s, x: s.out(wiring(s, s.stem(x))),
        stem=conv(3, hidden),
        out=conv(hidden if after is None else after, 4),
        **parts,
    )


# Convolutions and linears of every kind.


@awkward(1.0)
def eight_groups_of_six() -> nn.Module:
    return between(lambda s, h: s.mid(h), 48, mid=conv(48, 48, groups=8))


@awkward(1.0)
def grouped_that_widens() -> nn.Module:
    return between(lambda s, h: s.mid(h), 12, 24, mid=conv(12, 24, groups=3))


@awkward(0.5)
def one_output_a_group() -> nn.Module:  # dropping its only output would empty the group: 16 of 32 slots free
    return between(lambda s, h: s.mid(h), 16, 4, mid=conv(16, 4, groups=4), extra=None)


@awkward(1.0)
def depthwise() -> nn.Module:
    return between(lambda s, h: s.mid(h), mid=conv(8, 8, groups=8))


@awkward(1.0)
def depthwise_with_multiplier() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 24, mid=conv(8, 24, groups=8))


@awkward(1.0)
def transposed() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 6, mid=nn.ConvTranspose2d(8, 6, 2, 2))


@awkward(1.0)
def transposed_grouped() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 12, mid=nn.ConvTranspose2d(8, 12, 3, 2, 1, groups=2))


@awkward(1.0)
def transposed_depthwise_with_multiplier() -> nn.Module:
    return between(lambda s, h: s.mid(h), 8, 24, mid=nn.ConvTranspose2d(8, 24, 2, 2, groups=8))


@awkward(1.0, (2, 3, 20))
def one_dimension() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.PReLU(8), nn.Conv1d(8, 4, 3))


@awkward(1.0, (2, 3, 5, 6, 7))
def three_dimensions() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3),
        nn.BatchNorm3d(8),
        nn.MaxPool3d(2),
        nn.ConvTranspose3d(8, 6, 2),
        nn.Conv3d(6, 2, 1),
    )


@awkward(1.0, (3, 8, 8))
def without_batch() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4))


@awkward(1.0, (2, 5, 6))
def linear_on_three_dimensions() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 10), nn.GELU(), nn.Linear(10, 4))


@awkward(1.0, (6,))
def linear_on_a_vector() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))


@awkward(1.0)
def functional_convolution() -> nn.Module:
    return between(
        lambda s, h: F.conv2d(h, s.weight, s.bias, padding=1),
        8,
        10,
        weight=free_parameter(10, 8, 3, 3),
        bias=free_parameter(10),
    )


@awkward(1.0)
def functional_depthwise_by_shape() -> nn.Module:
    return between(
        lambda s, h: F.conv2d(h, s.weight, None, 1, 1, 1, h.shape[1]), weight=free_parameter(8, 1, 3, 3)
    )


@awkward(1.0)
def functional_depthwise_by_keyword() -> nn.Module:
    return between(
        lambda s, h: F.conv2d(h, weight=s.weight, padding=1, groups=8), weight=free_parameter(8, 1, 3, 3)
    )


@awkward(1.0)
def functional_linear() -> nn.Module:
    return Net(
        lambda s, x: F.linear(F.relu(F.linear(x.flatten(1), s.first)), s.second, s.bias),
        first=free_parameter(12, 192),
        second=free_parameter(4, 12),
        bias=free_parameter(4),
    )


@awkward(1.0)
def called_by_keyword() -> nn.Module:
    return Net(lambda s, x: s.out(input=F.relu(input=s.stem(input=x))), stem=conv(3, 8), out=conv(8, 4))


# Norms and slopes.


@awkward(1.0)
def group_norm() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.GroupNorm(4, 8))


@awkward(1.0)
def group_norm_without_weights() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.GroupNorm(4, 8, affine=False))


@awkward(1.0)
def functional_group_norm() -> nn.Module:
    return between(
        lambda s, h: F.group_norm(h, 4, s.weight, s.bias), weight=free_parameter(8), bias=free_parameter(8)
    )


@awkward(0.0)
def group_norm_of_one_group() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.GroupNorm(1, 8))


@awkward(1.0)
def instance_norm() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.InstanceNorm2d(8, affine=True, track_running_stats=True))


@awkward(1.0)
def instance_norm_without_weights() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.InstanceNorm2d(8))


@awkward(1.0)
def batch_norm_without_weights() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.BatchNorm2d(8, affine=False))


@awkward(0.0)
def layer_norm_over_channels() -> nn.Module:
    return between(lambda s, h: s.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(8))


@awkward(1.0)
def layer_norm_over_space() -> nn.Module:
    return between(lambda s, h: s.norm(h), norm=nn.LayerNorm((8, 8)))


@awkward(1.0)
def prelu_a_channel() -> nn.Module:
    return between(lambda s, h: s.slope(h), slope=nn.PReLU(8))


@awkward(1.0)
def functional_prelu() -> nn.Module:
    return between(lambda s, h: F.prelu(h, s.slope), slope=free_parameter(8))


# Gates, scales, reductions, softmax.


@awkward(1.0)
def squeeze_and_excite() -> nn.Module:
    return between(
        lambda s, h: h * torch.sigmoid(s.up(F.relu(s.down(F.adaptive_avg_pool2d(h, 1))))),
        down=conv(8, 4, 1),
        up=conv(4, 8, 1),
    )


@awkward(1.0)
def spatial_gate() -> nn.Module:
    return between(lambda s, h: h * torch.sigmoid(s.gate(h)), gate=conv(8, 1))


@awkward(0.0)
def spatial_gate_from_statistics() -> nn.Module:  # CBAM's: the mean over channels needs all of them
    return between(
        lambda s, h: h * torch.sigmoid(s.gate(torch.cat([h.mean(1, True), h.amax(1, True)], 1))),
        gate=conv(2, 1),
    )


@awkward(1.0)
def selective_kernel() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        both = torch.stack([s.one(x), s.two(x)], 1)
        gate = s.gate(both.sum(1).mean((2, 3), keepdim=True))
        gate = torch.softmax(gate.reshape(gate.shape[0], 2, 8, 1, 1), 1)
        return s.out((both * gate).sum(1))  # type: ignore[no-any-return]

    return Net(wiring, one=conv(3, 8), two=conv(3, 8), gate=conv(8, 16, 1), out=conv(8, 4))


@awkward(1.0)
def layer_scale() -> nn.Module:
    return between(lambda s, h: h * s.scale, scale=free_parameter(8, 1, 1))


@awkward(1.0)
def layer_scale_expanded() -> nn.Module:
    return between(lambda s, h: h * s.scale.expand(-1, -1, 8, 8), scale=free_parameter(1, 8, 1, 1))


@awkward(1.0)
def scale_by_the_channel_count() -> nn.Module:
    return between(lambda s, h: h * h.shape[1] ** -0.5)


@awkward(0.0)
def softmax_over_channels() -> nn.Module:
    return between(lambda s, h: h.softmax(1))


@awkward(0.0)
def mean_over_channels() -> nn.Module:
    return between(lambda s, h: h.mean(1, True), 8, 1)


@awkward(1.0)
def variance_by_position() -> nn.Module:
    return between(lambda s, h: h * h.var((2, 3), False, True))


@awkward(0.0, (2, 5, 6))
def attention_by_matmul() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.q(x), s.k(x), s.v(x)
        return s.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)  # type: ignore[no-any-return]

    return Net(wiring, q=nn.Linear(6, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 8), out=nn.Linear(8, 4))


@awkward(1.0)
def casts_by_another_tensor() -> nn.Module:
    return Net(
        lambda s, x: s.out(s.stem(x).type_as(x).to(s.other)),
        stem=conv(3, 8),
        out=conv(8, 4),
        other=free_parameter(7),
    )


# Sharing, wiring, inputs and outputs.


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
