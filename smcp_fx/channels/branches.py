"""Layer pruning: which groups may keep nothing, and which branches go with them.

With no channel left between two layers, the second one writes a constant: its bias. Where that constant meets a
tensor that still depends on the network's inputs (an addition, a concat), the branch between can go. Every node is
*live* (its value depends on the inputs), *constant* (it no longer does), or *empty* (it has no channel left).

Groups may keep nothing only if, with all of them empty at once, every output still depends on the same inputs. Then
any choice among them leaves the network in one piece.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, fx

from smcp_fx.channels.groups import Group
from smcp_fx.channels.labels import narrow_uniform
from smcp_fx.channels.trail import Layer, ParameterRef, Trail
from smcp_fx.channels.units import Units
from smcp_fx.tracing.modes import is_by_mode
from smcp_fx.tracing.operations import operation_name, writes_in_place
from smcp_fx.tracing.recurrent import recurrent_weight
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.trees import leaves_of

NUMBER, PARAMETER, LIVE, CONSTANT, EMPTY = range(5)


class Channels(Protocol):
    """The part of a `ChannelGraph` that is read here."""

    groups: list[Group]
    trail: Trail
    units: Units
    free_units: Tensor
    group_of_unit: Tensor

    @property
    def layers(self) -> list[Layer]: ...


@dataclass(frozen=True)
class Content:
    """The groups whose channels a tensor holds, as bits, and whether it holds anything else."""

    groups: int = 0
    more: bool = False

    def empty(self, zero: int) -> bool:
        """Is nothing left if the groups ``zero`` keep nothing?"""
        return bool(self.groups) and not self.more and not self.groups & ~zero

    def __or__(self, other: Content) -> Content:
        return Content(self.groups | other.groups, self.more or other.more)


@dataclass
class FlowNode:
    """One node: the places of its inputs in the order of the graph, and the channels that it reads and holds."""

    name: str
    kind: str  # "number", "start", "parameter", "sink", "dense", "other"
    reads: tuple[int, ...]
    content: Content = Content()
    pieces: tuple[Content, ...] = ()  # of a node that makes several tensors
    inputs: Content = Content()  # of a dense layer
    root: bool = False  # stays, although it has no reader
    bit: int = 0  # of a start


@dataclass
class Walk:
    """The nodes when the groups ``zero`` keep nothing.

    Their states, the inputs each depends on, and the groups whose absence made it constant or empty, as bits.
    """

    zero: int
    states: list[int] = field(default_factory=list)
    depends: list[int] = field(default_factory=list)
    causes: list[int] = field(default_factory=list)


class Flow:
    """How the network's inputs reach its outputs, for any choice of groups that keep nothing (bits)."""

    def __init__(self, module: fx.GraphModule, channels: Channels) -> None:
        self.channels = channels
        nodes = list(module.graph.nodes)
        self.place = {node.name: index for index, node in enumerate(nodes)}
        # Recurrent weights are not treated as dense layers: their bias is not a constant.
        recurrent = {node.name for node in nodes if node.target is recurrent_weight}
        dense = {la.node: la for la in channels.layers if la.kind == "dense" and la.node not in recurrent}
        self.steps: list[FlowNode] = []
        starts = 0
        for node in nodes:
            reads = tuple(self.place[source.name] for source in node.all_input_nodes)
            held = [self._of(labels) for labels in _tensors(channels, node)]
            content = functools.reduce(operator.or_, held, Content())
            step = FlowNode(node.name, "other", reads, content, tuple(held) if len(held) > 1 else ())
            if node.op == "placeholder":
                step.kind, step.bit = "start", 1 << starts
                starts += 1
            elif node.op == "output" or _ends_both(node):
                step.kind = "sink"
            elif node.op == "get_attr":
                step.kind = "parameter"
            elif not _tensors(channels, node):
                step.kind = "number"
            elif node.name in dense:
                step.kind, step.inputs = "dense", self._of(dense[node.name].input_channels)
            step.root = writes_shared(node, module)
            self.steps.append(step)
        self._sinks = [step for step in self.steps if step.kind == "sink"]
        self.consumers: dict[int, list[int]] = {}
        self.producers: dict[int, list[int]] = {}
        for index, step in enumerate(self.steps):
            if step.kind == "dense":
                for table, content in ((self.consumers, step.inputs), (self.producers, step.content)):
                    for group in bits(content.groups):
                        table.setdefault(group, []).append(index)
        self.full = self._walk(0)

    def walk(self, zero: int) -> Walk:
        """The states of all nodes if these groups keep nothing."""
        return self._walk(zero) if zero else self.full

    def _walk(self, zero: int) -> Walk:
        walk = Walk(zero)
        for index, step in enumerate(self.steps):
            depends = causes = 0
            if step.kind == "number" or step.kind == "sink":  # the size of a removed tensor cannot be read
                state, causes = NUMBER, self._causes(walk, step)
            elif step.kind == "start":
                state, depends = LIVE, step.bit
            elif step.content.empty(zero):
                state, causes = EMPTY, step.content.groups
            elif step.inputs.empty(zero):
                state, causes = CONSTANT, step.inputs.groups
            elif step.kind == "parameter":
                state = PARAMETER
            else:
                for source in step.reads:
                    depends |= walk.depends[source]
                state = LIVE if depends else PARAMETER
                if not depends and zero and self.full.depends[index]:
                    state, causes = CONSTANT, self._causes(walk, step)
            walk.states.append(state)
            walk.depends.append(depends)
            walk.causes.append(causes)
        return walk

    @staticmethod
    def _causes(walk: Walk, step: FlowNode) -> int:
        causes = 0
        for source in step.reads:
            causes |= walk.causes[source]
        return causes

    def connected(self, zero: int) -> bool:
        """Does every output still depend on the same inputs?"""
        walk = self.walk(zero)
        return all(
            walk.depends[source] == self.full.depends[source]
            for step in self._sinks
            for source in step.reads
            if self.steps[source].kind != "number"
        )

    def effective(self, walk: Walk) -> list[bool]:
        """A bool for each node: does an output still need it, or a node that stays for another reason?"""
        reached = [step.kind == "sink" for step in self.steps]
        for index in reversed(range(len(self.steps))):
            step = self.steps[index]
            reached[index] |= step.root and walk.states[index] == LIVE
            if reached[index]:
                for source in step.reads:
                    if walk.states[source] not in (CONSTANT, EMPTY):
                        reached[source] = True
        return reached

    def widest_cut_free(self, candidates: Iterable[int]) -> int:
        """A maximal set (bits) of these groups that can keep nothing all at once; earlier ones come first.

        A group that would cut an output from an input is left out. A set of groups is taken whole if the network
        stays connected without it, and halved otherwise.
        """
        chosen = 0
        stack = [list(candidates)]
        while stack:
            part = stack.pop()
            together = chosen | sum(1 << group for group in part)
            if self.connected(together):
                chosen = together
            elif len(part) > 1:
                middle = len(part) // 2
                stack += [part[middle:], part[:middle]]
        return chosen

    def _of(self, labels: Tensor) -> Content:
        channels = self.channels
        units = torch.unique(channels.units.of(narrow_uniform(labels)))
        channel_units = units[units >= 0]
        groups = torch.where(channels.free_units[channel_units], channels.group_of_unit[channel_units], -1)
        present = torch.unique(groups).tolist()
        more = channel_units.numel() < units.numel() or -1 in present
        return Content(sum(1 << group for group in present if group >= 0), more)


