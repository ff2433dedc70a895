"""The latency of a network as a cost: its blocks, priced by a latency table, in the cache's presence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from smcp_fx.allocation.rounding import without_dominated
from smcp_fx.backends.base import Backend, Fingerprint
from smcp_fx.blocks.cutting import FusedBlock, cut
from smcp_fx.blocks.sharing import Block, Grids, priced_as
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import CostTerm, NetworkCost, Price, Width
from smcp_fx.costs.parameters import ParamsCost
from smcp_fx.costs.terms import without_branch
from smcp_fx.errors import InputError
from smcp_fx.latency.filling import MeasureReport, MeasuringProgress
from smcp_fx.latency.residency import OF_ACTIVATIONS, Residency, Whole, calibrate
from smcp_fx.latency.surface import Surface
from smcp_fx.latency.table import LatencyTable
from smcp_fx.tracing.tracer import Traced

#: Counts that save less than this of their blocks are not offered: rows are no surer.
_LEAST_SAVING = 0.02
#: Where what takes longer gets colder by nearly as much, a first order says too much.
_LEAST_DAMPING = 0.25


@dataclass(frozen=True)
class _States:
    """What a bound network's latency is made of: both states in ms, and the footprint in bytes."""

    hot: NetworkCost
    cold: NetworkCost
    weights: NetworkCost
    activations: NetworkCost


