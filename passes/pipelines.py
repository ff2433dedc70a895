"""The two pipelines, to be read from top to bottom."""

from __future__ import annotations

from torch import Tensor

from smcp_fx.channels import ChannelGraph
from smcp_fx.config import PruningConfig
from smcp_fx.passes.base import GraphPass
from smcp_fx.passes.drop_idle_joins import DropIdleJoins
from smcp_fx.passes.fold_batch_norm_scalers import FoldBatchNormScalers
from smcp_fx.passes.fold_computed_weights import FoldComputedWeights
from smcp_fx.passes.fold_kept_statistics import FoldKeptStatistics
from smcp_fx.passes.fold_masks import FoldMasks
from smcp_fx.passes.insert_batch_norm_scalers import InsertBatchNormScalers
from smcp_fx.passes.insert_kept_statistics import InsertKeptStatistics
from smcp_fx.passes.insert_soft_masks import InsertSoftMasks
from smcp_fx.passes.remove_branches import RemoveBranches
from smcp_fx.passes.slice_channels import SliceChannels


def prepare_pipeline(channels: ChannelGraph, config: PruningConfig) -> list[GraphPass]:
    """From a traced model to one that trains with masks."""
    passes: list[GraphPass] = [
        # Consumers' weights times masks; gradients go straight through.
        InsertSoftMasks(channels, config.mask),
        # What mixes channels (norms, statistics, products) sees the kept ones alone.
        InsertKeptStatistics(channels),
    ]
    if config.batch_norm_scaling or config.layer_pruning:
        # Batch norms behind masked convolutions, scaled by the share of channels kept. Behind a branch that keeps
        # nothing an unscaled one would divide by the root of its epsilon, and multiply gradients by as much.
        passes.append(InsertBatchNormScalers(channels, config.gamma_gradient))
    return passes


def convert_pipeline(channels: ChannelGraph, keep: Tensor) -> list[GraphPass]:
    """From a model with masks to a plain, smaller one; ``keep``: a bool for every unit."""
    keep = keep.clone()  # which `RemoveBranches` gives units back
    passes: list[GraphPass] = [
        # Weights computed from parameters become parameters, which can be sliced.
        FoldComputedWeights(),
        # Masks become zeros in the weights, scales part of the batch norms: a plain graph again.
        FoldMasks(),
        FoldKeptStatistics(),
        FoldBatchNormScalers(),
        # Layers without channels go, and what they leave becomes a constant.
        RemoveBranches(channels, keep),
        # What nothing reads any more goes.
        SliceChannels(channels, keep),
    ]
    if channels.branches is not None:
        # Concats of one tensor, and sums with nothing, which removed branches leave.
        passes.append(DropIdleJoins())
    return passes
