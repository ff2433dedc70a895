"""The pipelines, to be read from top to bottom."""

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
from smcp_fx.passes.restore_recurrent_layers import RestoreRecurrentLayers
from smcp_fx.passes.slice_channels import SliceChannels


def prepare_pipeline(channels: ChannelGraph, config: PruningConfig) -> list[GraphPass]:
    """Return the passes from a traced model to one that trains with masks."""
    passes: list[GraphPass] = [
        # Multiply consumers' weights by masks; gradients go straight through.
        InsertSoftMasks(channels, config.mask),
        # Show only kept channels to operations that mix channels (norms, statistics, products).
        InsertKeptStatistics(channels),
    ]
    if config.batch_norm_scaling or config.layer_pruning:
        # Scale batch norms behind masked convolutions by the share of channels kept. Behind an empty branch, an
        # unscaled norm would divide by the root of its epsilon and blow up gradients.
        passes.append(InsertBatchNormScalers(channels, config.gamma_gradient))
    return passes


def convert_pipeline(channels: ChannelGraph, keep: Tensor) -> list[GraphPass]:
    """Return the passes from a masked model to a plain, smaller one; ``keep``: a bool for every unit."""
    keep = keep.clone()  # `RemoveBranches` may add units
    passes: list[GraphPass] = [
        # Turn computed weights into parameters, which can be sliced.
        FoldComputedWeights(),
        # Fold masks into weights as zeros, and scales into batch norms: the graph is plain again.
        FoldMasks(),
        FoldKeptStatistics(),
        FoldBatchNormScalers(),
        # Remove layers without channels; a constant replaces their result.
        RemoveBranches(channels, keep),
        # Slice away the channels that are not kept.
        SliceChannels(channels, keep),
        # Call recurrent layers as modules again.
        RestoreRecurrentLayers(),
    ]
    if channels.branches is not None:
        # Drop concats of one tensor and sums with nothing, left by removed branches.
        passes.append(DropIdleJoins())
    return passes


def fold_pipeline() -> list[GraphPass]:
    """Return the passes from a masked model to one of plain layers that computes the same with every channel."""
    # Operations that mix channels still read only the kept ones.
    return [FoldComputedWeights(cosines=True), FoldMasks(), FoldBatchNormScalers(), RestoreRecurrentLayers()]
