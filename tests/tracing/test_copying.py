"""Models that keep what autograd computed can be prepared, copied and converted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm

import smcp_fx


class Keeps(nn.Module):
    """Keeps its last features, as losses and visualisations want them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)
        self.kept: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.kept = {"features": [y]}
        return self.c(self.b(y).relu())


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 1))
    kept: list[Tensor] = []
    model[3].kept = kept
    model[3].register_forward_hook(lambda module, args, output: module.kept.append(output))
    return model


def of(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        wrap(nn.Conv2d(8, 8, 3)),
        nn.Conv2d(8, 4, 1),
    )


@pytest.mark.parametrize(
    "make",
    [
        Keeps,
        hooked,
        lambda: of(spectral_norm),
        lambda: of(lambda m: prune.l1_unstructured(m, "weight", amount=0.5)),
    ],
    ids=["attribute", "hook", "spectral_norm", "pruned"],
)
def test_after_a_step(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(2, 3, 10, 10)
    model(x).sum().backward()
    prepared = smcp_fx.prepare(model, x)
    model.eval()
    prepared.eval()
    torch.testing.assert_close(prepared(x), model(x))
    prepared.train()
    prepared(x).sum().backward()
    free = [group for group in prepared.channels.groups if group.free]
    assert free
    prepared.set_masks({group.name: torch.arange(group.size) % 2 == 0 for group in free})
    other = copy.deepcopy(prepared).eval()
    smaller = smcp_fx.convert(prepared).eval()
    prepared.eval()
    torch.testing.assert_close(other(x), prepared(x))
    torch.testing.assert_close(smaller(x), prepared(x), rtol=1e-4, atol=1e-5)


class Spare(nn.Module):
    """An encoder one of whose stages forward leaves out, as decoders of few levels do."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.spare = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.used(x).relu())


def test_copies_keep_what_no_graph_reads() -> None:
    prepared = smcp_fx.prepare(Spare(), torch.randn(2, 3, 10, 10))
    twice = copy.deepcopy(copy.deepcopy(prepared))
    assert twice.state_dict().keys() == prepared.state_dict().keys()
    one, other = (dict(model.named_parameters())["spare.0.weight"] for model in (prepared, twice))
    assert one is not other
    twice.load_state_dict(prepared.state_dict())
    smcp_fx.convert(twice)


class Disordered(nn.Module):
    """Parts in another order than they are called in, many that no graph reads, and one in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(8, 4, 1)
        self.spare = nn.ModuleDict({str(n): nn.Linear(2, 2) for n in range(4)})
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.body.spare, self.norm = nn.Linear(3, 3), self.body[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.norm(self.body[0](x)) * self.scale).relu())


def test_parameters_keep_their_order() -> None:
    """Optimisers' state dicts and averages of weights know them by it."""
    model, images = Disordered(), torch.randn(2, 3, 10, 10)
    prepared = smcp_fx.prepare(model, images)
    order, state = [name for name, _ in model.named_parameters()], list(model.state_dict())
    for one in (prepared, copy.deepcopy(prepared), copy.deepcopy(copy.deepcopy(prepared))):
        assert [name for name, _ in one.named_parameters()] == order
        assert [name for name in one.state_dict() if not name.startswith("smcp.")] == state
    average = torch.optim.swa_utils.AveragedModel(prepared)
    average.update_parameters(prepared)


def test_a_converted_models_copies_keep_its_order(tmp_path: Path) -> None:
    smaller = smcp_fx.convert(smcp_fx.prepare(Disordered(), torch.randn(2, 3, 10, 10)))
    smcp_fx.save(smaller, tmp_path / "m.safetensors")
    order = [name for name, _ in smaller.named_parameters()]
    again = smcp_fx.load(tmp_path / "m.safetensors")
    for one in (copy.deepcopy(smaller), pickle.loads(pickle.dumps(smaller)), again):
        assert [name for name, _ in one.named_parameters()] == order
