"""From ties to units: which channel slots must be kept or removed together, and which must stay.

Labels alone would allow ragged tensors. After the ties are closed, every tensor may vary along one dimension
at most; where one varies along more, the others are tied and the closure is taken again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smcp_fx.channels.labels import compress, narrow_uniform, varied_dims
from smcp_fx.channels.propagation import Trail


@dataclass(frozen=True)
class Units:
    """``unit[label]`` for every label; ``why[unit]`` lists the (node, reason) of those that must stay."""

    unit: Tensor
    why: dict[int, list[tuple[str, str]]]

    def of(self, labels: Tensor) -> Tensor:
        """Units of labels; -1 where the source always stays."""
        core = narrow_uniform(labels)
        known = torch.where(core > 0, self.unit[core.clamp(min=0)], torch.full_like(core, -1))
        return compress(known.expand(labels.shape))


def close(trail: Trail) -> Units:
    """Close the ties, make every tensor rectangular, and collect what pins each unit."""
    pairs = list(trail.ties)
    pins = list(trail.pins)
    tensors = _tensors(trail)
    units = Units(_components(pairs, trail.count), {})
    while True:
        extra: list[Tensor] = []
        for labels in tensors:
            extra += _rectangular(labels, units, pins)
        if not extra:
            break
        pairs += extra
        units = Units(_components(pairs, trail.count), {})
    trail.ties = pairs
    for labels, reason in pins:
        for unit in torch.unique(units.unit[labels]).tolist():
            _add(units.why, unit, trail.reasons[reason])
    for name, labels in _whole(trail):
        known = units.of(labels)
        if known.numel() and not varied_dims(known):
            unit = int(known.reshape(-1)[0])
            if unit >= 0:
                _add(units.why, unit, (name, f"removing it would leave {name!r} empty"))
    return units


def _components(pairs: list[Tensor], count: int) -> Tensor:
    if not pairs:
        return torch.arange(count)
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    left, right = torch.cat(pairs, dim=1).numpy()
    matrix = coo_matrix(([True] * len(left), (left, right)), shape=(count, count))
    return torch.from_numpy(connected_components(matrix, directed=False)[1]).to(torch.int64)


def _tensors(trail: Trail) -> list[Tensor]:
    """Every label tensor that must be rectangular: intermediate values and parameters used as tensors."""
    found = {}
    for name, tree in trail.labels.items():
        if name not in trail.virtual:
            for labels in pytree.tree_leaves(tree):
                if isinstance(labels, Tensor) and len(varied_dims(labels)) > 1:
                    found[id(labels)] = labels
    for labels in trail.elements.values():
        if len(varied_dims(labels)) > 1:
            found[id(labels)] = labels
    return list(found.values())


def _rectangular(labels: Tensor, units: Units, pins: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Ties that leave one varied dimension: the one along which most units can still be told apart."""
    known = units.of(labels)
    varied = varied_dims(known)
    if len(varied) < 2:
        return []
    core = narrow_uniform(labels)
    kept = max(varied, key=lambda dim: torch.unique(_line(known, dim)).numel())
    ties = []
    for dim in varied:
        if dim == kept:
            continue
        first = core.narrow(dim, 0, 1).expand_as(core)
        a, b = core.reshape(-1), first.reshape(-1)
        both = (a > 0) & (b > 0) & (a != b)
        if bool(both.any()):
            ties.append(torch.stack([a[both], b[both]]))
        for one, other in ((a, b), (b, a)):
            met = (one > 0) & (other < 0)
            if bool(met.any()):
                for source in torch.unique(other[met]).tolist():
                    pins.append((torch.unique(one[met & (other == source)]), -1 - source))
    merged = torch.cat(ties, dim=1) if ties else torch.empty(2, 0, dtype=torch.int64)
    same = units.unit[merged[0]] == units.unit[merged[1]]
    return [merged[:, ~same]] if bool((~same).any()) else []


def _line(known: Tensor, dim: int) -> Tensor:
    for other in range(known.dim()):
        if other != dim:
            known = known.narrow(other, 0, 1)
    return known


def _whole(trail: Trail) -> list[tuple[str, Tensor]]:
    """Tensors and parameter dimensions that a unit must not cover as a whole."""
    found = [
        (name, labels)
        for name, tree in trail.labels.items()
        if name not in trail.virtual
        for labels in pytree.tree_leaves(tree)
        if isinstance(labels, Tensor)
    ]
    found += [(name, labels) for name, slots in trail.slots.items() for labels in slots.values()]
    return found + list(trail.elements.items())


def _add(why: dict[int, list[tuple[str, str]]], unit: int, reason: tuple[str, str]) -> None:
    reasons = why.setdefault(unit, [])
    if reason not in reasons and len(reasons) < 8:
        reasons.append(reason)
