"""The channel graph of a network: its units, its groups, and what a user may ask of them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.channels import rules_elementwise, rules_layers, rules_movement
from smcp_fx.channels.labels import narrow_uniform
from smcp_fx.channels.propagation import Layer, Norm, Propagation, Rule, Trail
from smcp_fx.channels.units import Units, close
from smcp_fx.cost_model import Width
from smcp_fx.errors import InputError

if TYPE_CHECKING:
    import networkx as nx

RULES: dict[str, Rule] = {**rules_elementwise.RULES, **rules_movement.RULES, **rules_layers.RULES}


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
        self.units = units
        self.multiple = multiple
        self.groups: list[Group] = _groups(trail, units, multiple)
        self._by_name = {group.name: group for group in self.groups}
        count = int(units.unit.max()) + 1 if units.unit.numel() else 0
        self.group_of_unit = torch.full((count,), -1, dtype=torch.int64)
        self.place_in_group = torch.zeros(count, dtype=torch.int64)
        self.free_units = torch.zeros(count, dtype=torch.bool)
        for index, group in enumerate(self.groups):
            self.group_of_unit[group.units] = index
            self.place_in_group[group.units] = torch.arange(group.size)
            self.free_units[group.units] = group.free

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
        return bool(self.free_units[self.units.of(labels).clamp(min=0)][self.units.of(labels) >= 0].any())

    @functools.cached_property
    def free_share(self) -> float:
        """Share of the dense layers' input-channel slots that are free, network inputs left out."""
        free = total = 0
        for layer in self.layers:
            if layer.kind != "dense":
                continue
            units = self.units.of(layer.in_labels).tolist()
            for unit in units:
                reasons = self.units.why.get(unit, [])
                if any(why.startswith("network input") for _, why in reasons):
                    continue
                total += 1
                free += not reasons
        return free / total if total else 0.0

    def width(self, labels: Tensor) -> Width:
        """Channels kept among these 1-D labels, as a function of the groups' counts."""
        constant = 0
        per_group: dict[int, int] = defaultdict(int)
        for unit in self.units.of(labels).tolist():
            index = int(self.group_of_unit[unit]) if unit >= 0 else -1
            if index < 0 or not self.groups[index].free:
                constant += 1
            else:
                per_group[index] += 1
        groups = ((self.groups[i], n) for i, n in sorted(per_group.items()))
        return Width(constant, tuple((group.name, n // group.size) for group, n in groups))

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
    module: fx.GraphModule, values: dict[str, Any], *, multiple: int = 8, exclude: tuple[str, ...] = ()
) -> ChannelGraph:
    """Derive the channel graph of a traced module from what its example run showed.

    ``values`` maps node names to recorded values (`smcp_fx.tracing.record`); ``exclude`` names modules whose
    output channels stay.
    """
    run = Propagation(module, values, RULES)
    trail = run.run()
    _exclude(run, exclude)
    units = close(trail)
    if run.blind:  # ties found late may show what a rule could not see the first time
        second = Propagation(module, values, RULES, (trail, units.unit))
        trail = second.run()
        _exclude(second, exclude)
        units = close(trail)
    return ChannelGraph(trail, units, multiple)


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


def _groups(trail: Trail, units: Units, multiple: int) -> list[Group]:
    """Units with the same slots in the same weights form a group."""
    slots: dict[int, dict[tuple[str, str], int]] = defaultdict(dict)
    produced: set[int] = set()
    seen: set[str] = set()
    for layer in trail.layers:
        if layer.weight in seen:
            continue
        seen.add(layer.weight)
        sides = [("in", layer.input_channels), ("out", layer.output_channels)]
        for side, labels in sides if layer.kind == "dense" else [("carry", layer.output_channels)]:
            for unit, count in zip(*torch.unique(units.of(labels), return_counts=True), strict=True):
                if int(unit) >= 0:
                    slots[int(unit)][(layer.path, side)] = int(count)
                    if side == "out":
                        produced.add(int(unit))
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
        known = units.of(labels)
        for unit, count in zip(*torch.unique(narrow_uniform(known), return_counts=True), strict=True):
            if int(unit) in slots:
                slots[int(unit)][(name, "carry")] = int(count)
    for unit in slots:
        if unit not in produced and unit not in units.why:
            units.why[unit] = [("", "no layer produces it")]
    by_signature: dict[Any, list[int]] = defaultdict(list)
    for unit in sorted(slots):
        pinned = tuple(sorted({why for _, why in units.why.get(unit, [])}))
        by_signature[(tuple(slots[unit].items()), pinned)].append(unit)
    groups: list[Group] = []
    names: set[str] = set()
    order = {layer.path: index for index, layer in enumerate(trail.layers)}
    for (signature, pinned), members in sorted(
        by_signature.items(),
        key=lambda item: min(
            order[path] + (side == "in") / 2 for (path, side), _ in item[0][0] if path in order
        ),
    ):
        channels = dict(signature)
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
        groups.append(
            Group(
                name=name,
                size=len(members),
                consumers=consumers,
                producers=producers,
                permitted=(len(members),)
                if pinned
                else permitted_counts(len(members), kept_sides.values(), multiple),
                pinned=pinned,
                channels=kept_sides,
                units=torch.tensor(members),
            )
        )
    return groups


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
