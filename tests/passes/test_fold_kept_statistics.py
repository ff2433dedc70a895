"""Folding gives operations that mix channels their plain form back."""

from __future__ import annotations

from models import chain, run
from pass_models import IMAGE, change, kinds, traced
from test_insert_kept_statistics import mixing
from tolerances import assert_close

from smcp_fx.passes.fold_kept_statistics import FoldKeptStatistics
from smcp_fx.passes.insert_kept_statistics import InsertKeptStatistics


def test_folding_undoes_inserting() -> None:
    module, channels = traced(mixing())
    before, plain = kinds(module), run(module, (IMAGE,))
    InsertKeptStatistics(channels)(module)
    assert_close(run(module, (IMAGE,)), plain, "identity")  # all channels are kept
    result = FoldKeptStatistics()(module)
    assert result.modified and len(result.report) == 2
    assert change(before, kinds(module)) == {}
    assert_close(run(module, (IMAGE,)), plain, "identity")


def test_a_graph_without_masks_is_left_alone() -> None:
    module, _ = traced(chain(8, 12))
    assert not FoldKeptStatistics()(module).modified
