"""Multiply the batch norms' scales into their weights, and give the modules their calls back."""

from __future__ import annotations

from smcp_fx.passes.weight_products import FoldProducts
from smcp_fx.tracing.masking import scale_gamma, scale_gamma_direct


class FoldBatchNormScalers(FoldProducts):
    """The inverse of `InsertBatchNormScalers`, with the scaled weights in place of the unscaled ones."""

    functions = (scale_gamma, scale_gamma_direct)
    what = "scale"
