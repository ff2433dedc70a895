"""Attention over more than two leading dimensions, which the ONNX exporter has no translation for.

scaled_dot_product_attention(q, k, v)   of [batch, windows, heads, tokens, width]
->  the same of [batch * windows, heads, tokens, width], and back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FourDimensionalAttention(TorchFunctionMode):
    """While it is entered, attention of five dimensions or more runs on four; masks that differ in them stay out."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and _fits(*args[:4], **kwargs):
            query, key, value, *rest = args
            flat = (tensor.flatten(0, -4) for tensor in (query, key, value))
            return function(*flat, *rest, **kwargs).reshape(*query.shape[:-1], value.shape[-1])
        return function(*args, **kwargs)


def _fits(*tensors: Any, attn_mask: Tensor | None = None, **_: Any) -> bool:
    """Three tensors of more than four dimensions by position, alike in the leading ones; a mask of three at most."""
    if len(tensors) < 3 or any(tensor.dim() < 5 for tensor in tensors[:3]):
        return False
    mask = tensors[3] if len(tensors) > 3 else attn_mask
    alike = all(tensor.shape[:-2] == tensors[0].shape[:-2] for tensor in tensors[1:3])
    return alike and (mask is None or mask.dim() <= 3)
