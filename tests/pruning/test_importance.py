"""Taylor importance against sums by hand, and the paper's theorem on what it is equivalent to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, Residual, chain, conv, randomise
from models_products import TOKENS, attention_of_one_head, attention_of_torch_with_one_head
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import TrainingError
from smcp_fx.pruning import importance as importance_module
from smcp_fx.pruning.importance import TaylorImportance

IMAGE = (2, 3, 8, 8)


def backward(model: nn.Module, **options: Any) -> smcp_fx.PreparedModel:
    """Prepare in double precision and run one forward and backward in `train()`."""
    x = torch.randn(IMAGE, dtype=torch.float64)
    model = randomise(model).double()
    config = MethodConfig(**{"multiple": 1, "batch_norm_scaling": True, **options})
    prepared = smcp_fx.prepare(model, x, config=config)
    prepared.train()
    step(prepared, x)
    return prepared


def step(prepared: smcp_fx.PreparedModel, x: Tensor) -> None:
    output = prepared(x)
    (output * torch.randn_like(output)).sum().backward()


def terms(prepared: smcp_fx.PreparedModel, layer: str, dim: int = 1) -> Tensor:
    """W * dL/dW of a layer, summed over all dimensions but its input channels."""
    weight = prepared.get_parameter(f"{layer}.weight")
    assert weight.grad is not None
    return (weight.detach() * weight.grad).sum([d for d in range(weight.dim()) if d != dim])


def importance(prepared: smcp_fx.PreparedModel, rule: Any, group: str) -> Tensor:
    units = TaylorImportance(prepared.channels, prepared.smcp, rule)(prepared)
    return prepared.smcp.of_group(units, group)


def check(prepared: smcp_fx.PreparedModel, group: str, *parts: Tensor) -> None:
    """Both rules: the absolute value of the sum of the consumers' parts, and the sum of absolute values."""
    stacked = torch.stack(parts)
    for rule, expected in (("abs_of_sum", stacked.sum(0).abs()), ("sum_of_abs", stacked.abs().sum(0))):
        assert_close(importance(prepared, rule, group), expected.float(), "importance", rule)


def test_one_consumer() -> None:
    prepared = backward(chain(6, 8))
    check(prepared, "0.0", terms(prepared, "1.0"))
    check(prepared, "1.0", terms(prepared, "4"))


def test_slots_in_several_consumers() -> None:
    prepared = backward(Residual())
    parts = [terms(prepared, layer) for layer in ("conv1", "conv3", "fc")]
    check(prepared, "stem.0", *parts)
    # The two rules differ where the consumers disagree, or the test above would prove nothing.
    assert bool((torch.stack(parts).sign().sum(0).abs() < 3).any())


@pytest.mark.parametrize("made", [attention_of_one_head, attention_of_torch_with_one_head])
def test_queries_and_keys_that_no_layer_reads(made: Callable[[], nn.Module]) -> None:
    """Sum of q * dL/dq, and of k * dL/dk, as the layers that write them tell it."""
    model, x = randomise(made()).double(), torch.randn(TOKENS, dtype=torch.float64)
    prepared = smcp_fx.prepare(model, x, config=smcp_fx.PruningConfig(multiple=1))
    prepared.train()
    for _ in range(2):  # the second time is no sum of both
        prepared.zero_grad()
        step(prepared, x)
        found = importance(prepared, "abs_of_sum", "q")
        for path in ("q", "k"):
            written = [prepared.get_parameter(f"{path}.{name}") for name in ("weight", "bias")]
            told = sum((p.detach() * p.grad).reshape(8, -1).sum(1) for p in written if p.grad is not None)
            assert isinstance(told, Tensor)
            assert_close(found, told.abs().float(), "importance", path)
    assert float(importance(prepared, "abs_of_sum", "v").min()) > 0


def test_flatten_into_a_linear() -> None:
    """A channel has 64 slots in the linear; they are one consumer's, so that the rules agree."""
    prepared = backward(nn.Sequential(conv(3, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 4)))
    check(prepared, "0", terms(prepared, "3").view(6, 64).sum(1))


def test_a_concat_and_a_transposed_consumer() -> None:
    model = Net(
        lambda s, x: s.up(torch.cat([s.one(x), s.two(x), s.one(x)], 1)),
        one=conv(3, 4),
        two=conv(3, 5),
        up=nn.ConvTranspose2d(13, 2, 2),
    )
    prepared = backward(model)
    slots = terms(prepared, "up", 0)
    check(prepared, "one", slots[:4] + slots[9:])
    check(prepared, "two", slots[4:9])


def test_a_grouped_consumer() -> None:
    """A unit is one channel of each convolution group, at the same offset."""
    model = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 6, groups=2), nn.ReLU(), conv(6, 3))
    prepared = backward(model)
    weight = prepared.get_parameter("2.weight")
    assert weight.grad is not None
    check(prepared, "0", (weight.detach() * weight.grad).sum((0, 2, 3)))


def test_scaled_gradients() -> None:
    prepared = backward(chain(6, 8))
    measure = TaylorImportance(prepared.channels, prepared.smcp, "abs_of_sum")
    expected = measure(prepared)
    for parameter in prepared.parameters():
        assert parameter.grad is not None
        parameter.grad *= 1024
    assert_close(measure(prepared, 1024.0), expected, "importance")


