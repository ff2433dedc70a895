"""Random steps in which channels meet in unusual places: broadcasting beside moved channels, and tied weights.

Each step is one idiom in one of its spellings: a gate of size one beside folded, shuffled or transposed channels,
parameters [c] and [c, 1, 1], two orders of dimensions, selective kernels, writes into chunks, one weight read along
two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from random_builder import SIDE, WIDEST, Builder, Function
from random_tied import tied
from torch import Tensor, nn


def weight(*shape: int) -> nn.Parameter:
    """A parameter of random values."""
    return nn.Parameter(torch.randn(shape) / 2)


def folded(b: Builder) -> None:
    """[batch, k, c] or [batch, c, k] against [batch, c], one of both having the other's dimension at size one."""
    source = b.pick(most=WIDEST // 4)
    c, k = b.channels[source], b.random.choice([2, 3])
    other = b.convolve(b.pick(), k * c, 1)
    kind = b.random.choice(
        ["view", "reshape", "unflatten", "chunks", "literal", "sizes", "expanded", "repeated"]
    )
    first, end = b.random.random() < 0.5, b.random.choice(["flatten", "sum", "max", "mean", "view", "select"])
    shape = (k, c) if first else (c, k)
    place = 1 if first else 2
    pooled = b.random.random() < 0.5

    def unfold(a: Tensor, x: Tensor) -> Tensor:
        side = a.shape[2:]
        if kind == "unflatten":
            return a.unflatten(1, shape)
        if kind == "chunks":
            return torch.stack(a.chunk(k, 1), place)
        if kind == "sizes":
            n, channels = x.shape[:2]
            sizes = (n, k, channels) if first else (n, channels, k)
            return a.view(*sizes, *side)
        if kind == "reshape":
            return a.reshape(a.shape[0], *shape, *side)
        return a.view(-1, *shape, *side)

    def meet(s: Any, x: Tensor, a: Tensor) -> Tensor:
        if pooled:
            a = torch.sigmoid(a.mean((2, 3), keepdim=True))
        one = x.unsqueeze(place)
        if kind == "expanded":
            one = one.expand(*(k if d == place else -1 for d in range(5)))
        if kind == "repeated":
            one = one.repeat(*(k if d == place else 1 for d in range(5)))
        y = one * unfold(a, x)
        if end == "sum":
            return y.sum(place)
        if end == "max":
            return y.max(place)[0]
        if end == "mean":
            return y.mean(dim=place)
        if end == "select":
            return y.select(place, 1)
        return y.flatten(1, 2) if end == "flatten" else y.reshape(y.shape[0], -1, SIDE, SIDE)

    outputs = k * c if end in ("flatten", "view") else c
    name = f"folded {kind} {'k c' if first else 'c k'} {end}{' pooled' * pooled}"
    b.add(name, outputs, (source, other), meet)


def moved(b: Builder) -> None:
    """A gate of size one somewhere beside what moved: pixel shuffle, channel shuffle, windows, tokens, heads."""
    source = b.pick(8, 4, most=32)
    c = b.channels[source]
    kind = b.random.choice(["pixels", "shuffle", "unshuffle", "windows", "tokens", "heads", "groups"])
    what = b.random.choice(["channel", "position", "image", "both"])
    held: dict[str, Any] = {}

    def shuffled(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 4, -1, SIDE, SIDE).transpose(1, 2).flatten(1, 2)

    to: dict[str, tuple[int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "pixels": (c // 4, lambda x: F.pixel_shuffle(x, 2), lambda y: F.max_pool2d(y, 2)),
        "shuffle": (c, shuffled, lambda y: y),
        "unshuffle": (
            c,
            lambda x: F.pixel_unshuffle(x, 2)[:, ::4],
            lambda y: F.interpolate(y, scale_factor=2.0),
        ),
        "windows": (
            c,
            lambda x: x.view(x.shape[0], c, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c),
            lambda y: y.view(-1, 2, 2, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(-1, c, SIDE, SIDE),
        ),
        "tokens": (
            c,
            lambda x: x.flatten(2).transpose(1, 2),
            lambda y: y.transpose(1, 2).reshape(y.shape[0], -1, SIDE, SIDE),
        ),
        "heads": (
            c,
            lambda x: x.view(x.shape[0], 4, c // 4, SIDE * SIDE),
            lambda y: y.reshape(y.shape[0], -1, SIDE, SIDE),
        ),
        "groups": (
            c,
            lambda x: x.reshape(x.shape[0], 4, c // 4, SIDE, SIDE),
            lambda y: y.reshape(y.shape[0], c, SIDE, SIDE),
        ),
    }
    outputs, there, back = to[kind]
    last = kind in ("windows", "tokens")
    four = kind in ("heads", "groups")
    rank = {"windows": 3, "tokens": 3, "groups": 5}.get(kind, 4)
    by = b.random.choice(["computed", "parameter", "pooled"])
    axis = -1 if last else 1
    width = 4 if four else outputs
    if by == "computed":
        held["layer"] = nn.Conv2d(c, width, 1)
    if by == "parameter":
        held["scale"] = weight(width)

    def spread(g: Tensor, y: Tensor) -> Tensor:
        """[width] or [batch, width] along the channels (or heads) of ``y``, which has more dimensions."""
        if by == "parameter":
            return g if last else g.view(-1, *[1] * (rank - 2))
        if kind == "windows":
            g = g.repeat_interleave(4, 0)
        shape = (1,) * (rank - 2)
        return g.view(-1, *shape, width) if last else g.view(-1, width, *shape)

    def gated(s: Any, x: Tensor) -> Tensor:
        y = there(x)
        if by == "parameter":
            g = spread(s.scale, y)
        elif by == "computed":
            g = spread(torch.sigmoid(s.layer(x)).mean((2, 3)), y)
        else:
            rest = [d for d in range(1, rank) if d != axis % rank]
            g = torch.sigmoid(y.mean(rest, keepdim=True))
        if what == "position":
            g = torch.sigmoid(y.mean(axis, keepdim=True))
        if what == "image":
            g = y.mean([*range(1, rank)], keepdim=True)
        if what == "both":
            g = g * torch.sigmoid(y.mean(axis, keepdim=True))
        return back(y * g)

    b.add(f"moved {kind} {what} {by}", outputs, (source,), gated, **held)


def parameters(b: Builder) -> None:
    """A parameter in one of the shapes that broadcasting allows."""
    source = b.pick(4, 2)
    c = b.channels[source]
    kind = b.random.choice(
        ["c11", "1c11", "c last", "c", "c1", "view", "none", "two", "bias", "half", "einsum"]
    )
    options: dict[str, tuple[Function, tuple[int, ...]]] = {
        "c11": (lambda s, x: x * s.w, (c, 1, 1)),
        "1c11": (lambda s, x: s.w * x + s.w, (1, c, 1, 1)),
        "c last": (lambda s, x: (x.permute(0, 2, 3, 1) * s.w).permute(0, 3, 1, 2), (c,)),
        "c": (lambda s, x: (x.transpose(1, -1) + s.w).transpose(1, -1), (c,)),
        "c1": (lambda s, x: (x.flatten(2) * s.w).unflatten(2, (SIDE, SIDE)), (c, 1)),
        "view": (lambda s, x: x * s.w.view(1, -1, 1, 1), (c,)),
        "none": (lambda s, x: x + s.w[None, :, None, None], (c,)),
        "two": (
            lambda s, x: (x.unflatten(1, (2, c // 2)) * s.w).flatten(1, 2),
            b.random.choice([(2, 1, 1, 1), (2, c // 2, 1, 1), (c // 2, 1, 1), (1, c // 2, 1, 1)]),
        ),
        "bias": (lambda s, x: F.relu(x) + s.w.reshape(-1, 1, 1), (c,)),
        "half": (lambda s, x: x[:, : c // 2] * s.w[:, None, None], (c // 2,)),
        "einsum": (lambda s, x: torch.einsum("bchw,c->bchw", x, s.w), (c,)),
    }
    function, shape = options[kind]
    outputs = c // 2 if kind == "half" else c
    b.add(f"parameter {kind} {shape}", outputs, (source,), function, w=weight(*shape))


def orders(b: Builder) -> None:
    """Coefficients [batch, c, k] or [batch, k, c] against channels in another place: dynamic activations."""
    source = b.pick(most=WIDEST // 2)
    c, k = b.channels[source], b.random.choice([1, 2, 3])
    kind = b.random.choice(["batch last", "last", "first", "tokens", "stacked"])
    first, end = b.random.random() < 0.5, b.random.choice(["max", "sum"])
    shape = (k, c) if first else (c, k)

    def gate(s: Any, x: Tensor) -> Tensor:
        g = s.layer(x.mean((2, 3))).view(-1, *shape)
        y = g.transpose(1, 2) if first else g  # [batch, c, k]
        if kind == "batch last":
            z = x.permute(2, 3, 0, 1).unsqueeze(-1) * y
            back: Function = lambda t: t.permute(2, 3, 0, 1)  # noqa: E731
            at = -1
        elif kind == "last":
            z = x.permute(0, 2, 3, 1)[..., None] * y[:, None, None]
            back, at = (lambda t: t.permute(0, 3, 1, 2)), -1
        elif kind == "first":
            z = x[None] * y.permute(2, 0, 1)[..., None, None]
            back, at = (lambda t: t), 0
        elif kind == "tokens":
            z = x.flatten(2).unsqueeze(2) * y.unsqueeze(-1)
            back, at = (lambda t: t.view(t.shape[0], -1, SIDE, SIDE)), 2
        else:
            z = torch.stack([x] * k, 2) + y[..., None, None]
            back, at = (lambda t: t), 2
        return back(z.amax(at) if end == "max" else z.sum(at))  # type: ignore[no-any-return]

    name = f"orders {kind} {'k c' if first else 'c k'} {end} {k}"
    b.add(name, c, (source,), gate, layer=nn.Linear(c, c * k))


def fusion(b: Builder) -> None:
    """Selective kernels: branches, and the softmax over them."""
    left = b.pick(most=WIDEST // 2)
    c = b.channels[left]
    right = b.match(left, c)
    kind = b.random.choice(["cat view", "stack", "apart", "chunk", "split", "layers", "sigmoid", "last"])

    def fuse(s: Any, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[0]
        pooled = (x + y).mean((2, 3), keepdim=True)
        if kind == "layers":
            both = torch.stack([x, y], 1)
            a = torch.stack([s.layer(pooled)[:, :c], s.other(pooled)], 1).softmax(1)
            return (both * a).sum(1)
        a = s.layer(pooled)
        if kind == "cat view":
            both = torch.cat([x, y], 1).view(n, 2, c, SIDE, SIDE)
            return (both * a.view(n, 2, c, 1, 1).softmax(1)).sum(1)
        if kind == "stack":
            return (torch.stack([x, y]) * a.reshape(n, 2, -1, 1, 1).softmax(1).transpose(0, 1)).sum(0)
        if kind == "last":
            both = torch.stack([x, y], -1)
            return (both * a.view(n, 2, c).transpose(1, 2).softmax(-1)[:, :, None, None]).sum(-1)
        if kind == "apart":
            a = a.view(n, 2, -1, 1, 1).softmax(dim=1)
            return x * a[:, 0] + y * a[:, 1]
        if kind == "split":
            a = a.view(n, 2, c).softmax(1)
            one, two = a.split(1, 1)
            return x * one.reshape(n, c, 1, 1) + y * two.reshape(n, -1, 1, 1)
        one, two = a.chunk(2, 1)
        if kind == "sigmoid":
            return x * torch.sigmoid(one) + y * (1 - torch.sigmoid(two))
        one, two = torch.stack([one, two]).softmax(0).unbind(0)
        return x * one + y * two

    held = {"layer": nn.Conv2d(c, 2 * c, 1), "other": nn.Conv2d(c, c, 1)}
    if kind != "layers":
        held.pop("other")
    b.add(f"fusion {kind}", c, (left, right), fuse, **held)


def written(b: Builder) -> None:
    """Operations in place on pieces of a tensor, or beside them."""
    source = b.pick(4, 2)
    c = b.channels[source]
    kind = b.random.choice(["mul_", "relu_", "iadd", "base", "view", "gate", "silu", "sub"])

    def write(s: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        one, two = x[:, : c // 2], x[:, c // 2 :]  # autograd does not let chunks be written to
        if kind == "mul_":
            two = two.mul_(0.5)
        elif kind == "relu_":
            one = F.relu(one, inplace=True)
        elif kind == "iadd":
            one += two
        elif kind == "base":
            one.add_(two)
            return x
        elif kind == "view":
            x.view(x.shape[0], 2, c // 2, SIDE, SIDE).mul_(s.w)
            return x
        elif kind == "gate":
            one.mul_(two.mean((2, 3), keepdim=True).sigmoid_())
        elif kind == "silu":
            two = F.silu(two.clone(), inplace=True)
        else:
            two.sub_(one.mean(1, keepdim=True))
        return torch.cat([two, one], 1)

    held = {"w": weight(2, 1, 1, 1)} if kind == "view" else {}
    b.add(f"written {kind}", c, (source,), write, **held)


def outer(b: Builder) -> None:
    """Rows times columns, one of both made of channels."""
    source = b.pick(most=16)
    c, k = b.channels[source], b.random.choice([2, 3])
    kind = b.random.choice(["states", "states per channel", "experts", "mask"])

    def product(s: Any, x: Tensor) -> Tensor:
        if kind == "states":  # [b, c, 1, h, w] * [b, 1, k, h, w]
            return (x.unsqueeze(2) * s.layer(x).unsqueeze(1)).mean(2)
        if kind == "states per channel":
            rates = s.w.exp()  # positive ones, as state-space models have: negative ones would overflow
            return torch.exp(-F.softplus(x)[:, :, None] * rates[None, :, :, None, None]).sum(2)
        if kind == "experts":
            weights = s.layer(x).softmax(1)
            return (s.many(x).view(x.shape[0], k, c, SIDE, SIDE) * weights.unsqueeze(2)).sum(1)
        return (x.unsqueeze(1) * torch.sigmoid(s.layer(x)).unsqueeze(2)).flatten(1, 2)

    held: dict[str, Any] = {"layer": nn.Conv2d(c, k, 1)}
    if kind == "states per channel":
        held = {"w": weight(c, k)}
    if kind == "experts":
        held["many"] = nn.Conv2d(c, k * c, 1)
    b.add(f"outer {kind} {k}", c * k if kind == "mask" else c, (source,), product, **held)


OPERATIONS: list[tuple[Callable[[Builder], None], int]] = [
    (folded, 3),
    (moved, 4),
    (parameters, 3),
    (orders, 2),
    (fusion, 2),
    (written, 2),
    (outer, 1),
    (tied, 4),
]
