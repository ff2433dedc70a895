"""Hooks on modules of prepared and converted models, held against those on the original's."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smcp_fx


class Block(nn.Module):
    """It returns a dict, has optional arguments, another way in training, and returns what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor, skip: Tensor | None = None, scale: float = 2.0) -> dict[str, Any]:
        y = self.norm(self.conv(x)).relu()
        if self.training:
            y = y + 1
        y = y if skip is None else y + skip
        return {"y": y * scale, "both": (x, y)}


class Net(nn.Module):
    """A block that is called twice, blocks in blocks, attention, a recurrent layer, and a head for training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        )
        self.one, self.two = Block(16), Block(16)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.cell = nn.GRU(16, 8, batch_first=True)
        self.aux = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(self.stem(x), scale=1.5)
        b = self.two(a["y"], skip=a["both"][1])
        c = self.two(b["y"] + b["both"][0])["y"]
        found: Tensor = self.head(self.cell(self.attention(c.flatten(2).transpose(1, 2)))[0][:, -1])
        if self.training:
            found = found + self.aux(a["y"].mean((2, 3)))
        return found


class Parts(nn.Module):
    """Traced in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU()))
        self.head = nn.Sequential(nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU()), nn.Flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        found: Tensor = self.head(y if float(y.sum()) < 1e9 else y * 2)
        return found


def seen(model: nn.Module, x: Tensor, training: bool) -> dict[str, list[Any]]:
    """What hooks see of each module's calls: copies, as layers in place write into results."""
    found: dict[str, list[Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, given, out, name=name: found.setdefault(name, []).append(
                pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, (given, out))
            )
        )
        for name, module in model.named_modules()
        if name and not name.startswith("smcp")
    ]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "hooks on")  # a projection whose weight is read, not called
        model.train(training)(x)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [Net, Parts])
def test_hooks_see_what_the_originals_see(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 3, 6, 6)
    prepared = smcp_fx.prepare(model, x, check=False)
    assert bool(prepared.regions) == (kind is Parts)
    for graph in (prepared, smcp_fx.convert(prepared, check=False), copy.deepcopy(prepared)):
        expected, found = seen(copy.deepcopy(model), x, training), seen(graph, x, training)
        there = {name for name, _ in graph.named_modules()}
        assert found.keys() == expected.keys() & there
        assert {"stem", "one", "two", "attention"} <= found.keys() or kind is Parts
        for name, calls in found.items():
            torch.testing.assert_close(
                calls, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_hooks_change_what_a_block_takes_and_returns_and_hear_of_gradients() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 6, 6)
    prepared = smcp_fx.prepare(model, x, check=False)
    told = []
    for one in (model, prepared, smcp_fx.convert(prepared, check=False)):
        gradients: list[Tensor] = []
        before = one.eval()(x)
        hooks = [
            one.one.register_forward_pre_hook(lambda _m, given: (given[0] * 2,)),
            one.two.register_forward_hook(lambda _m, _g, out: {**out, "y": out["y"] + 1}),
            one.stem.register_full_backward_hook(lambda _m, _g, out, to=gradients: to.append(out[0])),
        ]
        changed = one(x.requires_grad_())
        changed.sum().backward()
        for hook in hooks:
            hook.remove()
        assert torch.equal(one(x), before)
        told.append((changed.detach(), gradients))
    torch.testing.assert_close(told[1:], [told[0]] * 2)


def test_hooks_that_cannot_be_called_are_named(tmp_path: Path) -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())),
        torch.randn(1, 3, 4, 4),
    )
    prepared = smcp_fx.prepare(model, x)
    smcp_fx.save(smcp_fx.convert(prepared), tmp_path / "s.safetensors")
    loaded = smcp_fx.load(tmp_path / "s.safetensors")
    loaded.get_submodule("1").register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"hooks on '1' are not called.*convert\(prepared, into=model\)"):
        loaded(x)
    loaded(x)  # it was told
    for graph in (prepared, smcp_fx.convert(prepared)):
        hook = graph.get_submodule("1").register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match=r"hooks on '1' are not called: torch\.compile"):
            torch.compile(graph, backend="eager", fullgraph=True)(x)
        hook.remove()
        torch.compile(graph, backend="eager", fullgraph=True)(x)


def test_a_layers_own_hooks_run_where_its_weight_is_masked() -> None:
    """A spectral norm that is a hook takes its step once, as before."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(3, 8, 1)), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1))
    prepared = smcp_fx.prepare(model, torch.randn(1, 3, 4, 4))
    calls: list[Any] = []
    prepared.get_submodule("1").register_forward_hook(lambda *_: calls.append(1))
    prepared(torch.randn(1, 3, 4, 4))
    assert calls == [1]
