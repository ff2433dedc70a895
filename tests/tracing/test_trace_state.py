"""What forward draws, counts, shares and is told by its caller: as in the eager model, in any mix of modes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from random import random as draw

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError

Made = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """Two layers and a head; what happens between them is given."""

    def __init__(self, between: Made) -> None:
        super().__init__()
        self.between = between
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Conv2d(16, 4, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.b(self.between(self, self.a(x))))
        return y


def image(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def trained(
    model: nn.Module, x: Tensor, *, calls: int = 2, frozen: str = ""
) -> tuple[Tensor, dict[str, Tensor]]:
    """The last output of a copy in train mode, and its state: drawn numbers start from the same seeds."""
    model = copy.deepcopy(model).train()
    if frozen:
        model.get_submodule(frozen).eval()
    for seed in range(calls):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        output = model(x)
    output.sum().backward()
    slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), slopes | {n: b for n, b in model.named_buffers() if not n.startswith("smcp.")}


def same(model: nn.Module, prepared: nn.Module, x: Tensor, frozen: str = "") -> None:
    expected, state = trained(model, x, frozen=frozen)
    found, other = trained(prepared, x, frozen=frozen)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert state.keys() <= other.keys()
    for name, value in state.items():
        torch.testing.assert_close(other[name], value, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_buffers_that_eval_mode_changes_are_as_they_were_once_prepared(norm: str) -> None:
    """Statistics gathered in any mode: the runs of the example are no part of them."""

    def between(net: nn.Module, f: Tensor) -> Tensor:
        if norm == "batch_norm":
            return F.batch_norm(f, net.mean, net.var, training=True)  # type: ignore[arg-type]
        return F.instance_norm(f, net.mean, net.var)  # type: ignore[arg-type]

    model = Net(between)
    model.register_buffer("mean", torch.zeros(8))
    model.register_buffer("var", torch.ones(8))
    prepared = smcp_fx.prepare(model, image())
    assert not prepared.regions and prepared.channels.free_share == 1
    for state in (model.state_dict(), prepared.state_dict()):
        assert not state["mean"].any() and (state["var"] == 1).all()
    same(model, prepared, image())


def mixup(net: nn.Module, f: Tensor) -> Tensor:
    return f + 0.3 * f[torch.randperm(f.size(0))] if net.training else f


def constant_noise(net: nn.Module, f: Tensor) -> Tensor:
    return f * torch.empty(1, 8, 1, 1).bernoulli_(0.6) + torch.normal(0.0, 1.0, (1,)) if net.training else f


def python_draw(net: nn.Module, f: Tensor) -> Tensor:
    return f * random.uniform(0.5, 2.0) if net.training else f


def imported_draw(net: nn.Module, f: Tensor) -> Tensor:
    return f * draw() if net.training else f


def numpy_draw(net: nn.Module, f: Tensor) -> Tensor:
    return f * float(np.random.beta(1.0, 1.0)) if net.training else f


def distribution(net: nn.Module, f: Tensor) -> Tensor:
    return f * torch.distributions.Beta(1.0, 1.0).sample() if net.training else f


@pytest.mark.parametrize(
    "between", [mixup, constant_noise, python_draw, imported_draw, numpy_draw, distribution]
)
def test_what_is_random_is_drawn_anew_in_each_call(between: Made) -> None:
    model = Net(between)
    prepared = smcp_fx.prepare(model, image())
    for batch in (4, 3):
        same(model, prepared, image(batch))


def scaled_by_a_draw(net: nn.Module, f: Tensor) -> Tensor:
    if not net.training:
        return f * float(net.scale)  # type: ignore[arg-type]
    alive = torch.bernoulli(torch.full((1,), 0.8, dtype=f.dtype))
    return float(alive) / 0.8 * f * (1 + torch.rand(()).item())


def test_numbers_taken_out_of_tensors_stay_arithmetic() -> None:
    """Whether a branch lives, drawn as a tensor of one element and read as a number."""
    model = Net(scaled_by_a_draw)
    model.register_buffer("scale", torch.full((1,), 0.7))
    prepared = smcp_fx.prepare(model, image())
    assert not prepared.regions and prepared.channels.free_share == 1
    same(model, prepared, image(3))
    for one in (model, prepared):
        one.get_buffer("scale").fill_(0.3)
    torch.testing.assert_close(prepared.eval()(image()), model.eval()(image()))


def test_a_draw_of_python_is_no_difference() -> None:
    for seed in range(
        8
    ):  # the original and the prepared model go the same way, wherever the generator stands
        random.seed(seed)
        smcp_fx.prepare(Net(lambda n, f: f * 2 if n.training and random.random() < 0.5 else f), image())


def counted(net: nn.Module, f: Tensor) -> Tensor:
    net.calls += net.training
    return f if net.calls < 2 else f * 0.5  # type: ignore[operator]


def test_a_counter_that_decides_on_what_is_computed_goes_on_counting() -> None:
    model = Net(counted)
    prepared = smcp_fx.prepare(model, image())
    assert "counts its calls" in prepared.untraced[""]
    same(model, prepared, image())


def only_counted(net: nn.Module, f: Tensor) -> Tensor:
    net.calls += 1
    return f


def test_a_counter_that_decides_on_nothing_is_no_hindrance() -> None:
    assert not smcp_fx.prepare(Net(only_counted), image()).regions


class Told(nn.Module):
    """Drops what its caller tells it to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor, training: bool) -> Tensor:
        return F.dropout(self.norm(x).relu(), 0.5, training)


