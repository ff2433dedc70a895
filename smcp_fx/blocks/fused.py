"""One block of one network, and how to build it at any width."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from smcp_fx.blocks.loaded import load
from smcp_fx.blocks.widths import take_out, thin, thin_groups
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import Width
from smcp_fx.passes.fold_computed_weights import FoldComputedWeights
from smcp_fx.passes.restore_recurrent_layers import RestoreRecurrentLayers
from smcp_fx.passes.slice_channels import SliceChannels
from smcp_fx.passes.sliced_labels import Sliced
from smcp_fx.tracing.values import TensorInfo

#: Random weights are drawn from this range: variances must be positive, and sums stay within float16.
_WEIGHTS = (0.01, 0.1)


@dataclass(frozen=True)
class Port:
    """A tensor that enters a block: its node, the channel axis if any, and the block's own units along it."""

    node: str
    axis: int | None
    units: Tensor = field(repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class FusedBlock:
    """A block; implements `blocks.sharing.Block`.

    ``widths`` say how its free widths follow from the network's counts, ``grids`` which values (channels, ascending)
    they can take. Blocks that differ only in their widths have the same ``signature``. ``read_before``: inputs, by
    position, whose conversion into a plain layout another block pays for: for a concatenation those that an earlier
    one also reads, for other blocks without a layer the gated ones. ``fed_by``: how each input is written
    (`blocks.feeding`; empty if all are written by convolutions). ``written``: for each tensor that it passes on, the
    channels, and the bytes of one of them.
    """

    name: str
    nodes: tuple[str, ...]
    signature: str
    widths: tuple[Width, ...]
    grids: tuple[tuple[int, ...], ...]
    module: fx.GraphModule = field(repr=False)
    channels: ChannelGraph = field(repr=False)
    inputs: tuple[Port, ...] = field(repr=False)
    shapes: tuple[TensorInfo, ...] = field(repr=False)
    lines: tuple[Tensor, ...] = field(repr=False)  # for each free width, the block's own units along it
    read_before: tuple[int, ...] = ()
    fed_by: tuple[str, ...] = ()
    written: tuple[tuple[Width, float], ...] = ()
    alone: bool = True  # whether ``channels`` are the block's alone, not the network's

    def build(self, widths: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the block at these widths in eval mode, its weights random, and example inputs, all on the CPU."""
        keep = torch.ones(self.channels.free_units.numel(), dtype=torch.bool)
        with_channels = [port for port in self.inputs if port.axis is not None]
        if self.alone:
            for line, width in zip(self.lines, widths, strict=True):
                thin(line, width, keep, self.name, [port.units for port in with_channels])
        else:
            thin_groups(self.lines, widths, keep, self.channels)
        module = copy.deepcopy(self.module).cpu()  # the network may be on a GPU by now
        # A concatenation with fewer channels than inputs loses inputs.
        absent = {port.node for port in with_channels if not keep[port.units].any()}
        if absent:
            take_out(module, absent, self.name)
        for one in (FoldComputedWeights(), SliceChannels(self.channels, keep), RestoreRecurrentLayers()):
            one(module, recompile=False)  # `load` recompiles it
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    tensor.uniform_(*_WEIGHTS)
        load(module.eval(), Sliced(self.channels, keep | ~self.channels.free_units))
        return module, tuple(self._example_inputs(keep, absent))

    def _example_inputs(self, keep: Tensor, absent: set[str]) -> list[Tensor]:
        inputs = []
        for port, info in zip(self.inputs, self.shapes, strict=True):
            if port.node in absent:
                continue
            shape = list(info.shape)
            if port.axis is not None:
                shape[port.axis] = int(keep[port.units].sum())
            inputs.append(torch.rand(shape).to(info.dtype))
        return inputs

    @property
    def full_widths(self) -> tuple[int, ...]:
        """The widths in the unpruned network."""
        return tuple(grid[-1] for grid in self.grids)

    @cached_property  # needed with every row
    def weight_bytes(self) -> float:
        """Bytes of its weights in the unpruned network."""
        return float(sum(weight.numel() * weight.element_size() for weight in self.module.parameters()))
