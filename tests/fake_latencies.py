"""A runtime whose latencies are known by formula, and a small network to price on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from smcp_fx.backends.base import Backend, BlockLatency, Engine, Fingerprint, Measurement
from smcp_fx.backends.timing.measuring import TimingConfig
from smcp_fx.blocks.sharing import Block
from smcp_fx.latency.sampling import rows_of_all
from smcp_fx.latency.surface import Surface


def steps(c: int, size: int = 16) -> int:
    return -(-c // size) * size


def cliffs(c_in: int, c_out: int) -> float:
    """Like a convolution on a CPU: steps of 16 both ways, slower just above multiples of 64, a special path at 8."""
    x, y = (8 if c_in == 8 else steps(c_in)), steps(c_out)
    remainder = {0: 0.0, 16: 0.3, 32: 0.2, 48: 0.1}[y % 64]
    return 0.01 + 1e-3 * x + 2e-3 * y + 1e-4 * x * (y + 16 * remainder)


@dataclass
class FakeBackend(Backend):
    """Latencies by formula. ``log``: the rows measured, in order."""

    latency: Callable[..., float] = lambda *widths: cliffs(*widths) if len(widths) == 2 else 1.0 + sum(widths)
    device: str = "fake"
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    fails_at: tuple[int, ...] | None = None
    cold: float | None = None
    pause: float = 0.0
    name = "fake"

    def fingerprint(self) -> Fingerprint:
        return Fingerprint("fake", self.device, "none", "1", 1, "float32", (("mode", "formula"),))

    def compile(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...], path: Path | str | None = None
    ) -> Engine:
        raise AssertionError("a formula compiles nothing")

    def block_latency(
        self, block: Block, widths: tuple[int, ...], config: TimingConfig | None = None
    ) -> BlockLatency:
        self.log.append((block.name, widths))
        time.sleep(self.pause)
        if widths == self.fails_at:
            raise RuntimeError("the kernel crashed")
        ms = self.latency(*widths)
        hot = Measurement(ms, ms, ms, 3, stable=True)
        return BlockLatency(hot, None if self.cold is None else replace(hot, median_ms=ms * self.cold))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def smooth(*widths: int) -> float:
    return 0.1 + sum(0.001 * w for w in widths) + 1e-4 * float(np.prod(widths))


@dataclass(frozen=True)
class FakeBlock:
    name: str
    signature: str
    grids: tuple[tuple[int, ...], ...]
    read_before: tuple[int, ...] = ()
    fed_by: tuple[str, ...] = ()
    weight_bytes: float = 0.0

    def build(self, widths: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return nn.Identity(), (torch.zeros(1),)


def grid(full: int, multiple: int = 8) -> tuple[int, ...]:
    return tuple(range(multiple, full + 1, multiple))


def conv(name: str = "conv", c_in: int = 256, c_out: int = 256) -> FakeBlock:
    return FakeBlock(name, json.dumps({"op": "conv", "k": 3}), (grid(c_in), grid(c_out)))


def dense(price: Callable[..., np.ndarray], block: FakeBlock) -> np.ndarray:
    x, y = (np.array(g) for g in block.grids)
    return price(x[:, None], y[None, :])


def truth(block: FakeBlock, latency: Callable[..., float] = cliffs) -> np.ndarray:
    return np.array([[latency(i, j) for j in block.grids[1]] for i in block.grids[0]])


def whole(grids, latency) -> dict[tuple[int, ...], float]:
    """What a block's whole range is measured at, by a formula."""
    return {point: latency(*point) for point in rows_of_all(grids, ())}


def over(surface: Surface) -> np.ndarray:
    """A surface on the whole grid."""
    return surface(*np.ix_(*(np.array(g) for g in surface.grids)))
