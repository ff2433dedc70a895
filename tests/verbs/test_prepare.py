"""The contract of `prepare` and `convert`: what is kept, what is copied, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, Residual, chain, conv, random_masks, randomise, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.masking.masks import META

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ONE = MethodConfig(multiple=1, batch_norm_scaling=True)


def residual() -> nn.Module:
    return randomise(Residual()).eval()


def masked(model: nn.Module | None = None) -> smcp_fx.PreparedModel:
    prepared = smcp_fx.prepare(model or residual(), IMAGE, config=ONE)
    prepared.set_masks(random_masks(prepared, 0))
    return prepared


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_parameters_keep_their_names() -> None:
    model = residual()
    prepared = smcp_fx.prepare(model, IMAGE)
    assert [n for n, _ in prepared.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert {n for n in prepared.state_dict() if not n.startswith("smcp.")} == set(model.state_dict())


@pytest.mark.parametrize(
    "wrap", [lambda m: m, nn.DataParallel, torch.compile, lambda m: nn.DataParallel(torch.compile(m))]
)
def test_checkpoints_of_dense_models_load_and_leave_the_masks(wrap: Callable[[nn.Module], nn.Module]) -> None:
    prepared, other = masked(), randomise(Residual(), seed=7).eval()
    masks, state = prepared.masks, wrap(other).state_dict()
    names = list(state)
    prepared.load_state_dict(state)
    assert list(state) == names
    assert_same_state(prepared.masks, masks)
    whole = smcp_fx.prepare(residual(), IMAGE)
    whole.load_state_dict(state)
    assert_close(run(whole, (IMAGE,)), run(other, (IMAGE,)), "identity")
    with pytest.raises(RuntimeError, match=r"Missing.*conv1.weight"):
        prepared.load_state_dict({name: value for name, value in state.items() if "conv1" not in name})


def test_a_state_dict_of_an_older_version_loads() -> None:
    """What it lacks of the pruner's state is as in a model that was just prepared."""
    prepared, fresh = masked(), smcp_fx.prepare(residual(), IMAGE, config=ONE)
    state = {f"_orig_mod.{name}": value for name, value in prepared.state_dict().items()}
    for name in ("as_of", "losses", "trained"):
        del state[f"_orig_mod.smcp.{name}"]
    again = masked()
    again.smcp.losses.fill_(1.0)
    again.load_state_dict(state)
    assert_same_state(again.masks, prepared.masks)
    for name in ("as_of", "losses", "trained"):
        assert torch.equal(getattr(again.smcp, name), getattr(fresh.smcp, name))
    del state["_orig_mod.smcp.keep"]
    with pytest.raises(RuntimeError, match=r"smcp\.keep"):
        again.load_state_dict(state)


def test_masks_and_scales_come_back_from_the_state_dict() -> None:
    prepared = masked()
    fresh = smcp_fx.prepare(residual(), IMAGE, config=ONE)
    assert not torch.equal(run(fresh, (IMAGE,)), run(prepared, (IMAGE,)))
    fresh.load_state_dict(prepared.state_dict())
    assert_same_state(fresh.masks, prepared.masks)
    assert torch.equal(run(fresh, (IMAGE,)), run(prepared, (IMAGE,)))


def test_the_original_is_untouched() -> None:
    model = residual()
    model.train()
    model.bn1.eval()
    before, code = state_of(model), list(model.modules())
    prepared = masked(model)
    prepared.train()(IMAGE).sum().backward()
    smcp_fx.convert(prepared)
    assert_same_state(model.state_dict(), before)
    assert list(model.modules()) == code
    assert not hasattr(model, "smcp")
    assert model.training and not model.bn1.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_deepcopy_is_independent() -> None:
    prepared = masked()
    prepared.pruner.correction = 1.25
    output, masks, state = run(prepared, (IMAGE,)), prepared.masks, state_of(prepared)
    copied = copy.deepcopy(prepared)
    assert torch.equal(run(copied, (IMAGE,)), output)
    assert_same_state(copied.masks, masks)
    assert copied.pruner.correction == 1.25
    copied.set_masks(random_masks(copied, 1))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    copied.train()(IMAGE).sum().backward()
    copied.pruner.step()
    copied.pruner.solve(0.6)
    assert_same_state(prepared.masks, masks)
    assert_same_state(prepared.state_dict(), state)
    assert prepared.pruner.history == [] and len(copied.pruner.history) == 1
    assert torch.equal(run(prepared, (IMAGE,)), output)


