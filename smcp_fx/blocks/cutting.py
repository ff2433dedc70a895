"""Cut a network into the blocks that an engine runs as one: what a latency table has rows of.

A block is a convolution or linear with what engines fuse behind it (batch norm, activations, an addition), a
concatenation with batch norm and activation behind it, or one other operation that costs time. It has at most two
free widths: the channels it reads and does not hand on, and those it hands on. It can be built at any of them with
random weights, by the same slicing that makes the final model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.blocks.feeding import CONVOLUTION, gated, how_written
from smcp_fx.blocks.signature import MOVES, signature
from smcp_fx.blocks.widths import take_out, thin
from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.graph import RULES
from smcp_fx.channels.labels import along, compress, varied_dims
from smcp_fx.channels.propagation import Propagation
from smcp_fx.channels.units import close
from smcp_fx.cost_model import Width
from smcp_fx.tracing.modes import evaluated_graph, with_branches
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.values import TensorInfo

_ANCHORS = {f"conv{kind}{rank}d" for kind in ("", "transpose") for rank in (1, 2, 3)} | {"linear"}
_FOLLOWERS = set(
    """
batchnorm add mul dropout identity stochasticdepth relu relu6 leakyrelu hardtanh clamp sigmoid
hardsigmoid hardswish silu gelu elu tanh prelu
""".split()
)


@dataclass(frozen=True)
class Port:
    """A tensor that enters or leaves a block: its node, the channel axis if any, and its local units there."""

    node: str
    axis: int | None
    units: Tensor = field(repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class FusedBlock:
    """One block of one network; implements `smcp_fx.latency.table.Block`.

    ``widths`` say how its free widths follow from the network's counts, ``grids`` which values (channels,
    ascending) they can take. ``signature`` is equal for blocks that differ in nothing but their widths.
    ``read_before``: the inputs, by position, of which another block pays for the conversion into a plain layout: of a
    concatenation those that an earlier one reads, too; of other blocks without a layer those that are gated.
    ``fed_by``: how each input was written (`blocks.feeding`; empty where all are by convolutions). ``written``: of
    each tensor that it hands on, the channels and the bytes that one of them is.
    """

    name: str
    nodes: tuple[str, ...]
    signature: str
    widths: tuple[Width, ...]
    grids: tuple[tuple[int, ...], ...]
    module: fx.GraphModule = field(repr=False)
    channels: ChannelGraph = field(repr=False)  # of the block alone
    inputs: tuple[Port, ...] = field(repr=False)
    shapes: tuple[TensorInfo, ...] = field(repr=False)
    lines: tuple[Tensor, ...] = field(repr=False)  # for each free width, the local units along it
    read_before: tuple[int, ...] = ()
    fed_by: tuple[str, ...] = ()
    written: tuple[tuple[Width, float], ...] = ()

    def build(self, widths: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the block at these widths in eval mode, its weights random, and example inputs."""
        from smcp_fx.passes.slice_channels import SliceChannels

        keep = torch.ones(self.channels.free_units.numel(), dtype=torch.bool)
        for line, width in zip(self.lines, widths, strict=True):
            thin(line, width, keep, self.name, [port.units for port in self.inputs if port.axis is not None])
        module = copy.deepcopy(self.module)
        absent = {port.node for port in self.inputs if port.axis is not None and not keep[port.units].any()}
        if absent:  # fewer channels than a concat has inputs: it has fewer
            take_out(module, absent, self.name)
        SliceChannels(self.channels, keep)(module)
        inputs = []
        for port, info in zip(self.inputs, self.shapes, strict=True):
            if port.node in absent:
                continue
            shape = list(info.shape)
            if port.axis is not None:
                shape[port.axis] = int(keep[port.units].sum())
            inputs.append(torch.rand(shape).to(info.dtype))
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    tensor.uniform_(0.01, 0.1)
        return module.eval(), tuple(inputs)

    @property
    def full_widths(self) -> tuple[int, ...]:
        """The widths in the unpruned network."""
        return tuple(grid[-1] for grid in self.grids)

    @cached_property  # sampling asks for it with every row
    def weight_bytes(self) -> float:
        """Bytes of its weights in the unpruned network."""
        return float(sum(weight.numel() * weight.element_size() for weight in self.module.parameters()))


def cut(traced: Traced, channels: ChannelGraph) -> list[FusedBlock]:
    """Cut a traced network, as it runs in eval mode, into blocks; every operation on tensors is in exactly one."""
    traced = replace(traced, module=fx.GraphModule(traced.module, evaluated_graph(traced.module.graph)))
    seen: set[fx.Node] = set()  # what the concatenations so far read
    how = how_written(traced)
    gates = gated(traced, how)
    blocks = []
    for nodes in _partition(traced):
        first = operation_of(traced.module, nodes[0])
        read = seen if first == "cat" else {source for source, gate in gates.items() if gate not in nodes}
        read = set() if first in _ANCHORS else read
        blocks.append(_block(traced, channels, nodes, read, how))
        if first == "cat":
            seen.update(nodes[0].all_input_nodes)
    return blocks


