"""From ties to units: which channel slots must be kept or removed together, and which must stay.

Labels would allow ragged tensors. Once the ties are closed, each tensor may vary along one dimension at most. If a
tensor varies along several, all but one are tied, and the ties are closed again. A broadcast operand is then tied to
the dimension that still varies, or pinned if it has size 1 there.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from smcp_fx.channels.labels import at_first, compact, narrow_uniform, paired, varied_dims
from smcp_fx.channels.trail import EMPTY, Reason, Spread, Trail
from smcp_fx.tracing.trees import leaves_of


class Why:
    """Why units must stay: a mapping from units to reasons, stored as two arrays."""

    def __init__(self, units: list[Tensor], reasons: list[int], texts: list[Reason]) -> None:
        sizes = torch.tensor([u.numel() for u in units], dtype=torch.int64)
        unit = torch.cat(units) if units else torch.empty(0, dtype=torch.int64)
        order = torch.argsort(unit, stable=True)
        self.units = unit[order]
        self.reasons = torch.repeat_interleave(torch.tensor(reasons, dtype=torch.int64), sizes)[order]
        self.texts = texts

    def get(self, unit: int) -> list[Reason]:
        """Up to eight different reasons for a unit, in the order they arose."""
        first, last = torch.searchsorted(self.units, torch.tensor([unit, unit + 1])).tolist()
        indices = self.reasons[first:last].tolist()
        return list(dict.fromkeys(self.texts[index] for index in indices))[:8]

    def pinned(self, count: int) -> Tensor:
        """A bool for each of ``count`` units: whether it must stay."""
        return torch.bincount(self.units, minlength=count) > 0

    def of_kind(self, kind: str, count: int) -> Tensor:
        """A bool for each of ``count`` units: whether any of its reasons is of this kind."""
        chosen = torch.tensor([reason.kind == kind for reason in self.texts] or [False])
        return torch.bincount(self.units[chosen[self.reasons]], minlength=count) > 0

    def only(self, kind: str, count: int) -> Tensor:
        """A bool for each of ``count`` units: whether it must stay, and all its reasons are of this kind."""
        others = torch.tensor([reason.kind != kind for reason in self.texts] or [False])
        return self.pinned(count) & (torch.bincount(self.units[others[self.reasons]], minlength=count) == 0)

    def and_also(self, units: Tensor, reason: Reason) -> Why:
        """These reasons, and ``reason`` as one more for ``units``."""
        more = Why([self.units, units], [0, len(self.texts)], [*self.texts, reason])
        reasons = torch.cat([self.reasons, torch.full_like(units, len(self.texts))])
        more.reasons = reasons[torch.argsort(torch.cat([self.units, units]), stable=True)]
        return more


@dataclass(frozen=True)
class Units:
    """The unit of each label, ``unit[label]``, and the reasons ``why`` units must stay."""

    unit: Tensor
    why: Why

    @property
    def count(self) -> int:
        """The number of units."""
        return int(self.unit.max()) + 1 if self.unit.numel() else 0

    def of(self, labels: Tensor) -> Tensor:
        """Units of labels; -1 for sources that always stay."""
        return compact(self._known[narrow_uniform(labels).clamp(min=0)].expand(labels.shape))

    @functools.cached_property
    def _known(self) -> Tensor:
        """The units, with -1 for label 0, which no channel has."""
        return torch.cat([self.unit.new_full((1,), -1), self.unit[1:]])

    def among(self, several: Iterable[Tensor]) -> Tensor:
        """A bool for each unit: do any of these labels belong to it?"""
        chosen = torch.zeros(self.count, dtype=torch.bool)
        for labels in several:
            own = self.of(narrow_uniform(labels)).reshape(-1)
            chosen[own[own >= 0]] = True
        return chosen

    def narrowed(self, labels: Tensor) -> Tensor:
        """The labels, with dimensions along which their units do not change at size 1."""
        return at_first(labels, varied_dims(self.of(labels)))


def close(trail: Trail) -> Units:
    """Close the ties, make every tensor rectangular, and collect what pins each unit."""
    ties = list(trail.ties)
    pins = list(trail.pins)
    spreads = [(trail.reasons[spread.reason].node, spread) for spread in trail.spread]
    tensors = _varied([*_labelled(trail), *((name, spread.merged) for name, spread in spreads)])
    elements = _varied(trail.elements.items())
    nothing = Why([], [], [])
    units = Units(_components(ties, trail.count), nothing)
    while True:
        extra = [(pairs, name) for name, la in tensors for pairs in _rectangular(la, units, pins)]
        if not extra:
            extra = [(pairs, name) for name, spread in spreads for pairs in _follow(spread, units, pins)]
        if not extra:  # last, once the other operands are tied
            extra = [(pairs, name) for name, la in elements for pairs in _rectangular(la, units, pins, True)]
        if not extra:
            break
        ties += extra
        units = Units(_components(ties, trail.count), nothing)
    pins += [(spread.operand, spread.reason) for spread in trail.spread if _stays(spread, units)]
    trail.ties = ties
    texts = list(trail.reasons)
    kept = [torch.unique(units.unit[labels[labels > 0]]) for labels, _ in pins]
    reasons = [reason for _, reason in pins]
    emptied: dict[int, tuple[str, Tensor]] = {}  # by unit: a tensor it covers, preferably of several channels
    for name, labels in _whole(trail):
        of = units.of(labels)
        if of.numel() and not varied_dims(of) and (unit := int(of[(0,) * of.dim()])) >= 0:
            own = torch.unique(narrow_uniform(labels))
            if unit not in emptied or emptied[unit][1].numel() == 1 < own.numel():
                emptied[unit] = name, own
    kept += [torch.tensor([unit]) for unit in emptied]
    reasons += range(len(texts), len(texts) + len(emptied))
    texts += [_empty(name, own, ties, units) for name, own in emptied.values()]
    return Units(units.unit, Why(kept, reasons, texts))


def _empty(name: str, labels: Tensor, ties: list[tuple[Tensor, str]], units: Units) -> Reason:
    """The reason for a tensor's only unit: names the nodes that tied its first two labels, and its last."""
    text = f"removing it would leave {name!r} empty"
    if labels.numel() == 1:
        return Reason(name, text, EMPTY)
    inside = [(pairs[:, units.unit[pairs[0]] == units.unit[labels[0]]], node) for pairs, node in ties]

    def parts(count: int) -> int:
        return len(torch.unique(_components(inside[:count], units.unit.numel())[labels]))

    first, last = (
        inside[bisect.bisect_left(range(1, len(inside)), True, key=lambda count: parts(count) <= few)][1]
        for few in (labels.numel() - 1, 1)
    )
    tied = f"at {first!r}" if first == last else f"from {first!r} to {last!r}"
    return Reason(first, f"{text}: all its {labels.numel()} channels go together, tied {tied}", EMPTY)


