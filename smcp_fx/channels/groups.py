"""Groups: units among which one count is chosen, and their permitted counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import Tensor

from smcp_fx.channels.labels import narrow_uniform
from smcp_fx.channels.trail import Reason, Trail
from smcp_fx.channels.units import Units, Why
from smcp_fx.tracing.trees import leaves_of


@dataclass(frozen=True)
class Group:
    """Units among which one count is chosen.

    ``consumers`` and ``producers`` are module paths (the weight's name for functional calls); ``pinned`` holds the
    reasons why its units must stay, and is empty if they are free; ``channels`` maps each consumer or producer, as
    ``(path, "in" | "out")``, to the number of channels that one unit has there. ``limits``: the user's limits on
    its layers' widths; ``limited``: the permitted counts within these limits.
    """

    name: str
    size: int
    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    permitted: tuple[int, ...]
    pinned: tuple[str, ...]
    channels: Mapping[tuple[str, str], int] = field(repr=False)
    units: Tensor = field(repr=False, compare=False)  # [size], ascending
    limits: tuple[str, ...] = ()
    limited: tuple[int, ...] = field(default=(), repr=False)

    @property
    def free(self) -> bool:
        """Whether its units may go."""
        return not self.pinned

    @property
    def note(self) -> str:
        """In brackets, why choices are few: the user's limits, or a multiple that leaves only one."""
        whole = self.free and self.size > 1 and len(self.permitted) == 1
        reasons = (*self.limits, *("the multiple leaves no other count",) * whole)
        return f" ({', '.join(reasons)})" if reasons else ""

    @property
    def choices(self) -> tuple[int, ...]:
        """The counts among which a solve chooses."""
        return self.limited or self.permitted


def form_groups(trail: Trail, units: Units, multiple: int) -> tuple[list[Group], Units]:
    """Group units with the same slots in the same weights. Also returns the units, with unproduced ones pinned."""
    table, orphans = _slots_of(trail, units)
    if orphans.numel():
        units = Units(units.unit, units.why.and_also(orphans, Reason("", "no layer produces it")))
    drafts = []
    order = {layer.path: index for index, layer in enumerate(trail.layers)}
    for members in table.alike(units.why):
        channels = table.of(int(members[0]))
        pinned = tuple(sorted({reason.text for reason in units.why.get(int(members[0]))}))
        place = min(order[path] + (side == "in") / 2 for path, side in channels if path in order)
        drafts.append((place, channels, pinned, members))
    groups: list[Group] = []
    names: set[str] = set()
    for _, channels, pinned, members in sorted(drafts, key=lambda item: item[0]):
        groups.append(_group(channels, pinned, members, multiple, names))
        names.add(groups[-1].name)
    return groups, units


def _slots_of(trail: Trail, units: Units) -> tuple[_Slots, Tensor]:
    """Return the slots of every unit, and the free units of layers that no layer produces."""
    count = units.count
    table = _Slots(count)
    produced = torch.zeros(count, dtype=torch.bool)
    seen: set[tuple[str, int]] = set()
    for layer in trail.layers:
        if (layer.weight, layer.in_dim) in seen:
            continue
        seen.add((layer.weight, layer.in_dim))
        if layer.kind != "dense":
            table.add((layer.path, "carry"), units.of(layer.output_channels))
            continue
        table.add((layer.path, "in"), units.of(layer.input_channels))
        outputs = table.add((layer.path, "out"), units.of(layer.output_channels))
        produced[outputs] = True
    in_layers = table.present.clone()
    # No layer writes learned queries, embeddings, zeros beside channels, or channels that a reshape selects.
    standing = [
        trail.elements[name] if name in trail.elements else trail.slots[name][1]
        for name in trail.free_standing
    ]
    standing += [trail.labels[name] for name in trail.selected]
    for labels in standing:
        standing_units = torch.unique(units.of(narrow_uniform(labels)))
        produced[standing_units[standing_units >= 0]] = True
    layered = {name for layer in trail.layers for name in (layer.weight, layer.bias)}
    others = {
        f"{name}.{dim}": labels
        for name, dims in trail.slots.items()
        if name not in layered
        for dim, labels in dims.items()
    }
    # Units of different norms, or of different pieces of a split tensor, must not share a count: it would not
    # tell how many channels each norm or piece keeps, and one could lose all.
    for name, labels in {**others, **trail.elements, **_pieces(trail)}.items():
        table.add((name, "carry"), narrow_uniform(units.of(labels)).reshape(-1), in_layers)
    return table, (in_layers & ~produced & ~units.why.pinned(count)).nonzero().flatten()


def _group(
    channels: Mapping[tuple[str, str], int],
    pinned: tuple[str, ...],
    members: Tensor,
    multiple: int,
    taken: set[str],
) -> Group:
    """Return a group, named after its first producer or consumer, with a number if the name is ``taken``."""
    consumers = tuple(path for path, side in channels if side == "in")
    producers = tuple(path for path, side in channels if side == "out")
    base = [*producers, *(f"input of {path}" for path in consumers), *(path for path, _ in channels)][0]
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}#{number}"
    kept_sides = {key: count for key, count in channels.items() if key[1] != "carry"}
    size = members.numel()
    return Group(
        name=name,
        size=size,
        consumers=consumers,
        producers=producers,
        permitted=(size,) if pinned else permitted_counts(size, kept_sides.values(), multiple),
        pinned=pinned,
        channels=kept_sides,
        units=members,
    )


