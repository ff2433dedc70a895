"""`x += y`: who reads the tensor under another name reads what was written, as in the eager model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import between, conv
from torch import Tensor, nn
from tracing_oracle import check_traced

Wiring = Callable[[Any, Tensor], Tensor]


def another_name(s: Any, h: Tensor) -> Tensor:
    b = h
    b += 1
    return h * s.part(b)


def in_a_list(s: Any, h: Tensor) -> Tensor:
    kept = [h]
    h += 0.5 * h.mean((2, 3), keepdim=True)
    return kept[0] * 2 + h


def in_a_helper(s: Any, h: Tensor) -> Tensor:
    def write(t: Tensor) -> None:
        t += 1

    write(h)
    return h * 2


def all_operators(s: Any, h: Tensor) -> Tensor:
    b = h
    b *= 2
    b -= 1
    b /= 3
    b **= 2
    return h + b


def of_masks(s: Any, h: Tensor) -> Tensor:
    mask = h > 0
    other = mask
    other &= h < 1
    other |= h < -1
    other ^= h > 0.5
    return h * mask


def by_itself(s: Any, h: Tensor) -> Tensor:
    b = h
    b += h
    return h


def behind(layer: Wiring) -> Wiring:
    def wiring(s: Any, h: Tensor) -> Tensor:
        b = layer(s, h)
        b += 1
        return h + b

    return wiring


def before_a_concat(s: Any, h: Tensor) -> Tensor:
    y = s.part(h)
    z = y
    y += h
    return torch.cat([y[:, :3], z[:, 3:]], 1)


def dense(s: Any, h: Tensor) -> Tensor:
    outs = [h]
    for _ in range(2):
        y = s.part(outs[-1])
        y += 1
        outs.append(y)
    outs[1] += 0.5
    return torch.stack(outs).sum(0)


def by_index(s: Any, h: Tensor) -> Tensor:
    b = h
    b += 1
    h[:, :, 2] += 3
    b *= 2
    return h + b


#: The last of a pair: does the eager model train? (Autograd refuses to go back through what was written over.)
ALIASES: dict[str, tuple[Wiring, bool]] = {
    "another name": (another_name, True),
    "in a list": (in_a_list, True),
    "in a helper": (in_a_helper, True),
    "all operators": (all_operators, False),
    "masks": (of_masks, True),
    "by itself": (by_itself, True),
    "the function": (lambda s, h: (operator.iadd(h, 1), h * 2)[1], True),
    "behind an in-place module": (behind(lambda s, h: s.relu(h)), False),
    "behind an in-place function": (behind(lambda s, h: F.leaky_relu(h, 0.1, inplace=True)), False),
    "behind a method": (behind(lambda s, h: h.mul_(2)), True),
    "behind an identity": (behind(lambda s, h: s.same(h)), True),
    "behind a dropout": (behind(lambda s, h: s.drop(h)), True),
    "behind a cast": (behind(lambda s, h: h.to(h.dtype)), True),
    "before a concat": (before_a_concat, True),
    "a list of features": (dense, False),
    "by index, too": (by_index, True),
}


def network(wiring: Wiring) -> nn.Module:
    """``wiring`` on features that no layer has saved for its backward."""
    parts = {
        "part": conv(8, 8),
        "relu": nn.ReLU(inplace=True),
        "same": nn.Identity(),
        "drop": nn.Dropout(0.0),
    }
    return between(lambda s, h: wiring(s, h * 1), **parts)


@pytest.mark.parametrize("how", ALIASES)
def test_a_write_is_read_under_every_name(how: str) -> None:
    wiring, trains = ALIASES[how]
    prepared = check_traced(network(wiring), trains=trains)
    assert prepared.channels.free_share == (0.0 if how == "masks" else 1.0)


def view_after(s: Any, h: Tensor) -> Tensor:
    view = h[:, :4]
    h += 1
    return F.pad(view, (0, 0, 0, 0, 0, 4)) * 2 + h


def whole_view_after(s: Any, h: Tensor) -> Tensor:
    view = h.flatten(2)
    h *= 2
    return view.view(h.shape) + h


def view_of_another_name(s: Any, h: Tensor) -> Tensor:
    view = s.same(h)[:, 3:]
    h += 1
    return torch.cat([view, h[:, :3]], 1)


def method_after(s: Any, h: Tensor) -> Tensor:
    view = h[:, :4]
    h.add_(1)
    return F.pad(view, (0, 0, 0, 0, 0, 4)) * 2 + h


def windows_written(s: Any, h: Tensor) -> Tensor:
    windows = h.unfold(2, 2, 2)
    windows += 1
    return h * 2


VIEWS: dict[str, Wiring] = {
    "windows": windows_written,
    "a part": view_after,
    "the whole": whole_view_after,
    "of another name": view_of_another_name,
    "by a method": method_after,
    "turned": lambda s, h: (lambda view: (operator.iadd(h, 1), view.permute(0, 3, 2, 1) + h)[1])(
        h.permute(0, 3, 2, 1)
    ),
}


@pytest.mark.parametrize("how", VIEWS)
def test_a_write_that_shows_in_a_view(how: str) -> None:
    check_traced(network(VIEWS[how]))
