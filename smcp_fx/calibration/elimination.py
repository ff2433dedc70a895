"""Orders a group's channels for removal, with the cost: the channels that the others replace best go first.

Each layer that reads a group computes y = W x from its inputs. Remove the channels S, and refit the rest of
W, as `repair` does. The squared errors of y, weighted by output, then add up to

    sum over outputs of  h w_S' (inverse(G)_SS)^-1 w_S,    G = covariance(x), and some ridge.

Each step removes the channels of the least error over all layers that read the group, and updates the inverse
and W exactly. (Optimal brain surgeon, Hassibi & Stork 1993, on whole channels of layer-wise regressions;
similar to OSSCAR, Meng et al. 2024, section 3.) The weight h is half the sum, over an image, of the loss's
squared gradients by that output. Errors are then rises of the loss (to second order, positions taken as
independent, as in K-FAC, Martens & Grosse 2015) and comparable between groups. Without gradients, h is 1 /
variance(y), which orders channels but does not compare groups. Only sums of products of the data are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcp_fx.calibration.batches import Batch, require_finite_gradients, run_batch
from smcp_fx.calibration.layer_rows import rows_for, some_of
from smcp_fx.calibration.readers import Reader, Run, readers_of, watching
from smcp_fx.calibration.regression import Gram
from smcp_fx.prepare import trained_graph
from smcp_fx.prepared import PreparedModel

#: Added to each variance: at least this share of the inputs' mean variance, plus this many roundings of their
#: mean square. Chosen, not measured.
_RIDGE, _ROUNDINGS = 1e-3, 16
#: Number of larger ridges to try if that one is too small.
_TRIES = 12
#: Each step removes one in this many of the remaining channels, but at least one. Chosen, not measured.
_AT_ONCE = 32
#: Shares of a group's channels left at which its readers' fitted weights are recorded.
STOPS = (0.9, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Refit:
    """A group with ``count`` units left: by reader, the change of its weight [as the weight] and of its mean output.

    The fitted bias (or the batch norm behind) removes the change of the mean output, [outputs].
    """

    count: int
    changes: Mapping[Reader, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Order:
    """The units of a group in the order of removal, [n]; the rise of the loss by number kept, [n + 1].

    ``rises`` is None unless all layers that read the group, and their gradients, are known.
    """

    units: Tensor
    rises: NDArray[np.float64] | None
    refits: tuple[Refit, ...] = ()


@dataclass
class _Part:
    """A layer's share in a group: for each unit of ``units`` [n] its ``columns`` [n, b] of the layer's inputs.

    ``inverse`` [groups, d, d] of the covariance and ``weight`` [groups, d, outputs] are zero at removed
    units, and shrink once a quarter is removed. ``heed`` [groups, 1, outputs]: the weights of squared errors.
    """

    reader: Reader
    units: Tensor
    columns: Tensor
    inverse: Tensor
    weight: Tensor
    heed: Tensor

    def __post_init__(self) -> None:
        self._left = torch.ones(self.weight.shape[1], dtype=torch.bool, device=self.weight.device)
        self._at = torch.arange(self.weight.shape[1], device=self.weight.device)  # the original inputs

    def costs(self) -> Tensor:
        """Return the error that removing each unit alone would add, [n]."""
        rows = self.weight[:, self.columns]  # [groups, n, b, outputs]
        blocks = self.inverse[:, self.columns[:, :, None], self.columns[:, None, :]]
        single = self.columns.shape[1] == 1
        errors = rows.square() / blocks if single else rows * torch.linalg.solve(blocks, rows)
        return (errors * self.heed.unsqueeze(1)).sum((0, 2, 3))

    def remove(self, gone: Tensor) -> float:
        """Remove units (bool [n]), refit the others, and return the error added."""
        out, error = self.columns[gone].flatten(), 0.0
        self.units, self.columns = self.units[~gone], self.columns[~gone]
        if out.numel():
            rows, across = self.weight[:, out], self.inverse[:, out]
            block = across[:, :, out]
            fitted = torch.linalg.solve(block, rows)
            error = float((rows * fitted * self.heed).sum())
            self.weight.baddbmm_(across.mT, fitted, alpha=-1)
            self.inverse.baddbmm_(across.mT, torch.linalg.solve(block, across), alpha=-1)
            self._left[out] = False
            if 4 * int(self._left.sum()) < 3 * self._left.numel():
                self._compact()
        return error

    def change(self) -> tuple[Tensor, Tensor]:
        """Return the change of the weight, in the weight's shape, and of the mean output, [outputs]."""
        consumer, gram = self.reader.consumer, self.reader.gram
        matrix = -consumer.matrix(consumer.weight)
        matrix[:, self._at[self._left]] += self.weight[:, self._left]
        offset = (gram.x.to(matrix).unsqueeze(1) / gram.count) @ matrix
        return consumer.unmatrix(matrix), offset.flatten().to(consumer.weight)

    def _compact(self) -> None:
        left = self._left
        self.weight, self.inverse = self.weight[:, left], self.inverse[:, left][:, :, left]
        self.columns = (left.cumsum(0) - 1)[self.columns]
        self._at, self._left = self._at[left], left[left]


