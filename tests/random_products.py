"""More operations for random networks: attention, products, computed weights, Python that asks about shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from random_builder import SIDE, Builder, Function
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm


def weight(*shape: int) -> nn.Parameter:
    """A parameter of random values."""
    return nn.Parameter(torch.randn(shape) / 2)


def tokens(x: Tensor) -> Tensor:
    """[batch, channels, 8, 8] to [batch, 64, channels]."""
    return x.flatten(2).transpose(1, 2)


def image(x: Tensor) -> Tensor:
    """Back again."""
    return x.transpose(1, 2).reshape(x.shape[0], -1, SIDE, SIDE)


def attention(b: Builder) -> None:
    source = b.pick()
    c, outputs = b.channels[source], b.width()
    count, size = b.random.choice([1, 2, 3]), b.random.choice([2, 3])
    inner = count * size
    kind = b.random.choice(["fused", "apart", "torch", "bias", "normed"])
    held: dict[str, nn.Module] = {"out": nn.Linear(inner, outputs), "norm": nn.LayerNorm(size)}
    if kind == "fused":
        held["qkv"] = nn.Linear(c, 3 * inner)
    else:
        held.update({name: nn.Linear(c, inner) for name in "qkv"})
    if kind == "bias":
        held["table"] = weight(5, count)  # type: ignore[assignment]
    index = (torch.arange(SIDE**4) % 5).reshape(-1)

    def heads(x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], count, size).transpose(1, 2)

    def attend(s: Any, x: Tensor) -> Tensor:
        x = tokens(x)
        n = x.shape[1]
        if kind == "fused":
            q, k, v = s.qkv(x).reshape(-1, n, 3, count, size).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = heads(s.q(x)), heads(s.k(x)), heads(s.v(x))
        if kind == "torch":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            if kind == "normed":
                q = s.norm(q)
            scores = (q * size**-0.5) @ k.transpose(-2, -1)
            if kind == "bias":
                scores = scores + s.table[index].view(n, n, -1).permute(2, 0, 1)
            y = scores.softmax(-1) @ v
        return image(s.out(y.transpose(1, 2).flatten(2)))

    b.add(f"attention {kind} {count}x{size}", outputs, (source,), attend, **held)


def product(b: Builder) -> None:
    left = b.pick(most=16)
    c = b.channels[left]
    right = b.match(left, c)
    outputs = b.width()
    kind = b.random.choice(["parameter", "context", "einsum", "outer", "rows", "grn", "eca"])

    def context(s: Any, x: Tensor, y: Tensor) -> Tensor:
        where = s.where(y).flatten(2).softmax(-1).unsqueeze(-1)
        return x + torch.matmul(x.flatten(2).unsqueeze(1), where).view(x.shape[0], -1, 1, 1)

    def einsum(s: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * torch.sigmoid(torch.einsum("bchw,bdhw->bc", y, s.where(x)))[:, :, None, None]

    def outer(s: Any, x: Tensor, y: Tensor) -> Tensor:
        affinity = torch.bmm(x.flatten(2), y.flatten(2).transpose(1, 2)) / 64
        return torch.bmm(affinity.softmax(-1), y.flatten(2)).view(x.shape)

    def grn(s: Any, x: Tensor, y: Tensor) -> Tensor:
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        return x + x * s.scale * (size / (size.mean(1, keepdim=True) + 1e-3)) + y

    def eca(s: Any, x: Tensor, y: Tensor) -> Tensor:
        pooled = y.mean((2, 3)).view(y.shape[0], 1, -1)
        return x * torch.sigmoid(s.slide(pooled).view(x.shape[0], -1, 1, 1)).expand_as(x)

    functions: dict[str, tuple[int, Function, dict[str, Any]]] = {
        "parameter": (
            outputs,
            lambda s, x, y: image(torch.matmul(tokens(x + y), s.mix)),
            {"mix": weight(c, outputs)},
        ),
        "context": (c, context, {"where": nn.Conv2d(c, 1, 1)}),
        "einsum": (c, einsum, {"where": nn.Conv2d(c, 3, 1)}),
        "outer": (c, outer, {}),
        "rows": (c, lambda s, x, y: torch.einsum("bchw,bcwv->bchv", x, y) / 8, {}),
        "grn": (c, grn, {"scale": weight(1, c, 1, 1)}),
        "eca": (c, eca, {"slide": nn.Conv1d(1, 1, 3, padding=1)}),
    }
    channels, function, held = functions[kind]
    b.add(f"product {kind}", channels, (left, right), function, **held)


def normed(b: Builder, source: int, outputs: int, groups: int) -> None:
    """A layer with a parametrisation, or a hook that makes its weight."""
    c, kind = b.channels[source], b.random.choice(["weight", "spectral", "hook", "pruned"])
    layer: nn.Module = nn.Conv2d(c, outputs, 3, padding=1, groups=groups)
    if groups == 1 and b.random.random() < 0.3:
        layer = nn.ConvTranspose2d(c, outputs, 3, padding=1)
    if kind == "weight":
        parametrizations.weight_norm(layer, dim=b.random.choice([0, 1]))
    elif kind == "spectral":
        parametrizations.spectral_norm(layer)
    elif kind == "hook":
        spectral_norm(layer)
    else:
        prune.random_unstructured(layer, "weight", 0.3)
    b.add(f"{kind} norm g{groups}", outputs, (source,), lambda s, x: s.layer(x), layer=layer)


def computed(b: Builder) -> None:
    groups = b.random.choice([1, 1, 2])
    source = b.pick(2 * groups, groups)
    c, outputs = b.channels[source], groups * b.random.choice([2, 4, 6])
    kind = b.random.choice("batch_norm by_hand scaled mask sum part factors data norm norm".split())
    if kind == "norm":
        normed(b, source, outputs, groups)
        return

    def made(s: Any, x: Tensor) -> Tensor:
        if kind == "batch_norm":
            flat = s.w.reshape(1, outputs, -1)
            return F.batch_norm(flat, None, None, s.gain.view(-1), training=True).reshape_as(s.w)
        if kind == "by_hand":
            mean, variance = s.w.mean((1, 2, 3), keepdim=True), s.w.var((1, 2, 3), keepdim=True)
            return (s.w - mean) * torch.rsqrt(variance + 1e-3)
        if kind == "sum":
            return s.w + F.pad(s.point, (1, 1, 1, 1))
        if kind == "part":
            return s.large[:outputs, : c // groups]
        if kind == "factors":
            return (s.gain.view(-1, 1) @ s.point[:1].flatten(1)).view(outputs, -1, 1, 1) * s.w
        if kind == "mask":
            return s.w * s.mask
        return s.w * s.gain if kind == "scaled" else s.w * torch.sigmoid(x.mean())

    def convolve(s: Any, x: Tensor) -> Tensor:
        return F.conv2d(x, made(s, x), s.shift, padding=1, groups=groups)

    held = {
        "w": weight(outputs, c // groups, 3, 3),
        "gain": weight(outputs, 1, 1, 1),
        "shift": weight(outputs),
    }
    if kind in ("sum", "factors"):
        held["point"] = weight(outputs, c // groups, 1, 1)
    if kind == "part":
        del held["w"]
        held["large"] = weight(outputs + 3, c // groups + 1, 3, 3)
    if kind == "mask":
        held["mask"] = nn.Parameter((torch.rand(held["w"].shape) > 0.4).float(), requires_grad=False)
    b.add(f"computed weight {kind} g{groups}", outputs, (source,), convolve, **held)


def shaped(b: Builder) -> None:
    source = b.pick(4, 2)
    c = b.channels[source]
    kind = b.random.choice(["same", "branch", "loop", "int", "like", "crop", "spread", "shift", "index"])
    by = b.random.randint(1, c - 1)
    order = torch.randperm(c, generator=torch.Generator().manual_seed(b.random.randrange(99)))

    def same(s: Any, x: Tensor) -> Tensor:
        size = x.shape[-1]
        missing = max((math.ceil(size / 2) - 1) * 2 + 3 - size, 0)
        if missing > 0:
            x = F.pad(x, (missing // 2, missing - missing // 2, missing, 0))
        return F.interpolate(F.max_pool2d(x, 3, 2), size=(SIDE, SIDE))

    def branch(s: Any, x: Tensor) -> Tensor:
        if x.shape[1] % 4 == 0 or x.ndim != 4:
            return x * 0.5
        return -x if x.shape[2] == x.shape[3] else x

    def loop(s: Any, x: Tensor) -> Tensor:
        for part in x.split([by, x.shape[1] - by], 1):
            x = x + part.mean(1, keepdim=True)
        return x * len(x.shape)

    def spread(s: Any, x: Tensor) -> Tensor:
        return x * x.mean(1, keepdim=True).expand(-1, c, -1, -1) + x.amax((2, 3))[:, :, None, None].expand_as(
            x
        )

    functions: dict[str, tuple[int, Callable[..., Tensor]]] = {
        "same": (c, same),
        "branch": (c, branch),
        "loop": (c, loop),
        "int": (c, lambda s, x: x.flatten(2).view(-1, int(x.shape[1]), SIDE, int(x.shape[3]))),
        "like": (c, lambda s, x: x.reshape(x.shape[0], -1).view(x.shape) + torch.zeros_like(x)),
        "crop": (c - by, lambda s, x: F.pad(x, (0, 0, 0, 0, -by, 0))),
        "shift": (c, lambda s, x: F.pad(x, (0, 0, 0, 0, by, -by)) + x),
        "spread": (c, spread),
        "index": (c, lambda s, x: x[:, order]),
    }
    channels, function = functions[kind]
    b.add(f"shaped {kind} {by}", channels, (source,), function)


OPERATIONS: list[tuple[Callable[[Builder], None], int]] = [
    (attention, 2),
    (product, 2),
    (computed, 2),
    (shaped, 3),
]