def test_a_flag_that_is_passed_on_is_that_of_the_module_which_read_it() -> None:
    model = Net(lambda net, f: net.told(f, net.training))  # type: ignore[operator, no-any-return]
    model.told = Told()
    prepared = smcp_fx.prepare(model, image())
    for frozen in ("", "told", "a"):
        same(model, prepared, image(), frozen)


def of_a_part(net: nn.Module, f: Tensor) -> Tensor:
    return F.dropout(f, 0.5, True) if net.b.training else f * 1.5


def test_a_flag_of_a_part_decides_for_its_owner() -> None:
    model = Net(of_a_part)
    prepared = smcp_fx.prepare(model, image())
    for frozen in ("", "b", "a"):
        same(model, prepared, image(), frozen)


def test_a_mode_that_forward_sets_is_set() -> None:
    def evaluated(net: nn.Module, f: Tensor) -> Tensor:
        net.b.eval()  # type: ignore[operator, union-attr]
        return f

    model = Net(evaluated)
    prepared = smcp_fx.prepare(model, image())
    assert "into eval mode" in prepared.untraced[""]
    same(model, prepared, image())


class Wrapped(nn.Module):
    """A module that also stands elsewhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


@pytest.mark.parametrize("frozen", ["first", "second", ""])
def test_a_module_in_two_places_follows_the_mode_of_both(frozen: str) -> None:
    model = Net(lambda net, f: net.first(net.second(f)))  # type: ignore[operator, no-any-return]
    inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5))
    model.first, model.second = Wrapped(inner), Wrapped(inner)
    prepared = smcp_fx.prepare(model, image())
    same(model, prepared, image(), frozen)
    assert [n for n, _ in prepared.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_copy_has_the_state_of_branches_not_taken() -> None:
    model = Net(lambda _, f: f)
    model.unused = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    prepared = smcp_fx.prepare(model, image())
    assert set(copy.deepcopy(prepared).state_dict()) == set(prepared.state_dict())
    copy.deepcopy(prepared).load_state_dict(model.state_dict(), strict=False)


def test_keyword_arguments_that_are_not_given_are_none() -> None:
    class Optional(Net):
        def forward(self, x: Tensor, *more: Tensor, scale: float = 2.0, **rest: Tensor) -> Tensor:
            y: Tensor = self.head(self.b(self.a(x) * scale))
            return y + rest["bias"] if rest.get("bias") is not None else y + len(more)

    model = Optional(mixup).eval()
    prepared = smcp_fx.prepare(model, image())
    assert not prepared.regions
    torch.testing.assert_close(prepared(image()), model(image()))


def test_sizes_that_unflatten_takes_from_a_shape() -> None:
    model = Net(lambda _, f: f.flatten(2).relu().unflatten(2, f.shape[2:])).eval()
    prepared = smcp_fx.prepare(model, image(), config=smcp_fx.PruningConfig(multiple=1))
    masks = {g.name: torch.arange(g.size) % 3 > 0 for g in prepared.channels.groups if g.free}
    prepared.set_masks(masks)
    smaller = smcp_fx.convert(prepared)
    torch.testing.assert_close(smaller(image()), prepared(image()), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_scripted_parts_are_called_as_they_are_and_can_be_trained() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), scripted, nn.Conv2d(16, 4, 1))
    model.eval()
    prepared = smcp_fx.prepare(model, image())
    assert not scripted.training
    assert not prepared.get_submodule("3").training
    assert all(p.is_leaf and p.requires_grad for p in copy.deepcopy(prepared).parameters())
    torch.testing.assert_close(prepared(image()), model(image()), atol=1e-5, rtol=1e-4)
    prepared.train()(image()).sum().backward()
    assert all(p.grad is not None for p in prepared.parameters())
    reason = "is compiled by torch.jit: prepare the model that it was made from"
    assert any(reason in why for group in prepared.channels.groups for why in group.pinned)
    with pytest.raises(InputError, match=r"compiled by torch\.jit: prepare the model that it was made from"):
        smcp_fx.prepare(torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))), image())


def test_a_model_from_torch_export_is_refused_with_the_cure() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with pytest.raises(InputError, match=r"made by torch\.export.* smcp_fx\.from_onnx"):
        smcp_fx.prepare(torch.export.export(plain, (image(),)).module(), image())


class Offsets(nn.Module):
    """Keeps the places of an image's positions outside the state dict, filled in the first call for a size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[0] != x.shape[3]:
            places = torch.zeros(x.shape[3])
            places[:] = torch.arange(x.shape[3], dtype=torch.float32)
            self.places = places.to(x)
        return x + self.places


