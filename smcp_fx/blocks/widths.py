"""Make a block narrower: which channels stay at a width, and which inputs are then left without channels."""

from __future__ import annotations

from torch import Tensor, fx

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
