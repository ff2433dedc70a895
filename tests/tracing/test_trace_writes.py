"""Writes by index (`x[:, :4] = y`): what they compute, who sees them, and what may be pruned around them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, between, conv
from torch import Tensor, nn
from tracing_oracle import check_traced

import smcp_fx


def writing(write: Callable[[Any, Tensor], Tensor | None], **parts: Any) -> nn.Module:
    """A network in which ``write`` changes a copy of the features, or returns others."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        own = h.clone()
        result = write(s, own)
        return own if result is None else result

    return between(wiring, **parts)


def assign(target: Tensor, index: Any, value: Any) -> None:
    target[index] = value


def shifted(s: Any, h: Tensor) -> Tensor:
    result, part = torch.zeros_like(h), h.size(1) // 4
    result[:, :part, :, 1:] = h[:, :part, :, :-1]
    result[:, part : 2 * part, :-1] = h[:, part : 2 * part, 1:]
    result[:, 2 * part :] = h[:, 2 * part :]
    return result


def halves(s: Any, h: Tensor) -> None:
    half = h.shape[2] // 2
    h[:, :, :half] = h[:, :, -half:]


def increased(s: Any, h: Tensor) -> None:
    h[:, 3] += h[:, 4]
    h[:, :, 0] *= 2


def twice(s: Any, h: Tensor) -> None:
    h[..., 0] = 0
    h[..., -1] = 1.5
    h[:, :, 0] = h[:, :, 1]


def narrowed(s: Any, h: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    result.narrow(3, 1, h.size(3) - 1).copy_(h.narrow(3, 0, h.size(3) - 1))
    torch.narrow(result, 2, 1, h.size(2) // 2).copy_(h.narrow(2, 0, h.size(2) // 2) * 2)
    result.narrow(1, 2, 3).copy_(h[:, :3].exp())
    result.narrow(-3, -2, 2).fill_(0.5)
    result.select(2, 0).copy_(h.select(-2, 1))
    result.select(-1, -1).zero_()
    return result


FREE: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "channels": lambda s, h: assign(h, (slice(None), slice(0, 4)), 2 * h[:, 4:]),
    "channels in the middle": lambda s, h: assign(h, (slice(None), slice(2, 5)), h[:, :3].exp()),
    "last channels": lambda s, h: assign(h, (slice(None), slice(-3, None)), 0.5),
    "a row": lambda s, h: assign(h, (..., 0), 0),
    "an image": lambda s, h: assign(h, 0, 1.5),
    "another type": lambda s, h: assign(h, (slice(None), slice(0, 4)), h[:, :4] > 0),
    "broadcast": lambda s, h: assign(h, (slice(None), slice(0, 4)), 2 * h[0, :4]),
    "mask": lambda s, h: assign(h, h < 0.1, 0),
    "shift": shifted,
    "a size of the input": halves,
    "augmented": increased,
    "several": twice,
    "narrow and select": narrowed,
    "steps": lambda s, h: assign(h, (slice(None), slice(1, None, 2)), 2 * h[:, ::2]),
    "a row of steps": lambda s, h: assign(h, (slice(None), slice(None, None, 4), 0), 0),
}


@pytest.mark.parametrize("how", FREE)
def test_a_write_nobody_else_sees_leaves_channels_free(how: str) -> None:
    prepared = check_traced(writing(FREE[how]))
    assert prepared.channels.free_share > 0.5
    names = {getattr(node.target, "__name__", node.target) for node in prepared.graph.nodes}
    assert "setitem" not in names


def view_after(s: Any, h: Tensor) -> Tensor:
    view = h[:, :4]
    h[:, :4] = 0
    return h + F.pad(view + 1, (0, 0, 0, 0, 0, 4))


def through_view(s: Any, h: Tensor) -> None:
    h.permute(0, 2, 3, 1)[..., 0] = 0


def view_of_view(s: Any, h: Tensor) -> None:
    h[:, :6][:, 1:3][:, 0] = 0


SEEN: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "a view is read later": view_after,
    "through a view": through_view,
    "a view of a view": view_of_view,
    "steps that do not divide": lambda s, h: assign(h, (slice(None), slice(None, None, 3)), 0),
    "a list": lambda s, h: assign(h, (slice(None), [0, 2]), 0),
    "picked by a mask": lambda s, h: assign(h, h > 0.1, (2 * h)[h > 0.1]),
}


@pytest.mark.parametrize("how", SEEN)
def test_a_write_that_others_see_stays_and_pins(how: str) -> None:
    prepared = check_traced(writing(SEEN[how]))
    assert any("setitem" in reason for group in prepared.channels.groups for reason in group.pinned)


@pytest.mark.parametrize("part", [slice(None, None, 2), slice(1, -1), torch.tensor([0, 3])])
def test_a_write_at_places_of_any_size_stays_and_pins_nothing(part: slice | Tensor) -> None:
    prepared = check_traced(writing(lambda s, h: assign(h, (slice(None), slice(None), part), 0)))
    assert prepared.channels.free_share == 1.0
    assert any(node.target is operator.setitem for node in prepared.graph.nodes)


def test_a_write_into_what_autograd_has_saved_trains_all_the_same() -> None:
    """The partial convolution of FasterNet: in eager mode its backward fails."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h[:, :4] = s.part(h[:, :4])
        return h

    prepared = check_traced(between(wiring, part=conv(4, 4)), trains=False)
    assert prepared.channels.free_share == 1.0
    prepared.train()(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())


def test_rows_are_written_one_by_one() -> None:
    def wiring(s: Any, h: Tensor) -> Tensor:
        result = torch.zeros_like(h)
        for place in range(h.shape[0]):
            result[place] = h[place] * (place + 1)
        return result

    check_traced(between(wiring), refused=(1, 3))


def test_a_tensor_that_forward_makes_is_new_in_every_call() -> None:
    def wiring(s: Any, x: Tensor) -> Tensor:
        gate = torch.ones(2, 8, 8, 8, dtype=torch.float64)
        gate[:, :, 0] = x.mean()
        return s.out(s.stem(x) * gate)

    model = Net(wiring, stem=conv(3, 8), out=conv(8, 4))
    prepared = check_traced(model, shapes=((2, 3, 8, 8),))
    assert not [name for name, buffer in prepared.named_buffers() if buffer.requires_grad]


def test_what_a_graph_cannot_assign_is_named() -> None:
    def wiring(s: Any, h: Tensor) -> Tensor:
        h = h * 1
        h.data = h.data * 2
        return h

    with pytest.raises(smcp_fx.SmcpError, match=r"\.data is assigned.*test_trace_writes\.py"):
        smcp_fx.prepare(between(wiring).eval(), torch.randn(2, 3, 8, 8))


def test_a_constant_looked_up_by_a_traced_tensor_is_an_index_like_others() -> None:
    table = torch.linspace(0.5, 1.0, 5)[None]
    wiring = lambda s, h: h * table[:, h.flatten(1).argmax(1) % 5].reshape(-1, 1, 1, 1)  # noqa: E731
    prepared = check_traced(between(wiring))
    assert not any(node.target == "__getitem__" for node in prepared.graph.nodes)
