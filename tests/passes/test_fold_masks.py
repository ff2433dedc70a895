"""Folding puts masks into weights."""

from __future__ import annotations

import torch
from models import chain, run
from models_mixed import mixture_by_einsum
from pass_models import IMAGE, traced
from tolerances import assert_close

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.passes.base import run_pipeline
from smcp_fx.passes.fold_batch_norm_scalers import FoldBatchNormScalers
from smcp_fx.passes.fold_masks import FoldMasks
from smcp_fx.passes.pipelines import prepare_pipeline
from smcp_fx.pruning.state import PruningState


def test_folding_puts_masks_and_scales_into_the_parameters() -> None:
    module, channels = traced(chain(8, 12))
    state = module.get_submodule("smcp")
    assert isinstance(state, PruningState)
    run_pipeline(module, prepare_pipeline(channels, MethodConfig(batch_norm_scaling=True)))
    weight, gamma = (module.get_parameter(n).detach().clone() for n in ("1.0.weight", "1.1.weight"))
    state.set_masks({"0.0": torch.arange(8) < 2})
    masked = run(module, (IMAGE,))
    run_pipeline(module, [FoldMasks(), FoldBatchNormScalers()])
    weight[:, 2:] = 0
    assert torch.equal(module.get_parameter("1.0.weight"), weight)
    assert torch.equal(module.get_parameter("1.1.weight"), gamma * 0.25)
    assert_close(run(module, (IMAGE,)), masked, "identity")


def test_the_mask_of_a_weight_that_is_computed_from_the_input_stays_as_a_constant() -> None:
    module, channels = traced(mixture_by_einsum())
    state = module.get_submodule("smcp")
    assert isinstance(state, PruningState)
    run_pipeline(module, prepare_pipeline(channels, smcp_fx.PruningConfig()))
    whole = run(module, (IMAGE,))
    state.set_masks({"stem": torch.arange(8) < 2})
    masked = run(module, (IMAGE,))
    assert not torch.allclose(whole, masked)
    run_pipeline(module, [FoldMasks()])
    assert_close(run(module, (IMAGE,)), masked, "identity")