def test_no_gradient_is_an_error_and_a_missing_one_counts_zero() -> None:
    prepared = backward(Residual())
    prepared.fc.weight.grad = None
    check(prepared, "stem.0", terms(prepared, "conv1"), terms(prepared, "conv3"))
    prepared.zero_grad()
    with pytest.raises(TrainingError, match=r"loss\.backward"):
        importance(prepared, "abs_of_sum", "stem.0")


def test_a_network_without_a_free_channel() -> None:
    prepared = backward(nn.Sequential(conv(3, 6)))
    for asked in (prepared.pruner.step, prepared.pruner.solve):
        with pytest.raises(TrainingError, match="nothing to prune"):
            asked()


def test_a_network_whose_free_channels_nothing_reads() -> None:
    def wiring(s: Any, x: Tensor) -> Tensor:
        y = s.one(x)
        return y.view(s.unused(y).shape)  # type: ignore[no-any-return]

    prepared = backward(Net(wiring, one=conv(3, 6), unused=conv(6, 6)))
    with pytest.raises(TrainingError, match=r"no layer reads .*'unused'"):
        prepared.pruner.step()


# ---- the theorem: Taylor-FO-BN is the importance of the downstream input channels ------------------------


def of_norm(prepared: nn.Module, norm: str) -> Tensor:
    """gamma * dL/dgamma + beta * dL/dbeta, by channel."""
    module = prepared.get_submodule(norm)
    return sum(p.detach() * p.grad for p in (module.weight, module.bias))  # type: ignore[operator, no-any-return]


def test_theorem_conv_bn_relu() -> None:
    prepared = backward(chain(6, 8), batch_norm_scaling=False)
    assert_close(of_norm(prepared, "0.1"), terms(prepared, "1.0"), "gradient")
    assert_close(of_norm(prepared, "1.1"), terms(prepared, "4"), "gradient")


def test_corollary_skip_connections() -> None:
    """Norms that are added to one stream against all convolutions that read it."""
    model = Net(
        lambda s, x: s.three(h := F.relu(s.bn1(s.one(x)) + s.bn2(s.two(x)))) + s.four(h),
        one=conv(3, 6),
        bn1=nn.BatchNorm2d(6),
        two=conv(3, 6),
        bn2=nn.BatchNorm2d(6),
        three=conv(6, 4),
        four=conv(6, 4),
    )
    prepared = backward(model, batch_norm_scaling=False)
    norms = of_norm(prepared, "bn1") + of_norm(prepared, "bn2")
    assert_close(norms, terms(prepared, "three") + terms(prepared, "four"), "gradient")
    assert_close(importance(prepared, "abs_of_sum", "one"), norms.abs().float(), "importance")


@pytest.mark.parametrize("mode", ["soft", "permanent"])
def test_corollary_masks(mode: str) -> None:
    """Equal for every channel under permanent masks; under soft ones the norm of a pruned channel sees nothing."""
    prepared = backward(chain(6, 8), batch_norm_scaling=False, mask=mode)
    prepared.set_masks({"0.0": torch.arange(6) < 4})
    prepared.zero_grad()
    step(prepared, torch.randn(IMAGE, dtype=torch.float64))
    norm, channels = of_norm(prepared, "0.1"), terms(prepared, "1.0")
    assert_close(norm[:4], channels[:4], "gradient")
    assert float(norm[4:].abs().max()) == 0
    if mode == "permanent":
        assert float(channels[4:].abs().max()) == 0
    else:
        assert float(channels[4:].abs().min()) > 0


# ---- the two ways to sum, against the definition ---------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        conv(5, 7),
        conv(5, 7).to(memory_format=torch.channels_last),
        nn.Conv2d(6, 9, 1),
        nn.Conv2d(6, 9, 1).to(memory_format=torch.channels_last),
        nn.Conv1d(6, 4, 3),
        nn.Conv3d(4, 5, 2),
        nn.Linear(6, 11),
        nn.ConvTranspose2d(5, 3, 2),
        nn.Conv2d(8, 6, 3, groups=2),
    ],
    ids=lambda module: f"{type(module).__name__} {tuple(module.weight.shape)} {module.weight.stride()}",
)
@pytest.mark.parametrize("gradient_like", ["weight", "other"])
def test_sums_over_all_but_the_input_channels(
    module: nn.Module, gradient_like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time or all layers at once, whatever the layout of weight and gradient."""
    monkeypatch.setattr(importance_module, "_CHUNK", 40)
    weight = module.weight.detach()  # type: ignore[operator, union-attr]
    assert isinstance(weight, Tensor)
    gradient = torch.randn_like(weight)
    if gradient_like == "other" and weight.dim() == 4:
        layout = torch.contiguous_format if not weight.is_contiguous() else torch.channels_last
        gradient = gradient.to(memory_format=layout)
    layer = SimpleNamespace(in_dim=0 if isinstance(module, nn.ConvTranspose2d) else 1)
    axes = "oihwd"[: weight.dim()] if layer.in_dim else "iohwd"[: weight.dim()]
    expected = torch.einsum(f"{axes},{axes}->i", weight.double(), gradient.double()).float()
    for way in (importance_module._on_cpu, importance_module._on_device):
        (found,) = way([(weight, gradient)], [layer])  # type: ignore[list-item]
        assert_close(found, expected, "importance", way.__name__)
