"""Make a block of some nodes of a network: its own module, its free widths, and what else its latency depends on."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.blocks.feeding import CONVOLUTION
from smcp_fx.blocks.fused import FusedBlock, Port
from smcp_fx.blocks.signature import PADS, signature
from smcp_fx.blocks.widths import in_units
from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.facts import Facts
from smcp_fx.channels.graph import RULES
from smcp_fx.channels.labels import along, compact, line_along, varied_dims
from smcp_fx.channels.propagation import Propagation
from smcp_fx.channels.units import close
from smcp_fx.channels.weight_views import is_question
from smcp_fx.cost_model import Width
from smcp_fx.tracing.modes import with_branches
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.values import TensorInfo

_LOG = logging.getLogger(__name__)
#: Operations that can be built at any width whatever surrounds them.
_USUAL = set(
    """
conv1d conv2d conv3d convtranspose1d convtranspose2d convtranspose3d linear batchnorm add mul sub dropout identity
stochasticdepth relu relu6 leakyrelu hardtanh clamp sigmoid hardsigmoid hardswish silu gelu elu tanh prelu softmax
layernorm maxpool2d avgpool2d adaptiveavgpool2d adaptivemaxpool2d mean cat scaleddotproductattention interpolate
""".split()
)


def make_block(
    traced: Traced,
    channels: ChannelGraph,
    nodes: list[fx.Node],
    converted: Collection[fx.Node],
    how: Mapping[fx.Node, str],
    before: list[fx.Node],
    tried: dict[str, str],
) -> FusedBlock:
    """Return the block of these nodes.

    ``converted``: nodes whose tensors another block has converted into a plain layout; ``how``: how each tensor is
    written (`blocks.feeding.how_written`); ``before``: the nodes that they read and that depend on no input;
    ``tried``: for each signature tried so far, why its block cannot be built narrower ("" if it can).
    """
    named = [node for node in nodes if operation_of(traced.module, node) not in PADS] or nodes
    paths = [str(node.target) for node in named if node.op == "call_module"]
    border = _Border.of(traced, channels, nodes, set(before))
    every = before + nodes
    module, values = _subgraph(traced, every, border)
    read_before = tuple(i for i, source in enumerate(border.tensors) if source in converted)
    ways = tuple(how.get(source, CONVOLUTION) for source in border.tensors)
    fed_by = ways if set(ways) - {CONVOLUTION} else ()

    def of(own: ChannelGraph, whole: bool = False) -> FusedBlock:
        inputs = tuple(
            Port(source.name, border.axes[source.name], _units_at(own, source.name, border.axes[source.name]))
            for source in border.tensors
        )
        free = [] if whole else _free_widths(channels, own, border, inputs)
        axes = border.axes if free else dict.fromkeys(border.axes)  # without a width, sizes tell blocks apart
        as_network = len(free) if own is channels else None
        return FusedBlock(
            name=paths[0] if paths else named[0].name,
            nodes=tuple(node.name for node in nodes),
            signature=signature(
                traced, every, border.tensors, axes, channels, read_before, fed_by, as_network
            ),
            widths=tuple(width for width, _ in free),
            grids=tuple(_grid(channels, width) for width, _ in free),
            module=module,
            channels=own,
            inputs=inputs,
            shapes=tuple(traced.values[source.name] for source in border.tensors),
            lines=tuple(line for _, line in free),
            read_before=read_before,
            fed_by=fed_by,
            written=tuple(_written(traced, channels, end.name) for end in border.ends),
            alone=own is not channels,
        )

    alone = of(_own_channels(module, values, channels, border.axes))
    # The block alone may not show which channels meet or must stay (zeros filled elsewhere, a channel picked
    # by its number). Then the network decides.
    shown = all(_axis(alone.channels, node.name) == _axis(channels, node.name) for node in every)
    shown &= all(in_units(line, grid) for line, grid in zip(alone.lines, alone.grids, strict=True))
    if shown and _USUAL.issuperset(operation_of(traced.module, node) for node in nodes):
        return alone
    for block in (alone, of(channels)) if shown else (of(channels), alone):
        fault = _fault(block, tried)
        if not fault:
            return block
    whole = of(channels, whole=True)
    _LOG.warning(
        "the latency of block %r counts as that of its full width, as it cannot be built narrower: %s",
        whole.name,
        fault,
    )
    return whole


def _fault(block: FusedBlock, tried: dict[str, str]) -> str:
    """Say why a block cannot be built or run at its smallest widths or half of its full ones; "" if it can."""
    if block.signature not in tried:
        tried[block.signature] = ""
        for share in (0.0, 0.5) if block.grids else ():
            try:
                module, inputs = block.build(tuple(grid[int(share * len(grid))] for grid in block.grids))
                with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                    warnings.simplefilter("ignore")
                    module(*inputs)  # fx prints the failing call
            except Exception as error:  # whatever the network's own operations raise
                tried[block.signature] = str(error)
    return tried[block.signature]


@dataclass(frozen=True)
class _Border:
    """A block's border: ``tensors`` that it reads, ``ends`` that others read, ``axes`` of the tensors' channels."""

    tensors: list[fx.Node]
    ends: list[fx.Node]
    axes: dict[str, int | None]

    @classmethod
    def of(
        cls, traced: Traced, channels: ChannelGraph, nodes: list[fx.Node], before: set[fx.Node]
    ) -> _Border:
        inside = before | set(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
        tensors = [
            source
            for source in read
            if source not in inside
            and source.op != "get_attr"
            and isinstance(traced.values[source.name], TensorInfo)
        ]
        ends = [node for node in nodes if any(_reads(channels, node, u) for u in node.users.keys() - inside)]
        ends = ends or nodes[-1:]
        axes = {source.name: _axis(channels, source.name) for source in tensors}
        if any(node.name in channels.trail.mixed for node in nodes):
            whole = _mixed_by(channels, nodes)
            axes = {
                name: axis
                if axis is not None and name not in whole and _width(channels, name, axis).groups
                else None
                for name, axis in axes.items()
            }
        return cls(tensors, ends, axes)


def _reads(channels: ChannelGraph, node: fx.Node, user: fx.Node) -> bool:
    """Does a reader outside the block need the values? A question about a computed weight needs none."""
    return node.name not in channels.trail.mixed or not is_question(user)


def _mixed_by(channels: ChannelGraph, nodes: list[fx.Node]) -> set[str]:
    """Return the tensors that mix or generate kernels: they stay whole, as a block has one input width."""
    by_name, mixed = {node.name: node for node in nodes}, channels.trail.mixed
    mixes = (mix for mix in channels.trail.mixes if mix.node in by_name and mix.node in mixed)
    return {str(by_name[mix.node].args[mix.operand]) for mix in mixes} - mixed.keys()


def _free_widths(
    channels: ChannelGraph, own: ChannelGraph, border: _Border, inputs: Sequence[Port]
) -> list[tuple[Width, Tensor]]:
    """Return the widths that the network's counts decide, each with the block's own units along it.

    The first width counts the channels that the block reads and does not pass on, the second those it passes on.
    """
    outputs = [(end.name, axis) for end in border.ends if (axis := _axis(channels, end.name)) is not None]
    handed_on = _distinct([_units_at(own, name, axis) for name, axis in outputs])
    passed = {int(unit) for line in handed_on for unit in line}
    read = [port for port in inputs if port.axis is not None and not set(port.units.tolist()) <= passed]
    read = [
        port
        for place, port in enumerate(read)
        if not any(torch.equal(port.units, o.units) for o in read[:place])
    ]
    in_widths = [_width(channels, port.node, port.axis or 0) for port in read]
    out_widths = [_width(channels, name, axis) for name, axis in outputs][: len(handed_on)]
    free = []
    for lines, widths in (([port.units for port in read], in_widths), (handed_on, out_widths)):
        total = _sum(widths)
        if total.groups:
            free.append((total, torch.cat(_distinct(lines))))
    return free


class _BlockPropagation(Propagation):
    """Labels for a block on its own: its inputs' channels are free, and its outputs pin nothing.

    ``network``: if given, channels of one of its units stay together. ``turned``, ``stacks``, ``beside``: the
    network's, as in `Trail`.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: dict[str, Any],
        axes: dict[str, int | None],
        network: ChannelGraph | None,
        turned: Collection[str],
        stacks: Mapping[str, tuple[str, str]],
        beside: Mapping[str, tuple[int, int]],
    ) -> None:
        facts = Facts(module, values).at(values, turned, beside)
        super().__init__(module, values, RULES, turned=turned, facts=facts)
        self.trail.stacks.update(stacks)
        self._axes = axes
        self._network = network

    def _execute(self, node: fx.Node) -> Any:
        axis = self._axes.get(node.name)
        if node.op == "placeholder" and axis is not None:
            shape = self.values[node.name].shape
            labels = self.fresh(node.name, shape[axis])
            if self._network is not None:
                units = _units_at(self._network, node.name, axis)
                _, which = torch.unique(units, return_inverse=True)
                labels = torch.where(units < 0, labels, self.fresh(node.name, shape[axis])[which])
            return compact(along(labels, shape, axis))
        return None if node.op == "output" else super()._execute(node)


