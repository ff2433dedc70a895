"""What mixes channels, over the kept ones: held against the plain operation on the kept channels alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import random_masks
from models_statistics import layer_norm_of_a_concat
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.masking import kept_statistics as kept

KEPT = torch.tensor([True, False, True, True, False, True, False, True])
Pair = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]

#: (with a mask, plain) on [batch, channels, height, width]; those that keep the channels are compared on kept ones.
OPERATIONS: dict[str, Pair] = {
    "layer_norm": (
        lambda m, x: kept.layer_norm_over_kept(m, x, (x.shape[1], 3, 4)),
        lambda x: F.layer_norm(x, x.shape[1:]),
    ),
    "rms_norm": (
        lambda m, x: kept.rms_norm_over_kept(m, x, (x.shape[1], 3, 4), None, 1e-3),
        lambda x: F.rms_norm(x, x.shape[1:], None, 1e-3),
    ),
    "group_norm": (lambda m, x: kept.group_norm_over_kept(m, x, 1), lambda x: F.group_norm(x, 1)),
    "normalize": (kept.normalize_over_kept, F.normalize),
    "softmax": (lambda m, x: kept.softmax_over_kept(m, x, 1), lambda x: x.softmax(1)),
    "log_softmax": (lambda m, x: kept.log_softmax_over_kept(m, x, 1), lambda x: x.log_softmax(1)),
    "sum": (lambda m, x: kept.zero_kept(x, m).sum(1), lambda x: x.sum(1)),
    "mean": (lambda m, x: kept.mean_kept(x, m).mean((1, 2)), lambda x: x.mean((1, 2))),
    "amax": (lambda m, x: kept.lowest_kept(x, m).amax(1), lambda x: x.amax(1)),
    "amin": (lambda m, x: kept.highest_kept(x, m).amin(1), lambda x: x.amin(1)),
    "prod": (lambda m, x: kept.one_kept(x, m).prod(1), lambda x: x.prod(1)),
    "std": (lambda m, x: kept.spread_kept(x, m, (1, 3), 1).std((1, 3)), lambda x: x.std((1, 3))),
    "var": (lambda m, x: kept.spread_kept(x, m, (1,), 0).var(1, False), lambda x: x.var(1, False)),
}


def mask(keep: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As a buffer of the graph: [1, channels, 1, 1]."""
    return keep.to(dtype).reshape(1, -1, 1, 1)


def of_kept(y: Tensor) -> Tensor:
    """The kept channels, where there are channels."""
    return y[:, KEPT] if y.dim() == 4 and y.shape[1] == KEPT.numel() else y


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_those_of_the_kept_channels(name: str) -> None:
    masked, plain = OPERATIONS[name]
    x = torch.randn(2, 8, 3, 4, dtype=torch.float64, requires_grad=True)
    alone = x.detach()[:, KEPT].requires_grad_()
    found, expected = of_kept(masked(mask(KEPT), x)), plain(alone)
    assert_close(found, expected, "slicing")
    direction = torch.randn_like(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    assert x.grad is not None and alone.grad is not None
    assert_close(x.grad[:, KEPT], alone.grad, "gradient")
    assert not x.grad[:, ~KEPT].any()  # what is not kept has no influence


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_all_channels_it_is_the_plain_operation(name: str, dtype: torch.dtype, autocast: bool) -> None:
    masked, plain = OPERATIONS[name]
    x = torch.randn(2, 8, 3, 4).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = masked(mask(torch.ones(8)), x), plain(x)
    assert found.dtype == expected.dtype
    assert_close(found, expected, "identity")


def test_norms_have_first_and_second_derivatives() -> None:
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 6, 2), (6, 2), (6, 2))
    )
    ones = (torch.arange(6) % 3 > 0).reshape(1, 6, 1)
    for function in (
        lambda x, w, b: kept.layer_norm_over_kept(ones, x, (6, 2), w, b),
        lambda x, w, b: kept.rms_norm_over_kept(ones, x, (6, 2), w) + b,
        lambda x, w, b: kept.group_norm_over_kept(ones, x, 2, w[:, 0], b[:, 0], 1e-2),
    ):
        assert torch.autograd.gradcheck(function, (x, weight, bias))
        assert torch.autograd.gradgradcheck(function, (x, weight, bias))


def test_a_masked_network_s_gradients_are_the_sliced_one_s() -> None:
    """Of all parameters that are not masked themselves, at the channels that are kept."""
    model = layer_norm_of_a_concat().double()
    image = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1))
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    for network in (prepared, sliced):
        network.train()(image).square().sum().backward()
    stem = next(group for group in prepared.channels.groups if group.name == "stem")
    left = prepared.masks[stem.name]
    for name in ("stem.weight", "deep.weight", "norm.weight", "norm.bias", "gamma"):
        dense, small = prepared.get_parameter(name).grad, sliced.get_parameter(name).grad
        assert dense is not None and small is not None
        assert_close(dense[:, left] if name == "gamma" else dense[left], small, "slicing", name)


def test_prepared_norms_compile_and_cast() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8), nn.Conv2d(8, 4, 1))
    image = torch.randn(2, 3, 4, 4)
    prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1))
    prepared.set_masks(random_masks(prepared, 0))
    expected = prepared(image)
    torch._dynamo.reset()
    compiled = torch.compile(prepared, backend="aot_eager", fullgraph=True)(image)
    assert_close(compiled, expected, "identity")
    compiled.sum().backward()
    torch._dynamo.reset()
    assert_close(prepared.bfloat16()(image.bfloat16()), expected.bfloat16(), "identity")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_branch_that_keeps_nothing_is_finite(name: str) -> None:
    """Layer pruning may switch all channels off; what they make is then times zero, which infinities survive."""
    x = torch.randn(2, 8, 3, 4, dtype=torch.float64, requires_grad=True)
    found = OPERATIONS[name][0](mask(torch.zeros(8)), x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
