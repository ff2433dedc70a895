"""A table that knows a network's blocks at other inputs says so: their rows do not count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_latencies import FakeBackend, network

from smcp_fx.blocks.cutting import cut
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.channels import build
from smcp_fx.errors import TableError
from smcp_fx.latency.inputs import input_shapes
from smcp_fx.latency.table import LatencyTable
from smcp_fx.tracing.tracer import trace


def blocks(*shape: int) -> list[FusedBlock]:
    traced = trace(network(), (torch.randn(*shape),))
    return cut(traced, build(traced.module, traced.values))


def test_rows_of_other_batches_and_sizes_are_told(tmp_path: Path) -> None:
    def told(*shape: int) -> str:
        return table.measure(blocks(*shape), FakeBackend(), whole=False).elsewhere

    with LatencyTable(tmp_path / "t.sqlite") as table:
        assert told(1, 3, 16, 16) == told(1, 3, 16, 16) == ""
        assert told(1, 3, 24, 24) == "other image sizes"
        assert told(8, 3, 16, 16) == "batch 1"
        assert told(4, 3, 16, 16) == "batch 1, 8"
        with pytest.raises(TableError, match="knows it at batch 1, 4, 8 only"):
            table.surfaces(blocks(32, 3, 16, 16), FakeBackend().fingerprint(), 0.0)
        with pytest.raises(TableError, match="holds rows of"):
            table.surfaces(blocks(32, 3, 16, 16), FakeBackend(device="another").fingerprint(), 0.0)
    with LatencyTable(tmp_path / "empty.sqlite") as table:
        assert told(4, 3, 16, 16) == ""


def test_shapes_of_signatures() -> None:
    first, second = blocks(2, 3, 16, 16)[:2]
    assert input_shapes(first.signature) == [[2, 3, 16, 16]]
    assert input_shapes(second.signature) == [[2, "c", 14, 14]]
    for foreign in ("", "{", "[]", '"x"', "{}", '{"inputs": 3}', '{"inputs": [3]}'):
        assert input_shapes(foreign) == []
