"""Make masks permanent: multiply the weights, and give the modules their calls back."""

from __future__ import annotations

from smcp_fx.masking.masks import EVERY_MASK
from smcp_fx.passes.weight_products import FoldProducts


class FoldMasks(FoldProducts):
    """The inverse of `InsertSoftMasks`, with the masked weights in place of the dense ones."""

    functions = EVERY_MASK
    what = "mask"
