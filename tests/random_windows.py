"""Windows, points, zeros and attention of torch: steps of random networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from random_builder import SIDE, Builder, Function
from torch import Tensor, nn


def window(b: Builder) -> None:
    """What gathers windows or points of each channel, or slides over the channels."""
    source = b.pick(3, most=16)
    c = b.channels[source]

    def unpool(s: Any, x: Tensor) -> Tensor:
        small, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(small, places, 2)

    def grid(s: Any, x: Tensor) -> Tensor:
        return F.grid_sample(x, s.where(x).tanh().permute(0, 2, 3, 1), align_corners=False)

    def attention(s: Any, x: Tensor) -> Tensor:
        return x * s.slide(x.mean((2, 3)).unsqueeze(1)).sigmoid().view(x.shape[0], -1, 1, 1)

    options: dict[str, tuple[Function, dict[str, Any]]] = {
        "fold": (lambda s, x: F.fold(F.unfold(x, 3, padding=1), (SIDE, SIDE), 3, padding=1), {}),
        "unfold": (lambda s, x: F.pad(x, (1, 1)).unfold(3, 3, 1).sum(-1), {}),
        "unpool": (unpool, {}),
        "grid": (grid, {"where": nn.Conv2d(c, 2, 1)}),
        "slide": (attention, {"slide": nn.Conv1d(1, 1, 3, padding=1)}),
        "neighbours": (lambda s, x: F.local_response_norm(x, 3, 0.1), {}),
    }
    kind = b.random.choice([*options])
    function, held = options[kind]
    b.add(f"window {kind}", c, (source,), function, **held)


def zeros(b: Builder) -> None:
    """Zeros beside channels, or as a state; tensors filled piece by piece; one value for all channels."""
    source = b.pick(4, 2, most=16)
    c, more = b.channels[source], b.random.choice([1, 2, 4])
    kind = b.random.choice(["pad", "join", "state", "fill", "spread"])
    layer: nn.Module = nn.Conv2d(c, c + more, 1)

    def joined(s: Any, x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(x.shape[0], more, SIDE, SIDE), x], 1) + s.layer(x)

    def state(s: Any, x: Tensor) -> Tensor:
        held = torch.zeros(x.shape[0], c, x.shape[2], x.shape[3], dtype=x.dtype)
        for _ in range(2):
            held = torch.tanh(s.layer(torch.cat([x, held], 1)))
        return held

    def fill(s: Any, x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        made[:, : c // 2] = s.layer(x[:, : c // 2])
        made[:, c // 2 :].copy_(x[:, c // 2 :])
        return made

    functions: dict[str, tuple[Function, nn.Module]] = {
        "pad": (lambda s, x: F.pad(x, (0, 0, 0, 0, 0, more)) + s.layer(x), layer),
        "join": (joined, layer),
        "state": (state, nn.Conv2d(2 * c, c, 1)),
        "fill": (fill, nn.Conv2d(c // 2, c // 2, 1)),
        "spread": (lambda s, x: s.layer(x).expand_as(x).sigmoid(), nn.Conv2d(c, 1, 1)),
    }
    function, held = functions[kind]
    outputs = c + more if kind in ("pad", "join") else c
    b.add(f"zeros {kind}", outputs, (source,), function, layer=held)


def attention(b: Builder) -> None:
    """Torch's attention between two tensors, under a mask or none."""
    source = b.pick(4, 4, most=16)
    other = b.pick(2, most=16)
    c, width = b.channels[source], b.channels[other]
    sizes = {} if width == c else {"kdim": width, "vdim": width}
    module = nn.MultiheadAttention(
        c, b.random.choice([2, 4]), batch_first=True, bias=b.random.random() < 0.7, **sizes
    )
    weights, masked = b.random.random() < 0.5, b.random.random() < 0.5

    def function(s: Any, x: Tensor, y: Tensor) -> Tensor:
        query, keys = x.flatten(2).mT, y.flatten(2).mT
        later = torch.ones(SIDE**2, SIDE**2, dtype=torch.bool).triu(1) if masked else None
        found = s.attend(query, keys, keys, attn_mask=later, need_weights=weights)[0]
        return found.mT.reshape_as(x)

    b.add("attention of torch", c, (source, other), function, attend=module)


OPERATIONS = [(window, 2), (zeros, 2), (attention, 1)]
