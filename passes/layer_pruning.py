"""Layer pruning: let groups keep nothing if the network stays in one piece without them.

Candidates are the groups whose channels are written inside the modules that the user names; by default, all.
As many are allowed as can keep nothing at once while every output still depends on the same inputs. If not
all can (one branch of a concatenation must stay), narrow groups come first, so that the widest connection
stays. Groups whose absence would leave a constant that depends on sizes are left out
(`smcp_fx.passes.remove_branches`).
"""

from __future__ import annotations

import torch

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.branches import Branches, Flow, bits
from smcp_fx.config import names
from smcp_fx.errors import InputError
from smcp_fx.passes.remove_branches import Removal
from smcp_fx.tracing.tracer import Traced


def allow_layer_pruning(traced: Traced, channels: ChannelGraph, within: tuple[str, ...] = ()) -> None:
    """Add 0 to the permitted counts of the groups that may keep nothing.

    ``within``: paths of modules; `InputError` for one that holds no layer whose channels are free.
    """
    groups = channels.groups
    mixed = _mixed_with_others(channels)
    floor = {i for i, group in enumerate(groups) if any("<=" not in limit for limit in group.limits)}
    free = [i for i, group in enumerate(groups) if group.free and group.consumers and i not in mixed | floor]
    inside = {path: {i for i in free if _is_in(path, groups[i].producers)} for path in within}
    for path, layers in inside.items():
        if not layers:
            raise InputError(
                f"layer_pruning_in: no layer in {path!r} has output channels that may go; among those that have are "
                f"{', '.join(groups[i].producers[0] for i in free[:6]) or 'none'}"
            )
    candidates = sorted(set().union(*inside.values())) if within else free
    flow = Flow(traced.module, channels)
    widths = {i: groups[i].size * max(groups[i].channels.values(), default=1) for i in candidates}
    removable = flow.widest_cut_free(sorted(candidates, key=lambda i: (widths[i], i)))
    # First test all groups at once, then each group with the groups that it implies.
    removable = Removal(traced.module, channels, removable, flow).zero
    while True:
        branches = Branches(flow, removable)
        bad = 0
        for group in bits(removable):
            together = 1 << group | branches.implied[group]
            if Removal(traced.module, channels, together, flow).zero != together:
                bad |= 1 << group
        if not bad:
            break
        removable &= ~bad
    channels.allow_nothing(branches)


def _mixed_with_others(channels: ChannelGraph) -> set[int]:
    """Groups that a norm or statistic reads together with others: a unit put back would count there."""
    group_of = {int(unit): index for index, group in enumerate(channels.groups) for unit in group.units}
    mixed: set[int] = set()
    for mix in channels.trail.mixes:
        groups = {group_of.get(unit, -1) for unit in torch.unique(channels.units.of(mix.labels)).tolist()}
        mixed |= groups if len(groups) > 1 else set()
    return mixed


def _is_in(path: str, layers: tuple[str, ...]) -> bool:
    return any(names(path, layer) for layer in layers)
