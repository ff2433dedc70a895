"""Random networks: operations of every kind wired at random, for properties that must hold for any network.

A network is a list of steps; each step reads one or more earlier tensors [batch, channels, 8, 8] and adds one.
What no step has read at the end goes through a head into the output. `random_network(seed, steps)` is a
function of its arguments: a failure is repeated by its seed, and shrunk by fewer steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import random_branches
import random_folded
import random_gates
import random_products
import random_statistics
import random_windows
import torch
import torch.nn.functional as F
from random_builder import SIDE, WIDEST, Builder, Function, RandomNetwork
from torch import Tensor, nn


def weight(*shape: int) -> nn.Parameter:
    """A parameter of random values."""
    return nn.Parameter(torch.randn(shape) / 2)


# ---- the operations -------------------------------------------------------------------------------------


def convolution(b: Builder) -> None:
    b.convolve(b.pick(), b.width())


def grouped(b: Builder) -> None:
    groups = b.random.choice([2, 3, 4])
    b.convolve(b.pick(groups, groups), groups * b.random.choice([1, 2, 3, 4]), groups=groups)


def depthwise(b: Builder) -> None:
    source = b.pick(most=WIDEST // 2)
    c = b.channels[source]
    b.convolve(source, c * b.random.choice([1, 1, 2]), 3, groups=c)


def transposed(b: Builder) -> None:
    groups = b.random.choice([1, 1, 2])
    source = b.pick(groups, groups)
    c = b.channels[source]
    outputs = groups * b.random.randint(2, 6)
    if b.random.random() < 0.3 and c <= WIDEST // 2:
        groups, outputs = c, c * b.random.choice([1, 2])
    layer = nn.ConvTranspose2d(c, outputs, 3, padding=1, groups=groups)
    b.add(f"transposed g{groups}", outputs, (source,), lambda s, x: s.layer(x), layer=layer)


def functional(b: Builder) -> None:
    source = b.pick()
    c = b.channels[source]
    if b.random.random() < 0.5:
        outputs = b.width()
        function = lambda s, x: F.conv2d(x, s.w, s.v, padding=1)  # noqa: E731
        b.add("F.conv2d", outputs, (source,), function, w=weight(outputs, c, 3, 3), v=weight(outputs))
    else:
        function = lambda s, x: F.conv2d(x, s.w, None, 1, 1, 1, x.shape[1])  # noqa: E731
        b.add("F.conv2d depthwise", c, (source,), function, w=weight(c, 1, 3, 3))


def reuse(b: Builder) -> None:
    if b.shared:
        width, block = b.random.choice(b.shared)
        fitting = [i for i, c in enumerate(b.channels) if i and c == width]
        b.add("reuse", width, (b.random.choice(fitting),), lambda s, x: s.block(x), block=block)
    else:
        convolution(b)


def addition(b: Builder) -> None:
    left = b.pick()
    right = b.match(left, b.channels[left])
    kind = b.random.choice(["add", "add", "mul", "in place", "maximum"])
    functions: dict[str, Function] = {
        "add": lambda s, x, y: x + y,
        "mul": lambda s, x, y: x * torch.sigmoid(y),
        "in place": lambda s, x, y: (x * 1.5).add_(y),
        "maximum": lambda s, x, y: torch.maximum(x, y),
    }
    b.add(kind, b.channels[left], (left, right), functions[kind])


def concatenation(b: Builder) -> None:
    sources = tuple(b.pick(most=WIDEST // 2) for _ in range(b.random.choice([2, 2, 3])))
    total = sum(b.channels[s] for s in sources)
    dim = b.random.choice([1, -3])
    joined = b.add("cat", total, sources, lambda s, *xs: torch.cat(xs, dim))
    if total > WIDEST:
        b.convolve(joined, b.width(), 1)


def parts(b: Builder) -> None:
    source = b.pick(4, 2)
    c = b.channels[source]
    first = b.random.randint(1, c - 1)
    kind = b.random.choice(["chunk", "split", "slice", "step", "narrow", "glu", "swap"])
    step, start = b.random.choice([2, 3]), b.random.choice([0, 1])

    def chunk(s: Any, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=1)
        return one * two

    functions: dict[str, tuple[int, Function]] = {
        "chunk": (c // 2, chunk),
        "split": (c - first, lambda s, x: torch.split(x, [first, c - first], 1)[1]),
        "slice": (first, lambda s, x: x[:, :first]),
        "step": (len(range(start, c, step)), lambda s, x: x[:, start::step]),
        "narrow": (c - first, lambda s, x: x.narrow(1, first, c - first)),
        "glu": (c // 2, lambda s, x: F.glu(x, 1)),
        "swap": (c, lambda s, x: torch.cat(x.split([first, c - first], -3)[::-1], -3)),
    }
    channels, function = functions[kind]
    b.add(f"{kind} {first}", channels, (source,), function)


def shuffle(b: Builder) -> None:
    groups = b.random.choice([2, 3])
    source = b.pick(groups * 2, groups)
    c = b.channels[source]
    kind = b.random.choice(["sizes", "literals", "module", "flip", "roll", "flatten"])
    by = b.random.randint(1, c - 1)

    def by_sizes(s: Any, x: Tensor) -> Tensor:
        n, k, h, w = x.size()
        x = x.reshape(n, groups, k // groups, h, w)
        return x.transpose(1, 2).contiguous().view(n, k, h, w)

    def by_literals(s: Any, x: Tensor) -> Tensor:
        x = x.reshape(-1, groups, c // groups, SIDE, SIDE)
        return x.permute(0, 2, 1, 3, 4).reshape(-1, c, SIDE, SIDE)

    def by_flattening(s: Any, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], groups, -1, SIDE * SIDE)
        return x.transpose(1, 2).flatten(1, 2).unflatten(2, (SIDE, SIDE))

    functions: dict[str, Function] = {
        "sizes": by_sizes,
        "literals": by_literals,
        "module": lambda s, x: s.shuffle(x),
        "flip": lambda s, x: x.flip(1),
        "roll": lambda s, x: torch.roll(x, by, 1),
        "flatten": by_flattening,
    }
    b.add(f"shuffle by {kind}", c, (source,), functions[kind], shuffle=nn.ChannelShuffle(groups))


def pixels(b: Builder) -> None:
    if b.random.random() < 0.5:
        source = b.pick(8, 4)
        function: Function = lambda s, x: F.avg_pool2d(F.pixel_shuffle(x, 2), 2)  # noqa: E731
        b.add("pixel_shuffle", b.channels[source] // 4, (source,), function)
    else:
        source = b.pick(most=WIDEST // 4)
        function = lambda s, x: F.interpolate(F.pixel_unshuffle(x, 2), scale_factor=2.0)  # noqa: E731
        b.add("pixel_unshuffle", b.channels[source] * 4, (source,), function)


def gate(b: Builder) -> None:
    source = b.pick()
    c = b.channels[source]
    kind = b.random.choice(["se", "eca", "spatial", "scale", "cbam", "layer scale", "count"])
    options: dict[str, tuple[Function, dict[str, Any]]] = {
        "se": (
            lambda s, x: x * torch.sigmoid(s.up(F.relu(s.down(x.mean((2, 3), keepdim=True))))),
            {"down": nn.Conv2d(c, 4, 1), "up": nn.Conv2d(4, c, 1)},
        ),
        "eca": (lambda s, x: x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1)).expand_as(x), {}),
        "spatial": (
            lambda s, x: x * torch.sigmoid(s.gate(x)),
            {"gate": nn.Conv2d(c, 1, 3, padding=1)},
        ),
        "scale": (lambda s, x: x * x.shape[1] ** -0.5, {}),
        "cbam": (
            lambda s, x: x * torch.sigmoid(s.gate(torch.cat([x.mean(1, True), x.amax(1, True)], 1))),
            {"gate": nn.Conv2d(2, 1, 3, padding=1)},
        ),
        "layer scale": (lambda s, x: x * s.scale, {"scale": weight(c, 1, 1)}),
        "count": (lambda s, x: x / (1 + x.size(1)), {}),
    }
    function, made = options[kind]
    b.add(f"gate {kind}", c, (source,), function, **made)


def norm(b: Builder) -> None:
    source = b.pick(4, 2)
    c = b.channels[source]
    kind = b.random.choice(["batch", "group", "functional group", "instance", "layer", "prelu", "softmax"])
    if kind == "layer" and b.random.random() < 0.5:
        kind = "batch"  # a layer norm pins: not too often
    made: dict[str, nn.Module] = {
        "batch": nn.BatchNorm2d(c),
        "group": nn.GroupNorm(2, c),
        "instance": nn.InstanceNorm2d(c, affine=b.random.random() < 0.5),
        "prelu": nn.PReLU(c),
        "layer": nn.LayerNorm(c),
    }
    functions: dict[str, Function] = {
        "functional group": lambda s, x: F.group_norm(x, 2),
        "layer": lambda s, x: s.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        "softmax": lambda s, x: x.flatten(2).softmax(-1).view(x.shape[0], -1, SIDE, SIDE) * 64.0,
    }
    held = {"norm": made[kind]} if kind in made else {}
    b.add(f"norm {kind}", c, (source,), functions.get(kind, lambda s, x: s.norm(x)), **held)


def spatial(b: Builder) -> None:
    source = b.pick()
    c = b.channels[source]
    kind = b.random.choice(["max", "resize", "pad", "roll", "adaptive"])

    def resize(s: Any, x: Tensor) -> Tensor:
        return F.interpolate(F.avg_pool2d(x, 2), size=x.shape[-2:], mode="bilinear", align_corners=False)

    functions: dict[str, Function] = {
        "max": lambda s, x: F.max_pool2d(x, 3, 1, 1),
        "resize": resize,
        "pad": lambda s, x: F.pad(x, (1, 2, 0, 1), mode="reflect")[..., :SIDE, 1 : SIDE + 1],
        "roll": lambda s, x: torch.roll(x, (1, 2), (2, 3)),
        "adaptive": lambda s, x: F.adaptive_max_pool2d(x, SIDE),
    }
    b.add(f"spatial {kind}", c, (source,), functions[kind])


def stacked(b: Builder) -> None:
    left = b.pick(most=WIDEST // 2)
    c = b.channels[left]
    right = b.match(left, c)
    kind = b.random.choice(["sum", "unbind", "select", "gate"])

    def gated(s: Any, x: Tensor, y: Tensor) -> Tensor:
        both = torch.stack([x, y], 1)
        weights = s.layer(both.sum(1).mean((2, 3), keepdim=True))
        return (both * weights.reshape(weights.shape[0], 2, c, 1, 1).softmax(1)).sum(1)

    def unbind(s: Any, x: Tensor, y: Tensor) -> Tensor:
        u, v = torch.stack([x, y], 0).unbind(0)
        return u - v

    functions: dict[str, Function] = {
        "sum": lambda s, x, y: torch.stack([x, y], -4).sum(-4),
        "unbind": unbind,
        "select": lambda s, x, y: torch.stack([x, y], 1)[:, 1] + x,
        "gate": gated,
    }
    held = {"layer": nn.Conv2d(c, 2 * c, 1)} if kind == "gate" else {}
    b.add(f"stack {kind}", c, (left, right), functions[kind], **held)


def last(b: Builder) -> None:
    source = b.pick()
    c, outputs = b.channels[source], b.width()
    kind = b.random.choice(["linear", "mlp", "tokens"])
    held: dict[str, Any] = {"one": nn.Linear(c, outputs)}
    if kind == "mlp":
        held["two"] = nn.Linear(outputs, c)

    def tokens(s: Any, x: Tensor) -> Tensor:
        return s.one(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape[0], -1, SIDE, SIDE)  # type: ignore[no-any-return]

    functions: dict[str, tuple[int, Function]] = {
        "linear": (outputs, lambda s, x: s.one(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
        "mlp": (c, lambda s, x: x + s.two(F.gelu(s.one(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)),
        "tokens": (outputs, tokens),
    }
    channels, function = functions[kind]
    b.add(f"last {kind}", channels, (source,), function, **held)


def rare(b: Builder) -> None:
    source = b.pick(4, 2)
    c = b.channels[source]
    kind = b.random.choice(["pad", "index", "repeat", "maxout", "select", "softmax", "matmul", "crop"])
    functions: dict[str, tuple[int, Function]] = {
        "pad": (c + 3, lambda s, x: F.pad(x, (0, 0, 0, 0, 1, 2))),
        "crop": (c - 1, lambda s, x: F.pad(x, (0, 0, 0, 0, -1, 0))),
        "index": (3, lambda s, x: x[:, [c - 1, 0, 2]]),
        "repeat": (c * 2, lambda s, x: x.repeat(1, 2, 1, 1)),
        "maxout": (c // 2, lambda s, x: x.reshape(x.shape[0], 2, c // 2, SIDE, SIDE).amax(1)),
        "select": (c, lambda s, x: x * torch.sigmoid(x.select(1, 1)).unsqueeze(1)),
        "softmax": (c, lambda s, x: x.softmax(1)),
        "matmul": (c, lambda s, x: torch.matmul(x.permute(0, 2, 3, 1), s.mix).permute(0, 3, 1, 2)),
    }
    channels, function = functions[kind]
    held = {"mix": weight(c, c)} if kind == "matmul" else {}
    b.add(f"rare {kind}", channels, (source,), function, **held)


OPERATIONS: list[tuple[Callable[[Builder], None], int]] = [
    (convolution, 4),
    (grouped, 2),
    (depthwise, 2),
    (transposed, 1),
    (functional, 1),
    (reuse, 1),
    (addition, 4),
    (concatenation, 3),
    (parts, 3),
    (shuffle, 2),
    (pixels, 1),
    (gate, 2),
    (norm, 2),
    (spatial, 1),
    (stacked, 1),
    (last, 2),
    (rare, 1),
    *random_products.OPERATIONS,
    *random_windows.OPERATIONS,
    *random_folded.OPERATIONS,
]
STATISTICS = [(function, 4 * share) for function, share in random_statistics.OPERATIONS]
GATES = [(function, 2 * share) for function, share in random_gates.OPERATIONS]


def random_network(
    seed: int,
    steps: int | None = None,
    branches: bool = False,
    gates: bool = False,
    statistics: bool = False,
) -> RandomNetwork:
    """A network of about ``steps`` operations (2 to 12 by default) on images [batch, 3, 8, 8].

    ``branches``: half of them are branches that layer pruning can remove. ``gates``: half of them are gates,
    parameters and tied weights in unusual places. ``statistics``: a third of them mix channels.
    """
    torch.manual_seed(seed)
    b = Builder(seed)
    b.convolve(0, b.width(), 3)
    more = [*(random_branches.OPERATIONS if branches else ()), *(GATES if gates else ())]
    more += STATISTICS if statistics else []
    functions, shares = zip(*OPERATIONS, *more, strict=True)
    for _ in range(steps if steps is not None else b.random.randint(2, 12)):
        b.random.choices(functions, shares)[0](b)
    flat: list[Function] = [
        lambda s, x: s.layer(x.flatten(1)),
        lambda s, x: s.layer(x.contiguous().view(x.size(0), -1)),
        lambda s, x: s.layer(x.reshape(-1, s.layer.in_features)),
    ]
    for source in [i for i in range(1, len(b.channels)) if i not in b.read]:
        c = b.channels[source]
        if b.random.random() < 0.4:
            layer: nn.Module = nn.Linear(c * SIDE * SIDE, 3)
            b.add("head flat", 3, (source,), b.random.choice(flat), layer=layer)
        else:
            b.add("head", 3, (source,), lambda s, x: s.layer(x), layer=nn.Conv2d(c, 3, 1))
    b.net.as_dict = b.random.random() < 0.2
    return b.net


Family = dict[str, bool]


def richest(families: list[tuple[Family, int]], most: int | None = None) -> list[tuple[Family, int]]:
    """Family and seed of few networks with every kind of step: each is the richest in kinds that are left.

    ``families``: options, and how many seeds are looked at. ``most``: how many networks at most.
    """
    kinds = [
        (family, seed, {re.split(r"[\d(]", step)[0] for step in random_network(seed, **family).program})
        for family, seeds in families
        for seed in range(seeds)
    ]
    left = set[str]().union(*(steps for _, _, steps in kinds))
    found: list[tuple[Family, int]] = []
    while left and len(found) != most:
        family, seed, steps = max(kinds, key=lambda one: len(one[2] & left))
        found.append((family, seed))
        left -= steps
    return found
