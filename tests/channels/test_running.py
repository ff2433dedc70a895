"""Buffers that a forward writes into: after training steps, those of masked and sliced networks agree."""

from __future__ import annotations

import copy
from pathlib import Path

import models_running
import models_weights
import pytest
import torch
from models import AWKWARD, Case, Net, random_masks, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx

CASES = [case for case in AWKWARD if case.build.__module__ == models_running.__name__]


def _train(model: nn.Module) -> list[Tensor]:
    """Outputs of three steps."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.train().parameters(), 0.01)
    outputs = []
    for _ in range(3):
        outputs.append(model(torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)))
        optimizer.zero_grad()
        outputs[-1].square().mean().backward()
        optimizer.step()
    return [output.detach() for output in outputs]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if not name.startswith("smcp.")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_buffers_after_training(case: Case, tmp_path: Path) -> None:
    model = randomise(case.build()).double().eval()
    inputs = tuple(i.double() for i in case.inputs())
    prepared = smcp_fx.prepare(copy.deepcopy(model), inputs, config=smcp_fx.PruningConfig(multiple=1))
    dense, all_kept = copy.deepcopy(model), copy.deepcopy(prepared)
    assert_close(_train(all_kept), _train(dense), "identity", "training, all channels kept")
    before, after, ours = _buffers(model), _buffers(dense), _buffers(all_kept)
    moving = {name for name in before if not name.endswith(("seen", "initialised"))}
    assert all(not torch.equal(before[name], after[name]) for name in moving)
    for name, value in after.items():
        assert_close(ours[name], value, "identity", name)
        assert not ours[name].requires_grad

    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    for parameter in (*prepared.parameters(), *sliced.parameters()):
        parameter.requires_grad_(False)
    outputs = []
    for network in (prepared, sliced):
        network.train()
        generator = torch.Generator().manual_seed(3)
        images = [torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
        outputs.append([network(image) for image in images])
    assert_close(outputs[1], outputs[0], "slicing", "in training")
    kept = _buffers(smcp_fx.convert(prepared))
    for name, value in _buffers(sliced).items():
        assert_close(value, kept[name], "slicing", name)
    assert_close(sliced.eval()(*inputs), prepared.eval()(*inputs), "slicing", "afterwards")
    if case.free == 1:
        smcp_fx.save(sliced, tmp_path / "sliced.safetensors")
        loaded = smcp_fx.load(tmp_path / "sliced.safetensors").requires_grad_()
        sliced.requires_grad_()
        assert_close(_train(loaded), _train(sliced), "identity", "loaded, in training")
        assert_close(_buffers(loaded), _buffers(sliced), "identity", "buffers")


def test_writes_stay_where_branches_go() -> None:
    """A block that keeps nothing, behind a batch norm by hand that writes by an index and counts."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), models_running.BatchNorm("without gradients"))
    block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    model = Net(
        lambda s, x: s.out(s.stem(x) + s.block(s.stem(x))), stem=stem, block=block, out=nn.Conv2d(8, 4, 1)
    )
    config = smcp_fx.PruningConfig(multiple=1, layer_pruning=True)
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), config=config)
    empty = {
        g.name: torch.zeros(g.size, dtype=torch.bool) for g in prepared.channels.groups if 0 in g.permitted
    }
    assert empty
    prepared.set_masks(empty)
    sliced = smcp_fx.convert(prepared)
    for network in (prepared, sliced):
        network.train()(torch.ones(2, 3, 8, 8).cumsum(3))
    assert_close(_buffers(sliced), _buffers(smcp_fx.convert(prepared)), "slicing", "buffers")
    assert int(sliced.get_buffer("stem.1.seen")) == 2


def test_a_model_that_writes_its_own_buffers() -> None:
    model = randomise(models_running.BatchNorm("assigned")).double()
    image = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    prepared = smcp_fx.prepare(copy.deepcopy(model), image)
    for network in (model, prepared):
        network.train()(image)
    assert_close(_buffers(prepared), _buffers(model), "identity", "buffers")


def test_a_range_of_a_weight_that_the_network_shows_moves_on() -> None:
    """The weight is folded, its parameter stays for the range; one that nothing shows goes with its parameter."""
    for shows in (True, False):
        model = Net(
            lambda s, x: (s.out(s.mid(s.stem(x))), s.mid.range if s.shows else None),
            stem=nn.Conv2d(3, 8, 3),
            mid=models_weights.ObservedWeight("in steps"),
            out=nn.Conv2d(8, 4, 3),
            shows=shows,
        )
        prepared = smcp_fx.prepare(randomise(model), torch.randn(2, 3, 8, 8))
        assert prepared.channels.free_share == 1
        sliced = smcp_fx.convert(prepared).train()
        buffers = _buffers(sliced)
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        sliced(torch.randn(2, 3, 8, 8))
        moved = [name for name, buffer in buffers.items() if not torch.equal(buffer, before[name])]
        assert moved == (["mid.range"] if shows else [])
        assert ("mid.mul_value" in sliced.state_dict()) == shows


def test_what_initialises_itself_says_what_to_do() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), models_running.ActNorm(), nn.Conv2d(8, 4, 3))
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8))
    assert "let the model see a batch in train mode" in prepared.channels.explain("0", 0)
    assert bool((model[1].scale == 1).all())