class LatencyCost:
    """Prices a network in ms on one backend, at the batch size of the example inputs it is prepared with.

    What the table lacks is measured first, unless ``measure`` is false, when it is a `TableError`.
    ``fingerprint``: use rows of another device or runtime as they are, and measure nothing. ``residency`` says
    how rows' hot and cold states are weighed; by default from the size of this machine's cache, or by the
    table's ``cold_share`` where that is set. ``blocks`` and ``report`` are set once a network was bound.
    """

    def __init__(
        self,
        table: LatencyTable,
        backend: Backend,
        *,
        measure: bool = True,
        progress: Callable[[MeasuringProgress], None] | None = None,
        fingerprint: Fingerprint | None = None,
        residency: Residency | None = None,
    ) -> None:
        self.table = table
        self.backend = backend
        self.measure = measure and fingerprint is None
        self.progress = progress
        self.fingerprint = fingerprint or backend.fingerprint()
        self.residency = residency or Residency.of_cache(backend.cache_bytes(), backend.fading_half_ms())
        self.blocks: list[FusedBlock] = []
        self.report: MeasureReport | None = None
        self._priced_as: dict[tuple[str, Grids], Block] = {}
        self._channels: ChannelGraph | None = None
        self._states: _States | None = None

    @property
    def foreign(self) -> bool:
        """Are the rows another device's or runtime's, so that nothing measured here says how true they are?"""
        return self.fingerprint != self.backend.fingerprint()

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Bind to a network: one term a block, the blocks without free widths in the constant.

        Weighed for the whole network; see `around`.
        """
        self.blocks, self._channels = cut(traced, channels), channels
        self._priced_as = priced_as(self.blocks)
        if self.measure:
            self.report = self.table.measure(self.blocks, self.backend, self.progress)
        permitted = {group.name: group.permitted for group in channels.groups if group.free}
        hot, cold = (self._state(share, permitted) for share in (0.0, 1.0))
        parameters = list(traced.module.parameters())
        size = parameters[0].element_size() if parameters else 4
        weights = _in_bytes(ParamsCost().network_cost(traced, channels), size)
        activations = self._activations(permitted)
        both = replace(hot, terms=(*hot.terms, *cold.terms))
        permitted = dict(without_dominated(both, _LEAST_SAVING).permitted)
        hot, cold = replace(hot, permitted=permitted), replace(cold, permitted=permitted)
        self._states = _States(hot, cold, weights, activations)
        return self.around(hot.full_counts)

    @property
    def full_counts(self) -> dict[str, int]:
        """Every group of the bound network at its full size."""
        return self._bound().hot.full_counts

    def latency(self, counts: Mapping[str, int]) -> float:
        """Return the predicted latency in ms at these counts."""
        whole = self.whole(counts)
        if self.table.cold_share is None:
            return self.residency.latency(whole.hot_ms, whole.cold_ms, whole.footprint, whole.run_ms)
        of_cold = self.table.cold_share * (whole.cold_ms - whole.hot_ms)
        return self.residency.scale * (whole.run_ms + whole.hot_ms + of_cold)

    def share(self, counts: Mapping[str, int]) -> float:
        """Return how cold the network's weights are taken to be at these counts."""
        if self.table.cold_share is not None:
            return self.table.cold_share
        return self.residency.share(self.whole(counts).footprint, self.latency(counts))

    def by_block(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Return what each block with free widths is predicted to take, in ms, by its name."""
        bound, share = self._bound(), self.share(counts)
        return {
            hot.name: self.residency.scale * ((1 - share) * hot.cost(counts) + share * cold.cost(counts))
            for hot, cold in zip(bound.hot.terms, bound.cold.terms, strict=True)
        }

    def whole(self, counts: Mapping[str, int], measured_ms: float = 0.0) -> Whole:
        """Return what the prediction at these counts is made of, beside what was measured."""
        bound, run_ms = self._bound(), self.table.run_overhead(self.fingerprint)
        return Whole(
            hot_ms=bound.hot.cost(counts),
            cold_ms=bound.cold.cost(counts),
            weight_bytes=bound.weights.cost(counts),
            run_ms=run_ms,
            measured_ms=measured_ms,
            activation_bytes=bound.activations.cost(counts),
        )

    def calibrate(self, measured: Sequence[tuple[Mapping[str, int], float]]) -> Residency:
        """Set and return the residency that fits whole networks: pairs of counts and measured ms."""
        self.residency = calibrate([self.whole(counts, ms) for counts, ms in measured], self.residency)
        return self.residency

    def surface(self, block: FusedBlock, cold_share: float) -> Surface:
        """Return the latency of one of the network's ``blocks``, which another's rows may give."""
        home = self._priced_as[block.signature, block.grids]
        return self.table.surface(home, self.fingerprint, cold_share)

    def around(self, counts: Mapping[str, int]) -> NetworkCost:
        """Return the latency as a sum of terms: exact at these counts, to first order in the footprint near them.

        The share of weights that come from memory follows from the whole network, which no sum of terms can
        say. So an allocator takes this cost, and takes it again around what it chose.
        """
        bound = self._bound()
        hot, cold = bound.hot, bound.cold
        whole, residency = self.whole(counts), self.residency
        share, ms = self.share(counts), self.latency(counts)
        slope, scale = 0.0, residency.scale
        if self.table.cold_share is None:
            of_cold = max(
                whole.cold_ms - whole.hot_ms, 0.0
            )  # cold rows that measured faster than hot ones are noise
            with_bytes, with_ms = (each * of_cold for each in residency.slopes(whole.footprint, ms))
            slope = with_bytes + residency.beside_slope(whole.footprint)
            # What takes longer is colder, which takes longer.
            scale /= max(1 - scale * with_ms, _LEAST_DAMPING)
        blends: dict[object, Price] = {}
        terms = []
        for a, b in zip(hot.terms, cold.terms, strict=True):
            pair = id(a.price), id(b.price)
            if pair not in blends:
                blends[pair] = _blend(a.price, b.price, scale * (1 - share), scale * share)
            terms.append(replace(a, price=blends[pair]))
        if slope:
            for part, weight in ((bound.weights, 1.0), (bound.activations, OF_ACTIVATIONS)):
                terms += [
                    replace(t, name=f"{t.name} in memory", price=_scaled(t.price, scale * slope * weight))
                    for t in part.terms
                ]
        constant = ms - sum(term.cost(counts) for term in terms)
        return NetworkCost("ms", hot.permitted, tuple(terms), constant, self.around)

    def _activations(self, permitted: Mapping[str, tuple[int, ...]]) -> NetworkCost:
        """The bytes that the blocks write."""
        terms, constant = [], 0.0
        for block in self.blocks:
            for width, size in block.written:
                term = CostTerm(f"{block.name} written", (width,), partial(np.multiply, size))
                if self._channels is not None:
                    term = without_branch(self._channels, block.nodes, term)
                if term.groups:
                    terms.append(term)
                else:
                    constant += term.cost({})
        return NetworkCost("bytes", permitted, tuple(terms), constant)

    def _state(self, share: float, permitted: Mapping[str, tuple[int, ...]]) -> NetworkCost:
        terms, constant = [], 0.0
        prices: dict[object, Price] = {}  # blocks that are alike share theirs, so that it is evaluated once
        for block in self.blocks:
            empty = any(_least(width, permitted) == 0 for width in block.widths)
            least = tuple(grid[0] for grid in block.grids) if empty else ()
            alike = block.signature, block.grids, least
            if alike not in prices:
                price: Price = self.surface(block, share)
                prices[alike] = _nothing_is_free(price, least) if empty else price
            price = prices[alike]
            term = CostTerm(block.name, block.widths, price)
            if self._channels is not None:
                term = without_branch(self._channels, block.nodes, term)
            if term.widths:
                terms.append(term)
            else:
                constant += float(price())
        return NetworkCost("ms", permitted, tuple(terms), constant)

    def _bound(self) -> _States:
        if self._states is None:
            raise InputError("this latency cost belongs to no network yet: prepare one with it")
        return self._states


def _least(width: Width, permitted: Mapping[str, tuple[int, ...]]) -> int:
    return width.constant + sum(per_unit * permitted[group][0] for group, per_unit in width.groups)


def _nothing_is_free(price: Price, least: tuple[int, ...]) -> Price:
    """Nothing where a block has no channel to read or to write; ``least``: the smallest widths that have a price."""

    def priced(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        present = np.logical_and.reduce([width > 0 for width in np.broadcast_arrays(*widths)])
        inside = [np.maximum(width, low) for width, low in zip(widths, least, strict=True)]
        return np.where(present, price(*inside), 0.0)

    return priced


def _in_bytes(parameters: NetworkCost, size: int) -> NetworkCost:
    terms = tuple(replace(term, price=_scaled(term.price, size)) for term in parameters.terms)
    return replace(parameters, unit="bytes", terms=terms, constant=size * parameters.constant)


def _scaled(price: Price, factor: float) -> Price:
    def scaled(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        return factor * price(*widths)

    return scaled


def _blend(hot: Price, cold: Price, of_hot: float, of_cold: float) -> Price:
    def blended(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        return of_hot * hot(*widths) + of_cold * cold(*widths)

    return blended