# ---- which nodes go together --------------------------------------------------------------------------------


def _partition(traced: Traced) -> list[list[fx.Node]]:
    blocks: list[list[fx.Node]] = []
    home: dict[fx.Node, int] = {}
    for node in traced.module.graph.nodes:
        if not _computes(traced, node):
            continue
        operation = operation_of(traced.module, node)
        target = None
        # The latest of the blocks that end in this node's operands takes it in: engines fuse an addition
        # with the convolution that runs last before it.
        for source in sorted((n for n in node.all_input_nodes if n in home), key=lambda n: -home[n]):
            block = blocks[home[source]]
            if not isinstance(traced.values[source.name], TensorInfo):
                target = home[source]  # an element of several outputs belongs to what made them
                break
            if (
                block[-1] is source
                and _tensor_users(traced, source) == 1
                and _joins(traced, block, operation)
            ):
                target = home[source]
                break
        if target is None:
            target = len(blocks)
            blocks.append([])
        blocks[target].append(node)
        home[node] = target
    return blocks


def _joins(traced: Traced, block: list[fx.Node], operation: str | None) -> bool:
    operations = [operation_of(traced.module, node) for node in block]
    if all(name in MOVES for name in operations):
        return operation in MOVES or operation == "linear"
    if (
        operations[0] == "cat"
    ):  # what follows reads the layout that it leaves, which its inputs' widths decide
        return operation in _FOLLOWERS - {"add", "mul"}
    return operation in _FOLLOWERS and (operations[0] in _ANCHORS | _FOLLOWERS or "linear" in operations)


