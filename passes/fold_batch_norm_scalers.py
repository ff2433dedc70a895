"""Multiply the batch norms' scales into their weights, and give the modules their calls back."""

from __future__ import annotations

from smcp_fx.masking.masks import scale_gamma, scale_gamma_direct
from smcp_fx.passes.weight_products import FoldProducts


class FoldBatchNormScalers(FoldProducts):
    """The inverse of `InsertBatchNormScalers`, with the scaled weights in place of the unscaled ones."""

    functions = (scale_gamma, scale_gamma_direct)
    what = "scale"
