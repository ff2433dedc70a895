"""Models that keep what autograd computed can be prepared, copied and converted."""

from __future__ import annotations

import copy
from collections.abc import Callable

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
