"""What branches that go cost, and what their widths can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_latencies import FakeBackend
from layer_pruning_models import IMAGE, Bottleneck, Mixer, body, nothing, parallel, prepared, removable
from models import (
    random_masks,
    run,
)

import smcp_fx
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.table import LatencyTable


@pytest.mark.parametrize("cost", ["flops", "params"])
def test_what_is_of_no_use_costs_nothing(cost: str) -> None:
    """Against the sliced network, priced on its own: also where a depthwise convolution goes with hidden units."""
    found = prepared(body(Bottleneck(), Mixer()), cost=cost)
    for zero in ((), ("2.up",), ("1.expand.0", "1.gate.down"), ("1.gate.down",), tuple(removable(found))):
        found.set_masks(random_masks(found, 5, nothing=0.0) | nothing(found, *zero))
        sliced = smcp_fx.convert(found)
        expected = smcp_fx.prepare(sliced, IMAGE.double(), cost=cost).pruner.full_cost
        if cost == "params":  # what is left of a branch is no layer's
            expected -= sum(p.numel() for n, p in sliced.named_parameters() if "constant" in n)
        assert found.pruner.cost.cost(found.pruner.counts) == pytest.approx(expected, rel=1e-12), zero


def test_a_layer_without_channels_takes_no_time_and_no_measurement(tmp_path: Path) -> None:
    backend = FakeBackend(latency=lambda *widths: 1.0 + sum(widths))
    with LatencyTable(tmp_path / "t.sqlite", cold_share=0.0) as table:
        found = prepared(body(Bottleneck(), Mixer()), cost=LatencyCost(table, backend))
        cost = latency_of(found.pruner.cost)
        assert cost is not None
        assert all(0 not in widths for _, widths in backend.log)
        counts = cost.full_counts
        blocks = {block.name: block for block in cost.blocks}
        without = {**counts, "2.up": 0}
        names = ("2.depthwise", "permute", "2.norm", "2.up", "2.down", "permute_1")  # up to the addition
        gone = [blocks[name] for name in names]
        saved = sum(1.0 + sum(w.channels(counts) for w in block.widths) for block in gone)
        assert cost.latency(counts) - cost.latency(without) == pytest.approx(saved)
        assert all(0 in cost.around(counts).permitted[name] for name in removable(found))


def test_every_width_that_a_concat_can_have_can_be_built() -> None:
    from smcp_fx.blocks.cutting import cut
    from smcp_fx.channels import build
    from smcp_fx.passes.layer_pruning import allow_layer_pruning
    from smcp_fx.tracing.tracer import trace

    model = parallel(4, 2, 4, 3, 4, 4)
    traced = trace(model.eval(), (IMAGE,))
    channels = build(traced.module, traced.values, multiple=1)
    allow_layer_pruning(traced, channels)
    joins = [block for block in cut(traced, channels) if "cat" in block.nodes]
    (join,) = joins
    assert join.grids == (tuple(range(1, 10)),)
    for width in join.grids[0]:
        module, inputs = join.build((width,))
        assert sum(i.shape[1] for i in inputs) == width
        assert run(module, inputs).shape[1] == width