def _components(ties: list[tuple[Tensor, str]], count: int) -> Tensor:
    if not ties:
        return torch.arange(count)
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    left, right = torch.cat([pairs for pairs, _ in ties], dim=1).numpy()
    matrix = coo_matrix(([True] * len(left), (left, right)), shape=(count, count))
    return torch.from_numpy(connected_components(matrix, directed=False)[1]).to(torch.int64)


def _labelled(trail: Trail) -> list[tuple[str, Tensor]]:
    """Every label tensor that must be rectangular, with its node; not parameters used as tensors."""
    trees = ((name, tree) for name, tree in trail.labels.items() if name not in trail.virtual)
    return [(name, la) for name, tree in trees for la in leaves_of(tree) if isinstance(la, Tensor)]


def _varied(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return list({id(la): (name, la) for name, la in tensors if len(varied_dims(la)) > 1}.values())


def _rectangular(
    labels: Tensor, units: Units, pins: list[tuple[Tensor, int]], alone: bool = False
) -> list[Tensor]:
    """Ties that leave one dimension varying: the one with the most different units.

    ``alone``: for the elements of a parameter, prefer the dimension along which they go with different
    channels of other tensors. A position embedding may have more positions than channels.
    """
    own_units = units.of(labels)
    varied = varied_dims(own_units)
    if len(varied) < 2:
        return []
    core = narrow_uniform(labels)
    met = _met_along(core, own_units, units) if alone else []
    kept = (
        met[0]
        if len(met) == 1
        else max(varied, key=lambda dim: torch.unique(at_first(own_units, [dim])).numel())
    )
    ties = []
    for dim in varied:
        if dim != kept:
            ties += _bind(core, core.narrow(dim, 0, 1).expand_as(core), units, pins)
    return ties


def _met_along(core: Tensor, own_units: Tensor, units: Units) -> list[int]:
    """The dimensions along which a parameter's elements go with different units of other tensors."""
    of = torch.where(core > 0, narrow_uniform(own_units).expand_as(core), -1)
    own = torch.bincount(units.unit[torch.unique(core[core > 0])], minlength=units.count)
    shared = torch.bincount(units.unit, minlength=units.count) > own
    met = (of >= 0) & shared[of.clamp(min=0)]
    most, least = torch.where(met, of, -1), torch.where(met, of, units.count)
    return [
        dim
        for dim in varied_dims(core)
        if bool((most.amax(dim) > least.amin(dim)).logical_and(met.any(dim)).any())
    ]


def _follow(spread: Spread, units: Units, pins: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Ties of a broadcast operand to the others; none if the others vary where it has size 1."""
    if _stays(spread, units):
        return []
    return _bind(spread.merged, spread.operand.expand_as(spread.merged), units, pins)


def _stays(spread: Spread, units: Units) -> bool:
    varied = varied_dims(units.of(spread.merged))
    return any(spread.operand.shape[dim] == 1 for dim in varied)


def _bind(left: Tensor, right: Tensor, units: Units, pins: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Pairs of labels at equal places that are in different units; labels opposite fixed ones are pinned."""
    pairs, more = paired(left, right)
    pins += more
    apart = units.unit[pairs[0]] != units.unit[pairs[1]]
    return [pairs[:, apart]] if bool(apart.any()) else []


def _whole(trail: Trail) -> list[tuple[str, Tensor]]:
    """Tensors and parameter dimensions that must not become empty: no single unit may cover one completely."""
    slots_of = [(name, labels) for name, slots in trail.slots.items() for labels in slots.values()]
    return [*_labelled(trail), *slots_of, *trail.elements.items()]


def read_by_layers(trail: Trail, units: Units) -> Tensor:
    """A bool for each unit: does a dense layer read it?"""
    return units.among(layer.in_labels for layer in trail.layers if layer.kind == "dense")


def keep_unread(trail: Trail, units: Units) -> Units:
    """Pin channels that only statistics without mask gradients read, as nothing measures their worth."""
    scored = units.among(mix.labels for mix in trail.mixes if mix.scores) | read_by_layers(trail, units)
    mixed = units.among(mix.labels for mix in trail.mixes)
    kept = (mixed & ~scored & ~units.why.pinned(units.count)).nonzero().flatten()
    if not kept.numel():
        return units
    where = next(mix.node for mix in trail.mixes if bool(torch.isin(units.of(mix.labels), kept).any()))
    why = units.why.and_also(
        kept, Reason(where, f"no layer reads it, but {where!r}, which is made of all channels")
    )
    return Units(units.unit, why)
