"""Wrappers around models, and whether a model has been prepared."""

from __future__ import annotations

from torch import nn

from smcp_fx.tracing.masking import STATE


def is_prepared(model: nn.Module) -> bool:
    """Whether the model, or the one wrapped in it, is prepared and not yet converted."""
    return STATE in unwrapped(model)._modules


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, `DataParallel` or `torch.compile`."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