class Branches:
    """The groups ``removable`` (bits) of a network, and the groups that become useless if one of them keeps nothing.

    ``implied[g]``: the removable groups that nothing useful reads any more when g keeps nothing, or that only hold
    constants then; ``dead[g]``: the nodes that no output needs then.
    """

    def __init__(self, flow: Flow, removable: int) -> None:
        self.flow = flow
        self.removable = removable
        self._names = [group.name for group in flow.channels.groups]
        self._index = {name: index for index, name in enumerate(self._names)}
        needed = _as_bits(flow.effective(flow.full))
        self.implied: dict[int, int] = {}
        self.dead: dict[int, int] = {}
        for group in bits(removable):
            zero = self._closed(1 << group)
            self.implied[group] = zero & ~(1 << group)
            self.dead[group] = needed & ~_as_bits(flow.effective(flow.walk(zero)))

    def closed(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The counts, with 0 for each removable group that the present zeros make useless."""
        zero = self._closed(sum(1 << self._index[name] for name, count in counts.items() if count == 0))
        return {name: 0 if zero >> self._index[name] & 1 else count for name, count in counts.items()}

    def _closed(self, zero: int) -> int:
        while True:
            walk = self.flow.walk(zero)
            needed = self.flow.effective(walk)
            more = zero
            for group in bits(self.removable & ~zero):
                readers, writers = (
                    table.get(group, []) for table in (self.flow.consumers, self.flow.producers)
                )
                unread = bool(readers) and not any(needed[reader] for reader in readers)
                unwritten = bool(writers) and all(walk.states[writer] == CONSTANT for writer in writers)
                if unread or unwritten:
                    more |= 1 << group
            if more == zero:
                return zero
            zero = more

    def sets(self) -> list[tuple[str, ...]]:
        """The removable groups that go together, by name."""
        removable = {1 << group | implied: None for group, implied in self.implied.items() if implied}
        return [tuple(self._names[group] for group in bits(together)) for together in removable]

    def couplings(self, paired: Collection[frozenset[str]]) -> list[tuple[str, str]]:
        """Pairs (a, b) that imply all others: b must keep nothing if a does.

        Groups that imply each other are chained in the order they run. Pairs that follow from others are left out.
        Pairs in ``paired`` (groups of one layer) are preferred.
        """
        classes: list[list[int]] = []
        seen = 0
        for group in bits(self.removable):
            if not seen >> group & 1:
                same = [group, *(o for o in bits(self.implied[group]) if self.implied[o] >> group & 1)]
                seen |= sum(1 << other for other in same)
                classes.append(sorted(same))
        pairs = []
        for members in classes:
            for left, right in itertools.pairwise(members):
                pairs += [(left, right), (right, left)]
        heads = {members[0]: members for members in classes}
        for head, members in heads.items():
            after = {other for other in heads if other != head and self.implied[head] >> other & 1}
            direct = {o for o in after if not any(self.implied[via] >> o & 1 for via in after - {o})}
            for other in sorted(direct):
                options = [(a, b) for a in members for b in heads[other]]
                names = {frozenset((self._names[a], self._names[b])): (a, b) for a, b in options}
                pairs.append(next((p for key, p in names.items() if key in paired), options[0]))
        return [(self._names[a], self._names[b]) for a, b in pairs]

    def remover(self, nodes: Iterable[str], own: Collection[str]) -> str | None:
        """The group, outside ``own``, that makes these nodes useless if it keeps nothing.

        ``own``: groups without which the nodes are known to cost nothing. None if there is no other group. Of several
        groups, the one that most of the others imply.
        """
        places = [self.flow.place[name] for name in nodes if name in self.flow.place]
        wanted = sum(1 << place for place in places)
        removers = sum(1 << g for g, dead in self.dead.items() if places and not wanted & ~dead)
        own_bits = sum(1 << self._index[name] for name in own) & removers
        left = [g for g in bits(removers) if not own_bits >> g & 1 and not self.implied[g] & own_bits]
        if not left:
            return None
        return self._names[max(left, key=lambda g: sum(self.implied[o] >> g & 1 for o in left))]


def bits(number: int) -> Iterator[int]:
    """The places of the set bits, ascending."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def writes_shared(node: fx.Node, module: torch.nn.Module) -> bool:
    """Does the node change a tensor, or a view of one, that another node reads?"""
    base = node.args[0] if node.args and writes_in_place(node, module) else None
    while isinstance(base, fx.Node):
        if len(base.users) > 1 or base.op in ("placeholder", "get_attr"):
            return True
        target = module.get_submodule(str(base.target)) if base.op == "call_module" else None
        if not _moves(operation_name(base, target)) and not writes_in_place(base, module):
            return False
        base = base.args[0] if base.args else None
    return False


def _moves(name: str | None) -> bool:
    return name == "getattr" or has(name, Trait.MOVES | Trait.JOINS | Trait.PADS)


def _tensors(channels: Channels, node: fx.Node) -> list[Tensor]:
    """The label tensors of a node's result."""
    trail = channels.trail
    value = trail.labels.get(node.name)
    if isinstance(value, ParameterRef):
        value = trail.elements.get(value.name)
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def _ends_both(node: fx.Node) -> bool:
    """Does the node choose between outputs of the two modes that differ in structure?"""
    ends = any(user.op == "output" for user in node.users)
    return is_by_mode(node) and ends and not all(isinstance(side, fx.Node) for side in node.args[1:])


def _as_bits(flags: list[bool]) -> int:
    return int("".join("1" if flag else "0" for flag in reversed(flags)) or "0", 2)
