"""What random networks are built from: steps, the network that runs them, and the builder that adds them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

SIDE = 8
WIDEST = 40

Function = Callable[..., Any]


class Step(nn.Module):
    """One operation: a function of the step (for its parts) and the tensors it reads."""

    def __init__(self, function: Function, parts: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *tensors: Any) -> Any:
        """What the function says."""
        return self.function(self, *tensors)


class RandomNetwork(nn.Module):
    """Runs its steps in order; ``program`` says what they are, for messages."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        self.sources: list[tuple[int, ...]] = []
        self.program: list[str] = []
        self.as_dict = False

    def forward(self, x: Tensor) -> Any:
        """A tensor, a tuple or a dict of tensors."""
        values: list[Any] = [x]
        for sources, step in zip(self.sources, self.steps, strict=True):
            values.append(step(*(values[source] for source in sources)))
        heads = [
            value for value, name in zip(values[1:], self.program, strict=True) if name.startswith("head")
        ]
        if self.as_dict:
            return {f"head{index}": head for index, head in enumerate(heads)}
        return heads[0] if len(heads) == 1 else tuple(heads)


class Builder:
    """Adds steps to a network; ``channels[i]`` is the width of its i-th tensor."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.net = RandomNetwork()
        self.channels = [3]
        self.read: set[int] = set()
        self.shared: list[tuple[int, nn.Module]] = []

    def add(
        self, name: str, channels: int, sources: tuple[int, ...], function: Function, **parts: Any
    ) -> int:
        """Add a step and return the index of its tensor."""
        self.net.steps.append(Step(function, parts))
        self.net.sources.append(sources)
        self.net.program.append(f"{name}{sources}->{channels}")
        self.channels.append(channels)
        self.read.update(sources)
        return len(self.channels) - 1

    def pick(self, least: int = 2, multiple: int = 1, most: int = WIDEST) -> int:
        """A tensor with a fitting number of channels, fresh ones preferred; made by a convolution if need be."""
        fitting = [i for i, c in enumerate(self.channels) if i and least <= c <= most and c % multiple == 0]
        unread = [i for i in fitting if i not in self.read]
        if unread and self.random.random() < 0.7:
            return self.random.choice(unread)
        if fitting and self.random.random() < 0.9:
            return self.random.choice(fitting)
        start = self.random.randrange(len(self.channels))
        wanted = multiple * self.random.randint(-(-least // multiple), max(1, 12 // multiple))
        return self.convolve(start, wanted)

    def width(self) -> int:
        """A width to convolve to."""
        return self.random.choice([4, 6, 8, 9, 12, 16])

    def convolve(self, source: int, outputs: int, kernel: int | None = None, groups: int = 1) -> int:
        """A convolution, often with a batch norm and an activation."""
        kernel = kernel or self.random.choice([1, 3])
        parts: list[nn.Module] = [
            nn.Conv2d(self.channels[source], outputs, kernel, padding=kernel // 2, groups=groups)
        ]
        if self.random.random() < 0.5:
            parts.append(nn.BatchNorm2d(outputs))
        if self.random.random() < 0.6:
            parts.append(self.random.choice([nn.ReLU(), nn.SiLU(), nn.LeakyReLU(0.1), nn.Hardswish()]))
        block = nn.Sequential(*parts)
        if groups == 1 and outputs == self.channels[source]:
            self.shared.append((outputs, block))
        return self.add(f"conv{kernel}g{groups}", outputs, (source,), lambda s, x: s.block(x), block=block)

    def match(self, source: int, outputs: int) -> int:
        """A tensor of this many channels: another one of them, or a convolution of ``source``."""
        fitting = [i for i, c in enumerate(self.channels) if i and c == outputs and i != source]
        if fitting and self.random.random() < 0.6:
            return self.random.choice(fitting)
        return self.convolve(source, outputs)
