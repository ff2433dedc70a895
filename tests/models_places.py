"""Small networks that read and write features at places: graphs, points, codes of a table."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, conv
from torch import Tensor, nn

NODES, POINTS = (7, 3), (2, 7, 3)


class Graph(nn.Module):
    """Two layers of messages along edges that are a buffer; ``gather``: messages and edges' ends to sums at nodes."""

    def __init__(self, gather: Any) -> None:
        super().__init__()
        self.gather = gather
        self.first, self.second, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer(
            "edges", torch.tensor([[0, 1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3, 4, 5, 6, 0, 3, 5]])
        )

    def forward(self, x: Tensor) -> Tensor:
        """[nodes, 3]."""
        start, end = self.edges[0], self.edges[1]
        h = F.relu(self.first(x))
        h = F.relu(self.second(self.gather(h, h[start], end)) + h)
        return self.last(self.gather(h, h.index_select(0, start), end))  # type: ignore[no-any-return]


class Codes(nn.Module):
    """Rounds each position to the nearest row of a table, straight through; ``spelling``: how it is found."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.table = nn.Embedding(16, 8)

    def nearest(self, flat: Tensor, table: Tensor) -> Tensor:
        """The place in the table, of each row."""
        if self.spelling == "distances":
            return torch.cdist(flat, table).argmin(1)
        if self.spelling == "cosines":
            return (F.normalize(flat, dim=-1) @ F.normalize(table, dim=-1).t()).argmax(1)
        if self.spelling == "differences":
            return (flat[:, None] - table[None]).pow(2).sum(-1).argmin(1)
        squares = flat.pow(2).sum(1, keepdim=True) + table.pow(2).sum(1)
        if self.spelling == "einsum":
            return (squares - 2 * torch.einsum("bd,dn->bn", flat, table.t())).argmin(1)
        if self.spelling == "added":
            return torch.addmm(squares, flat, table.t(), alpha=-2.0).min(1)[1]
        return (squares - 2 * torch.matmul(flat, table.t())).argmin(1)

    def rows(self, places: Tensor, table: Tensor, like: Tensor) -> Tensor:
        """The rows of the table at these places."""
        if self.spelling == "distances":
            return table[places].view(like.shape)
        if self.spelling == "einsum":
            return (F.one_hot(places, 16).to(like.dtype) @ table).view(like.shape)
        if self.spelling == "added":
            ones = torch.zeros(len(places), 16, dtype=like.dtype).scatter_(1, places.unsqueeze(1), 1)
            return torch.matmul(ones, table).view(like.shape)
        return self.table(places).view(like.shape)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 8, H, W], rounded, and the loss of table and features."""
        z = x.permute(0, 2, 3, 1).contiguous()
        flat, table = z.view(-1, z.shape[-1]), self.table.weight
        rounded = self.rows(self.nearest(flat, table), table, z)
        loss = F.mse_loss(rounded, z.detach()) + 0.25 * (rounded.detach() - z).pow(2).mean()
        return (z + (rounded - z).detach()).permute(0, 3, 1, 2), loss


def coded(spelling: str, shows: bool = False) -> Net:
    """``shows``: the network returns the loss, too."""

    def wiring(s: Any, x: Tensor) -> Any:
        h, loss = s.codes(s.stem(x))
        return (s.out(h), loss) if shows else s.out(h)

    return Net(wiring, stem=conv(3, 8), codes=Codes(spelling), out=conv(8, 4))


def points(read: Any) -> Net:
    """``read``: features [2, 7, 8] and the three nearest of each point to features of as many channels."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(3, largest=False)[1]
        return s.last(F.relu(s.second(read(F.relu(s.first(x)), near))))

    return Net(wiring, first=nn.Linear(3, 8), second=nn.Linear(8, 8), last=nn.Linear(8, 4))


@awkward(1.0, NODES)
def messages_scattered() -> nn.Module:
    return Graph(
        lambda h, m, end: torch.zeros_like(h).scatter_add(0, end.unsqueeze(-1).expand(-1, h.shape[1]), m)
    )


@awkward(1.0, NODES)
def messages_scattered_by_literals() -> nn.Module:
    return Graph(lambda h, m, end: m.new_zeros(7, 8).scatter_add_(0, end[:, None].repeat(1, 8), m))


@awkward(1.0, NODES)
def messages_averaged() -> nn.Module:
    def gather(h: Tensor, m: Tensor, end: Tensor) -> Tensor:
        count = torch.zeros(len(h), dtype=h.dtype).scatter_add(0, end, torch.ones_like(end, dtype=h.dtype))
        total = torch.zeros_like(h).index_add(0, end, m)
        return total / count.clamp(min=1)[:, None]

    return Graph(gather)


@awkward(1.0, NODES)
def messages_reduced() -> nn.Module:
    def gather(h: Tensor, m: Tensor, end: Tensor) -> Tensor:
        largest = torch.zeros_like(h).scatter_reduce(0, end.view(-1, 1).expand_as(m), m, "amax")
        return largest + torch.zeros_like(h).index_reduce(0, end, m, "mean")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is new, which it says once
        torch.zeros(1).index_reduce(0, torch.tensor([0]), torch.zeros(1), "mean")
    return Graph(gather)


@awkward(1.0, NODES)
def messages_by_a_matrix() -> nn.Module:
    def gather(h: Tensor, m: Tensor, end: Tensor) -> Tensor:
        adjacent = torch.zeros(len(end), len(h), dtype=h.dtype)
        adjacent[torch.arange(len(end)), end] = 1.0
        return adjacent.t() @ m

    return Graph(gather)


@awkward(1.0, POINTS)
def nearest_points_gathered() -> nn.Module:
    def read(h: Tensor, near: Tensor) -> Tensor:
        spread = h.unsqueeze(1).expand(-1, h.shape[1], -1, -1)
        return torch.gather(spread, 2, near.unsqueeze(-1).expand(-1, -1, -1, 8)).amax(2) - h

    return points(read)


@awkward(1.0, POINTS)
def nearest_points_by_index() -> nn.Module:
    def read(h: Tensor, near: Tensor) -> Tensor:
        batch, count, channels = h.shape
        flat = (near + torch.arange(batch).view(-1, 1, 1) * count).view(-1)
        return h.reshape(batch * count, channels)[flat].view(batch, count, 3, channels).mean(2)

    return points(read)


@awkward(1.0, POINTS)
def points_scattered_to_the_nearest() -> nn.Module:
    def read(h: Tensor, near: Tensor) -> Tensor:
        start = torch.zeros(len(h), h.shape[1], 8, dtype=h.dtype)
        return start.scatter_add(1, near[..., :1].expand(-1, -1, 8), h)

    return points(read)


@awkward(1.0)
def codes_by_distances() -> nn.Module:
    return coded("distances")


@awkward(1.0)
def codes_by_cosines() -> nn.Module:
    return coded("cosines")


@awkward(1.0)
def codes_by_differences() -> nn.Module:
    return coded("differences")


@awkward(1.0)
def codes_by_an_einsum() -> nn.Module:
    return coded("einsum")


@awkward(1.0)
def codes_by_rows_of_ones() -> nn.Module:
    return coded("added")


@awkward(1.0)
def codes_and_their_loss() -> nn.Module:
    return coded("products", shows=True)
