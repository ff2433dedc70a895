"""Factors of a weight's dimensions: held against where movements really put each element."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from models import Net
from torch import Tensor, nn

from smcp_fx.channels.weight_factors import Factor, Factors, Part, UnknownError, unify
from smcp_fx.tracing.tracer import trace

#: From a parameter [3, 40] to a weight with 4 output and 5 input channels, and their dimensions there.
MOVEMENTS: list[tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = [
    (lambda w: w.view(3, 4, 5, 2), (1, 2)),
    (lambda w: w.view(3, 4, 5, 2).permute(2, 0, 3, 1).reshape(5, 6, 4), (2, 0)),
    (lambda w: w.t().reshape(4, 5, 6).unsqueeze(0).transpose(1, 2).contiguous(), (2, 1)),
    (lambda w: w.reshape(12, 10).view(3, 4, 10).transpose(0, 1).reshape(4, 3, 5, 2).sum(3).sum(1), (0, 1)),
]


@pytest.mark.parametrize(("move", "dims"), MOVEMENTS)
def test_each_channel_is_where_the_movements_put_it(
    move: Callable[[Tensor], Tensor], dims: tuple[int, int]
) -> None:
    weight = nn.Parameter(torch.ones(3, 40))
    traced = trace(Net(lambda s, x: x.sum() * move(s.weight), weight=weight), (torch.ones(2),))
    moved = move(weight)
    kinds = {dims[0]: "out", dims[1]: "in"}
    parts = tuple((Part(kinds.get(dim, ""), size),) for dim, size in enumerate(moved.shape))
    factors = Factors(traced.module, traced.values)
    nodes = [
        n
        for n in traced.module.graph.nodes
        if tuple(traced.values[n.name].shape or ()) and n.op != "placeholder"
    ]
    (read,) = (node for node in nodes if node.op == "get_attr")
    chain = [node for node in nodes if node not in (read, nodes[-1])]
    factors.bind(chain[-1], parts)
    for node in reversed(chain):
        factors.relate(node)
    said = [part for dim in factors.parts(read) for part in dim]
    for dim, kind in kinds.items():
        (place,) = (at for at, part in enumerate(said) if part.kind == kind)
        behind = prod(part.size for part in said[place + 1 :])
        channel = torch.arange(weight.numel()) // behind % moved.shape[dim]
        # The gradient of one channel's elements is in this channel's elements of the parameter alone.
        for index in range(moved.shape[dim]):
            (gradient,) = torch.autograd.grad(move(weight).select(dim, index).sum(), weight)
            assert torch.equal(gradient.flatten() != 0, channel == index)


def test_channels_are_not_split_nor_taken_for_others() -> None:
    for left, right in (
        ([Factor(6, "in")], [Factor(2), Factor(3)]),
        ([Factor(6, "in")], [Factor(6, "out")]),
        ([Factor(6)], [Factor(4)]),
        ([Factor(6)], [Factor(6), Factor(2)]),
    ):
        with pytest.raises(UnknownError):
            unify(left, right)
