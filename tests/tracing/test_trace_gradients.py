"""Checkpointed parts, questions about gradients, and what forward keeps on its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import between, conv, conv_bn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from tracing_oracle import SHAPES, check_traced, image

from smcp_fx.errors import TraceError
from smcp_fx.tracing.tracer import trace

Wiring = Callable[[Any, Tensor], Tensor]


def saving(s: Any, h: Tensor) -> Tensor:
    return checkpoint(s.part, h, use_reentrant=False)


CHECKPOINTED: dict[str, Wiring] = {
    "always": saving,
    "reentrant": lambda s, h: checkpoint(s.part, h, use_reentrant=True),
    "sequential": lambda s, h: checkpoint_sequential(s.part, 2, h, use_reentrant=False),
    "in training": lambda s, h: saving(s, h) if s.training else s.part(h),
    "requires_grad": lambda s, h: saving(s, h) if h.requires_grad else s.part(h),
    "any": lambda s, h: saving(s, h) if any(t.requires_grad for t in [h]) else s.part(h),
    "weights": lambda s, h: saving(s, h) if any(p.requires_grad for p in s.parameters()) else s.part(h),
    "is_leaf": lambda s, h: s.part(h) if h.is_leaf else saving(s, h),
    "enabled": lambda s, h: saving(s, h) if torch.is_grad_enabled() and h.requires_grad else s.part(h),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("how", CHECKPOINTED)
def test_a_checkpointed_part_is_traced_as_if_it_were_called(how: str) -> None:
    part = nn.Sequential(conv(8, 6), nn.ReLU(), conv(6, 8))
    prepared = check_traced(between(CHECKPOINTED[how], part=part))
    assert prepared.channels.free_share == 1.0 and not prepared.regions
    assert not prepared.plan.traced.assumptions


@pytest.mark.parametrize(
    "wiring",
    [
        lambda s, h: h * 2 if h.requires_grad else h,
        lambda s, h: h * 2 if torch.is_grad_enabled() else h,
        lambda s, h: h + (torch.ones(8, 1, 1) if h.requires_grad else torch.zeros(8, 1, 1)),
    ],
)
def test_another_result_where_gradients_are_kept_is_refused(wiring: Wiring) -> None:
    with pytest.raises(TraceError, match=r"else where gradients are kept .*test_trace_gradients\.py, line"):
        trace(between(wiring).eval(), (torch.randn(2, 3, 8, 8),))


def switched(s: Any, h: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    frozen = s.part(h)
    torch.set_grad_enabled(before)
    return h + frozen


def switched_off_and_on(s: Any, h: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    frozen = s.part(h)
    torch.set_grad_enabled(True)
    return h + frozen


@pytest.mark.parametrize("wiring", [switched, switched_off_and_on])
def test_gradients_switched_by_a_call_come_back(wiring: Wiring) -> None:
    prepared = check_traced(between(wiring, part=conv(8, 8)))
    assert [n.args[0].target for n in prepared.graph.nodes if n.target == "detach"] == ["part"]


# ---- attributes ----------------------------------------------------------------------------------------


class Grid(nn.Module):
    """Keeps the grid of the last image's size, as detection heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = conv_bn(3, 8), conv(8, 4)
        self.grid = torch.empty(0)
        self.known: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.known != h.shape[2:]:
            self.grid = torch.arange(h.shape[3]).to(h).view(1, 1, 1, -1).expand(1, 1, *h.shape[2:])
            self.known = h.shape[2:]
        return self.out(h + self.grid)


def test_a_cache_by_size_is_filled_anew_at_any_size() -> None:
    model = Grid()
    prepared = check_traced(model)
    assert prepared.channels.free_share == 1.0
    assert model.known == torch.Size(SHAPES[-1][2:])  # the caller's own, of its own last call


class Pyramid(Grid):
    """Keeps the sizes of several maps, in lists."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        sizes = [[*h.shape[2:]], [h.shape[2], 1]]
        if self.known != sizes:
            self.grid = torch.arange(sizes[0][1]).to(h).expand(1, 1, *sizes[0])
            self.known = sizes
        return self.out(h + self.grid)


def test_a_cache_by_the_sizes_of_several_maps_is_filled_anew() -> None:
    model = Pyramid().double()
    model(image(SHAPES[0]))
    assert check_traced(model).channels.free_share == 1.0


class Lazy(Grid):
    """Makes the grid once, and again where the shape is another."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.known is None or self.grid.shape != h.shape:
            self.grid = torch.ones_like(h)
            self.known = h.shape
        return self.out(h + self.grid)


def test_a_lazily_made_attribute_is_made_in_the_graph() -> None:
    check_traced(Lazy())


class Centred(nn.Module):
    """The mean is moved to the input's type, and stored."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.out = conv(3, 8), conv(8, 4)
        mean = torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)
        if how == "buffer":
            self.register_buffer("mean", mean)
        else:
            self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean.type_as(x)
        h = self.body(x - self.mean)
        return self.out(h[:, :, 1:] if h.shape[2] % 2 else h)


@pytest.mark.parametrize("how", ["attribute", "buffer"])
def test_an_attribute_in_another_type_is_assigned(how: str) -> None:
    model = Centred(how)
    prepared = check_traced(model, refused=(3,))
    assert isinstance(model.mean, Tensor) and isinstance(dict(prepared.named_buffers())["mean"], Tensor)
    assert bool(torch.isfinite(model(image(SHAPES[0]))).all())


def test_what_forward_leaves_on_its_module_is_no_part_of_the_graph() -> None:
    def wiring(s: Any, h: Tensor) -> Tensor:
        s.features = h
        return s.features * 2

    model = between(wiring)
    check_traced(model)
    assert type(model.features) is Tensor
