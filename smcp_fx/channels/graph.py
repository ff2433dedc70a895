"""The channel graph of a network: its units, its groups, and what a user may ask of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.channels import rules_elementwise, rules_layers, rules_movement, rules_products
from smcp_fx.channels.branches import Branches, bits
from smcp_fx.channels.labels import narrow_uniform
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.steadiness import keep_unsteady
from smcp_fx.channels.trail import Layer, Norm, Trail
from smcp_fx.channels.units import Units, Why, close
from smcp_fx.cost_model import Width
from smcp_fx.errors import InputError

if TYPE_CHECKING:
    import networkx as nx

RULES: dict[str, Rule] = {
    **rules_elementwise.RULES,
    **rules_movement.RULES,
    **rules_layers.RULES,
    **rules_products.RULES,
}


@dataclass(frozen=True)
class Group:
    """Units among which one count is chosen.

    ``consumers`` and ``producers`` are module paths (the weight's name for functional calls); ``pinned``
    holds the reasons why its units must stay and is empty when all of them are free; ``channels`` maps each
    consumer or producer, as ``(path, "in" | "out")``, to the channels one unit has there.
    """

    name: str
    size: int
    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    permitted: tuple[int, ...]
    pinned: tuple[str, ...]
    channels: Mapping[tuple[str, str], int] = field(repr=False)
    units: Tensor = field(repr=False, compare=False)  # [size], ascending

    @property
    def free(self) -> bool:
        """True when its units may go."""
        return not self.pinned


class ChannelGraph:
    """Channel structure of one traced network.

    Made by `smcp_fx.prepare`; holds plain data only (no parameters), so that it can be shared by copies.
    """

    def __init__(self, trail: Trail, units: Units, multiple: int) -> None:
        self.trail = trail
        self.multiple = multiple
        self.groups: list[Group]
        self.groups, self.units = _groups(trail, units, multiple)
        self._by_name = {group.name: group for group in self.groups}
        count = _count(units)
        self.group_of_unit = torch.full((count,), -1, dtype=torch.int64)
        self.place_in_group = torch.zeros(count, dtype=torch.int64)
        self.free_units = torch.zeros(count, dtype=torch.bool)
        for index, group in enumerate(self.groups):
            self.group_of_unit[group.units] = index
            self.place_in_group[group.units] = torch.arange(group.size)
            self.free_units[group.units] = group.free
        self._free_group = torch.where(self.free_units, self.group_of_unit, -1)
        #: With layer pruning: which groups may keep nothing, and what goes with them.
        self.branches: Branches | None = None

    def allow_nothing(self, branches: Branches) -> None:
        """Let the groups that ``branches`` names keep nothing: 0 is the least of their permitted counts."""
        self.branches = branches
        for index in bits(branches.removable):
            group = self.groups[index]
            self.groups[index] = replace(group, permitted=(0, *group.permitted))
        self._by_name = {group.name: group for group in self.groups}

    def __getitem__(self, name: str) -> Group:
        """Return the group of this name; `InputError` lists near names when there is none."""
        if name not in self._by_name:
            raise InputError(
                f"there is no group {name!r}; the network has {len(self.groups)}: "
                f"{', '.join(list(self._by_name)[:8])}{', ...' if len(self.groups) > 8 else ''}. "
                "prepared.channels.groups lists them."
            )
        return self._by_name[name]

    @property
    def layers(self) -> list[Layer]:
        """Convolutions and linears in the order they run."""
        return self.trail.layers

    @property
    def norms(self) -> list[Norm]:
        """Batch norms in the order they run."""
        return self.trail.norms

    def has_choice(self, labels: Tensor) -> bool:
        """Tell whether any of these 1-D labels belongs to a free group."""
        units = self.units.of(labels)
        return bool((self.free_units[units.clamp(min=0)] & (units >= 0)).any())

    @functools.cached_property
    def free_share(self) -> float:
        """Share of the dense layers' input-channel slots that are free, network inputs left out."""
        dense = [self.units.of(layer.in_labels) for layer in self.layers if layer.kind == "dense"]
        if not dense:
            return 0.0
        slots, count = torch.cat(dense), self.free_units.numel()
        slots = slots[~self.units.why.with_text("network input", count)[slots]]
        return float((~self.units.why.pinned(count)[slots]).double().mean()) if slots.numel() else 0.0

    @functools.cached_property
    def layer_of_label(self) -> Tensor:
        """For every label, the index of the dense layer that wrote it; -1 for none."""
        found = torch.full((self.trail.count,), -1, dtype=torch.int64)
        for index, layer in enumerate(self.layers):
            if layer.kind == "dense":
                labels = layer.output_channels
                found[labels[labels > 0]] = index
        return found

    def width(self, labels: Tensor) -> Width:
        """Channels kept among these 1-D labels, as a function of the groups' counts."""
        units = self.units.of(labels)
        group = torch.where(units >= 0, self._free_group[units.clamp(min=0)], -1)
        counts = torch.bincount(group + 1, minlength=1).tolist()
        per_group = ((self.groups[i - 1], n) for i, n in enumerate(counts) if i and n)
        return Width(counts[0], tuple((group.name, n // group.size) for group, n in per_group))

    def explain(self, module_path: str, channel: int, side: str = "out") -> str:
        """Say which group a layer's channel belongs to, what would go with it, and why it must stay if so.

        ``side`` is "out" or "in"; raises `InputError` for a path that is no convolution or linear.
        """
        layer = next((la for la in self.layers if la.path == module_path), None)
        if layer is None:
            raise InputError(
                f"{module_path!r} is no convolution or linear of this network; it has "
                f"{', '.join(la.path for la in self.layers[:6])}, ..."
            )
        labels = layer.output_channels if side == "out" else layer.input_channels
        if not 0 <= channel < labels.numel():
            raise InputError(f"{module_path!r} has {labels.numel()} {side}put channels; {channel} is not one")
        unit = int(self.units.of(labels)[channel])
        head = f"{side}put channel {channel} of {module_path!r}"
        reasons = self.units.why.get(unit, [])
        index = int(self.group_of_unit[unit]) if unit >= 0 else -1
        lines = [f"{head} belongs to group {self.groups[index].name!r}." if index >= 0 else f"{head}:"]
        if reasons:
            lines.append("It must stay:")
            lines += [f"  - {why} (at {node!r})" for node, why in reasons]
        else:
            lines.append("It is free. With it go:")
        for path, where, positions in self._slots_of(unit):
            shown = ", ".join(map(str, positions[:6])) + (", ..." if len(positions) > 6 else "")
            lines.append(f"  - {where}put channel{'s' * (len(positions) > 1)} {shown} of {path!r}")
        return "\n".join(lines)

    def _slots_of(self, unit: int) -> list[tuple[str, str, list[int]]]:
        found = []
        for layer in self.layers:
            for where, labels in (("in", layer.input_channels), ("out", layer.output_channels)):
                positions = (self.units.of(labels) == unit).nonzero().flatten().tolist()
                if positions:
                    found.append((layer.path, where, positions))
        return found

    @functools.cached_property
    def graph(self) -> nx.DiGraph[Any]:
        """The groups and layers as a bipartite `networkx` graph: producer -> group -> consumer.

        Node attributes: ``kind`` ("group" or "layer"), for groups ``size``, ``pinned`` (a string, empty when
        free); edge attribute ``channels``: channels a unit has there. Exports to GraphML and DOT as it is.
        """
        import networkx as nx  # a fifth of a second to import, which most runs need not pay

        graph: nx.DiGraph[Any] = nx.DiGraph()
        for layer in self.layers:
            graph.add_node(layer.path, kind="layer", type=layer.kind)
        for group in self.groups:
            key = f"group:{group.name}"
            graph.add_node(key, kind="group", size=group.size, pinned="; ".join(group.pinned))
            for (path, side), channels in group.channels.items():
                edge = (path, key) if side == "out" else (key, path)
                graph.add_edge(*edge, channels=channels)
        return graph


def build(
    module: fx.GraphModule,
    values: dict[str, Any],
    *,
    multiple: int = 8,
    exclude: tuple[str, ...] = (),
    other: dict[str, Any] | None = None,
) -> ChannelGraph:
    """Derive the channel graph of a traced module from what its example run showed.

    ``values`` maps node names to recorded values (`smcp_fx.tracing.record`); ``exclude`` names modules whose
    output channels stay; ``other``: the values at another size of the images (`smcp_fx.other_sizes`), if any.
    Channels that would go with others there must stay.
    """
    trail, units = _propagated(module, values, exclude, other)
    if other is not None:
        units = keep_unsteady((trail, units), _propagated(module, other, exclude, values))
    return ChannelGraph(trail, units, multiple)


def _propagated(
    module: fx.GraphModule, values: dict[str, Any], exclude: tuple[str, ...], other: dict[str, Any] | None
) -> tuple[Trail, Units]:
    run = Propagation(module, values, RULES, other=other)
    trail = run.run()
    _exclude(run, exclude)
    units = close(trail)
    if run.blind:  # ties found late may show what a rule could not see the first time
        second = Propagation(module, values, RULES, (trail, units.unit), other)
        trail = second.run()
        _exclude(second, exclude)
        units = close(trail)
    return trail, units


def _exclude(run: Propagation, paths: tuple[str, ...]) -> None:
    for path in paths:
        layers = [la for la in run.trail.layers if la.path == path or la.path.startswith(path + ".")]
        if not layers:
            raise InputError(
                f"exclude: {path!r} is no convolution or linear of this network, and holds none; it has "
                f"{', '.join(la.path for la in run.trail.layers[:6])}, ..."
            )
        for layer in layers:
            run.pin(layer.output_channels, layer.node, f"excluded by the user ({path!r})")


def _count(units: Units) -> int:
    return int(units.unit.max()) + 1 if units.unit.numel() else 0


def _groups(trail: Trail, units: Units, multiple: int) -> tuple[list[Group], Units]:
    """Units with the same slots in the same weights form a group. Returns the units, too: unproduced ones stay."""
    count = _count(units)
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
    layered = {name for layer in trail.layers for name in (layer.weight, layer.bias)}
    others = {
        f"{name}.{dim}": labels
        for name, dims in trail.slots.items()
        if name not in layered
        for dim, labels in dims.items()
    }
    # Units that pass other norms, or other pieces of a split tensor, must not share a count: each of these
    # would not know how many channels it keeps, and could be left with none.
    for name, labels in {**others, **trail.elements, **_pieces(trail)}.items():
        table.add((name, "carry"), narrow_uniform(units.of(labels)).reshape(-1), in_layers)
    orphans = (in_layers & ~produced & ~units.why.pinned(count)).nonzero().flatten()
    if orphans.numel():
        units = Units(units.unit, units.why.and_also(orphans, "", "no layer produces it"))
    found = []
    order = {layer.path: index for index, layer in enumerate(trail.layers)}
    for members in table.alike(units.why):
        channels = table.of(int(members[0]))
        pinned = tuple(sorted({why for _, why in units.why.get(int(members[0]), [])}))
        place = min(order[path] + (side == "in") / 2 for path, side in channels if path in order)
        found.append((place, channels, pinned, members))
    groups: list[Group] = []
    names: set[str] = set()
    for _, channels, pinned, members in sorted(found, key=lambda item: item[0]):
        consumers = tuple(path for path, side in channels if side == "in")
        producers = tuple(path for path, side in channels if side == "out")
        base = (
            producers[0]
            if producers
            else f"input of {consumers[0]}"
            if consumers
            else next(iter(channels))[0]
        )
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}#{number}"
        names.add(name)
        kept_sides = {key: count for key, count in channels.items() if key[1] != "carry"}
        size = members.numel()
        groups.append(
            Group(
                name=name,
                size=size,
                consumers=consumers,
                producers=producers,
                permitted=(size,) if pinned else permitted_counts(size, kept_sides.values(), multiple),
                pinned=pinned,
                channels=kept_sides,
                units=members,
            )
        )
    return groups, units


def _counted(units: Tensor) -> tuple[Tensor, Tensor]:
    found, counts = torch.unique(units, return_counts=True)
    return found, counts


class _Slots:
    """How many slots each unit has in each weight: rows (unit, key, count), and units compared by their rows."""

    def __init__(self, count: int) -> None:
        self.present = torch.zeros(count, dtype=torch.bool)
        self.keys: list[tuple[str, str]] = []
        self._rows: list[Tensor] = []  # each [3, n]
        self._sorted: Tensor | None = None

    def add(self, key: tuple[str, str], units: Tensor, among: Tensor | None = None) -> Tensor:
        """Count the units' slots under a key; returns the different units. ``among``: leave out the others."""
        found, counts = _counted(units)
        kept = found >= 0
        if among is not None:
            kept &= among[found.clamp(min=0)]
        found, counts = found[kept], counts[kept]
        self._rows.append(torch.stack([found, torch.full_like(found, len(self.keys)), counts]))
        self.keys.append(key)
        self.present[found] = True
        return found

    def alike(self, why: Why) -> list[Tensor]:
        """The units that have a row, those with the same rows and reasons together; each ascending.

        Sets of rows are compared by the sum of one random 64-bit number for each different row.
        """
        if not self._rows:
            return []
        rows = torch.cat(self._rows, dim=1)
        self._sorted = rows[:, torch.argsort(rows[0], stable=True)]
        texts: dict[str, int] = {}
        number = torch.tensor([texts.setdefault(text, len(texts)) for _, text in why.texts] or [0])
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
    """Tensors that hold a part of another tensor's elements: pieces of splits, slices, selections."""
    found = {}
    for name in trail.parts:
        for index, labels in enumerate(pytree.tree_leaves(trail.labels[name])):
            if isinstance(labels, Tensor):
                found[f"{name}[{index}]"] = labels
    return found


def permitted_counts(size: int, channels_per_unit: Any, multiple: int) -> tuple[int, ...]:
    """Counts that keep a multiple of ``multiple`` channels in every layer, and the full size; never 0.

    ``channels_per_unit``: the channels one unit has at each of the group's producers and consumers.
    """
    step = 1
    for channels in channels_per_unit:
        needed = multiple // gcd(multiple, channels)
        step = step * needed // gcd(step, needed)
    return (*range(step, size, step), size)
