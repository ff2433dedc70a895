"""Attention on other than four dimensions, which the ONNX exporter cannot translate.

scaled_dot_product_attention(q, k, v)   of [batch, windows, heads, tokens, width]
->  the same of [batch * windows, heads, tokens, width], and back

                                        of [batch * heads, tokens, width]
->  the same of [batch * heads, 1, tokens, width], and back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FourDimensionalAttention(TorchFunctionMode):
    """While entered, attention of three, five or more dimensions runs on four.

    Five or more stay unchanged if a mask differs in the leading ones.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is not F.scaled_dot_product_attention or len(args) < 3:
            return function(*args, **kwargs)
        mask = args[3] if len(args) > 3 else kwargs.pop("attn_mask", None)
        query, key, value = args[:3]
        rest = args[4:]
        if all(tensor.dim() == 3 for tensor in (query, key, value)):
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
            flat = (tensor.unsqueeze(1) for tensor in (query, key, value))
            return function(*flat, mask, *rest, **kwargs).squeeze(1)
        if _can_flatten(query, key, value, mask):
            flat = (tensor.flatten(0, -4) for tensor in (query, key, value))
            return function(*flat, mask, *rest, **kwargs).reshape(*query.shape[:-1], value.shape[-1])
        return function(query, key, value, mask, *rest, **kwargs)


def _can_flatten(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Have all tensors five or more dimensions with equal leading ones, and has a mask at most three?"""
    if any(tensor.dim() < 5 for tensor in (query, key, value)):
        return False
    alike = all(tensor.shape[:-2] == query.shape[:-2] for tensor in (key, value))
    return alike and (mask is None or mask.dim() <= 3)
