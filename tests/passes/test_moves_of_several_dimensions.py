"""Operations that move channels and something else in one call: every kept channel comes from its own place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import between, check_slicing, randomise
from torch import Tensor

import smcp_fx

ORDER = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])

#: What is done to 12 channels of 8 x 8, and how many channels it leaves.
MOVES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "roll": (lambda h: torch.roll(h, (h.shape[3] // 2, 3), (3, 1)), 12),
    "roll backwards": (lambda h: h.roll(shifts=(-1, -3), dims=(-1, -3)), 12),
    "roll of channels last": (lambda h: h.swapdims(1, 2).roll((1, 2), (1, 2)).swapdims(1, 2), 12),
    "step and crop": (lambda h: h[:, ::2, 1:], 6),
    "steps": (lambda h: h[:, 1::3, ::2, ::2], 4),
    "step and ellipsis": (lambda h: h[:, ::2, ..., 1:], 6),
    "step and row": (lambda h: h[:, ::2, 0].unsqueeze(2), 6),
    "step and new dimension": (lambda h: h[:, ::2, None, 1:].squeeze(2), 6),
    "list and crop": (lambda h: h[:, [1, 5, 3], 1:], 3),
    "order and crop": (lambda h: h[:, ORDER, 1:], 8),
    "order of both": (lambda h: h[:, ORDER[:, None], torch.tensor([0, 2])[None]], 8),
    "order of both at once": (lambda h: h[:, ORDER, torch.arange(8)].unsqueeze(-1), 8),
    "mask and steps": (lambda h: h[:, torch.tensor([True, False, True] * 4), ::2], 8),
    "diagonal": (lambda h: h.diagonal(0, 1, 2).unsqueeze(-1).transpose(1, 2), 8),
    "parts of groups": (lambda h: h.unflatten(1, (3, 4))[:, :, ::2, 1:].flatten(1, 2), 6),
    "pixel shuffle": (lambda h: F.pixel_shuffle(h, 2).roll((1, 1), (1, 2)), 3),
    "flip": (lambda h: h.flip((1, 3))[:, 2:, 1:], 10),
    "shuffled rows": (lambda h: h.view(*h.shape[:2], 2, 4, 8).transpose(2, 3).reshape(h.shape), 12),
}


@pytest.mark.parametrize("name", MOVES)
def test_masked_is_sliced(name: str) -> None:
    move, left = MOVES[name]
    net = between(lambda _, h: move(h), 12, left)
    prepared = check_slicing(net, (torch.randn(2, 3, 8, 8),), seeds=(0, 1, 2))
    assert any(group.free for group in prepared.channels.groups)


def test_a_roll_along_one_dimension_is_one_selection() -> None:
    prepared = smcp_fx.prepare(
        randomise(between(lambda _, h: h.roll(3, 1), 12)),
        torch.randn(2, 3, 8, 8),
        config=smcp_fx.PruningConfig(multiple=1),
    )
    prepared.set_masks({"stem": torch.arange(12) % 3 > 0})
    nodes = smcp_fx.convert(prepared).graph.nodes
    assert [n.target for n in nodes if n.op == "call_function"] == [torch.index_select]
