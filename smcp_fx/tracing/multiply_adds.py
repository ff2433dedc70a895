"""Multiply-adds of PyTorch code, counted by operation while it runs.

Parts without layers in the channel graph (modules called as they are, attention, Python around regions) have a cost,
too. They run on the example inputs under `MultiplyAdds`, which sees the operations inside every module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class MultiplyAdds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiply-adds of matrix products, convolutions, attention and recurrent layers while it is entered.

    ``total``: the count so far, for all images. Element-wise operations, norms and pooling count nothing, as usual.
    Composite operations are counted by their parts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name not in _COUNTS and name and not name.startswith("prim::"):
            with self:
                inside = func.decompose(*args, **kwargs)
            if inside is not NotImplemented:
                return inside
        result = func(*args, **kwargs)
        if name in _COUNTS:
            made = next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self.total += int(_COUNTS[name](args, made))
        return result


def _product(left: int) -> Callable[[Sequence[Any], Tensor], int]:
    """Count a matrix product; ``left``: the place of the left factor, whose last dimension is summed over."""
    return lambda args, result: result.numel() * int(args[left].shape[-1])


def _convolution(args: Sequence[Any], result: Tensor) -> int:
    x: Tensor = args[0]
    weight: Tensor = args[1]
    transposed = bool(args[6]) if len(args) > 6 else False
    return (x if transposed else result).numel() * math.prod(weight.shape[1:])


def _filtered(args: Sequence[Any], result: Tensor) -> int:
    weight: Tensor = args[1]
    return result.numel() * math.prod(weight.shape[1:])


def _attention(args: Sequence[Any], result: Tensor) -> int:
    """softmax(q k^T) v of [..., positions, channels]."""
    query, key, value = args[:3]
    count: int = math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return count


def _recurrent(args: Sequence[Any], result: Tensor) -> int:
    """One layer in one direction, of [steps, images, channels] or [images, steps, channels]: two weights a step."""
    x, one, other = args[:3]
    count: int = math.prod(x.shape[:-1]) * (one.numel() + other.numel())
    return count


def _trilinear(args: Sequence[Any], result: Tensor) -> int:
    """A bilinear layer: [images, in1] and [images, in2] through a weight [out, in1, in2]."""
    return int(args[0].numel() // args[0].shape[-1]) * int(args[1].numel())


def _self_attention(tokens: Tensor, weights: Sequence[Tensor]) -> int:
    """Self-attention of tokens [images, positions, channels], nested if images differ: weights and products."""
    lengths = [len(one) for one in tokens.unbind()]
    channels = int(weights[0].shape[-1])
    return sum(n * sum(weight.numel() for weight in weights) + 2 * n * n * channels for n in lengths)


def _encoder_layer(args: Sequence[Any], result: Tensor) -> int:
    return _self_attention(args[0], [args[3], args[5], args[14], args[16]])


def _native_attention(args: Sequence[Any], result: Tensor) -> int:
    return _self_attention(args[0], [args[5], args[7]])


_COUNTS: dict[str, Callable[[Sequence[Any], Tensor], int]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot"), _product(0)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv"), _product(1)),
    "aten::addbmm": lambda args, result: args[1].numel() * args[2].shape[-1],
    **dict.fromkeys(
        ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"), _convolution
    ),
    **dict.fromkeys(
        ("aten::cudnn_convolution", "aten::mkldnn_convolution", "torchvision::deform_conv2d"), _filtered
    ),
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::_trilinear": _trilinear,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _native_attention,
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention,
    ),
}