@pytest.mark.parametrize("ran", [False, True])
def test_a_buffer_that_is_filled_in_the_first_call_is_a_cache(ran: bool) -> None:
    """A network that never ran is as free as one that did."""
    model = Net(lambda s, h: s.offsets(h)).eval()
    model.offsets = Offsets()
    expected = copy.deepcopy(model)(image())
    if ran:
        model(image())
    prepared = smcp_fx.prepare(model, image(), config=smcp_fx.PruningConfig(multiple=1))
    assert prepared.channels.free_share == 1
    assert torch.equal(prepared(image()), expected)


class Kept(nn.Module):
    """Returns a dict or a list that it keeps as an attribute, as Monodepth2's decoder does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.outputs, self.parts = way, {}, []
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> object:
        y = self.b(torch.relu(self.a(x)))
        if self.way == "list":
            self.parts.clear()
            self.parts.append(y)
            return self.parts
        if self.way == "new":
            self.outputs = {}
        self.outputs["disparity", 0] = y
        return self.outputs


@pytest.mark.parametrize("way", ["new", "same", "list"])
def test_a_dict_that_the_model_keeps_may_be_its_output(way: str) -> None:
    model = Kept(way).eval()
    outputs, parts = model.outputs, model.parts
    prepared = smcp_fx.prepare(model, image())
    assert model.outputs is outputs and model.parts is parts and not outputs and not parts
    assert not prepared.regions and prepared.channels.free_share == 1
    found, expected = prepared(image()), model(image())
    key = 0 if way == "list" else ("disparity", 0)
    assert torch.equal(found[key], expected[key])
