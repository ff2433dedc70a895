"""The order in which a group's channels go, and the cost: first those that the others best make up for.

Each layer that reads a group computes y = W x from its inputs. Remove the channels S, and fit the rest of W again, as
`repair` does. The squared errors of y, weighted by output, then add up to

    sum over outputs of  h w_S' (inverse(G)_SS)^-1 w_S,    G = covariance(x), and some ridge.

Channels are removed one by one, always those of the least error over all layers that read the group; the inverse and
W are updated exactly. (Optimal brain surgeon, Hassibi & Stork 1993, on whole channels of layer-wise regressions; of
the kind of OSSCAR, Meng et al. 2024, section 3.) The weight h is half the sum, over an image, of the loss's squared
gradients by that output. Errors are then rises of the loss (to second order, positions taken as independent, as in
K-FAC, Martens & Grosse 2015) and comparable between groups. Without gradients, h is 1 / variance(y), which orders
channels but does not compare groups. Of the data, only sums of products are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from smcp_fx.calibration.batches import Batch, entering, run_batch
from smcp_fx.calibration.consumers import consumer_of
from smcp_fx.calibration.frontier import Frontier
from smcp_fx.calibration.layer_rows import LEAST_ROWS, ROWS_PER_INPUT, Consumer
from smcp_fx.calibration.regression import WIDEST, Sums
from smcp_fx.passes.insert_soft_masks import masked_layers
from smcp_fx.prepared import PreparedModel
from smcp_fx.tracing.modes import run_in_eval

#: Added to each variance: a share of the inputs' mean variance, and a share of their mean square (lost to rounding).
#: Chosen, not measured.
_RIDGE, _ROUNDING = 1e-3, 1e-12
#: One in this many of the remaining channels goes at a time, but at least one. Chosen, not measured.
_AT_ONCE = 32


@dataclass
class _Reader:
    """A layer that reads free channels; ``places`` [groups, inputs]: each column's unit, -1 for one that stays."""

    consumer: Consumer
    places: Tensor
    sums: Sums
    squares: Tensor | None = (
        None  # squared gradients by each output, [groups, outputs], summed over positions and images
    )


@dataclass(frozen=True)
class Order:
    """The units of a group in the order they go, [n]; the rise of the loss by number kept, [n + 1].

    ``rises`` is None where not all layers that read the group, and their gradients, are known.
    """

    units: Tensor
    rises: NDArray[np.float64] | None


@dataclass
class _Part:
    """A layer's share in a group: for each unit of ``units`` [n] its ``columns`` [n, b] of the layer's inputs.

    ``inverse`` [groups, d, d] of the covariance, ``weight`` [groups, d, outputs], each output in its own scale. Both
    hold zeros at removed units, and are made smaller once a quarter is removed.
    """

    units: Tensor
    columns: Tensor
    inverse: Tensor
    weight: Tensor

    def __post_init__(self) -> None:
        self._left = torch.ones(self.weight.shape[1], dtype=torch.bool, device=self.weight.device)

    def costs(self) -> Tensor:
        """Return the error that removing each unit alone would add, [n]."""
        rows = self.weight[:, self.columns]  # [groups, n, b, outputs]
        blocks = self.inverse[:, self.columns[:, :, None], self.columns[:, None, :]]
        single = self.columns.shape[1] == 1
        errors = rows.square() / blocks if single else rows * torch.linalg.solve(blocks, rows)
        return errors.sum((0, 2, 3))

    def remove(self, gone: Tensor) -> float:
        """Remove units (bool [n]), let the others make up for them, and return the error added."""
        out, error = self.columns[gone].flatten(), 0.0
        self.units, self.columns = self.units[~gone], self.columns[~gone]
        if out.numel():
            rows, across = self.weight[:, out], self.inverse[:, out]
            block = across[:, :, out]
            fitted = torch.linalg.solve(block, rows)
            error = float((rows * fitted).sum())
            self.weight.baddbmm_(across.mT, fitted, alpha=-1)
            self.inverse.baddbmm_(across.mT, torch.linalg.solve(block, across), alpha=-1)
            self._left[out] = False
            if 4 * int(self._left.sum()) < 3 * self._left.numel():
                self._compact()
        return error

    def _compact(self) -> None:
        left = self._left
        self.weight, self.inverse = self.weight[:, left], self.inverse[:, left][:, :, left]
        self.columns = (left.cumsum(0) - 1)[self.columns]
        self._left = left[left]


