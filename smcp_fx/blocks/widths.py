"""Make a block narrower: which channels stay at a width, and which inputs are then left without channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.groups import Group
from smcp_fx.errors import PassError
from smcp_fx.tracing.operations import operation_name


def take_out(module: fx.GraphModule, names: set[str], block: str) -> None:
    """Remove inputs of a concatenation."""
    for node in list(module.graph.nodes):
        if node.name not in names:
            continue
        for user in list(node.users):
            parts = user.args[0] if user.args else None
            if not isinstance(parts, (list, tuple)) or operation_name(user, None) != "cat":
                raise PassError(f"block {block!r} cannot be built without its input {node.name!r}")
            user.args = ([part for part in parts if part is not node], *user.args[1:])
        module.graph.erase_node(node)
    module.recompile()


def thin(line: Tensor, width: int, keep: Tensor, name: str, inputs: list[Tensor]) -> None:
    """Keep ``width`` slots along a line of units, evenly spread, and some of every input of a concatenation."""
    order = list(dict.fromkeys(line.tolist()))
    per_unit = int((line == order[0]).sum())
    wanted, rest = divmod(width, per_unit)
    if rest or not 0 < wanted <= len(order):
        raise PassError(
            f"block {name!r} cannot be built {width} channels wide ({len(order)} units of {per_unit})"
        )
    chosen = {order[index * len(order) // wanted] for index in range(wanted)}
    parts = [
        set(part) for part in {frozenset(units.tolist()) & frozenset(order): None for units in inputs} if part
    ]
    for part in parts if len(parts) <= wanted else ():
        if not part & chosen:
            fullest = max(parts, key=lambda p: len(p & chosen))
            chosen -= {max(fullest & chosen)}
            chosen |= {min(part)}
    for unit in order:
        keep[unit] = unit in chosen


def in_units(line: Tensor, widths: Sequence[int]) -> bool:
    """Whether all these widths are whole numbers of the line's units, all of which have as many slots."""
    _, slots = torch.unique(line, return_counts=True)
    each = int(slots[0])
    return bool((slots == each).all()) and all(width % each == 0 for width in widths)


def thin_groups(lines: Sequence[Tensor], widths: Sequence[int], keep: Tensor, channels: ChannelGraph) -> None:
    """Keep ``widths`` slots along lines of a network's units, as counts of its groups; fixed units stay.

    If the widths exclude each other (both lines have channels of one group), the nearest ones are kept.
    """
    counts: dict[int, int] = {}
    for line, width in zip(lines, widths, strict=True):
        free = line[channels.free_units[line]]
        indices, slots = torch.unique(channels.group_of_unit[free], return_counts=True)
        parts = {
            i: n // channels.groups[i].size for i, n in zip(indices.tolist(), slots.tolist(), strict=True)
        }
        counts.update(_counts(parts, channels.groups, width - (line.numel() - free.numel()), counts))
    for index, count in counts.items():
        group = channels.groups[index]
        keep[group.units] = False
        keep[group.units[[place * group.size // count for place in range(count)]]] = True


def _counts(
    parts: Mapping[int, int], groups: Sequence[Group], width: int, fixed: Mapping[int, int]
) -> dict[int, int]:
    """Return permitted counts of groups that sum to a width, or come closest, in the most equal shares.

    ``parts``: slots of one unit, by group; ``fixed``: counts that are chosen already.
    """
    share = width / max(1, sum(each * groups[index].size for index, each in parts.items()))
    reached: dict[int, tuple[float, dict[int, int]]] = {0: (0.0, {})}
    for index, each in parts.items():
        permitted = (fixed[index],) if index in fixed else groups[index].permitted
        wider: dict[int, tuple[float, dict[int, int]]] = {}
        for total, (uneven, counts) in reached.items():
            for count in permitted:
                so_far, cost = total + each * count, uneven + abs(count / groups[index].size - share)
                if so_far not in wider or cost < wider[so_far][0]:
                    wider[so_far] = cost, {**counts, index: count}
        reached = wider
    return reached[min(reached, key=lambda total: abs(total - width))][1]
