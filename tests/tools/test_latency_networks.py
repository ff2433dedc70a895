"""The latency benchmark's networks: random prunings, and one export for all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import smcp_fx
from smcp_fx.backends.onnx.block_shapes import moves_of

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from latency_networks import SMALLEST, Network  # noqa: E402

sys.path[:] = _PATH

WIDTHS = {"a": 400, "b": 600, "c": 1000}


def network() -> Network:
    groups = [
        SimpleNamespace(name=name, free=True, permitted=tuple(range(1, size + 1)))
        for name, size in WIDTHS.items()
    ]
    prepared: Any = SimpleNamespace(channels=SimpleNamespace(groups=groups))
    return Network(prepared, ())


def test_random_prunings_are_other_networks_and_repeat() -> None:
    found = [network().random_counts(index) for index in range(1, 21)]
    assert found == [network().random_counts(index) for index in range(1, 21)]
    assert len({tuple(counts.values()) for counts in found}) == 20
    for name, size in WIDTHS.items():
        assert all(SMALLEST / 2 * size - 1 <= counts[name] <= size for counts in found)


class Shuffled(nn.Module):
    """A unit of ShuffleNetV2: half of the channels pass, and both halves are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side, self.head = (
            nn.Conv2d(3, 32, 1),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        passing, other = torch.relu(self.stem(x)).chunk(2, 1)
        y = torch.cat([passing, torch.relu(self.side(other))], 1)
        n, c, h, w = y.shape
        return self.head(y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w).mean((2, 3)))


def test_networks_whose_channels_are_shuffled_take_one_export() -> None:
    """What each engine fetches and splits is what its own network does."""
    inputs = (torch.randn(1, 3, 8, 8),)
    config = smcp_fx.PruningConfig(multiple=1)
    prepared = smcp_fx.prepare(Shuffled().eval(), inputs, cost="params", config=config)
    found = Network(prepared, inputs)
    full = {name: allowed[-1] for name, allowed in found.permitted.items()}
    rng = np.random.default_rng(0)
    moves = set()
    for _ in range(4):
        counts = {name: int(rng.integers(2, count)) for name, count in full.items()}
        model = found.model(counts)
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        moving = [node for node in model.graph.node if node.op_type in ("Gather", "Split")]
        expected = moves_of(found.pruned(counts))
        assert [tuple(constants[node.input[1]].tolist()) for node in moving] == list(expected)
        assert len(expected) == 2  # the halves, and the shuffle
        moves.add(expected)
        with found.engine(counts) as engine:
            assert engine.run([inputs[0].numpy()])[0].shape == (1, 4)
    assert len(moves) == 4
    assert found.templates.exports == 1
