"""Wrappers around models, and whether a model has been prepared."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from smcp_fx.masking.masks import STATE

#: What `torch.compile` and other wrappers of parts put into names, and `DistributedDataParallel` before them.
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_BEFORE = ("module.", *INSIDE)


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


def without_wrappers(state: dict[str, Any], prefix: str, own: Container[str]) -> None:
    """Rename entries of a state dict behind ``prefix``, in place: names as wrappers change them become ``own`` ones.

    Other names, and those of which the plain one is there, too, stay.
    """
    for name in [name for name in state if name.startswith(prefix)]:
        plain = prefix + _plain(name[len(prefix) :], own)
        if plain not in state:
            state[plain] = state.pop(name)


def _plain(name: str, own: Container[str]) -> str:
    plain = name
    while plain not in own and plain.startswith(_BEFORE):
        plain = plain.partition(".")[2]
    if plain not in own:
        for wrapper in INSIDE:
            plain = plain.replace(wrapper, "")
    return plain if plain in own else name
