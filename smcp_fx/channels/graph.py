"""The channel graph of a network: its units, its groups, and queries on them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from smcp_fx.channels import (
    rules_elementwise,
    rules_layers,
    rules_mixed,
    rules_movement,
    rules_products,
    rules_recurrent,
    rules_spectra,
    rules_statistics,
    rules_windows,
    rules_writes,
)
from smcp_fx.channels.blocks import by_block
from smcp_fx.channels.branches import Branches, bits
from smcp_fx.channels.facts import Facts
from smcp_fx.channels.groups import Group, form_groups
from smcp_fx.channels.labels import line_along, varied_dims
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.steadiness import keep_unsteady
from smcp_fx.channels.trail import EMPTY, INPUT, Factors, Layer, Norm, Trail
from smcp_fx.channels.units import Units, close, keep_unread, read_by_layers
from smcp_fx.config import names
from smcp_fx.cost_model import Width
from smcp_fx.errors import InputError
from smcp_fx.texts import table
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import LINE

if TYPE_CHECKING:
    import networkx as nx

_ROOMS = (
    rules_elementwise,
    rules_movement,
    rules_layers,
    rules_statistics,
    rules_products,
    rules_windows,
    rules_writes,
    rules_spectra,
    rules_recurrent,
    rules_mixed,
)
RULES: dict[str, Rule] = {name: by_block(rule) for room in _ROOMS for name, rule in room.RULES.items()}
#: Stop after this many retries that free no further channel.
_TRIES = 8


@dataclass(frozen=True)
class _Asked:
    """The request that a graph is built from. ``mixed_up``: reshapes that read positions as channels.

    ``at_size``: the ``facts`` at each size, by the id of its values and the turned nodes.
    """

    module: fx.GraphModule
    exclude: tuple[str, ...]
    keep_first_layer: bool
    facts: Facts
    mixed_up: tuple[str, ...] = ()
    at_size: dict[tuple[int, frozenset[str]], Facts] = field(default_factory=dict)


class ChannelGraph:
    """Channel structure of one traced network.

    Made by `smcp_fx.prepare`; holds plain data only (no parameters), so that it can be shared by copies.
    """

    def __init__(self, trail: Trail, units: Units, multiple: int) -> None:
        self.trail = trail
        self.multiple = multiple
        self.groups: list[Group]
        self.groups, self.units = form_groups(trail, units, multiple)
        self._by_name = {group.name: group for group in self.groups}
        count = units.count
        self.group_of_unit = torch.full((count,), -1, dtype=torch.int64)
        self.place_in_group = torch.zeros(count, dtype=torch.int64)
        self.free_units = torch.zeros(count, dtype=torch.bool)
        for index, group in enumerate(self.groups):
            self.group_of_unit[group.units] = index
            self.place_in_group[group.units] = torch.arange(group.size)
            self.free_units[group.units] = group.free
        self._free_group = torch.where(self.free_units, self.group_of_unit, -1)
        #: Units that dense layers read. The worth of other units comes from the operations that mix them.
        self.read = read_by_layers(trail, self.units)
        #: With layer pruning: which groups may keep nothing, and the branches that go with them.
        self.branches: Branches | None = None

    def allow_nothing(self, branches: Branches) -> None:
        """Let the groups that ``branches`` names keep nothing: add 0 to their permitted counts."""
        self.branches = branches
        for index in bits(branches.removable):
            group = self.groups[index]
            limited = (0, *group.limited) if group.limited else ()
            self.replace_group(index, replace(group, permitted=(0, *group.permitted), limited=limited))

    def replace_group(self, index: int, group: Group) -> None:
        """Put a group of the same units in the place of the one at ``index``."""
        self.groups[index] = self._by_name[group.name] = group

    def __getitem__(self, name: str) -> Group:
        """Return the group of this name; `InputError` if there is none."""
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

    def __repr__(self) -> str:
        return f"<ChannelGraph: {len(self.groups)} groups, {self.freedom}>"

    @property
    def freedom(self) -> str:
        """In words: how many groups are free, and how many free ones have a choice of counts."""
        free = [len(group.choices) > 1 for group in self.groups if group.free]
        but = "" if all(free) else f" ({sum(free)} with a choice of counts, in multiples of {self.multiple})"
        return f"{len(free)} of them free{but}; {self.free_share:.1%} of the input channels are free"

    def summary(self) -> str:
        """Return a table of the groups: units, the layers that write and read them, and why they must stay."""
        rows = [
            (
                g.name,
                str(g.size),
                *map(_shortened, (g.producers, g.consumers, g.pinned[:1] or (f"it may go{g.note}",))),
            )
            for g in self.groups
        ]
        return f"{self!r}\n\n{table(('group', 'units', 'written by', 'read by', 'why it must stay'), rows)}"

    def has_choice(self, labels: Tensor) -> bool:
        """Whether any of these 1-D labels belongs to a free group."""
        units = self.units.of(labels)
        return bool((self.free_units[units.clamp(min=0)] & (units >= 0)).any())

    @functools.cached_property
    def free_share(self) -> float:
        """Share of the dense layers' input-channel slots that are free, without the network's inputs."""
        dense = [self.units.of(layer.in_labels) for layer in self.layers if layer.kind == "dense"]
        if not dense:
            return 0.0
        slots, count = torch.cat(dense), self.free_units.numel()
        slots = slots[~self.units.why.of_kind(INPUT, count)[slots]]
        return float((~self.units.why.pinned(count)[slots]).double().mean()) if slots.numel() else 0.0

    @functools.cached_property
    def layer_of_label(self) -> Tensor:
        """For every label, the index of the dense layer that wrote it; -1 for none."""
        writer = torch.full((self.trail.count,), -1, dtype=torch.int64)
        for index, layer in enumerate(self.layers):
            if layer.kind == "dense":
                labels = layer.output_channels
                writer[labels[labels > 0]] = index
        return writer

    def factors(self, parameter: str) -> dict[int, Factors]:
        """The factors of a parameter's dimensions with channels, from one of the three stores of `Trail`."""
        trail, elements = self.trail, self.trail.elements.get(parameter)
        if parameter in trail.mixed_parameters:
            return dict(enumerate(trail.mixed_parameters[parameter]))
        if parameter in trail.slots or elements is None:
            return {dim: (labels,) for dim, labels in trail.slots.get(parameter, {}).items()}
        varied = varied_dims(self.units.of(elements))
        return {varied[0]: (line_along(elements, varied[0]),)} if len(varied) == 1 else {}

    def width(self, labels: Tensor) -> Width:
        """The number of channels kept among these 1-D labels, as a function of the groups' counts."""
        units = self.units.of(labels)
        group = torch.where(units >= 0, self._free_group[units.clamp(min=0)], -1)
        indices, counts = (values.tolist() for values in torch.unique(group, return_counts=True))
        always = counts[0] if indices and indices[0] < 0 else 0
        per_group = ((self.groups[i], n) for i, n in zip(indices, counts, strict=True) if i >= 0)
        return Width(always, tuple((group.name, n // group.size) for group, n in per_group))

    def explain(self, module_path: str, channel: int, side: str = "out") -> str:
        """Say which group a layer's channel belongs to, what would go with it, and why it must stay if so.

        ``side`` is "out" or "in"; raises `InputError` for a path that is not a convolution or linear.
        """
        layer = next((la for la in self.layers if la.path == module_path), None)
        if layer is None:
            raise InputError(
                f"{module_path!r} is not a convolution or linear of this network; it has "
                f"{', '.join(la.path for la in self.layers[:6])}, ..."
            )
        labels = layer.output_channels if side == "out" else layer.input_channels
        if not 0 <= channel < labels.numel():
            raise InputError(f"{module_path!r} has {labels.numel()} {side}put channels; {channel} is not one")
        unit = int(self.units.of(labels)[channel])
        head = f"{side}put channel {channel} of {module_path!r}"
        reasons = self.units.why.get(unit)
        index = int(self.group_of_unit[unit]) if unit >= 0 else -1
        lines = [f"{head} belongs to group {self.groups[index].name!r}." if index >= 0 else f"{head}:"]
        if reasons:
            why = (f"  - {self.trail.explained(reason)}" for reason in reasons)
            lines += ["It must stay:", *why, "With it stay:"]
        else:
            lines.append(f"It is free{self.groups[index].note if index >= 0 else ''}. With it go:")
        for path, where, positions in self._slots_of(unit):
            shown = ", ".join(map(str, positions[:6])) + (", ..." if len(positions) > 6 else "")
            lines.append(f"  - {where}put channel{'s' * (len(positions) > 1)} {shown} of {path!r}")
        return "\n".join(lines)

    def _slots_of(self, unit: int) -> Iterator[tuple[str, str, list[int]]]:
        for layer in self.layers:
            for where, labels in (("in", layer.input_channels), ("out", layer.output_channels)):
                positions = (self.units.of(labels) == unit).nonzero().flatten().tolist()
                if positions:
                    yield layer.path, where, positions

    @functools.cached_property
    def graph(self) -> nx.DiGraph[Any]:
        """The groups and layers as a bipartite `networkx` graph: producer -> group -> consumer.

        Node attributes: ``kind`` ("group" or "layer"), for groups ``size``, ``pinned`` (a string, empty when
        free); edge attribute ``channels``: channels a unit has there. Exports to GraphML and DOT as it is.
        """
        import networkx as nx  # takes a fifth of a second, and most runs do not need it

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
    keep_first_layer: bool = False,
    other: dict[str, Any] | None = None,
) -> ChannelGraph:
    """Derive the channel graph of a traced module from its example run.

    ``values`` maps node names to recorded values (see `smcp_fx.tracing.example_runs`). ``exclude`` names modules
    whose output channels stay; with ``keep_first_layer``, those of the first layer stay too. ``other``: the values at
    another size of the images, if any: channels that are tied differently there must stay.
    """
    asked = _Asked(module, exclude, keep_first_layer, Facts(module, values))
    trail, units, where = _steady(asked, values, other)
    fruitless = 0
    while where and where not in asked.mixed_up and _reshapes(module, where) and fruitless < _TRIES:
        asked = replace(asked, mixed_up=(*asked.mixed_up, where))
        newer, newer_units, where = _steady(asked, values, other)
        fruitless += 1  # another reshape may tie the same channels
        if _pinned(newer, newer_units) < _pinned(trail, units):
            trail, units, fruitless = newer, newer_units, 0
    reasons = {reason.node for reason in units.why.texts}
    trail.lines = {n.name: n.meta[LINE] for n in module.graph.nodes if n.name in reasons and LINE in n.meta}
    return ChannelGraph(trail, units, multiple)


def _steady(asked: _Asked, values: dict[str, Any], other: dict[str, Any] | None) -> tuple[Trail, Units, str]:
    """Trail and units, with units that differ at the ``other`` size pinned, and the first node where they differ."""
    trail, units = _propagated(asked, values, other)
    if other is None:
        return trail, units, ""
    return (trail, *keep_unsteady((trail, units), _propagated(asked, other, values)))


def _reshapes(module: fx.GraphModule, name: str) -> bool:
    node = next(node for node in module.graph.nodes if node.name == name)
    return has(operation_of(module, node), Trait.RESHAPES)


def _propagated(asked: _Asked, values: dict[str, Any], other: dict[str, Any] | None) -> tuple[Trail, Units]:
    run = functools.partial(_closed, asked, values, other)
    turned: set[str] = set()
    trail, units = run(turned)
    while chained := _chained(trail, units):
        turned |= chained
        trail, units = run(turned)
    stuck = _stuck(trail, units)
    if stuck:  # these tie all channels into one unit; retry removing whole groups
        for norms in (set[str](), turned) if turned else (turned,):
            retry = run(norms | stuck)
            if _pinned(*retry) < _pinned(trail, units):
                trail, units = retry
    # A mask must not depend on the image's size: dimensions that ties make uniform get size 1.
    trail.mixes = [replace(mix, labels=units.narrowed(mix.labels)) for mix in trail.mixes]
    return trail, keep_unread(trail, units)


def _closed(
    asked: _Asked, values: dict[str, Any], other: dict[str, Any] | None, turned: set[str]
) -> tuple[Trail, Units]:
    """Propagate and close the ties; propagate again if a rule may do better knowing all ties."""
    earlier = None
    key = id(values), frozenset(turned)
    if key not in asked.at_size:
        asked.at_size[key] = asked.facts.at(values, turned)
    facts = asked.at_size[key]
    while True:
        run = Propagation(asked.module, values, RULES, earlier, other, turned, asked.mixed_up, facts)
        trail = run.run()
        rules_mixed.pin_read_otherwise(run)
        _exclude(run, asked.exclude, asked.keep_first_layer)
        units = close(trail)
        if earlier is not None or not run.blind:
            return trail, units
        earlier = trail, units.unit


def _chained(trail: Trail, units: Units) -> set[str]:
    """Group norms that tie each other's groups, so that few groups could go, and the products of `Trail.passed`."""
    members = {name: torch.unique(units.of(labels)) for name, (_, labels) in trail.grouped.items()}
    stuck: set[int] = set()
    for name, (groups, labels) in trail.grouped.items():
        own, each = members[name][members[name] >= 0], labels.numel() // groups
        if each > 1 and 0 < own.numel() <= max(1, min(groups, each) // 4):
            stuck.update(own.tolist())
    return trail.passed | {
        name
        for name, (groups, labels) in trail.grouped.items()
        if labels.numel() > groups and not stuck.isdisjoint(members[name].tolist())
    }


def _stuck(trail: Trail, units: Units) -> set[str]:
    """Grouped convolutions that tie all their channels into one unit, which stays for no other reason."""
    stuck = set()
    for name, (_, sides) in trail.within.items():
        for labels in sides:
            members = torch.unique(units.of(labels))
            reasons = units.why.get(int(members[0])) if members.numel() == 1 and labels.numel() > 1 else []
            if reasons and all(reason.kind == EMPTY for reason in reasons):
                stuck.add(name)
    return stuck


def _pinned(trail: Trail, units: Units) -> int:
    """How many channels of layers must stay."""
    pinned = units.why.pinned(units.count)
    sides = (side for layer in trail.layers for side in (layer.input_channels, layer.output_channels))
    return sum(int(pinned[in_units[in_units >= 0]].sum()) for in_units in map(units.of, sides))


def _exclude(run: Propagation, paths: tuple[str, ...], first_layer: bool) -> None:
    if first_layer and run.trail.layers:
        paths = (*paths, run.trail.layers[0].path)
    for path in paths:
        layers = [layer for layer in run.trail.layers if names(path, layer.path)]
        if not layers:
            raise InputError(
                f"exclude: {path!r} is not a convolution or linear of this network, and holds none; it has "
                f"{', '.join(la.path for la in run.trail.layers[:6])}, ..."
            )
        for layer in layers:
            run.pin(layer.output_channels, layer.node, f"excluded by the user ({path!r})")


def _shortened(names: Sequence[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= 60 else f"{text[:57]}..."
