"""Masks and batch-norm scales: values and gradients in double precision, held against formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import chain, randomise
from models_mixed import mixture_by_einsum
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.masking.masks import computed_mask, hard_mask, scale_gamma, scale_gamma_direct, soft_mask
from smcp_fx.tracing.own_weights import forward_with_weight

MASK = torch.tensor([True, False, True, True, False]).view(1, 5, 1, 1)


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """An input, a dense weight that takes gradients, and the gradient of the convolution's output."""
    x = torch.randn(3, 5, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    return x, weight, torch.randn(3, 4, 6, 6, dtype=torch.float64)


def dense_gradients(x: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dx and dL/dW of a padded 3x3 convolution, from their definitions: sums over patches."""
    columns = F.unfold(x.detach(), 3, padding=1)  # [n, 5 * 9, 36]
    flat = upstream.flatten(2)  # [n, 4, 36]
    to_weight = torch.einsum("nop,nkp->ok", flat, columns).view_as(weight)
    back = torch.einsum("nop,ok->nkp", flat, weight.detach().flatten(1))
    return F.fold(back, x.shape[-2:], 3, padding=1), to_weight


def test_soft_mask_computes_with_the_masked_weight() -> None:
    x, weight, _ = problem()
    found = F.conv2d(x, soft_mask(weight, MASK), padding=1)
    kept = [0, 2, 3]
    assert_close(found, F.conv2d(x[:, kept], weight[:, kept], padding=1), "gradient")


def test_soft_mask_gives_the_dense_weight_its_dense_gradient() -> None:
    """The weight's gradient is that of an unmasked convolution; the input's is that of the masked one."""
    x, weight, upstream = problem()
    (F.conv2d(x, soft_mask(weight, MASK), padding=1) * upstream).sum().backward()
    to_input, to_weight = dense_gradients(x, weight.detach() * MASK, upstream)
    assert_close(weight.grad, to_weight, "gradient")
    assert_close(x.grad, to_input, "gradient")
    assert x.grad is not None and weight.grad is not None
    assert float(weight.grad[:, [1, 4]].abs().min()) > 0
    assert float(x.grad[:, [1, 4]].abs().max()) == 0


def test_hard_mask_gives_masked_weights_none() -> None:
    x, weight, upstream = problem()
    (F.conv2d(x, hard_mask(weight, MASK), padding=1) * upstream).sum().backward()
    to_input, to_weight = dense_gradients(x, weight.detach() * MASK, upstream)
    assert_close(weight.grad, to_weight * MASK, "gradient")
    assert_close(x.grad, to_input, "gradient")


def test_what_computes_a_masked_weight_hears_of_the_kept_channels_alone() -> None:
    """Its gradient is that of the kept columns; the mask's own is the dense weight times the dense gradient."""
    x, weight, upstream = problem()
    gain = torch.randn(4, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    mask = MASK.double().requires_grad_()
    (F.conv2d(x, computed_mask(gain * weight, mask), padding=1) * upstream).sum().backward()
    _, dense = dense_gradients(x, weight, upstream)
    assert_close(gain.grad, (weight * dense * MASK).sum((1, 2, 3), keepdim=True), "gradient")
    assert_close(weight.grad, gain * dense * MASK, "gradient")
    assert_close(mask.grad, (gain * weight * dense).sum((0, 2, 3), keepdim=True), "gradient")


@pytest.mark.parametrize(
    ("function", "rule"),
    [(scale_gamma, lambda g, s: s * g), (scale_gamma_direct, lambda g, s: g / s)],
    ids=["chain", "direct"],
)
def test_gamma_gets_its_rules_gradient(function: Any, rule: Any) -> None:
    """With g = dL/d(s gamma): s g by the chain rule, g / s as if gamma had been scaled itself."""
    gamma = torch.randn(4, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.25, 1.0, 0.5, 0.75], dtype=torch.float64)
    x, upstream = torch.randn(2, 24, 4, dtype=torch.float64).unbind()
    scaled = function(gamma, scale)
    assert_close(scaled, gamma.detach() * scale, "gradient")
    (F.batch_norm(x, None, None, scaled, None, training=True) * upstream).sum().backward()
    normalised = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    assert_close(gamma.grad, rule((normalised * upstream).sum(0), scale), "gradient")


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, padding_mode="circular"), (2, 4, 9, 9)),
        (nn.Conv3d(4, 6, 1, bias=False), (2, 4, 3, 3, 3)),
        (nn.ConvTranspose2d(4, 6, 2, 2), (2, 4, 5, 5)),
        (nn.Linear(4, 6), (2, 3, 4)),
        (nn.BatchNorm2d(4), (2, 4, 5, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_computes_with_another_weight(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    weight = module.weight
    assert isinstance(weight, Tensor)
    other = torch.randn_like(weight)
    found = forward_with_weight(module, other, x)
    by_keyword = forward_with_weight(module, other, input=x)
    assert module.weight is weight
    with torch.no_grad():
        weight.copy_(other)
    assert torch.equal(found, module(x)) and torch.equal(by_keyword, found)


def gradients(mode: Any) -> tuple[smcp_fx.PreparedModel, dict[str, Tensor]]:
    torch.manual_seed(1)
    model = randomise(chain(6, 8)).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    config = MethodConfig(multiple=1, mask=mode, batch_norm_scaling=False)
    prepared = smcp_fx.prepare(model, x, config=config)
    prepared.set_masks({"0.0": torch.arange(6) < 4})
    prepared(x).square().sum().backward()
    found = {name: p.grad for name, p in prepared.named_parameters() if p.grad is not None}
    assert len(found) == len(list(prepared.parameters()))
    return prepared, found


def test_in_a_network_pruned_channels_learn_under_soft_masks_only() -> None:
    """The consumer's weights learn; what produces a pruned channel gets nothing, as its input gradient is 0."""
    _, soft = gradients("soft")
    _, permanent = gradients("permanent")
    assert bool((soft["1.0.weight"][:, 4:].flatten(2).abs().amax((0, 2)) > 0).all())
    assert float(permanent["1.0.weight"][:, 4:].abs().max()) == 0
    assert_close(soft["1.0.weight"][:, :4], permanent["1.0.weight"][:, :4], "gradient")
    for name in ("0.0.weight", "0.1.weight", "0.1.bias"):
        assert float(soft[name][4:].abs().max()) == 0
        assert_close(soft[name], permanent[name], "gradient")


def test_a_router_learns_under_soft_masks_as_it_does_without_the_masked_channels() -> None:
    torch.manual_seed(0)
    model = randomise(mixture_by_einsum()).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    prepared = smcp_fx.prepare(model, x, config=smcp_fx.PruningConfig(multiple=1))
    prepared.set_masks({"stem": torch.arange(8) % 2 == 0})
    smaller = smcp_fx.convert(prepared)
    for network in (prepared, smaller):
        network.train()(x).square().sum().backward()
    assert_close(
        prepared.get_parameter("routing.bias").grad, smaller.get_parameter("routing.bias").grad, "gradient"
    )