def test_a_copy_has_the_same_state_dict() -> None:
    """Constants of the trace are no part of it."""
    model = Net(lambda s, x: s.conv(x) * torch.tensor([2.0]), conv=nn.Conv2d(3, 8, 3))
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8))
    assert copy.deepcopy(prepared).state_dict().keys() == prepared.state_dict().keys()


def test_pickling_is_refused_with_advice() -> None:
    import pickle

    with pytest.raises(CheckpointError, match="state_dict"):
        pickle.dumps(masked())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    prepared = masked()
    expected = run(prepared, (IMAGE,))
    prepared = prepared.to(dtype)
    output = run(prepared, (IMAGE.to(dtype),))
    assert output.dtype == dtype
    what = dtype if dtype != torch.float64 else torch.float32
    assert_close(output.to(what), expected.to(what), "identity")
    sliced = smcp_fx.convert(prepared)
    assert {p.dtype for p in sliced.parameters()} == {dtype}
    assert_close(run(sliced, (IMAGE.to(dtype),)).to(what), expected.to(what), "identity")
    # What is gathered over many steps stays in single precision.
    assert prepared.smcp.gathered.dtype == torch.float32
    assert prepared.smcp.keep.dtype == torch.bool


def test_double_and_half_are_to() -> None:
    assert run(masked().double(), (IMAGE.double(),)).dtype == torch.float64
    assert run(masked().half(), (IMAGE.half(),)).dtype == torch.float16


@pytest.mark.parametrize("training", [False, True])
def test_each_submodule_keeps_its_mode(training: bool) -> None:
    model = residual().train(training)
    model.bn1.train(not training)
    prepared = masked(model)
    for made in (prepared, copy.deepcopy(prepared), smcp_fx.convert(prepared)):
        modes = {name: module.training for name, module in made.named_modules() if "smcp" not in name}
        expected = {name: module.training for name, module in model.named_modules()}
        assert {name: expected[name] for name in modes} == modes
        assert made.bn1.training is not training and made.training is training


def test_functional_dropout_follows_train_and_eval() -> None:
    model = Net(
        lambda s, x: s.out(F.dropout(s.stem(x), 0.5, s.training)), stem=conv(3, 8), out=conv(8, 4)
    ).eval()
    prepared = smcp_fx.prepare(model, IMAGE, config=ONE)
    sliced = smcp_fx.convert(prepared)
    for made in (prepared, sliced):
        made.eval()
        assert torch.equal(run(made, (IMAGE,)), run(made, (IMAGE,)))
        made.train()
        assert not torch.equal(run(made, (IMAGE,)), run(made, (IMAGE,)))


class WithArray(Net):
    example_input_array = torch.zeros(3, 5, 6)


def linear_net(kind: type[Net], **fields: Any) -> Net:
    net = kind(lambda s, x: s.two(F.relu(s.one(x))), one=nn.Linear(6, 8), two=nn.Linear(8, 4))
    for name, value in fields.items():
        setattr(net, name, value)
    return net


