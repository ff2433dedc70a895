"""The pruner in users' training stacks: optimisers, averaging, accumulation, compilation, freezing, batch norms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import chain
from small_training import batch, loss_of, network, prepared_model, pruned_to_target
from tolerances import assert_close
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.pruning.importance import TaylorImportance
from smcp_fx.tracing.own_weights import forward_with_weight

# ---- optimisers and what surrounds them --------------------------------------------------------------------


def one_step(prepared: smcp_fx.PreparedModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A training step as docs/guides/training_loop.md has it."""
    optimizer.zero_grad()
    loss_of(prepared, step).backward()
    prepared.pruner.step()
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
    ],
    ids=["sgd with weight decay", "adamw", "adamw, one by one", "adamw, fused", "rmsprop"],
)
def test_optimisers(make: Callable[..., torch.optim.Optimizer]) -> None:
    prepared = prepared_model()
    optimizer = make(prepared.parameters())
    for step in range(12):
        optimizer.zero_grad()
        loss_of(prepared, step).backward()
        prepared.pruner.step()
        torch.nn.utils.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
    pruned_to_target(prepared)


def test_weight_decay_moves_pruned_channels_too() -> None:
    """Soft masks leave the dense weights to the optimiser: without a gradient, decay alone shrinks them."""
    prepared = prepared_model(chain(8, 8))
    mask = torch.arange(8) < 4
    prepared.set_masks({"0.0": mask})
    layer = prepared.get_parameter("1.0.weight")
    before = layer.detach().clone()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1, weight_decay=0.5)
    (prepared(torch.zeros(2, 3, 8, 8)) * 0).sum().backward()
    optimizer.step()
    assert_close(layer[:, ~mask], before[:, ~mask] * 0.95, "slicing")


def test_clipping_after_the_step_leaves_the_importance_alone() -> None:
    """Importances come from the gradients as backward left them."""
    prepared = prepared_model()
    loss_of(prepared, 0).backward()
    measure = TaylorImportance(prepared.channels, prepared.smcp, "abs_of_sum")
    expected = measure(prepared)
    prepared.pruner.step()
    torch.nn.utils.clip_grad_norm_(prepared.parameters(), 1e-3)
    assert_close(prepared.smcp.gathered, 0.1 * expected, "importance")
    assert float(measure(prepared).max()) < 0.1 * float(expected.max())


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_model_has_the_masks_of_the_model(use_buffers: bool) -> None:
    prepared = prepared_model()
    average = torch.optim.swa_utils.AveragedModel(
        prepared, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=use_buffers
    )
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for step in range(12):
        one_step(prepared, optimizer, step)
        average.update_parameters(prepared)
    pruned_to_target(prepared)
    averaged = average.module
    if use_buffers:  # averages of masks are none: take the model's
        averaged.smcp.load_state_dict(prepared.smcp.state_dict())
    assert torch.equal(averaged.smcp.keep, prepared.smcp.keep)
    x = torch.randn(2, 3, 8, 8)
    assert_close(smcp_fx.convert(averaged.eval())(x), averaged(x), "slicing")


def test_an_averaged_model_that_is_written_to_takes_the_masks_over() -> None:
    """Averages that go through the state dict's tensors: floats averaged, the rest copied (timm's `ModelEmaV3`)."""
    prepared = prepared_model()
    average = copy.deepcopy(prepared).eval()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for step in range(12):
        one_step(prepared, optimizer, step)
        with torch.no_grad():
            for mine, new in zip(average.state_dict().values(), prepared.state_dict().values(), strict=True):
                mine.lerp_(new, 0.1) if mine.is_floating_point() else mine.copy_(new)
    average.eval()
    assert torch.equal(average.smcp.mask_conv2, prepared.smcp.mask_conv2)
    assert not bool(average.smcp.mask_conv2.all())
    x = torch.randn(2, 3, 8, 8)
    assert_close(smcp_fx.convert(average)(x), average(x), "slicing")


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_convert_takes_what_wraps_the_model(wrap: Callable[..., Any]) -> None:
    prepared = prepared_model().eval()
    prepared.set_masks({"stem.0": torch.arange(16) < 9})
    x = torch.randn(2, 3, 8, 8)
    assert_close(smcp_fx.convert(wrap(prepared))(x), prepared(x), "slicing")