class Elimination:
    """Gathers the inputs of layers over batches, then orders channels by how dispensable they are.

    ``whole``: a copy of the network as last trained, with every unit. ``batches``: the number to come.
    """

    def __init__(self, prepared: PreparedModel, batches: int) -> None:
        self._state = prepared.smcp
        graph, self.whole = trained_graph(prepared)
        self.batches = batches
        self._images = 0
        self.readers, self.unread = readers_of(prepared, graph)

    def add(
        self, batch: Batch, loss: Callable[[Any], Tensor] | None = None, used: Tensor | None = None
    ) -> None:
        """Run the whole model on a batch and gather inputs; with a ``loss`` of outputs, also its gradients.

        ``used`` [images] bool: the images whose inputs count, in layers that keep them apart; all by default.
        """
        generator = torch.Generator().manual_seed(batch.number)
        gradients: dict[Reader, list[Tensor]] = {}

        def see(run: Run) -> Tensor | None:
            self._take(run, generator, used)
            if loss is None:
                return None
            y = run.y if run.y.requires_grad else run.y + torch.zeros_like(run.y, requires_grad=True)
            y.register_hook(gradients.setdefault(run.reader, []).append)  # type: ignore[no-untyped-call]
            return y

        with watching(self.whole, self.readers, see), torch.set_grad_enabled(loss is not None):
            outputs = run_batch(self.whole, batch)
        if loss is None or not gradients:
            return
        value = loss(outputs)
        for mine in gradients.values():
            mine.clear()  # drop gradients that the loss itself computed
        value.backward()  # type: ignore[no-untyped-call]
        for reader, mine in gradients.items():
            # No gradients arrive if the loss does not depend on the layer, which belongs to another head.
            none = torch.zeros_like(reader.consumer.matrix(reader.consumer.weight)[:, 0])
            total = sum((reader.consumer.squares(g) for g in mine), none) * batch.images**2
            reader.squares = total if reader.squares is None else reader.squares + total
        require_finite_gradients(
            batch, [reader.squares for reader in gradients if reader.squares is not None]
        )
        self._images += batch.images

    @torch.no_grad()
    def _take(self, run: Run, generator: torch.Generator, used: Tensor | None) -> None:
        reader = run.reader
        images, positions = reader.consumer.positions(run.y)
        wanted = rows_for(reader.places.numel())
        mine = torch.arange(images)
        if used is not None and images % used.numel() == 0:  # the first dimension keeps images apart
            mine = used.repeat_interleave(images // used.numel()).nonzero().flatten()
        chosen = some_of(positions, -(-wanted // (self.batches * mine.numel())), generator)
        for inputs, _ in reader.consumer.rows(run.x.detach(), run.y.detach(), mine, chosen):
            reader.gram.add(inputs)

    @torch.no_grad()
    def order(self, group: str) -> Order | None:
        """Return a group's order of removal; None if no reader with gathered inputs reads it evenly."""
        places = torch.arange(self._state.keep.numel(), device=self._state.keep.device)
        mine = self._state.of_group(places, group)
        readers = [reader for reader in self.readers if _columns(reader, mine) is not None]
        measured = all(reader.squares is not None for reader in readers) and self.unknown(group) is None
        parts = [_part(reader, mine, self._images if measured else 0) for reader in readers]
        if not parts:
            return None
        alive, gone = torch.ones(mine.numel(), dtype=torch.bool), list[Tensor]()
        size, counts, rises, refits = alive.numel(), [alive.numel()], [0.0], list[Refit]()
        stops = [max(1, round(share * counts[0])) for share in STOPS]
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
            if measured and stops and counts[-1] <= stops[0]:
                stops = [stop for stop in stops if stop < counts[-1]]
                refits.append(Refit(counts[-1], {part.reader: part.change() for part in parts}))
        curve = np.interp(np.arange(counts[0] + 1), counts[::-1], rises[::-1])
        return Order(torch.cat(gone), curve if measured else None, tuple(refits))

    def forget(self) -> None:
        """Free the gathered sums, which are large."""
        for reader in self.readers:
            reader.gram = Gram()

    def unknown(self, group: str) -> str | None:
        """Return the node of a layer that reads the group and has no gathered sums; None if there is none."""
        places = torch.arange(self._state.keep.numel(), device=self._state.keep.device)
        mine = self._state.of_group(places, group).tolist()
        return next((self.unread[unit] for unit in mine if unit in self.unread), None)


def _columns(reader: Reader, mine: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the units at these places that the layer reads [n], and their columns [n, b]; None if none or uneven."""
    if not reader.gram.count:
        return None
    places, first = reader.places.to(mine.device), int(mine[0])
    columns = ((places >= first) & (places < first + mine.numel())).nonzero().flatten()
    units, counts = torch.unique(places[columns] - first, return_counts=True)
    if not units.numel() or int(counts.min()) != int(counts.max()):
        return None
    return units, columns[torch.argsort(places[columns], stable=True)].reshape(units.numel(), -1)


def _part(reader: Reader, mine: Tensor, images: int) -> _Part:
    """Return the layer's share in a group; ``images``: number with gradients, 0 if gradients are unknown."""
    columns = _columns(reader, mine)
    assert columns is not None
    covariance = reader.gram.covariance()
    weight = reader.consumer.matrix(reader.consumer.weight)
    tiny = torch.finfo(torch.float64).tiny ** 0.5
    spread = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
    square = reader.gram.xx.diagonal(dim1=-2, dim2=-1).mean(-1) / reader.gram.count
    rounding = _ROUNDINGS * torch.finfo(reader.consumer.weight.dtype).eps * square
    share = _shrinkage(covariance, reader.gram.count).clamp(min=_RIDGE)
    ridge = (share * spread.clamp(min=0) + rounding).clamp(min=tiny)[:, None, None]
    if images and reader.squares is not None:
        heed = 0.5 / images * reader.squares.unsqueeze(1)
    else:
        variance = (weight * (covariance @ weight)).sum(1, keepdim=True)
        heed = 1 / (variance + ridge * weight.square().sum(1, keepdim=True)).clamp(min=tiny)
    covariance.diagonal(dim1=-2, dim2=-1).add_(ridge[..., 0])
    return _Part(reader, columns[0].cpu(), columns[1], _inverse(covariance, rounding), weight, heed)


def _inverse(covariance: Tensor, rounding: Tensor) -> Tensor:
    """Return the inverse; add larger ridges, [groups], if products were rounded more than estimated."""
    for _ in range(_TRIES):
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if not bool(failed.any()):
            return torch.cholesky_inverse(factor)
        rounding = 4 * rounding
        covariance = covariance + torch.diag_embed(rounding[:, None].expand(covariance.shape[:-1]))
    return torch.cholesky_inverse(torch.linalg.cholesky(covariance))


def _shrinkage(covariance: Tensor, rows: int) -> Tensor:
    """Return the ridge for this many rows, as a share of the mean variance, [groups].

    (Oracle approximating shrinkage: Chen et al. 2010, "Shrinkage algorithms for MMSE covariance estimation", eq. 23,
    for many inputs.)
    """
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).square()
    square = covariance.square().sum((-2, -1))
    away = (rows + 1) * (square - trace / covariance.shape[-1])
    share = ((square + trace) / away.clamp(min=torch.finfo(covariance.dtype).tiny)).clamp(max=0.5)
    return share / (1 - share)