def test_default_inputs() -> None:
    def shape(model: nn.Module) -> tuple[int, ...]:
        (found,) = smcp_fx.prepare(model).plan.example_inputs
        return tuple(found.shape)

    assert shape(chain(8, 8)) == (2, 3, 32, 32)
    assert shape(nn.Sequential(nn.Conv1d(5, 8, 3), nn.Conv1d(8, 4, 3))) == (2, 5, 32)
    assert shape(nn.Sequential(conv(3, 8), nn.Flatten(), nn.Linear(8 * 64 * 64, 4))) == (2, 3, 64, 64)
    assert shape(linear_net(WithArray)) == (3, 5, 6)
    assert shape(linear_net(Net, pretrained_cfg={"input_size": (7, 6)})) == (2, 7, 6)
    with pytest.raises(InputError, match="example_inputs"):
        smcp_fx.prepare(linear_net(Net))


def uses_the_name() -> nn.Module:
    return Net(lambda s, x: s.smcp(s.stem(x)), stem=conv(3, 8), smcp=conv(8, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet50"}, "nn.Module"),
        ({"model": uses_the_name()}, "rename"),
        ({"target": 0}, "fraction"),
        ({"target": 1.5}, "fraction"),
        ({"target": True}, "fraction"),
        ({"target": float("nan")}, "fraction"),
        ({"target": "3 apples"}, "FLOPs"),
        ({"target": "3 parameters"}, "FLOPs"),
        ({"target": "-3 GFLOPs"}, "positive"),
        ({"target": "1e1e1 FLOPs"}, "positive"),
        ({"cost": "speed"}, "flops, params"),
        ({"example_inputs": torch.zeros(2, 4, 8, 8)}, "does not run"),
        ({"config": {"exclude": ("stem.7",)}}, "stem.7"),
        ({"config": {"multiple": 0}}, "multiple"),
        ({"config": {"momentum": 1.0}}, "momentum"),
        ({"config": {"mask": "softest"}}, "softest"),
        ({"config": {"exclude": "stem"}}, "tuple"),
        ({"config": {"exclude": 5}}, "exclude"),
        ({"config": {"layer_pruning_in": None}}, "layer_pruning_in"),
        ({"config": {"momentum": "0.5"}}, "momentum"),
        ({"config": {"memory": None}}, "memory"),
        ({"config": {"tolerance": torch.tensor(0.1)}}, "tolerance"),
        ({"config": {"width_exponent": True}}, "width_exponent"),
        ({"config": {"multiple": True}}, "multiple"),
        ({"config": {"layer_pruning": 1}}, "layer_pruning"),
        ({"config": {"batch_norm_scaling": "no"}}, "batch_norm_scaling"),
        ({"config": {"keep_first_convolution": None}}, "keep_first_convolution"),
        ({"config": {"mask": ["soft"]}}, "mask"),
        ({"cost": 5}, "cost"),
        ({"cost": None}, "cost"),
        ({"leaves": None}, "leaves"),
        ({"leaves": [5]}, "leaves"),
    ],
)
def test_prepare_refuses_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    options = {"model": residual(), "example_inputs": IMAGE, **options}
    model, config = options["model"], options.pop("config", {})
    before = state_of(model) if isinstance(model, nn.Module) else {}

    def attempt() -> None:
        smcp_fx.prepare(**options, config=MethodConfig(**config))

    with pytest.raises(InputError, match=message):
        attempt()
    if before:
        assert_same_state(model.state_dict(), before)


def test_prepared_models_are_not_prepared_again_and_others_not_converted() -> None:
    with pytest.raises(InputError, match="already"):
        smcp_fx.prepare(masked(), IMAGE)
    with pytest.raises(InputError, match="what prepare returned"):
        smcp_fx.convert(residual())  # type: ignore[arg-type]


