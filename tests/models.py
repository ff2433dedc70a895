"""Tiny models, and helpers that randomise any model, mask it at random, slice it and compare.

`AWKWARD` lists small networks that are hard to prune, each with the share of its input channels that must be
free. They are in the files that `free_channels_page.py` lists.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smcp_fx
from smcp_fx.channels.propagation import UNFIT
from smcp_fx.config import MethodConfig
from smcp_fx.prepare import converted_full

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


def random_masks(
    prepared: smcp_fx.PreparedModel, seed: int, share: float = 0.5, nothing: float = 0.4
) -> dict[str, Tensor]:
    """A random mask for every free group: each unit kept with probability ``share``, at least one kept and one not.

    Groups that may keep nothing do so with probability ``nothing``.
    """
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for group in prepared.channels.groups:
        if group.free:
            mask = torch.rand(group.size, generator=generator) < share
            one = int(torch.randint(group.size, (1,), generator=generator))
            mask[one] = True
            mask[one] = group.size == 1 or not mask.all()
            if 0 in group.permitted and float(torch.rand((), generator=generator)) < nothing:
                mask[:] = False
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
    layer_pruning: bool = False,
    cost: Any = "flops",
) -> smcp_fx.PreparedModel:
    """Assert that the prepared model computes what the model does, and under random masks what it slices to.

    Also: converting leaves the prepared model as it was, and the sliced one trains (forward and backward in
    `train()`), holds no name of this library and is smaller wherever a channel went.
    """
    model = randomise(model).to(dtype).eval()
    inputs = tuple(i.to(dtype) if i.is_floating_point() else i for i in inputs)
    expected = run(model, inputs)
    config = MethodConfig(multiple=1, batch_norm_scaling=True, layer_pruning=layer_pruning)
    prepared = smcp_fx.prepare(model, inputs, config=config, cost=cost)
    assert_close(run(prepared, inputs), expected, "identity", "all channels kept")
    failed_rules = [why for _, why, _ in prepared.channels.units.why.texts if why.startswith(UNFIT)]
    assert not failed_rules, failed_rules
    for seed in seeds:
        masks = random_masks(prepared, seed, share)
        prepared.set_masks(masks)
        masked = run(prepared, inputs)
        assert any(float(t.abs().max()) > 0 for t in pytree.tree_leaves(masked) if isinstance(t, Tensor))
        sliced = smcp_fx.convert(prepared)
        assert_close(run(sliced, inputs), masked, "slicing", f"masks of seed {seed}")
        assert_close(run(prepared, inputs), masked, "identity", "the prepared model after convert")
        check_larger_batch(prepared, sliced, inputs)
        check_larger_images(prepared, sliced, inputs)
        assert not [n for n, _ in sliced.named_modules() if n.split(".")[0] == "smcp"]
        assert not [n for n in sliced.state_dict() if n.startswith("smcp.")]
        gone = sum(int((~mask).sum()) for mask in masks.values())
        if gone and size_of(sliced) >= size_of(model):  # one kernel for all channels is written out for each
            assert size_of(sliced) < size_of(converted_full(prepared)), (
                f"{gone} units went, yet nothing is smaller"
            )
        check_trains(sliced, inputs, copy.deepcopy(model))
    return prepared


def check_larger_batch(prepared: nn.Module, sliced: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Check that a model that runs on one more image before slicing does so afterwards, with the same result."""
    larger = tuple(torch.cat([i, i[:1]]) for i in inputs)
    try:
        expected = run(prepared, larger)
    except (RuntimeError, AssertionError, IndexError, ValueError):
        return  # the network, or its trace, works for one batch size only
    assert_close(run(sliced, larger), expected, "slicing", "an image more")


def check_larger_images(prepared: nn.Module, sliced: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Check that a model that runs on larger images before slicing does so afterwards, with the same result."""
    sides = inputs[0].shape[2:]
    larger = []
    for index, given in enumerate(inputs):
        for dim in range(2 if index == 0 else 1, given.dim()):
            given = torch.cat([given, given], dim) if given.shape[dim] in sides else given
        larger.append(given)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where fx writes what failed
            example, expected = run(prepared, inputs), run(prepared, tuple(larger))
    except (RuntimeError, AssertionError, IndexError, ValueError, Warning):
        return  # the network, or its trace, works for one size only
    pairs = zip(pytree.tree_leaves(example), pytree.tree_leaves(expected), strict=True)
    if all(a.shape[:1] == b.shape[:1] for a, b in pairs if isinstance(a, Tensor)):
        assert_close(run(sliced, tuple(larger)), expected, "slicing", "larger images")


def check_trains(model: nn.Module, inputs: tuple[Tensor, ...], original: nn.Module) -> None:
    """Forward in `train()` and backward reach the parameters they reach in ``original``, with finite values."""
    backward(original, inputs)
    reached = {name for name, parameter in original.named_parameters() if parameter.grad is not None}
    assert reached
    backward(model, inputs)
    for name, parameter in model.named_parameters():
        if name in reached:
            assert parameter.grad is not None, f"{name} has no gradient"
            assert bool(torch.isfinite(parameter.grad).all()), f"{name}'s gradient is not finite"
    model.eval()


def backward(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Forward in `train()` and backward from the mean square of all outputs."""
    model.train()
    outputs = [t for t in pytree.tree_leaves(model(*(i.clone() for i in inputs))) if isinstance(t, Tensor)]
    loss = sum((t.double() ** 2).mean() for t in outputs if t.is_floating_point())
    assert isinstance(loss, Tensor)
    loss.backward()


def size_of(model: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def without_repeats(model: nn.Module) -> nn.Module:
    """Leave out blocks that have the kind and the sizes of the one before them: more only take longer."""
    for stage in [module for module in model.modules() if isinstance(module, nn.Sequential)]:
        kinds = [(type(block), [t.shape for t in block.state_dict().values()]) for block in stage]
        for index in reversed(range(1, len(kinds))):
            if kinds[index][1] and kinds[index] == kinds[index - 1]:
                del stage[index]
    return model


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
