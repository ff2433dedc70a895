"""Views of weights: which movements of a parameter are told, and as which dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from smcp_fx.channels.weight_views import parameter_views


class Moved(nn.Module):
    """A movement of a parameter [4, 3, 1], in which each element has a value of its own."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.move, self.weight = move, nn.Parameter(torch.arange(12.0).reshape(4, 3, 1))

    def forward(self) -> Tensor:
        return self.move(self.weight)


class Values(fx.Interpreter):
    """Keeps what each node gives."""

    def run_node(self, n: fx.Node) -> Any:
        self.found = {**getattr(self, "found", {}), n: super().run_node(n)}
        return self.found[n]


def told(move: Callable[[Tensor], Tensor]) -> tuple[nn.Parameter, Tensor, tuple[int | None, ...] | None]:
    """The parameter, its movement, and the dimensions that are told of it."""
    module = fx.symbolic_trace(Moved(move))
    values = Values(module)
    values.run()
    end = next(iter(module.graph.find_nodes(op="output"))).args[0]
    assert isinstance(end, fx.Node)
    view = parameter_views(module, lambda node: tuple(values.found[node].shape)).get(end)
    return module.weight, values.found[end], None if view is None else view.dims


@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.transpose(0, 1),
        lambda w: w.permute(2, 1, 0),
        lambda w: w.mT,
        lambda w: w[:, :, 0],
        lambda w: w[None, ..., None],
        lambda w: w.view(4, 3, 1, 1),
        lambda w: w.flatten(1),
        lambda w: w.squeeze(-1).t().unsqueeze(1),
        lambda w: w.reshape(1, 4, 3).contiguous(),
    ],
)
def test_dimensions_of_movements_are_those_of_their_elements(move: Callable[[Tensor], Tensor]) -> None:
    weight, moved, dims = told(move)
    assert dims is not None
    assert len(dims) == moved.dim()
    order = [dim for dim in dims if dim is not None]
    rest = [dim for dim in range(weight.dim()) if dim not in order]
    assert torch.equal(weight.permute(*order, *rest).reshape(moved.shape), moved)


@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.view(3, 4),
        lambda w: w.flatten(),
        lambda w: w[torch.tensor([1, 0, 2, 3])],
        lambda w: w[:3],
        lambda w: w.flip(0),
        lambda w: w * 2,
    ],
)
def test_what_does_more_than_move_dimensions_is_no_view(move: Callable[[Tensor], Tensor]) -> None:
    assert told(move)[2] is None
