"""Random steps in which one weight is read by two layers: along the same dimension, or along both."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from random_builder import SIDE, Builder
from torch import Tensor, nn

KINDS = "conv modules linear matmul left einsum conv1d conv3d grouped same back view deep".split()


def lines(x: Tensor) -> Tensor:
    """Channels last."""
    return x.permute(0, 2, 3, 1)


def image(x: Tensor) -> Tensor:
    """Channels second, from last."""
    return x.permute(0, 3, 1, 2)


def encode(kind: str, s: Any, x: Tensor) -> Tensor:
    """The first layer: reads [N, c, H, W] by the weight."""
    w = s.layer.weight
    if kind == "back":
        return F.conv_transpose2d(x, s.w, padding=1)
    if kind == "conv1d":
        return F.conv1d(x.flatten(2), s.w, padding=1).unflatten(2, (SIDE, SIDE))
    if kind == "conv3d":
        return F.conv3d(x.unsqueeze(2), s.w, padding=(0, 1, 1)).squeeze(2)
    if kind == "left":
        return (w @ x.flatten(2)).unflatten(2, (SIDE, SIDE))
    if kind == "einsum":
        return torch.einsum("bchw,oc->bohw", x, w)
    if kind in ("linear", "matmul", "view"):
        return image(F.linear(lines(x), w, s.layer.bias))
    return s.layer(x)  # type: ignore[no-any-return]


def decode(kind: str, s: Any, y: Tensor) -> Tensor:
    """The second layer: gives [N, c, H, W] by the same weight."""
    if kind == "back":
        return F.conv2d(y, s.w, padding=1)
    if kind == "modules":
        return s.other(y)  # type: ignore[no-any-return]
    w = s.layer.weight
    if kind == "conv1d":
        return F.conv_transpose1d(y.flatten(2), s.w, padding=1).unflatten(2, (SIDE, SIDE))
    if kind == "conv3d":
        return F.conv_transpose3d(y.unsqueeze(2), s.w, padding=(0, 1, 1)).squeeze(2)
    if kind == "linear":
        return image(F.linear(lines(y), w.t()))
    if kind == "matmul":
        return image(lines(y) @ w)
    if kind == "left":
        return torch.matmul(w.mT, y.flatten(2)).view(y.shape[0], -1, SIDE, SIDE)
    if kind == "einsum":
        return torch.einsum("oc,bohw->bchw", w, y)
    if kind == "view":
        return F.conv_transpose2d(y, w[:, :, None, None])
    if kind == "grouped":
        return F.conv_transpose2d(y, w, padding=1, groups=2)
    return F.conv_transpose2d(y, w, padding=1)


def tied(b: Builder) -> None:
    """One weight, read by two layers: along the same dimension, or along both."""
    source = b.pick(most=16)
    c, inner = b.channels[source], b.width()
    kind = b.random.choice(KINDS)
    held: dict[str, Any] = {"between": nn.Conv2d(inner, inner, 1)}
    between = b.random.random() < 0.6
    norm = b.random.random() < 0.4
    if norm:
        held["norm"], held["last"] = nn.BatchNorm2d(inner), nn.BatchNorm2d(c)
    if kind == "grouped" and (c % 2 or inner % 2):
        kind = "conv"

    def middle(s: Any, y: Tensor) -> Tensor:
        y = F.relu(s.norm(y) if norm else y)
        return F.silu(s.between(y)) if between else y

    def both(s: Any, x: Tensor) -> Tensor:
        y = middle(s, encode(kind, s, x))
        z = F.relu(s.two(y)) if kind == "deep" else y
        if kind == "deep":
            z = F.relu(F.conv_transpose2d(z, s.two.weight, padding=1))
        if kind == "same":
            return F.relu(F.conv2d(F.relu(s.down(y)), s.layer.weight, padding=1))
        z = decode(kind, s, z)
        return s.last(z) if norm else z

    held["layer"] = nn.Conv2d(c, inner, 3, padding=1, groups=2 if kind == "grouped" else 1)
    if kind in ("linear", "matmul", "left", "einsum", "view"):
        held["layer"] = nn.Linear(c, inner)
    if kind == "modules":
        held["other"] = nn.ConvTranspose2d(inner, c, 3, padding=1)
        held["other"].weight = held["layer"].weight
    if kind == "deep":
        held["two"] = nn.Conv2d(inner, 6, 3, padding=1)
    if kind == "same":
        held["down"] = nn.Conv2d(inner, c, 1)
    if kind in ("conv1d", "conv3d", "back"):
        held["layer"] = nn.Identity()
        kernel = {"conv1d": (3,), "conv3d": (1, 3, 3), "back": (3, 3)}[kind]
        held["layer"].weight = None
        held["w"] = nn.Parameter(torch.randn(*((c, inner) if kind == "back" else (inner, c)), *kernel) / 2)
    if not between:
        held.pop("between")
    if kind == "same":
        held.pop("last", None)
    outputs = inner if kind == "same" else c
    b.add(f"tied {kind}{' between' * between}{' norm' * norm}", outputs, (source,), both, **held)