def test_accumulated_gradients_give_the_importance_of_the_large_batch() -> None:
    """|W (g1 + g2 + g3 + g4)|, one step of the schedule; batch statistics are fixed so that batches can be split."""
    whole = prepared_model()
    for module in whole.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    parts = copy.deepcopy(whole)
    x, labels = batch(0, 16)
    nn.functional.cross_entropy(whole(x), labels).backward()
    whole.pruner.step()
    for images, targets in zip(x.split(4), labels.split(4), strict=True):
        (nn.functional.cross_entropy(parts(images), targets) / 4).backward()
    parts.pruner.step()
    assert float(whole.smcp.gathered.max()) > 0
    assert_close(parts.smcp.gathered, whole.smcp.gathered, "accumulation")
    assert int(parts.smcp.steps) == 1


def test_channels_last_is_the_same_network_and_importance() -> None:
    plain = prepared_model()
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    moved = network().to(memory_format=torch.channels_last)
    before = smcp_fx.prepare(moved, torch.randn(2, 3, 8, 8), config=plain.plan.config)
    plain.set_masks({"stem.0": torch.arange(16) < 8})
    x, labels = batch(0)
    nn.functional.cross_entropy(plain(x), labels).backward()
    plain.pruner.step()
    for model in (other, before):
        assert model.get_parameter("conv2.weight").is_contiguous(memory_format=torch.channels_last)
        assert model.smcp.mask_conv2.is_contiguous(memory_format=torch.channels_last)
        model.set_masks({"stem.0": torch.arange(16) < 8})
        nn.functional.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), labels).backward()
        model.pruner.step()
        assert_close(model.smcp.gathered, plain.smcp.gathered, "accumulation")


