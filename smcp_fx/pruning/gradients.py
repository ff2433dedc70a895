"""All gradients at once, read with few kernels and without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def loss_scale(scaler: Any) -> Tensor | float | None:
    """Return the factor of the gradients under a `GradScaler`; None without one.

    The factor is 1 after ``scaler.unscale_(optimizer)``, which the scaler's own records show.
    """
    if scaler is None or not scaler.is_enabled():
        return None
    books = getattr(scaler, "_per_optimizer_states", {})
    if any(getattr(book.get("stage"), "name", "") == "UNSCALED" for book in books.values()):
        return 1.0
    scale = getattr(scaler, "_scale", None)  # `get_scale()` would wait for the device
    return scale if isinstance(scale, Tensor) else float(scaler.get_scale())


def all_finite(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return whether all gradients are finite, as a bool scalar on their device; true if there are none."""
    gradients = _gradients(parameters)
    if not gradients:
        return torch.tensor(True)
    return torch.isfinite(torch.nn.utils.get_total_norm(gradients, math.inf))


def norm(parameters: Iterable[nn.Parameter], scale: Tensor | float | None = None) -> float | None:
    """Return the norm of all gradients, unscaled; None without any. Waits for the device."""
    gradients = _gradients(parameters)
    if not gradients:
        return None
    return float(torch.nn.utils.get_total_norm(gradients)) / (1.0 if scale is None else float(scale))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
