"""The latency benchmark's networks: those that calibrate are of sizes spread evenly."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
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


def weights(counts: Mapping[str, int]) -> float:
    """Three layers in a row: what goes in times what comes out of each."""
    return 3.0 * counts["a"] + counts["a"] * counts["b"] + counts["b"] * counts["c"]


def network() -> Network:
    groups = [
        SimpleNamespace(name=name, free=True, permitted=tuple(range(1, size + 1)))
        for name, size in WIDTHS.items()
    ]
    prepared: Any = SimpleNamespace(channels=SimpleNamespace(groups=groups))
    cost: Any = SimpleNamespace(
        full_counts=WIDTHS, whole=lambda counts: SimpleNamespace(weight_bytes=weights(counts))
    )
    return Network(prepared, cost, ())


@pytest.mark.parametrize("number", [2, 5, 12])
def test_sizes_fall_evenly_from_the_dense_networks(number: int) -> None:
    found = network().sizes(number)
    assert len(found) == number and found[0] == WIDTHS
    assert found == network().sizes(number)
    for name, size in WIDTHS.items():
        assert all(1 <= counts[name] <= size for counts in found)
        assert SMALLEST / 2 * size - 1 <= found[-1][name] <= SMALLEST * 1.5 * size + 1
    evenly = np.geomspace(weights(WIDTHS), weights(found[-1]), number)
    # A share moves each group by a unit at a time, a fiftieth of the smallest; nothing exceeds what is wanted.
    for counts, wanted in list(zip(found, evenly, strict=True))[1:-1]:
        assert 0.96 * wanted <= weights(counts) <= wanted


def test_random_prunings_are_other_networks_and_repeat() -> None:
    found = [network().random_counts(index) for index in range(1, 21)]
    assert found == [network().random_counts(index) for index in range(1, 21)]
    assert len({tuple(counts.values()) for counts in (*found, *network().sizes(12))}) == 32


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
    cost: Any = SimpleNamespace(fingerprint=SimpleNamespace(threads=1))
    found = Network(prepared, cost, inputs)
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
