"""Which of a group's channels go first: those that the ones left make up for best.

Each layer that reads a group computes y = W x from its inputs. Take out the channels S, and fit what is left of W
anew, as `repair` does. The squared error of y, each output in its own scale, is then

    sum over outputs of  w_S' (inverse(G)_SS)^-1 w_S / variance(y),    G = covariance(x), and some ridge.

Channels are taken out one by one, always those of the least error over all layers that read the group; the inverse
and W follow exactly. (Optimal brain surgeon, Hassibi & Stork 1993, on whole channels of layer-wise regressions; of
the kind of OSSCAR, Meng et al. 2024, section 3.) Sums of products are all that is kept of the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from smcp_fx.calibration.batches import Batch, entering
from smcp_fx.calibration.consumers import consumer_of
from smcp_fx.calibration.frontier import Frontier
from smcp_fx.calibration.layer_rows import Consumer
from smcp_fx.calibration.regression import WIDEST, Sums
from smcp_fx.passes.insert_soft_masks import masked_layers
from smcp_fx.prepare import full_graph
from smcp_fx.prepared import PreparedModel

#: Output positions that are taken at least, where there are as many, and as many times a layer's inputs.
_ROWS, _TIMES = 20_000, 8
#: Of the inputs' mean square, what is added to each.
_RIDGE = 1e-3
#: Of the channels still there, one in so many goes at a time, one at least.
_AT_ONCE = 32


@dataclass
class _Reader:
    """A layer that reads free channels; ``places`` [groups, inputs]: whose unit each column is, -1 for what stays."""

    consumer: Consumer
    places: Tensor
    sums: Sums


@dataclass
class _Part:
    """A layer's share in a group: for each unit of ``units`` [n] its ``columns`` [n, b] of the layer's inputs.

    ``inverse`` [groups, d, d] of the covariance, ``weight`` [groups, d, outputs], each output in its own scale.
    """

    units: Tensor
    columns: Tensor
    inverse: Tensor
    weight: Tensor

    def costs(self) -> Tensor:
        """The error that each unit alone would add, [n]."""
        rows = self.weight[:, self.columns]  # [groups, n, b, outputs]
        blocks = self.inverse[:, self.columns[:, :, None], self.columns[:, None, :]]
        single = self.columns.shape[1] == 1
        errors = rows.square() / blocks if single else rows * torch.linalg.solve(blocks, rows)
        return errors.sum((0, 2, 3))

    def remove(self, gone: Tensor) -> None:
        """Take units (bool [n]) out; the others make up for them."""
        out = self.columns[gone].flatten()
        if out.numel():
            away = self.inverse[:, :, out] @ torch.linalg.inv(self.inverse[:, out][:, :, out])
            left = torch.ones(self.weight.shape[1], dtype=torch.bool, device=out.device)
            left[out] = False
            weight = self.weight - away @ self.weight[:, out]
            inverse = self.inverse - away @ self.inverse[:, out]
            self.weight, self.inverse = weight[:, left], inverse[:, left][:, :, left]
            self.columns = (left.cumsum(0) - 1)[self.columns[~gone]]
        self.units = self.units[~gone]


class Elimination:
    """Gathers what layers read over batches; then says in which order channels go."""

    def __init__(self, prepared: PreparedModel, batches: int) -> None:
        self._state = prepared.smcp
        self.graph, self.whole = full_graph(prepared)
        self._joined = prepared.plan.joined
        self._batches = batches
        nodes = {node.name: node for node in self.graph.graph.nodes}
        self._readers: dict[fx.Node, _Reader] = {}
        for layer in masked_layers(prepared.channels):
            node = nodes.get(layer.node)
            consumer = None if node is None else consumer_of(self.graph, node)
            if consumer is None or node is None:
                continue
            inputs = consumer.matrix(consumer.weight).shape[1]
            places = self._state.places(layer.input_channels)
            if inputs > WIDEST or places.numel() % consumer.groups:
                continue
            places = places.reshape(consumer.groups, -1)
            if inputs % places.shape[1] or not bool((places == places[:1]).all()):
                continue
            self._readers[node] = _Reader(
                consumer, places[0].repeat_interleave(inputs // places.shape[1]), Sums()
            )

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
            wanted = max(_ROWS, _TIMES * reader.places.numel())
            chosen = torch.arange(positions)
            if positions > -(-wanted // self._batches):
                chosen = torch.randperm(positions, generator=generator)[: -(-wanted // self._batches)]
            for rows in reader.consumer.rows(x, y, chosen.to(y.device)):
                reader.sums.add(*rows)

    def order(self, group: str) -> Tensor | None:
        """The places of a group's units in the order they go, [size]; None where no layer tells."""
        places = torch.arange(self._state.keep.numel(), device=self._state.keep.device)
        mine = self._state.of_group(places, group)
        parts = [part for reader in self._readers.values() if (part := _part(reader, mine)) is not None]
        if not parts:
            return None
        alive, gone = torch.ones(mine.numel(), dtype=torch.bool), []
        while (left := int(alive.sum())) > 1:
            costs = torch.zeros(mine.numel(), dtype=torch.float64)
            for part in parts:
                costs.index_add_(0, part.units, part.costs().cpu())
            costs[~alive] = torch.inf
            worst = costs.sort(stable=True).indices[: max(1, left // _AT_ONCE)]
            alive[worst] = False
            gone.append(worst)
            for part in parts:
                part.remove(~alive[part.units])
        return torch.cat([*gone, alive.nonzero().flatten()])


def _part(reader: _Reader, mine: Tensor) -> _Part | None:
    """What the layer reads of the units at these places; None where that is nothing, or unevenly much of each."""
    places = reader.places.to(mine.device)
    first = int(mine[0])
    columns = ((places >= first) & (places < first + mine.numel())).nonzero().flatten()
    if not columns.numel() or not reader.sums.count:
        return None
    units, counts = torch.unique(places[columns] - first, return_counts=True)
    if int(counts.min()) != int(counts.max()):
        return None
    by_unit = columns[torch.argsort(places[columns], stable=True)].reshape(units.numel(), -1)
    covariance = reader.sums.centred()[0] / reader.sums.count
    weight = reader.consumer.matrix(reader.consumer.weight)
    spread = (weight * (covariance @ weight)).sum(1, keepdim=True)
    tiny = torch.finfo(torch.float64).tiny ** 0.5
    ridge = (_RIDGE * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)).clamp(min=tiny)
    loaded = covariance + ridge[:, None, None] * torch.eye(covariance.shape[-1]).to(covariance)
    weight = (
        weight / (spread + ridge[:, None, None] * weight.square().sum(1, keepdim=True)).clamp(min=tiny).sqrt()
    )
    return _Part(units.cpu(), by_unit, torch.linalg.inv(loaded), weight)