class Elimination:
    """Gathers the inputs of layers over batches, then orders channels by how dispensable they are.

    ``network``: as `sliced_graph` returns it for the present masks or, with every unit, `trained_graph`. ``there``
    [units] bool: the units that it has. ``batches``: how many there will be.
    """

    def __init__(
        self, prepared: PreparedModel, network: tuple[fx.GraphModule, nn.Module], there: Tensor, batches: int
    ) -> None:
        self._state = prepared.smcp
        self.graph, self.whole = network
        self._there = there.cpu()
        self._joined = prepared.plan.traced.joined
        self.batches = batches
        self._images = 0
        nodes = {node.name: node for node in self.graph.graph.nodes}
        deployed = run_in_eval(self.graph.graph)
        self._readers: dict[fx.Node, _Reader] = {}
        self._unread = torch.zeros(self._state.keep.numel() + 1, dtype=torch.bool)
        # Place -1, of what stays, is the last.
        stays = torch.cat([self._there, torch.ones(1, dtype=torch.bool)])
        for layer in masked_layers(prepared.channels):
            node, places = nodes.get(layer.node), self._state.places(layer.input_channels).cpu()
            places = places[stays[places]]
            runs = node is not None and layer.node in deployed  # others train alone: their weights are fused
            columns = self._columns(node, places) if node is not None and runs else None
            if columns is None or node is None:
                self._unread[places] = True
                continue
            self._readers[node] = _Reader(*columns, Sums())

    def _columns(self, node: fx.Node, places: Tensor) -> tuple[Consumer, Tensor] | None:
        """Return a node's layer and the place of each of its inputs, [inputs of a group]; None if it is left out."""
        consumer = consumer_of(self.graph, node)
        if consumer is None or places.numel() % consumer.groups:
            return None
        inputs = consumer.matrix(consumer.weight).shape[1]
        places = places.reshape(consumer.groups, -1)
        if inputs > WIDEST or inputs % places.shape[1] or not bool((places == places[:1]).all()):
            return None
        return consumer, places[0].repeat_interleave(inputs // places.shape[1])

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Run the whole network on a batch, and gather."""
        frontier = Frontier(self.graph, [entering(self.whole, self._joined, batch)])
        generator = torch.Generator().manual_seed(batch.number)
        for node in frontier.nodes:
            reader = self._readers.get(node)
            if reader is None:
                continue
            frontier.advance(node, past=False)
            x = frontier.values[0][reader.consumer.input]
            frontier.advance(node)
            y = frontier.values[0][node]
            _, positions = reader.consumer.positions(y)
            wanted = max(LEAST_ROWS, ROWS_PER_INPUT * reader.places.numel())
            chosen = torch.arange(positions)
            if positions > -(-wanted // self.batches):
                chosen = torch.randperm(positions, generator=generator)[: -(-wanted // self.batches)]
            for rows in reader.consumer.rows(x, y, chosen.to(y.device)):
                reader.sums.add(*rows)

    def gradients(self, batch: Batch, loss: Callable[[Any], Tensor]) -> None:
        """Run the whole model on a batch, and gather the gradients of ``loss(outputs)`` by layers' outputs."""
        readers: dict[nn.Module, list[_Reader]] = {}
        for node, reader in self._readers.items():
            if node.op == "call_module":
                readers.setdefault(self.whole.get_submodule(reader.consumer.path), []).append(reader)
        found: dict[nn.Module, list[Tensor]] = {module: [] for module in readers}

        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:  # hooked here, before anything is written into the output
                output.register_hook(found[module].append)  # type: ignore[no-untyped-call]

        with ExitStack() as stack, torch.enable_grad():
            for module in readers:
                stack.callback(module.register_forward_hook(keep).remove)
            loss(run_batch(self.whole, batch)).backward()  # type: ignore[no-untyped-call]
        for module, mine in readers.items():
            for reader in mine:
                squares = [reader.consumer.squares(gradient) for gradient in found[module]]
                if squares:  # a module that runs twice has two readers
                    total = torch.stack(squares).sum(0) * (batch.images**2 / len(mine))
                    reader.squares = total if reader.squares is None else reader.squares + total
        self._images += batch.images

    def order(self, group: str) -> Order | None:
        """Return the order in which those of a group's units go that are there; None if no layer knows."""
        places = torch.arange(self._state.keep.numel(), device=self._state.keep.device)
        mine = self._state.of_group(places, group)
        readers = [reader for reader in self._readers.values() if _columns(reader, mine) is not None]
        known = all(reader.squares is not None for reader in readers) and not bool(
            self._unread[mine.cpu()].any()
        )
        parts = [_part(reader, mine, self._images if known else 0) for reader in readers]
        if not parts:
            return None
        alive, gone = self._state.of_group(self._there, group).clone(), []
        size, counts, rises = alive.numel(), [int(alive.sum())], [0.0]
        while left := int(alive.sum()):
            costs = torch.zeros(size, dtype=torch.float64)
            for part in parts:
                costs.index_add_(0, part.units, part.costs().cpu())
            costs[~alive] = torch.inf
            worst = costs.sort(stable=True).indices[: max(1, left // _AT_ONCE)]
            alive[worst] = False
            gone.append(worst)
            counts.append(int(alive.sum()))
            rises.append(rises[-1] + sum(part.remove(~alive[part.units]) for part in parts))
        curve = np.interp(np.arange(counts[0] + 1), counts[::-1], rises[::-1])
        return Order(torch.cat(gone), curve if known else None)


def _columns(reader: _Reader, mine: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the units at these places that the layer reads [n], and their columns [n, b]; None if none or uneven."""
    if not reader.sums.count:
        return None
    places, first = reader.places.to(mine.device), int(mine[0])
    columns = ((places >= first) & (places < first + mine.numel())).nonzero().flatten()
    units, counts = torch.unique(places[columns] - first, return_counts=True)
    if not units.numel() or int(counts.min()) != int(counts.max()):
        return None
    return units, columns[torch.argsort(places[columns], stable=True)].reshape(units.numel(), -1)


def _part(reader: _Reader, mine: Tensor, images: int) -> _Part:
    """Return the layer's share in a group; ``images``: number with gradients, 0 if gradients are unknown."""
    found = _columns(reader, mine)
    assert found is not None
    covariance = reader.sums.centred()[0] / reader.sums.count
    weight = reader.consumer.matrix(reader.consumer.weight)
    tiny = torch.finfo(torch.float64).tiny ** 0.5
    spread, square = (m.diagonal(dim1=-2, dim2=-1).mean(-1) for m in (covariance, reader.sums.xx))
    ridge = (_RIDGE * spread + _ROUNDING * square / reader.sums.count).clamp(min=tiny)[:, None, None]
    if images and reader.squares is not None:
        heed = 0.5 / images * reader.squares.unsqueeze(1)
    else:
        variance = (weight * (covariance @ weight)).sum(1, keepdim=True)
        heed = 1 / (variance + ridge * weight.square().sum(1, keepdim=True)).clamp(min=tiny)
    covariance.diagonal(dim1=-2, dim2=-1).add_(ridge[..., 0])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    return _Part(found[0].cpu(), found[1], inverse, weight * heed.sqrt())