def mask(size: int, kept: int) -> Tensor:
    return torch.arange(size) < kept


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"conv1": mask(24, 5), "nowhere": mask(24, 5)}, "nowhere"),
        ({"conv1": mask(24, 5), "conv3": mask(23, 5)}, r"\(24,\)"),
        ({"conv1": mask(24, 5), "conv3": mask(24, 5).float()}, "bool"),
        ({"conv1": mask(24, 5), "conv3": mask(24, 0)}, "keeps nothing"),
        ({"conv1": mask(24, 5), "conv3": [True] * 24}, "bool tensor"),
        ({"conv1": mask(24, 5), "fc": mask(5, 3)}, "must stay whole"),
        ([("conv1", mask(24, 5))], "map"),
    ],
)
def test_bad_masks_change_nothing(masks: Any, message: str) -> None:
    prepared = masked()
    before, output = state_of(prepared), run(prepared, (IMAGE,))
    with pytest.raises(InputError, match=message):
        prepared.set_masks(masks)
    assert_same_state(prepared.state_dict(), before)
    assert torch.equal(run(prepared, (IMAGE,)), output)


def test_masks_are_copies() -> None:
    prepared = masked()
    before = state_of(prepared)
    for value in prepared.masks.values():
        value.logical_not_()
    assert_same_state(prepared.state_dict(), before)


def test_convert_leaves_the_prepared_model_as_it_was() -> None:
    prepared = masked()
    before, code, output = state_of(prepared), prepared.code, run(prepared, (IMAGE,))
    first = smcp_fx.convert(prepared)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert_same_state(prepared.state_dict(), before)
    assert prepared.code == code
    assert torch.equal(run(prepared, (IMAGE,)), output)
    assert_close(run(smcp_fx.convert(prepared), (IMAGE,)), output, "slicing")


def test_the_converted_model_is_plain_and_trains() -> None:
    prepared = masked()
    sliced = smcp_fx.convert(prepared)
    assert not hasattr(sliced, "smcp") and not hasattr(sliced, "pruner")
    assert not [name for name in sliced.state_dict() if "smcp" in name]
    for node in sliced.graph.nodes:
        assert META not in node.meta
        assert not getattr(node.target, "__module__", "").startswith("smcp_fx"), node
        assert "smcp" not in str(node.target)
    kept = int(prepared.masks["conv1"].sum())
    assert sliced.conv1.out_channels == sliced.bn1.num_features == sliced.conv2.in_channels == kept < 24
    sliced.train()
    optimizer = torch.optim.SGD(sliced.parameters(), lr=0.01)
    before = state_of(sliced)
    sliced(IMAGE).square().mean().backward()
    optimizer.step()
    changed = [n for n, tensor in sliced.state_dict().items() if not torch.equal(tensor, before[n])]
    assert set(changed) >= {n for n, _ in sliced.named_parameters()}
    assert "bn1.running_mean" in changed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_types(dtype: torch.dtype) -> None:
    model, x = chain(8, 8).to(dtype).eval(), IMAGE.to(dtype)
    prepared = smcp_fx.prepare(model, x, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    prepared.set_masks(random_masks(prepared, 0))
    assert run(prepared, (x,)).dtype == dtype
    assert run(smcp_fx.convert(prepared), (x,)).dtype == dtype


def test_the_memory_format_is_kept() -> None:
    model = chain(8, 8).to(memory_format=torch.channels_last).eval()
    prepared = smcp_fx.prepare(model, IMAGE, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    prepared.set_masks({"0.0": torch.arange(8) < 5})
    weight = smcp_fx.convert(prepared).get_parameter("1.0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_convert_leaves_spectrally_normed_weights_as_they_are() -> None:
    """Reading such a weight in train mode takes a step towards its singular vectors: it is read in eval mode."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3)), nn.Conv2d(8, 4, 1)
    )
    prepared = smcp_fx.prepare(net, torch.randn(2, 3, 8, 8)).train()
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    smaller = smcp_fx.convert(prepared)
    assert smaller.training
    for name, value in before.items():
        assert torch.equal(prepared.state_dict()[name], value), name
    expected = before | {"1.weight": net.eval()[1].weight.detach()}
    for name, value in smaller.state_dict().items():
        assert torch.equal(value, expected[name]), name