# ---- compilation -------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("mask", ["soft", "permanent"])
def test_compiled_without_graph_breaks_or_recompilation(mask: str, dynamo: Any) -> None:
    """``fullgraph`` refuses breaks; one graph serves training with all its changes of masks."""
    eager = prepared_model(mask=mask)
    compiled_model = copy.deepcopy(eager)
    compiled = torch.compile(compiled_model, backend="aot_eager", fullgraph=True)
    for model, call in ((eager, eager), (compiled_model, compiled)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(call, step).backward()
            model.pruner.step()
            optimizer.step()
        pruned_to_target(model)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not dynamo.utils.counters["graph_break"]
    for name, tensor in eager.state_dict().items():
        other = compiled_model.state_dict()[name]
        if tensor.is_floating_point():
            assert_close(other.float(), tensor.float(), "accumulation", name)
        else:
            assert torch.equal(other, tensor), name


def test_the_pruner_inside_what_is_compiled(dynamo: Any) -> None:
    """A whole training step handed to the compiler: the pruner's part runs as it is."""
    prepared = prepared_model()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)

    def train_step(x: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(prepared(x), labels).backward()
        prepared.pruner.step()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own making
        compiled = torch.compile(train_step, backend="eager")
        for step in range(12):
            compiled(*batch(step))
    pruned_to_target(prepared)


def test_compiled_ahead_of_time_the_importances_are_the_same(dynamo: Any) -> None:
    eager = prepared_model(chain(8))
    compiled_model = copy.deepcopy(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own making
        # As Inductor does, up to the C++ that it writes and compiles.
        compiled = torch.compile(compiled_model, fullgraph=True, backend="aot_eager_decomp_partition")
        for model, call in ((eager, eager), (compiled_model, compiled)):
            for masks in (torch.arange(8) < 8, torch.arange(8) < 3):
                model.zero_grad()
                model.set_masks({"0.0": masks})
                loss_of(call, 0).backward()
                model.pruner.step()
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_close(compiled_model.smcp.gathered, eager.smcp.gathered, "accumulation")


# ---- frozen layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["soft", "permanent"])
@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
def test_frozen_layers_have_the_importance_they_would_have(before: bool, mask: Any) -> None:
    """Every consumer of a group is frozen; the importances equal those of the same network that learns."""
    config = MethodConfig(multiple=1, batch_norm_scaling=True, mask=mask)
    image = torch.randn(2, 3, 8, 8)
    learning = smcp_fx.prepare(network(), image, config=config)
    model = network()
    frozen_layers = ("conv1", "conv2", "fc", "stem.0")
    if before:
        for name in frozen_layers:
            model.get_submodule(name).requires_grad_(False)
    frozen = smcp_fx.prepare(model, image, config=config)
    for name in frozen_layers:
        frozen.get_submodule(name).requires_grad_(False)
    if not before:
        frozen.smcp.mask_conv1.requires_grad_(False)
    loss_of(frozen, 0).backward()
    frozen.pruner.step()  # finds out which weights are frozen
    frozen.zero_grad()
    for prepared in (learning, frozen):
        prepared.set_masks({"stem.0": torch.arange(16) < 9})
        prepared.smcp.forget()
        for part in range(2):  # accumulated over two batches
            loss_of(prepared, part).backward()
        prepared.pruner.step()
    assert frozen.get_parameter("conv1.weight").grad is None
    assert float(learning.smcp.gathered.min()) > 0 or mask == "permanent"
    assert_close(frozen.smcp.gathered, learning.smcp.gathered, "accumulation")


def test_frozen_layers_stay_and_the_rest_is_pruned_to_the_target() -> None:
    prepared = prepared_model()
    prepared.get_submodule("conv1").requires_grad_(False)
    weight = prepared.get_parameter("conv1.weight").detach().clone()
    optimizer = torch.optim.AdamW([p for p in prepared.parameters() if p.requires_grad], lr=1e-3)
    for step in range(12):
        one_step(prepared, optimizer, step)
    assert torch.equal(prepared.get_parameter("conv1.weight"), weight)
    pruned_to_target(prepared)
    frozen = copy.deepcopy(prepared)
    frozen.get_submodule("conv1").requires_grad_(True)  # thawed: the weight's own gradient counts again
    loss_of(frozen, 20).backward()
    frozen.pruner.step()
    assert not frozen.smcp.mask_conv1.requires_grad


@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
def test_all_masked_layers_frozen(before: bool) -> None:
    """Only norms and biases learn: the masks tell what matters, from the second step on where they came first."""
    model = network()
    prepared = prepared_model(None if not before else model.requires_grad_(False))
    for name, parameter in prepared.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    optimizer = torch.optim.SGD([p for p in prepared.parameters() if p.requires_grad], lr=0.01)
    for step in range(12):
        one_step(prepared, optimizer, step)
    pruned_to_target(prepared)


def test_a_layer_that_is_frozen_again_forgets_what_its_mask_gathered() -> None:
    """The mask took a gradient, too, in the step in which the layer was thawed."""
    prepared = prepared_model()
    layer = prepared.get_submodule("conv1")
    for step, frozen in enumerate((True, False, True)):
        layer.requires_grad_(not frozen)
        prepared.zero_grad()
        loss_of(prepared, step).backward()
        if step == 2:  # as if nothing else were known, so that what is left shows
            prepared.smcp.forget()
            for parameter in prepared.parameters():
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        prepared.pruner.step()
    assert float(prepared.smcp.gathered.max()) == 0


# ---- batch norms -------------------------------------------------------------------------------------------


def test_sync_batch_norm_before_or_after_prepare() -> None:
    """One process: the synchronised norms compute what the plain ones do, scales and all."""
    image = torch.randn(2, 3, 8, 8)
    plain = smcp_fx.prepare(network(), image)
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    first = smcp_fx.prepare(convert(network()), image)
    last = convert(smcp_fx.prepare(network(), image))
    x, labels = batch(0)
    results = []
    for prepared in (plain, first, last):
        kind = nn.BatchNorm2d if prepared is plain else nn.SyncBatchNorm
        assert any(type(module) is kind for module in prepared.modules())
        prepared.set_masks({"stem.0": torch.arange(16) < 8})
        nn.functional.cross_entropy(prepared(x), labels).backward()
        prepared.pruner.step()
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
        optimizer.step()
        prepared.eval()
        results.append((prepared(x), prepared.smcp.gathered, dict(prepared.smcp.scales)))
        prepared.train()
    assert float(results[0][2]["bn1"].min()) < 1
    for found in results[1:]:
        assert_close(found[0], results[0][0], "slicing")
        assert_close(found[1], results[0][1], "importance")
        assert_close(found[2], results[0][2], "identity")


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 1e-3}],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_with_another_weight_keeps_its_statistics(
    options: dict[str, Any], training: bool
) -> None:
    """Against the module itself with that weight in its place: outputs, statistics and batches counted."""
    module = nn.BatchNorm2d(4, **options).train(training)
    expected = copy.deepcopy(module)
    weight = torch.rand(4) + 0.5
    with torch.no_grad():
        expected.weight.copy_(weight)
    for _ in range(3):
        x = torch.randn(5, 4, 3, 3) * 2 + 1
        assert torch.equal(forward_with_weight(module, weight, x), expected(x))
    for name, buffer in expected.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
