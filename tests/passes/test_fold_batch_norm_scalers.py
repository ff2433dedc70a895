"""Folding masks and scales takes out exactly what was put in."""

from __future__ import annotations

import copy

import pytest
import torch
from models import run
from pass_models import IMAGE, NETWORKS, kinds, traced

from smcp_fx.config import MethodConfig
from smcp_fx.passes.base import run_pipeline
from smcp_fx.passes.fold_batch_norm_scalers import FoldBatchNormScalers
from smcp_fx.passes.fold_masks import FoldMasks
from smcp_fx.passes.pipelines import prepare_pipeline


@pytest.mark.parametrize("name", NETWORKS)
def test_folding_is_the_inverse_of_inserting(name: str) -> None:
    module, channels = traced(NETWORKS[name]())
    before, code, tensors = kinds(module), module.code, copy.deepcopy(module.state_dict())
    expected = run(module, (IMAGE,))
    run_pipeline(module, prepare_pipeline(channels, MethodConfig(batch_norm_scaling=True)))
    assert kinds(module) != before
    run_pipeline(module, [FoldMasks(), FoldBatchNormScalers()])
    assert kinds(module) == before
    assert [line.split() for line in module.code.splitlines()] == [line.split() for line in code.splitlines()]
    assert all(torch.equal(t, tensors[n]) for n, t in module.state_dict().items())
    assert torch.equal(run(module, (IMAGE,)), expected)
