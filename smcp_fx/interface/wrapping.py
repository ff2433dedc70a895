"""Wrappers around models, weights that are sharded, and whether a model has been prepared."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from smcp_fx.errors import TrainingError
from smcp_fx.masking.masks import STATE

#: What `torch.compile` and other wrappers of parts put into names; `DistributedDataParallel` adds a prefix.
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_BEFORE = ("module.", *INSIDE)
_AROUND = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)


def is_prepared(model: nn.Module) -> bool:
    """Whether the model, or the one wrapped in it, is prepared and not yet converted."""
    return STATE in unwrapped(model)._modules


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, `DataParallel`, `AveragedModel` or `torch.compile`."""
    while True:
        if isinstance(model, _AROUND):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def require_whole(model: nn.Module, verb: str = "") -> None:
    """Raise `TrainingError` for a model whose parameters lie in parts on several ranks.

    ``verb``: what needs them whole, other than pruning.
    """
    by_fsdp = any("_is_fsdp_managed_module" in vars(module) for module in model.modules())
    if by_fsdp or any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        how = f"the parameters are sharded, by {'FSDP' if by_fsdp else 'tensor parallelism'}, and"
        if verb:
            raise TrainingError(
                f"{how} {verb} needs them whole: call it before the model is sharded, or on a copy that is not, with "
                "the state that torch's get_model_state_dict(..., StateDictOptions(full_state_dict=True)) gathers"
            )
        raise TrainingError(
            f"{how} channels are chosen from whole ones. Train the prepared model with DistributedDataParallel; or "
            "prune first, and shard the plain model that convert or compress returns: fully_shard(smaller)."
        )


def without_wrappers(state: dict[str, Any], prefix: str, own: Container[str]) -> None:
    """Rename entries of a state dict behind ``prefix``, in place: undo wrappers' changes to ``own`` names.

    Other names stay, and so does a name whose plain form is there already.
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
