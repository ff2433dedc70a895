"""Every pass of both pipelines, run twice: the second run changes nothing."""

from __future__ import annotations

import pytest
import torch
from models import run
from pass_models import IMAGE, NETWORKS, traced
from torch import Tensor

from smcp_fx.channels import ChannelGraph
from smcp_fx.config import MethodConfig
from smcp_fx.passes.pipelines import convert_pipeline, prepare_pipeline
from smcp_fx.pruning.state import PruningState


def half(channels: ChannelGraph) -> dict[str, Tensor]:
    return {g.name: torch.arange(g.size) % 2 == 0 for g in channels.groups if g.free}


@pytest.mark.parametrize("name", NETWORKS)
def test_run_twice_nothing_changes(name: str) -> None:
    module, channels = traced(NETWORKS[name]())
    state = module.get_submodule("smcp")
    assert isinstance(state, PruningState)
    state.set_masks(half(channels))
    config = MethodConfig(multiple=1, batch_norm_scaling=True)
    for one in [*prepare_pipeline(channels, config), *convert_pipeline(channels, state.units_kept())]:
        first = one(module)
        code, tensors = module.code, {n: t.clone() for n, t in module.state_dict().items()}
        second = one(module)
        assert not second.modified, one.name
        assert module.code == code
        assert all(torch.equal(t, tensors[n]) for n, t in module.state_dict().items()), one.name
        if one.name in ("InsertSoftMasks", "FoldMasks", "SliceChannels"):
            assert first.modified and first.report
    run(module, (IMAGE,))
