"""Blocks by operation: what is the block's own, and nothing of what it is measured with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnxruntime.profile import NodeTime
from smcp_fx.blocks.cutting import cut
from smcp_fx.channels import build
from smcp_fx.tracing.tracer import trace

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
import latency_nodes  # noqa: E402
from latency_nodes import Taken, by_operation, of_block, show  # noqa: E402

sys.path[:] = _PATH


class Gated(nn.Module):
    """A convolution, and a gate from the mean of what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 20, 3, padding=1)
        self.gate = nn.Conv2d(20, 20, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


@pytest.mark.parametrize("state", ["hot", "cold"])
def test_a_block_has_its_own_operations_and_no_conversion_of_its_result(state: str) -> None:
    traced = trace(Gated().eval(), (torch.randn(1, 16, 8, 8),))
    blocks = cut(traced, build(traced.module, traced.values))
    models = BlockModels()
    taken = [of_block(models, block, block.full_widths, state) for block in blocks]
    stem, mean, gate = ({k: n for k, n in each.nodes.items() if "Reorder" not in k} for each in taken)
    assert stem == {"Conv": 1.0}
    assert list(mean.values()) == [1.0]
    assert gate == {"Conv": 1.0, "Mul": 1.0}
    assert not any("Reorder" in name for name in taken[0].nodes)
    assert taken[1].ms.get("ReorderOutput", 0.0) == 0.0  # the gate pays for the tensor that both read
    assert all(each.total > 0 for each in taken)


def test_times_are_medians_without_what_the_profiler_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_nodes, "overhead", lambda: SimpleNamespace(node_ms=0.0005))
    runs = [[NodeTime("a", "Conv", (), ms), NodeTime("b", "Conv", (), 2 * ms)] for ms in (1.0, 1.1, 5.0)]
    taken = by_operation(runs, 0.1, 0.5)
    assert taken.nodes == {"Conv": 1.0}
    assert taken.total == pytest.approx(0.5 * (1.1 - 0.1 + 2.2 - 0.1))
    both = Taken()
    both.add(taken)
    both.add(taken)
    assert both.ms["Conv"] == pytest.approx(2 * taken.ms["Conv"])


def test_no_node_takes_less_than_a_link_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler of another moment added more than the first of these nodes took with it."""
    monkeypatch.setattr(latency_nodes, "overhead", lambda: SimpleNamespace(node_ms=0.0005))
    runs = [[NodeTime("a", "Relu", (), 0.002), NodeTime("b", "Conv", (), 0.009)]] * 3
    taken = by_operation(runs, 0.003, 0.5)
    assert taken.ms == pytest.approx({"Relu": 0.5 * 0.0005, "Conv": 0.5 * (0.009 - 0.003)})


def test_what_is_small_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    of = {"blocks": 1.0, "network": 1.0}
    operations = {
        "Conv": {**of, "blocks_ms": 9.0, "network_ms": 10.0},
        "Add": {**of, "blocks_ms": 0.01, "network_ms": 0.01},
    }
    show(
        {
            "model": "m",
            "setting": "s",
            "pruning": 3,
            "state": "cold",
            "blocks_ms": 9.0,
            "network_ms": 10.0,
            "operations": operations,
        }
    )
    told = capsys.readouterr().out
    assert "-10.0%" in told
    assert "Conv" in told
    assert "Add" not in told
