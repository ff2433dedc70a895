"""What may stand around a model, and whether a model has been prepared."""

from __future__ import annotations

from torch import nn

from smcp_fx.tracing.masking import STATE


def is_prepared(model: nn.Module) -> bool:
    """Was the model, or the one that is wrapped in it, prepared and not converted yet?"""
    return STATE in unwrapped(model)._modules


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel`, `DataParallel` and `torch.compile`."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
