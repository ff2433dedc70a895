"""Optimisers that go along when a model becomes smaller: each element's state is found by its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import smcp_fx
from smcp_fx import TrainingWarning
from smcp_fx.errors import InputError


class Net(nn.Module):
    """Grouped, depthwise, transposed and shared convolutions, plain parameters and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.dw = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.grouped = nn.Conv2d(16, 24, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.shared = nn.Conv2d(16, 16, 1)
        self.scale = nn.Parameter(torch.randn(1, 16, 1, 1))
        self.cell, self.head = nn.LSTM(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.grouped(self.dw(self.bn(self.stem(x)).relu())))
        x = self.shared(self.shared(x)) * self.scale
        found: Tensor = self.head(self.cell(x.mean(3).permute(2, 0, 1))[0][-1])
        return found


def split(parameters: Any) -> list[dict[str, Any]]:
    found = [*parameters]
    return [{"params": found[:5], "lr": 0.5, "weight_decay": 0.1}, {"params": found[5:]}]


MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "groups": lambda p: optim.AdamW(split(p), lr=1e-3, amsgrad=True),
    "fused": lambda p: optim.Adam(p, fused=True),
    "factored": lambda p: optim.Adafactor(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9),
}


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.train()(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()


def cut(prepared: smcp_fx.PreparedModel) -> None:
    prepared.set_masks(
        {g.name: torch.rand(g.size) > 0.4 for g in prepared.channels.groups if g.free and g.size > 1}
    )


def check(optimizer: optim.Optimizer, carried: optim.Optimizer, before: nn.Module, after: nn.Module) -> None:
    """Each element's state is that of the element of its value: no two weights are equal."""
    whole, seen = dict(before.named_parameters()), 0
    for name, small in after.named_parameters():
        values = whole[name].flatten()
        at = [(values == value).nonzero().flatten().tolist() for value in small.detach().flatten()]
        if any(len(places) != 1 for places in at):
            continue  # set to zero by a mask, or never trained
        index = torch.tensor(at).flatten()
        assert carried.state[small].keys() == optimizer.state[whole[name]].keys()
        for key, value in optimizer.state[whole[name]].items():
            found = carried.state[small][key]
            if value.shape == whole[name].shape:
                assert torch.equal(found.flatten(), value.flatten()[index])
                assert found.stride() == small.stride()
                seen += small.numel() < values.numel()
            elif value.dim() == 0:
                assert torch.equal(found, value)
    assert seen


@pytest.mark.parametrize("made_for", ["the original", "the prepared model"])
@pytest.mark.parametrize("name", MAKERS)
def test_state_is_that_of_the_kept_channels(name: str, made_for: str) -> None:
    torch.manual_seed(0)
    model = Net()
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), check=False)
    trained = model if made_for == "the original" else prepared
    optimizer = MAKERS[name](trained.parameters())
    step(trained, optimizer)
    if trained is model:
        prepared.load_state_dict(model.state_dict())
    cut(prepared)
    smaller = smcp_fx.convert(prepared, check=False)
    carried = smcp_fx.carry_optimizer(optimizer, trained, smaller)
    assert type(carried) is type(optimizer)
    assert carried.defaults == optimizer.defaults
    for old, new in zip(optimizer.param_groups, carried.param_groups, strict=True):
        assert len(old["params"]) == len(new["params"])
        assert {k: v for k, v in old.items() if k != "params"} == {
            k: v for k, v in new.items() if k != "params"
        }
    if name != "factored":
        check(optimizer, carried, trained, smaller)
    step(smaller, carried)


class Factored(optim.Optimizer):
    """Keeps means of squares along the two longest dimensions, of weights from 12 wide on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state, squares = self.state[p], p.grad.square()
            narrow = p.dim() < 2 or sorted(p.shape)[-2] < 12
            means = {"all": squares} if narrow else {
                str(dim): squares.mean(dim, True) for dim in (0, 1)
            }  # fmt: skip
            if not state:
                state.update({key: torch.zeros_like(value) for key, value in means.items()})
            for key, value in means.items():
                state[key].lerp_(value, 0.1)


def test_state_of_another_kind_at_the_new_shape_is_dropped_and_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(a, b, 1) for a, b in ((3, 16), (16, 32), (32, 32), (32, 2))))
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), check=False)
    optimizer = Factored(prepared.parameters())
    step(prepared, optimizer)
    widths = dict(zip((g.name for g in prepared.channels.groups if g.free), (8, 14, 14), strict=True))
    prepared.set_masks({name: torch.arange(g.size) < widths[name]
                        for g in prepared.channels.groups if (name := g.name) in widths})  # fmt: skip
    smaller = smcp_fx.convert(prepared, check=False)
    random = torch.get_rng_state()
    with pytest.warns(TrainingWarning, match=r"begins anew for 1 of 8 parameters, .*: '1\.weight'"):
        carried = smcp_fx.carry_optimizer(optimizer, prepared, smaller)
    assert torch.equal(random, torch.get_rng_state())
    assert [tuple(value.shape) for value in carried.state[smaller.get_parameter("2.weight")].values()] == [
        (1, 14, 1, 1),
        (14, 1, 1, 1),
    ]
    assert "1.weight" not in {n for n, p in smaller.named_parameters() if p in carried.state}
    step(smaller, carried)


def test_so_it_is_in_the_own_class_and_after_layers_went() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 2)
    )
    model[0].requires_grad_(False)
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), check=False)
    optimizer = optim.SGD(prepared.named_parameters(), lr=0.1, momentum=0.9)
    step(prepared, optimizer)
    cut(prepared)
    own = smcp_fx.convert(prepared, into=model, check=False)
    carried = smcp_fx.carry_optimizer(optimizer, prepared, own)
    assert carried.param_groups[0]["param_names"] == [name for name, _ in own.named_parameters()]
    assert own[0].weight not in carried.state
    check(optimizer, carried, prepared, own)


def test_a_weight_that_was_computed_joins_its_parameters_group_and_other_parameters_stay() -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 16, 3)), nn.Conv2d(16, 2, 1), nn.Flatten(1)
    )
    loss, x = nn.Parameter(torch.ones(3)), torch.randn(2, 3, 4, 4)
    optimizer = optim.SGD(
        [{"params": model[1].parameters()}, {"params": [*model[0].parameters(), loss], "lr": 0.5}],
        momentum=0.9,
    )
    smaller = smcp_fx.compress(model, [x], target=0.5, outputs="values")
    carried = smcp_fx.carry_optimizer(optimizer, model, smaller)
    computed = dict(smaller.named_parameters())["0.weight"]
    assert any(one is computed for one in carried.param_groups[1]["params"])
    assert any(one is loss for one in carried.param_groups[1]["params"])
    assert len(carried.param_groups[0]["params"]) == 2


def test_what_does_not_fit_is_told() -> None:
    model, x = Net(), torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(model, x, check=False)
    cut(prepared)
    smaller = smcp_fx.convert(prepared, check=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="holds no parameter of Net: give the model that it was made for"):
        smcp_fx.carry_optimizer(optimizer, Net(), smaller)
    with pytest.raises(InputError, match="nothing says which channels Net kept"):
        smcp_fx.carry_optimizer(optimizer, model, model)
    with pytest.raises(InputError, match=r"needs a torch\.optim\.Optimizer"):
        smcp_fx.carry_optimizer(None, model, smaller)  # type: ignore[type-var]
    flat = optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        flat.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    flat.step(closure)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be cut: start a new one"):
        smcp_fx.carry_optimizer(flat, model, smaller)
