"""Models whose classes override `train()`: norms that they freeze stay frozen.

    def train(self, mode=True):
        super().train(mode)
        self.stem.eval()

A graph has none of the model's classes. So it keeps a copy of the model without weights, and asks that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def own_modes(model: nn.Module) -> nn.Module | None:
    """A copy of the model on the meta device, to ask its `train()`; None if that sets the usual modes."""
    if all(type(module).train is nn.Module.train for module in model.modules()):
        return None
    asked = _without_weights(model)
    return None if _sets_usual_modes(copy.deepcopy(asked)) else asked


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _sets_usual_modes(model: nn.Module) -> bool:
    """Does `train()` set every module, for instance because it only clears a cache (timm's LeViT)?"""
    for mode in (True, False):
        model.train(mode)
        if any(part.training is not mode for part in model.modules()):
            return False
    return True


def set_own_modes(asked: nn.Module, module: nn.Module, mode: bool) -> None:
    """Give each submodule of ``module`` the mode that ``asked.train(mode)`` gives to its namesake."""
    asked.train(mode)
    modes = {name: part.training for name, part in asked.named_modules()}
    for name, part in module.named_modules():
        part.training = modes.get(name, part.training)
