"""The scores of units that a solve uses: importances of this interval, blended with earlier intervals'."""

from __future__ import annotations

import torch
from torch import Tensor

from smcp_fx.config import PruningConfig
from smcp_fx.pruning.state import PruningState


def scores(state: PruningState, config: PruningConfig, arrived: bool) -> Tensor:
    """Return the importances of all free units, [units], as a solve would see them now.

    Importances gathered since the last solve become shares of their sum, so that every solve counts equally.
    They are then averaged with the remembered ones. ``arrived``: the target has stopped falling.

    Units of a narrowed group look more important for being few, whether they are kept or not. So importances
    gathered at a share r of the group are multiplied by r ** width_exponent.
    """
    if int(state.gathers) == 0:
        return state.remembered.clone()
    shares = _shares_kept(state)
    gathered = state.gathered * shares**config.width_exponent
    fresh = gathered / gathered.sum().clamp(min=torch.finfo(torch.float32).tiny)
    if config.memory:
        # Gradients do not reach a removed branch: keep its remembered importances.
        fresh = torch.where(shares > 0, fresh, state.remembered)
    solves = int(state.solves)
    memory = min(config.memory, solves / (solves + 1))  # a plain mean until the memory is full ...
    if arrived and solves:
        memory = config.memory  # ... or the target has arrived
    return memory * state.remembered + (1 - memory) * fresh


def _shares_kept(state: PruningState) -> Tensor:
    """Return, for every free unit, the share of its group that is kept, [units]."""
    shares = torch.empty_like(state.gathered)
    for name, mask in state.free_masks().items():
        state.of_group(shares, name).fill_(mask.to(shares.dtype).mean())
    return shares
