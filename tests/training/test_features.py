"""Features of blocks beside the teacher's, on the channels that are kept: by hand, through hooks and own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError

SMALL = smcp_fx.PruningConfig(multiple=1)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.two = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x)).relu_()  # written into what the norm gave
        return F.relu(y + self.two(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.head = Block(3, 12), Block(12, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer2(self.layer1(x)).mean((2, 3)))
        return y


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], 1)


NAMES = ["layer1", "layer2.norm"]


def _cut() -> tuple[nn.Module, smcp_fx.PreparedModel, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = randomise(Net()).eval(), torch.randn(6, 3, 8, 8)
    prepared = smcp_fx.prepare(model, x, config=SMALL)
    prepared.set_masks({g.name: torch.arange(g.size) % 3 > 0 for g in prepared.channels.groups if g.free})
    return model, prepared.eval(), smcp_fx.convert(prepared).eval(), x


def test_kept_channels_are_held_against_the_teachers_own() -> None:
    """Of the masked and of the sliced network; by hand from hooks on the network in its own class."""
    model, prepared, smaller, x = _cut()
    own = smcp_fx.convert(prepared, into=model).eval()
    seen: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for network in (model, own):
        for name in NAMES:
            network.get_submodule(name).register_forward_hook(
                lambda m, i, o, name=name: seen[name].append(o.clone())
            )
    dense, outputs = model(x), own(x)
    expected = F.kl_div(outputs.log_softmax(1), dense.log_softmax(1), log_target=True, reduction="batchmean")
    for name, layer in (("layer1", "layer1.two"), ("layer2.norm", "layer2.norm")):
        whole, mine = seen[name]
        assert mine.shape[1] < whole.shape[1]
        kept: Any = smaller.kept
        whole = whole[:, kept[layer][1]]
        expected = expected + (mine - whole).square().mean() / whole.var(0, correction=0).mean()
    teacher = smcp_fx.Teacher(model, outputs="classes", features=NAMES)
    for student in (smaller, prepared):
        call = teacher.watch(student)
        outputs = call(x)
        assert_close(outputs, own(x), "slicing")
        assert_close(teacher(x, outputs), expected, "accumulation")


def test_what_is_learnt_brings_them_together() -> None:
    model, _, smaller, x = _cut()
    teacher = smcp_fx.Teacher(model, outputs="values", features=NAMES)
    call, optimizer, told = teacher.watch(smaller), torch.optim.Adam(smaller.parameters(), 1e-2), []
    for _ in range(20):
        loss = teacher(x, call(x))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        told.append(loss.item())
    assert told[-1] < 0.5 * told[0]


def test_a_whole_network_of_any_class_is_watched() -> None:
    model, _, _, x = _cut()
    teacher = smcp_fx.Teacher(model, outputs="classes", features=NAMES)
    assert teacher(x, teacher.watch(model)(x)).item() == pytest.approx(0, abs=1e-6)


def test_what_cannot_be_seen_is_told() -> None:
    model, prepared, smaller, x = _cut()
    for features, said in ((["layer9"], "no module; the model has layer1"), ("layer1", "a list")):
        with pytest.raises(InputError, match=said):
            smcp_fx.Teacher(model, features=features)
    teacher = smcp_fx.Teacher(model, outputs="classes", features=NAMES)
    with pytest.raises(InputError, match=r"teacher\.watch"):
        teacher(x, smaller(x))
    teacher(x, teacher.watch(smaller)(x))
    with pytest.raises(InputError, match=r"teacher\.watch"):  # not what the call before it gave
        teacher(x, smaller(x))
    joined = nn.Sequential(Joined(), nn.Conv2d(16, 5, 1))
    graph = smcp_fx.prepare(joined, x, config=SMALL)
    other = smcp_fx.Teacher(joined, outputs="values", features=["0"])
    with pytest.raises(InputError, match="put together anew"):
        other(x, other.watch(graph)(x))
    call = teacher.watch(smcp_fx.convert(prepared, into=model))
    with pytest.raises(InputError, match="watch the graph that convert"):
        teacher(x, call(x))
