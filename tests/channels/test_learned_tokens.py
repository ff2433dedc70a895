"""Learned tokens and position embeddings have channels where what they meet has them, however they get there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import random_masks
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx


class Transformer(nn.Module):
    """Patches, with ``ways`` of learned tensors: tokens beside them, positions added to them, queries of them."""

    def __init__(self, ways: str) -> None:
        super().__init__()
        self.ways = ways.split()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.one, self.tokens = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.randn(1, 20, 12))
        self.positions = nn.Parameter(torch.randn(1, 37, 12))
        self.queries = nn.Embedding(18, 12)
        self.norm, self.hidden, self.back = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W]."""
        e, count = self.patches(x).flatten(2).transpose(1, 2), x.shape[0]
        if "alone" in self.ways:
            e = e + self.positions[:, 1:17]
        if "resized" in self.ways:
            grid = self.positions[:, 1:17].transpose(1, 2).view(1, 12, 4, 4)
            grid = F.interpolate(grid, (x.shape[2] // 4, x.shape[3] // 4), mode="bicubic").flatten(2)
            e = e + grid.transpose(1, 2)
        if "tokens" in self.ways:
            e = torch.cat((self.one.expand(count, -1, -1), e, self.tokens.expand(count, -1, -1)), 1)
        if "pieces" in self.ways:
            first, last = self.positions[:, 0][:, None], self.positions[:, -20:]
            grid = self.positions[:, 1:17].transpose(1, 2).reshape(1, 12, 4, 4).flatten(2).transpose(1, 2)
            e = e + torch.cat((first, grid, last), 1)
        e = e + self.back(self.hidden(self.norm(e)).relu())
        if "queries" in self.ways:
            asked = self.norm(self.queries.weight.unsqueeze(0).repeat(count, 1, 1))
            e = asked + self.attention(asked, e, e)[0]
        return self.head(self.norm(e[:, -20:] if "tokens" in self.ways else e).mean(1))


@pytest.mark.parametrize(
    "ways", ["tokens", "alone", "resized", "tokens pieces", "queries", "resized tokens pieces queries"]
)
def test_they_go_with_the_channels_that_they_meet(ways: str) -> None:
    torch.manual_seed(0)
    model, image = Transformer(ways).double().eval(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    prepared = smcp_fx.prepare(model, image)
    assert prepared.channels.free_share == 1.0
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    assert_close(sliced(image), prepared(image), "slicing", ways)
    kept = int(sliced.get_parameter("patches.weight").shape[0])
    assert kept < 12
    for name in ("tokens", "positions"):
        if any(name == n for n, _ in sliced.named_parameters()):
            assert sliced.get_parameter(name).shape[-1] == kept


class Words(nn.Module):
    """An embedding that nothing but a convolution reads."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 12, max_norm=max_norm)
        self.layer, self.head = nn.Conv1d(12, 5, 3), nn.Linear(5, 3)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.embedding(words).mT).relu().mean(2))
        return y


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_an_embedding_makes_channels_unless_its_rows_are_scaled_by_them(max_norm: float | None) -> None:
    torch.manual_seed(0)
    model = Words(max_norm).double().eval()
    prepared = smcp_fx.prepare(model, torch.tensor([[0, 1, 2, 1]]))
    assert prepared.channels.free_share == (1 if max_norm is None else 5 / 17)
    prepared.set_masks(random_masks(prepared, 0))
    words = torch.tensor([[3, 4, 5, 6, 7, 8]])  # rows that no call has scaled yet
    assert_close(smcp_fx.convert(prepared)(words), prepared(words), "slicing", "words")