class _Slots:
    """How many slots each unit has in each weight: rows (unit, key, count), by which units are compared."""

    def __init__(self, count: int) -> None:
        self.present = torch.zeros(count, dtype=torch.bool)
        self.keys: list[tuple[str, str]] = []
        self._rows: list[Tensor] = []  # each [3, n]
        self._sorted: Tensor | None = None

    def add(self, key: tuple[str, str], units: Tensor, among: Tensor | None = None) -> Tensor:
        """Count the units' slots under a key; returns the distinct units. ``among``: ignore other units."""
        distinct, counts = torch.unique(units, return_counts=True)
        kept = distinct >= 0
        if among is not None:
            kept &= among[distinct.clamp(min=0)]
        rows = torch.stack([distinct, torch.full_like(distinct, len(self.keys)), counts])[:, kept]
        self._rows.append(rows)
        self.keys.append(key)
        self.present[rows[0]] = True
        return rows[0]

    def alike(self, why: Why) -> list[Tensor]:
        """Lists of units with the same rows and reasons, each ascending. Units without a row are left out.

        Sets of rows are compared by the sum of a random 64-bit number for each distinct row.
        """
        if not self._rows:
            return []
        rows = torch.cat(self._rows, dim=1)
        self._sorted = rows[:, torch.argsort(rows[0], stable=True)]
        texts: dict[str, int] = {}
        number = torch.tensor([texts.setdefault(text, len(texts)) for _, text, _ in why.texts] or [0])
        reasons = torch.unique(torch.stack([why.units, number[why.reasons]]), dim=1)
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros(self.present.numel(), dtype=torch.int64)
        for units, kinds in ((rows[0], (rows[1] << 32) | rows[2]), (reasons[0], reasons[1])):
            different, which = torch.unique(kinds, return_inverse=True)
            numbers = torch.randint(-(2**63), 2**63 - 1, different.shape, generator=generator)
            total.index_add_(0, units, numbers[which])
        members = self.present.nonzero().flatten()
        _, which, sizes = torch.unique(total[members], return_inverse=True, return_counts=True)
        parts = torch.split(members[torch.argsort(which, stable=True)], sizes.tolist())
        return sorted(parts, key=lambda part: int(part[0]))

    def of(self, unit: int) -> dict[tuple[str, str], int]:
        """A unit's rows, in the order the keys were added."""
        assert self._sorted is not None
        first, last = torch.searchsorted(self._sorted[0], torch.tensor([unit, unit + 1])).tolist()
        _, keys, counts = self._sorted[:, first:last].tolist()
        return {self.keys[key]: count for key, count in zip(keys, counts, strict=True)}


def _pieces(trail: Trail) -> dict[str, Tensor]:
    """Tensors that hold part of another tensor's elements: pieces of splits, slices, selections."""
    return {
        f"{name}[{index}]": labels
        for name in trail.parts
        for index, labels in enumerate(leaves_of(trail.labels[name]))
        if isinstance(labels, Tensor)
    }


def permitted_counts(size: int, channels_per_unit: Any, multiple: int) -> tuple[int, ...]:
    """Counts that keep a multiple of ``multiple`` channels in every layer, and the full size; never 0.

    ``channels_per_unit``: how many channels one unit has at each of the group's producers and consumers.
    """
    step = 1
    for channels in channels_per_unit:
        needed = multiple // gcd(multiple, channels)
        step = step * needed // gcd(step, needed)
    return (*range(step, size, step), size)