def _own_channels(
    module: fx.GraphModule,
    values: dict[str, Any],
    channels: ChannelGraph,
    axes: dict[str, int | None],
) -> ChannelGraph:
    for network in (None, channels):
        decided = channels.trail.turned, channels.trail.stacks, channels.trail.beside
        trail = _BlockPropagation(module, values, axes, network, *decided).run()
        own = ChannelGraph(trail, close(trail), 1)
        own.free_units = torch.ones_like(own.free_units)
        # If a tensor holds heads and each head's channels, the network says which of the two may go.
        if all(_axis(own, name) in (None, _axis(channels, name)) for name in trail.labels):
            break
    return own


def _subgraph(traced: Traced, nodes: list[fx.Node], border: _Border) -> tuple[fx.GraphModule, dict[str, Any]]:
    """Return the nodes as a module of their own, and its values; numbers computed elsewhere become constants."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = _numbers(traced, nodes)
    for source in border.tensors:
        copies[source] = graph.placeholder(source.name)
    for node in traced.module.graph.nodes:
        if node in nodes:
            for source in node.all_input_nodes:
                if source in copies:
                    continue
                if source.op == "get_attr":
                    copies[source] = graph.node_copy(source)
                else:  # only its size is read
                    shape = tuple(traced.values[source.name].shape)
                    copies[source] = graph.create_node(
                        "call_function", torch.empty, (shape,), name=source.name
                    )
            args = fx.node.map_arg(node.args, lambda n: copies[n])
            kwargs = fx.node.map_arg(node.kwargs, lambda n: copies[n])
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
    ends = [copies[end] for end in border.ends]
    graph.output(ends[0] if len(ends) == 1 else tuple(ends))
    module = fx.GraphModule(traced.module, with_branches(graph))
    values = {n.name: traced.values[o.name] for o, n in copies.items() if isinstance(n, fx.Node)}
    return module, {**values, "output": None}


def _numbers(traced: Traced, nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    """Sources that are numbers (sizes) rather than tensors or attributes, with their recorded values."""
    numbers: dict[fx.Node, Any] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            value = traced.values[source.name]
            tensors = any(isinstance(v, TensorInfo) for v in pytree.tree_leaves(value))
            if source.op != "get_attr" and not tensors:
                numbers[source] = value
            elif source.op == "get_attr" and isinstance(value, bool):
                numbers[source] = False  # a training flag: blocks run in eval mode
    return numbers


def _written(traced: Traced, channels: ChannelGraph, node: str) -> tuple[Width, float]:
    """The channels that a node writes, and the bytes of one; a tensor without channels counts as one channel."""
    tensors = [v for v in pytree.tree_leaves(traced.values[node]) if isinstance(v, TensorInfo)]
    size = float(sum(prod(info.shape) * info.dtype.itemsize for info in tensors))
    axis = _axis(channels, node)  # of a single tensor
    if axis is None or not tensors[0].shape[axis]:
        return Width(1), size
    return _width(channels, node, axis), size / tensors[0].shape[axis]


def _axis(channels: ChannelGraph, node: str) -> int | None:
    """The channel axis of a node's tensor; None if it has none."""
    labels = channels.trail.labels.get(node)
    if not isinstance(labels, Tensor):
        return None
    varied = varied_dims(channels.units.of(labels))
    return varied[0] if varied else None


def _units_at(channels: ChannelGraph, node: str, axis: int | None) -> Tensor:
    labels = channels.trail.labels.get(node)
    if axis is None or not isinstance(labels, Tensor):
        return torch.empty(0, dtype=torch.int64)
    return line_along(channels.units.of(labels), axis)


def _width(channels: ChannelGraph, node: str, axis: int) -> Width:
    return channels.width(line_along(channels.trail.labels[node], axis))


def _sum(widths: Sequence[Width]) -> Width:
    groups: dict[str, int] = {}
    for width in widths:
        for group, per_unit in width.groups:
            groups[group] = groups.get(group, 0) + per_unit
    return Width(sum(width.constant for width in widths), tuple(groups.items()))


def _distinct(lines: list[Tensor]) -> list[Tensor]:
    different: list[Tensor] = []
    for line in lines:
        if not any(torch.equal(line, other) for other in different):
            different.append(line)
    return different


def _grid(channels: ChannelGraph, width: Width) -> tuple[int, ...]:
    """Every value that an affine width can take, ascending, except 0 (a block without channels is removed)."""
    sums = {width.constant}
    for group, per_unit in width.groups:
        sums = {total + per_unit * count for total in sums for count in channels[group].permitted}
    return tuple(sorted(sums - {0}))
