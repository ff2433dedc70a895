"""Remove branches whose inner layers keep no channel, and the layers that only these branches need.

    before   add = bn2(conv2(relu(bn1(conv1(x))))) + x     (all inputs of conv2 masked)
    after    add = constant_bn2 + x                        (a parameter, [1, C, 1, 1])

A branch leaves a constant: a bias that went through the layers behind it. The graph keeps its full widths;
`SliceChannels` slices it, including the constants.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.branches import CONSTANT, EMPTY, LIVE, Flow, Walk, bits, writes_shared
from smcp_fx.errors import PassError
from smcp_fx.masking.masks import META, Constant, mark_of
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.passes.constants import Constants, NoValueError
from smcp_fx.passes.movement_rewrites import SPLITS
from smcp_fx.tracing.aliases import memory_of_model
from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.in_place import PLAIN
from smcp_fx.tracing.operations import operation_name, writes_in_place
from smcp_fx.tracing.traits import Trait, has


class RemoveBranches(GraphPass):
    """Removes the nodes that have no channels or no use once some groups keep nothing.

    ``keep``: a bool for every unit. If a branch's constant would depend on the shapes of later inputs, its
    groups get a unit back *in* ``keep``; their consumers' weights are zero there, so nothing else changes.
    """

    def __init__(self, channels: ChannelGraph, keep: Tensor) -> None:
        self.channels = channels
        self.keep = keep

    def requires(self, module: fx.GraphModule) -> None:
        """No mask or scale is left in the graph."""
        if any(mark_of(node) is not None for node in module.graph.nodes):
            raise PassError("RemoveBranches needs FoldMasks and FoldBatchNormScalers to have run")

    def apply(self, module: fx.GraphModule) -> PassResult:
        zero = empty_groups(self.channels, self.keep)
        if not zero:
            return PassResult(module, False)
        removal = Removal(module, self.channels, zero)
        report = removal.apply()
        modified = bool(report)
        for index in bits(zero & ~removal.zero):
            group = self.channels.groups[index]
            self.keep[group.units[0]] = True
            report.append(f"group {group.name!r}: keeps a unit, since what it would leave depends on sizes")
        return PassResult(module, modified, tuple(report))


def empty_groups(channels: ChannelGraph, keep: Tensor) -> int:
    """The groups (bits) that keep no unit."""
    empty = 0
    for index, group in enumerate(channels.groups):
        free = bool(channels.free_units[group.units].all())
        empty |= (free and not bool(keep[group.units].any())) << index
    return empty


class Removal:
    """Removes what the empty groups ``zero`` (bits) leave unused; groups that need a unit leave `zero`."""

    def __init__(
        self, module: fx.GraphModule, channels: ChannelGraph, zero: int, flow: Flow | None = None
    ) -> None:
        self.module = module
        self.channels = channels
        self.flow = flow or Flow(module, channels)
        self.nodes = list(module.graph.nodes)
        self.zero = zero
        self._look()
        while left := self._unremovable():
            self.zero &= ~left
            self._look()

    def _look(self) -> None:
        self.walk: Walk = self.flow.walk(self.zero)
        self.needed = dict(zip(self.nodes, self.flow.effective(self.walk), strict=True))
        self.constants = Constants(self.module, self.flow, self.walk)

    def _state(self, node: fx.Node) -> int:
        return self.constants.state(node)

    def _causes(self, node: fx.Node) -> int:
        return self.walk.causes[self.flow.place[node.name]]

    # ---- what can go --------------------------------------------------------------------------------------

    def _unremovable(self) -> int:
        """The groups (bits) that a remaining node needs."""
        if not self.flow.connected(self.zero):
            return self.zero
        stuck = 0
        for node in self.nodes:
            if self._state(node) == EMPTY:
                continue
            if self.needed[node] and self._state(node) == LIVE:
                stuck |= self._lost_pieces(node)
            if writes_shared(node, self.module):
                stuck |= self._causes(node.all_input_nodes[0])
            for source in node.all_input_nodes if self.needed[node] else ():
                causes = self._causes(source)
                if causes and not self._can_lose(node, source):
                    stuck |= causes
        return stuck

    def _lost_pieces(self, node: fx.Node) -> int:
        """The groups (bits) that fill an emptied piece of this node; none for a split that can drop it."""
        pieces = self.flow.steps[self.flow.place[node.name]].pieces
        lost = [piece.groups for piece in pieces if piece.empty(self.zero)]
        read_apart = all(u.target is operator.getitem and isinstance(u.args[1], int) for u in node.users)
        if not lost or (operation_name(node, None) in SPLITS and read_apart):
            return 0
        return functools.reduce(operator.or_, lost)

    def _can_lose(self, node: fx.Node, source: fx.Node) -> bool:
        """Can the node, which stays, lose this operand, or read a constant instead?"""
        parts = joined_tensors(node)
        if self._state(source) == EMPTY:
            return source in parts
        if self._state(source) != CONSTANT:
            return False  # a size of a removed tensor
        try:
            value = self.constants.value(source)
        except NoValueError:
            return False
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        if parts:
            return source in parts and self._sibling(parts) is not None
        if writes_in_place(node, self.module) and node.args[0] is source and _plain(node) is None:
            return False
        # The constant is broadcast, so another operand must have the result's shape.
        return _is_elementwise(node) and any(
            self._state(other) == LIVE and self._shape(other) == self._shape(node)
            for other in node.all_input_nodes
        )

    def _sibling(self, parts: list[fx.Node]) -> fx.Node | None:
        """The first part of a concat that is live."""
        return next((part for part in parts if self._state(part) == LIVE), None)

    def _shape(self, node: fx.Node) -> tuple[int, ...] | None:
        labels = self.channels.trail.labels.get(node.name)
        return tuple(labels.shape) if isinstance(labels, Tensor) else None

    # ---- letting it go ------------------------------------------------------------------------------------

    def apply(self) -> list[str]:
        """Change the graph; return a line for each change."""
        if not self.zero:
            return []
        report = []
        graph = self.module.graph
        unused = {node for node in self.nodes if not node.users}
        for node in self.nodes:
            if not self.needed[node]:
                continue
            for source in node.all_input_nodes:
                if self._state(source) == CONSTANT:
                    report.append(self._replace(node, source))
            parts = joined_tensors(node)
            if any(self._state(part) == EMPTY for part in parts):
                node.args = ([part for part in parts if self._state(part) != EMPTY], *node.args[1:])
        self._memory = memory_of_model(self.module, graph)
        gone: list[fx.Node] = []
        for node in reversed(self.nodes):
            if node.users or node.op in ("placeholder", "output"):
                continue
            idle = node not in unused or self._asks_what_goes(node) or self._is_made_of_what_goes(node)
            if self._causes(node) or (idle and not self.needed[node]):
                graph.erase_node(node)
                gone.append(node)
        left = [node.name for node in graph.nodes if self._state(node) in (CONSTANT, EMPTY)]
        if left:
            raise PassError(f"{', '.join(left[:4])} would be left without channels, yet something reads them")
        return report + _drop_uncalled(self.module, gone)

    def _asks_what_goes(self, node: fx.Node) -> bool:
        """Does a number without readers (an assertion) only ask for sizes of tensors that are not needed?"""
        seen, stack = {node}, [node]
        while stack:
            asked = stack.pop()
            if asked in self._memory and writes_in_place(asked, self.module):  # a counter, an average
                return False
            if self.flow.steps[self.flow.place[asked.name]].kind != "number":
                return asked is not node and not self.needed[asked]
            stack += [source for source in asked.all_input_nodes if source not in seen]
            seen.update(stack)
        return False

    def _is_made_of_what_goes(self, node: fx.Node) -> bool:
        """Does a result without readers (unused attention weights) come from a node that goes?"""
        if (
            node.op not in ("call_function", "call_method")
            or node.is_impure()
            or writes_in_place(node, self.module)
        ):
            return False
        return any(self._state(source) in (CONSTANT, EMPTY) for source in ancestors(node))

    def _replace(self, node: fx.Node, source: fx.Node) -> str:
        """Let the node read a parameter instead of ``source``, which has become constant."""
        value = self.constants.value(source)
        assert isinstance(value, Tensor)
        layer = self._origin(source)
        path = layer.path.rpartition(".")[0]
        owner = self.module.get_submodule(path)
        # Named after the module, so that another call that leaves the same numbers shares the parameter.
        name = (
            f"constant_{str(source.target).replace('.', '_') if source.op == 'call_module' else source.name}"
        )
        if hasattr(owner, name) and not torch.equal(getattr(owner, name), value):
            name = f"constant_{source.name}_"
        if not hasattr(owner, name):
            trains = self.module.get_parameter(layer.weight).requires_grad
            owner.register_parameter(name, nn.Parameter(value.contiguous(), trains))
        meta = {key: value for key, value in node.meta.items() if key != META}
        with self.module.graph.inserting_before(node):
            read = self.module.graph.create_node("get_attr", f"{path}.{name}" if path else name)
            read.meta = {**meta, META: Constant(source.name)}
            if parts := joined_tensors(node):
                read = self._spread(read, value, source, node, self._sibling(parts), meta)
        node.replace_input_with(source, read)
        if writes_in_place(node, self.module) and node.args[0] is read:
            plain = _plain(node)
            assert plain is not None
            node.target = plain
        return f"{source.name}: constant, now {tuple(value.shape)} numbers"

    def _spread(
        self, read: fx.Node, value: Tensor, source: fx.Node, node: fx.Node, like: fx.Node | None, meta: Any
    ) -> fx.Node:
        """The constant, expanded to full size: a live part of the concat that reads it gives the sizes."""
        graph, full = self.module.graph, self._shape(source)
        assert full is not None and like is not None
        axis = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(full)  # type: ignore[arg-type]
        sizes: list[int | fx.Node] = []
        for dim, size in enumerate(value.shape):
            if dim == axis or size > 1:
                sizes.append(-1)
            else:
                sizes.append(graph.call_method("size", (like, dim)))
        spread = graph.call_method("expand", (read, *sizes))
        for made in (spread, *sizes):
            if isinstance(made, fx.Node):
                made.meta = dict(meta)
        return spread

    def _origin(self, node: fx.Node) -> Any:
        """The layer whose bias gives the constant; one of several, if it comes from several."""
        place = self.flow.place[node.name]
        while not self.flow.steps[place].inputs.empty(self.zero):
            place = next(s for s in self.flow.steps[place].reads if self.walk.states[s] == CONSTANT)
        name = self.flow.steps[place].name
        return next(layer for layer in self.channels.layers if layer.node == name)


def joined_tensors(node: fx.Node) -> list[fx.Node]:
    """The tensors that a concat joins; none if the node is no concat."""
    if operation_name(node, None) != "cat" or not node.args or not isinstance(node.args[0], (list, tuple)):
        return []
    return [part for part in node.args[0] if isinstance(part, fx.Node)]


def _is_elementwise(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method")
    return called and has(operation_name(node, None), Trait.ELEMENTWISE)


def _plain(node: fx.Node) -> Any:
    """The out-of-place form of an in-place operation; None if unknown."""
    if node.op == "call_method":
        return str(node.target).rstrip("_")
    return PLAIN.get(node.target)


def _drop_uncalled(module: fx.GraphModule, gone: list[fx.Node]) -> list[str]:
    """Delete the modules and parameters that only these nodes used."""
    used = {str(node.target) for node in module.graph.nodes if node.op in ("call_module", "get_attr")}
    report = []
    targets = {str(node.target) for node in gone if node.op in ("call_module", "get_attr")}
    for target in sorted(targets, key=lambda name: (-name.count("."), name)):  # a module after its parameters
        parts = target.split(".")
        inside = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        if inside & used:
            continue
        if any(name.startswith(f"{target}.") for name in used):  # another call reads its weight
            held = module.get_submodule(target)
            for name, _ in list(held.named_parameters(recurse=False)):
                if f"{target}.{name}" not in used:
                    setattr(held, name, None)
                    report.append(f"{target}.{name}: removed")
            continue
        if delete(module, target):
            report.append(f"{target}: removed")
    return report


def delete(module: nn.Module, target: str) -> bool:
    """Delete a submodule, parameter or buffer; other attributes stay."""
    path, _, name = target.rpartition(".")
    owner = module.get_submodule(path)
    held = getattr(owner, name, None)
    if isinstance(held, (nn.Module, Tensor)):
        delattr(owner, name)
    return isinstance(held, (nn.Module, Tensor))