def _computes(traced: Traced, node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    return any(isinstance(v, TensorInfo) for v in pytree.tree_leaves(traced.values[node.name]))


def _tensor_users(traced: Traced, node: fx.Node) -> int:
    return sum(user.op == "output" or _computes(traced, user) for user in node.users)


# ---- one block ------------------------------------------------------------------------------------------------


def _block(
    traced: Traced,
    channels: ChannelGraph,
    nodes: list[fx.Node],
    seen: Collection[fx.Node],
    how: Mapping[fx.Node, str],
) -> FusedBlock:
    inside = set(nodes)
    numbers = _numbers(traced, nodes)
    sources = [n for n in dict.fromkeys(s for node in nodes for s in node.all_input_nodes) if n not in inside]
    tensors = [s for s in sources if s.op != "get_attr" and isinstance(traced.values[s.name], TensorInfo)]
    ends = [n for n in nodes if any(user not in inside for user in n.users)] or nodes[-1:]
    read_before = tuple(i for i, source in enumerate(tensors) if source in seen)
    fed_by = tuple(how.get(source, CONVOLUTION) for source in tensors)
    fed_by = fed_by if set(fed_by) - {CONVOLUTION} else ()
    module, values = _subgraph(traced, nodes, tensors, ends, numbers)
    axes = {s.name: _axis(channels, s.name) for s in tensors}
    local = _local_channels(module, values, channels, axes)
    inputs = tuple(Port(s.name, axes[s.name], _units_at(local, s.name, axes[s.name])) for s in tensors)
    outputs = [(end.name, axis) for end in ends if (axis := _axis(channels, end.name)) is not None]
    handed_on = _distinct([_units_at(local, name, axis) for name, axis in outputs])
    known = {int(u) for line in handed_on for u in line}
    read = [port for port in inputs if port.axis is not None and not set(port.units.tolist()) <= known]
    out_widths = [_width(channels, name, axis) for name, axis in outputs][: len(handed_on)]
    in_widths = [_width(channels, port.node, port.axis or 0) for port in read]
    lines, widths = [], []
    for parts, found in (([p.units for p in read], in_widths), (handed_on, out_widths)):
        total = _sum(found)
        if total.groups:
            lines.append(torch.cat(_distinct(parts)))
            widths.append(total)
    paths = [str(n.target) for n in nodes if n.op == "call_module"]
    return FusedBlock(
        name=paths[0] if paths else nodes[0].name,
        nodes=tuple(n.name for n in nodes),
        signature=signature(traced, nodes, tensors, axes, channels, read_before, fed_by),
        widths=tuple(widths),
        grids=tuple(_grid(channels, width) for width in widths),
        module=module,
        channels=local,
        inputs=inputs,
        shapes=tuple(traced.values[s.name] for s in tensors),
        lines=tuple(lines),
        read_before=read_before,
        fed_by=fed_by,
        written=tuple(_written(traced, channels, end.name) for end in ends),
    )


class _BlockPropagation(Propagation):
    """Labels for a block on its own: its inputs' channels are as free as any, its outputs pin nothing.

    ``network``: where given, channels of one of its units stay together.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: dict[str, Any],
        axes: dict[str, int | None],
        network: ChannelGraph | None,
    ) -> None:
        super().__init__(module, values, RULES)
        self._axes = axes
        self._network = network

    def _execute(self, node: fx.Node) -> Any:
        axis = self._axes.get(node.name)
        if node.op == "placeholder" and axis is not None:
            shape = self.values[node.name].shape
            labels = self.fresh(node.name, shape[axis])
            if self._network is not None:
                units = _units_at(self._network, node.name, axis)
                _, first = torch.unique(units, return_inverse=True)
                labels = torch.where(units < 0, labels, self.fresh(node.name, shape[axis])[first])
            return compress(along(labels, shape, axis))
        return None if node.op == "output" else super()._execute(node)


def _local_channels(
    module: fx.GraphModule,
    values: dict[str, Any],
    channels: ChannelGraph,
    axes: dict[str, int | None],
) -> ChannelGraph:
    for network in (None, channels):
        trail = _BlockPropagation(module, values, axes, network).run()
        local = ChannelGraph(trail, close(trail), 1)
        local.free_units = torch.ones_like(local.free_units)
        # Of a tensor that holds heads and the channels of each, the network says which may go.
        if all(_axis(local, name) in (None, _axis(channels, name)) for name in trail.labels):
            break
    return local


def _subgraph(
    traced: Traced,
    nodes: list[fx.Node],
    inputs: list[fx.Node],
    ends: list[fx.Node],
    numbers: dict[fx.Node, Any],
) -> tuple[fx.GraphModule, dict[str, Any]]:
    """The nodes as a module of their own; numbers computed elsewhere become constants."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = dict(numbers)
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
    for node in traced.module.graph.nodes:
        if node in nodes:
            for source in node.all_input_nodes:
                if source not in copies:
                    copies[source] = graph.node_copy(source)
            args = fx.node.map_arg(node.args, lambda n: copies[n])
            kwargs = fx.node.map_arg(node.kwargs, lambda n: copies[n])
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
    graph.output(copies[ends[0]] if len(ends) == 1 else tuple(copies[e] for e in ends))
    module = fx.GraphModule(traced.module, with_branches(graph))
    values = {n.name: traced.values[o.name] for o, n in copies.items() if isinstance(n, fx.Node)}
    return module, {**values, "output": None}


def _numbers(traced: Traced, nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    """Sources that are numbers (sizes) rather than tensors or attributes, with their recorded values."""
    found = {}
    for node in nodes:
        for source in node.all_input_nodes:
            value = traced.values[source.name]
            if source.op != "get_attr" and not any(
                isinstance(v, TensorInfo) for v in pytree.tree_leaves(value)
            ):
                found[source] = value
            elif source.op == "get_attr" and isinstance(value, bool):
                found[source] = False  # a training flag: blocks run in eval mode
    return found


def _written(traced: Traced, channels: ChannelGraph, node: str) -> tuple[Width, float]:
    """The channels that a node writes, and each one's bytes; tensors without channels count as a single one."""
    tensors = [v for v in pytree.tree_leaves(traced.values[node]) if isinstance(v, TensorInfo)]
    size = float(sum(prod(info.shape) * info.dtype.itemsize for info in tensors))
    axis = _axis(channels, node)  # of a single tensor
    if axis is None or not tensors[0].shape[axis]:
        return Width(1), size
    return _width(channels, node, axis), size / tensors[0].shape[axis]


def _axis(channels: ChannelGraph, node: str) -> int | None:
    labels = channels.trail.labels.get(node)
    if not isinstance(labels, Tensor):
        return None
    varied = varied_dims(channels.units.of(labels))
    return varied[0] if varied else None


def _units_at(channels: ChannelGraph, node: str, axis: int | None) -> Tensor:
    labels = channels.trail.labels.get(node)
    if axis is None or not isinstance(labels, Tensor):
        return torch.empty(0, dtype=torch.int64)
    return _along(channels.units.of(labels), axis)


def _along(tensor: Tensor, axis: int) -> Tensor:
    for dim in range(tensor.dim()):
        if dim != axis:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.reshape(-1)


def _width(channels: ChannelGraph, node: str, axis: int) -> Width:
    return channels.width(_along(channels.trail.labels[node], axis))


def _sum(widths: Sequence[Width]) -> Width:
    groups: dict[str, int] = {}
    for width in widths:
        for group, per_unit in width.groups:
            groups[group] = groups.get(group, 0) + per_unit
    return Width(sum(width.constant for width in widths), tuple(groups.items()))


def _distinct(lines: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for line in lines:
        if not any(torch.equal(line, other) for other in found):
            found.append(line)
    return found


def _grid(channels: ChannelGraph, width: Width) -> tuple[int, ...]:
    """Every value an affine width can take, ascending; 0 is none (a block without channels is removed)."""
    sums = {width.constant}
    for group, per_unit in width.groups:
        sums = {total + per_unit * count for total in sums for count in channels[group].permitted}
    return tuple(sorted(sums - {0}))
