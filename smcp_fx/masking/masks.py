"""The functions that masked graphs call, and the marks that passes leave on nodes.

before   conv1 = call_module[conv1](x)
after    weight = get_attr[conv1.weight];  mask = get_attr[smcp.mask_conv1]
         masked = soft_mask(weight, mask);  module = get_attr[conv1]
         conv1 = forward_with_weight(module, masked, x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

#: Name of the submodule of a prepared model that holds masks, scales, importances and the schedule's place.
STATE = "smcp"
#: Key of this library's metadata in `node.meta`.
META = "smcp"


@dataclass(frozen=True)
class Mark:
    """What a pass did to a node: ``kind``, and the module path it took the call from.

    "mask" and "scale" change a weight; "kept" restricts a mix to the kept channels, and replaces ``call``.
    """

    kind: Literal["mask", "scale", "kept"]
    path: str | None  # None: a functional call
    call: tuple[str, Any] | None = None  # op and target


@dataclass(frozen=True)
class Constant:
    """Marks a `get_attr` of the constant that a removed branch leaves: the value of the node ``of``."""

    of: str


@dataclass(frozen=True)
class Masked:
    """Marks the product of a mask and a weight that is computed from the input, which the node ``layer`` reads."""

    layer: str


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor) -> Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight, mask)
        return weight * mask.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,) = gradients
        to_weight = gradient if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_weight, None
        weight, mask = ctx.saved_tensors
        product = (weight.conj() * gradient).real if weight.is_complex() else weight * gradient
        return to_weight, product.sum_to_size(mask.shape).to(mask.dtype)


class _DirectScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gamma: Tensor, scale: Tensor) -> Tensor:
        scale = scale.to(gamma.dtype)
        ctx.save_for_backward(scale)
        return gamma * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        # Behind a layer that reads nothing, the scale is 0: the norm's weight has no effect and no gradient.
        return torch.where(scale > 0, gradients[0] / scale, 0.0), None


def soft_mask(weight: Tensor, mask: Tensor) -> Tensor:
    """Return ``weight * mask``; the gradient goes straight through to all of ``weight`` (SMCP eq. 1, 2).

    If the weight is frozen, its mask takes the gradient: for each element the sum of ``weight * gradient``,
    which the importance would otherwise compute from the weight's own gradient.
    """
    return _StraightThrough.apply(weight, _for_each_image(mask, weight))  # type: ignore[no-any-return]


def hard_mask(weight: Tensor, mask: Tensor) -> Tensor:
    """Return ``weight * mask``; masked weights get no gradient, and neither do their masks."""
    masked = weight * _for_each_image(mask, weight).detach().to(weight.dtype)
    return soft_mask(masked, mask) if mask.requires_grad else masked


def computed_mask(weight: Tensor, mask: Tensor) -> Tensor:
    """Return ``weight * mask`` for a computed weight; the computation gets only the kept channels' gradient.

    With straight-through gradients, masked channels would move a norm's scale or a router, which the kept ones share
    (docs/explanations/experiments.md). The mask's own gradient is as for a frozen weight: see `soft_mask`.
    """
    return weight * _for_each_image(mask, weight).to(weight.dtype)


def _for_each_image(mask: Tensor, weight: Tensor) -> Tensor:
    """The mask, repeated where all images' inputs are rows of one weight (a transposed convolution's)."""
    rows = mask.shape[0]
    return (
        mask
        if rows in (1, weight.shape[0])
        else mask.repeat(weight.shape[0] // rows, *(1,) * (mask.dim() - 1))
    )


def scale_gamma(gamma: Tensor, scale: Tensor) -> Tensor:
    """Return ``gamma * scale`` (SMCP eq. 4); ``gamma`` gets ``scale`` times the gradient (chain rule)."""
    return gamma * scale.to(gamma.dtype)


def scale_gamma_direct(gamma: Tensor, scale: Tensor) -> Tensor:
    """Return ``gamma * scale``; ``gamma`` gets the gradient over ``scale``, as if it had been scaled itself."""
    return _DirectScale.apply(gamma, scale)  # type: ignore[no-any-return]


MASKS = {"soft": soft_mask, "permanent": hard_mask}
#: The same for weights that are computed, not parameters.
COMPUTED_MASKS = {"soft": computed_mask, "permanent": hard_mask}
EVERY_MASK = (soft_mask, hard_mask, computed_mask)
SCALES = {"chain": scale_gamma, "direct": scale_gamma_direct}


def mark_of(node: fx.Node) -> Mark | None:
    """Return the mark a pass left on a node."""
    mark = node.meta.get(META)
    return mark if isinstance(mark, Mark) else None
