"""The latency of one network at any counts: the sum of its blocks from a table, and the cache's effect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from smcp_fx.allocation.rounding import without_dominated
from smcp_fx.backends.base import BYTES, Backend, Fingerprint
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.blocks.sharing import Grids
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import CostTerm, NetworkCost, Price
from smcp_fx.costs.parameters import ParamsCost
from smcp_fx.costs.terms import without_branch
from smcp_fx.errors import MachineBusyError, TableError
from smcp_fx.latency.filling import MeasureReport
from smcp_fx.latency.progress import Watcher, row_watcher
from smcp_fx.latency.residency import OF_ACTIVATIONS, Residency, Whole
from smcp_fx.latency.surface import Surface
from smcp_fx.latency.table import LatencyTable
from smcp_fx.tracing.tracer import Traced

#: A smaller count is offered only if it saves this share of its blocks' latency, as rows are no more certain than
#: that (docs: experiments.md).
_LEAST_SAVING = 0.02
#: How uncertain unmeasured rows may leave the dense and the chosen networks' latencies, as a share of the
#: latency. Chosen: repeated measurements of a row differ by more.
SURE = 0.002
#: A longer run makes weights colder, which makes the run longer still. First-order prices are divided by one less
#: this feedback; the divisor is at least this, or prices would grow without bound. Chosen, not measured.
_LEAST_DAMPING = 0.25


@dataclass(frozen=True)
class Measurer:
    """Measures rows that a table lacks. ``progress``: as for `row_watcher`."""

    backend: Backend
    progress: bool | Watcher = True


@dataclass
class NetworkLatency:
    """The parts of a network's latency. `learn` measures missing rows, which makes the prices more certain.

    Only rows up to the last one asked for (``as_of``, seconds) count, so that a resumed run ignores rows that
    it measured later.

    ``blocks``: the network's blocks; ``report``: the measurements so far, None without any. ``hot`` and
    ``cold``: the sums over blocks with weights in cache and in memory, ms; ``weights`` and ``activations``:
    the bytes that a run reads and writes. ``run_ms``: a run's own cost outside its blocks. ``cold_share``:
    set by the user instead of computed from the footprint. ``measurer``: None if nothing may be measured.
    """

    table: LatencyTable = field(repr=False)
    fingerprint: Fingerprint
    residency: Residency
    blocks: tuple[FusedBlock, ...] = field(repr=False)
    channels: ChannelGraph = field(repr=False)
    weights: NetworkCost = field(repr=False)
    activations: NetworkCost = field(repr=False)
    run_ms: float
    cold_share: float | None
    measurer: Measurer | None = field(default=None, repr=False)
    report: MeasureReport | None = None
    as_of: float = 0.0
    hot: NetworkCost = field(init=False, repr=False)
    cold: NetworkCost = field(init=False, repr=False)
    _surfaces: dict[tuple[str, Grids], Surface] = field(init=False, repr=False)

    @classmethod
    def bind(
        cls,
        traced: Traced,
        channels: ChannelGraph,
        blocks: Sequence[FusedBlock],
        table: LatencyTable,
        fingerprint: Fingerprint,
        residency: Residency,
        measurer: Measurer | None = None,
    ) -> NetworkLatency:
        """Read the prices of a network's blocks from a table, after measuring the first rows that it lacks.

        `TableError` if it lacks some and there is no ``measurer``.
        """
        report = None
        if measurer is not None:
            with row_watcher(measurer.progress) as tell:
                report = table.measure(blocks, measurer.backend, tell, whole=False)
        parameters = list(traced.module.parameters())
        own_bytes = parameters[0].element_size() if parameters else 4
        bytes_each = BYTES.get(fingerprint.precision, own_bytes)
        latency = cls(
            table=table,
            fingerprint=fingerprint,
            residency=residency,
            blocks=tuple(blocks),
            channels=channels,
            weights=_in_bytes(ParamsCost().network_cost(traced, channels), bytes_each),
            activations=_bytes_written(blocks, channels, _permitted(channels), bytes_each / own_bytes),
            run_ms=table.run_overhead(fingerprint),
            cold_share=table.cold_share,
            measurer=measurer,
            report=report,
        )
        latency.as_of = table.latest(blocks, fingerprint)
        latency.read()
        latency.learn(latency.full_counts, SURE)
        return latency

    def price_as_of(self, as_of: float) -> bool:
        """Take the prices from the rows up to a time; return whether that was possible.

        If these rows do not suffice, the table is another or was measured anew; then all its rows count.
        """
        before, self.as_of = self.as_of, as_of
        try:
            if before != as_of:
                self.read()
        except TableError:
            self.as_of = self.table.latest(self.blocks, self.fingerprint)
            self.read()
        return self.as_of == as_of

    def read(self) -> None:
        """Compute the prices from the table's rows."""
        hot, cold = self.table.surfaces(self.blocks, self.fingerprint, 0.0, 1.0, as_of=self.as_of)
        permitted = _permitted(self.channels)
        self.hot, self.cold = (
            _sum_of_blocks(self.blocks, self.channels, permitted, surfaces) for surfaces in (hot, cold)
        )
        both = replace(self.hot, terms=(*self.hot.terms, *self.cold.terms))
        offered = dict(without_dominated(both, _LEAST_SAVING).permitted)
        self.hot, self.cold = replace(self.hot, permitted=offered), replace(self.cold, permitted=offered)
        self._surfaces = hot

    def learn(self, counts: Mapping[str, int], doubt: float) -> bool:
        """Measure the rows at these counts that the table lacks; return whether prices changed.

        Rows are not needed if the network's latency is known to within ``doubt`` (a share of it) without
        them; each block may contribute that share divided by the square root of the number of blocks. On a
        busy machine final choices (``doubt`` = `SURE`) raise `MachineBusyError`; others forgo the rows.
        """
        try:
            return self.measurer is not None and self.take(self.lacking(counts, doubt))
        except MachineBusyError:
            if doubt <= SURE:
                raise
            return False  # guesses are good enough for masks that will change again

    def take(self, rows: Sequence[tuple[FusedBlock, tuple[int, ...]]]) -> bool:
        """Measure these rows, or find them measured; return whether prices changed."""
        if self.measurer is None or not rows:
            return False
        with row_watcher(self.measurer.progress) as tell:
            report = self.table.learn(rows, self.blocks, self.measurer.backend, tell)
        self.report = report if self.report is None else report.after(self.report)
        blocks, points = zip(*rows, strict=True)
        before, latest = self.as_of, self.table.latest(blocks, self.fingerprint, points)
        self.as_of = max(before, latest)
        self.read()
        return self.as_of > before or report.measured + report.repeated > 0

    def lacking(self, counts: Mapping[str, int], doubt: float) -> list[tuple[FusedBlock, tuple[int, ...]]]:
        """Return the rows that make the latency at these counts too uncertain; see `learn`."""
        limit = doubt * self.latency(counts) / math.sqrt(len(self.blocks))
        wanted: dict[tuple[str, tuple[int, ...]], FusedBlock] = {}
        for block in self.blocks:
            point = tuple(width.channels(counts) for width in block.widths)
            if 0 in point:
                continue
            surface, at = self._surfaces[block.signature, block.grids], tuple(map(np.asarray, point))
            if float(surface.doubt(*at)) * float(surface(*at)) > limit:
                wanted[block.signature, point] = block
        failed = {
            block.signature: self.table.store.failures(block.signature, self.fingerprint, self.as_of)
            for block in wanted.values()
        }
        return [(block, at) for (_, at), block in wanted.items() if at not in failed[block.signature]]

    @property
    def full_counts(self) -> dict[str, int]:
        """Every group at its full size."""
        return self.hot.full_counts

    def latency(self, counts: Mapping[str, int]) -> float:
        """Return the predicted latency in ms at these counts."""
        whole = self.whole(counts)
        if self.cold_share is None:
            return self.residency.latency(whole.hot_ms, whole.cold_ms, whole.footprint, whole.run_ms)
        return whole.run_ms + whole.hot_ms + self.cold_share * (whole.cold_ms - whole.hot_ms)

    def share(self, counts: Mapping[str, int]) -> float:
        """Return the share of the network's weights that is taken to come from memory at these counts, in [0, 1]."""
        if self.cold_share is not None:
            return self.cold_share
        return self.residency.share(self.whole(counts).footprint, self.latency(counts))

    def by_block(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Return the predicted ms of each block with free widths, by its name."""
        share = self.share(counts)
        return {
            hot.name: (1 - share) * hot.cost(counts) + share * cold.cost(counts)
            for hot, cold in zip(self.hot.terms, self.cold.terms, strict=True)
        }

    def whole(self, counts: Mapping[str, int]) -> Whole:
        """Return the sums that the prediction at these counts is computed from."""
        return Whole(
            hot_ms=self.hot.cost(counts),
            cold_ms=self.cold.cost(counts),
            weight_bytes=self.weights.cost(counts),
            run_ms=self.run_ms,
            activation_bytes=self.activations.cost(counts),
        )

    def surfaces(self, cold_share: float) -> dict[tuple[str, Grids], Surface]:
        """Return the latencies of `blocks` as functions of their widths, by signature and grids."""
        return self.table.surfaces(self.blocks, self.fingerprint, cold_share, as_of=self.as_of)[0]

    def around(self, counts: Mapping[str, int]) -> NetworkCost:
        """Return the latency as a sum of terms: exact at these counts, to first order in the footprint near them.

        How many weights come from memory depends on the whole network, which a sum of terms cannot express. So an
        allocator uses this cost, and then uses it again around its choice.
        """
        whole = self.whole(counts)
        share, ms = self.share(counts), self.latency(counts)
        slope, damping = 0.0, 1.0
        if self.cold_share is None:
            # A cold row that is faster than the hot one is noise.
            of_cold = max(whole.cold_ms - whole.hot_ms, 0.0)
            slope, with_ms = (each * of_cold for each in self.residency.slopes(whole.footprint, ms))
            damping = max(1 - with_ms, _LEAST_DAMPING)
        blends: dict[object, Price] = {}
        terms = []
        for hot, cold in zip(self.hot.terms, self.cold.terms, strict=True):
            pair = id(hot.price), id(cold.price)
            if pair not in blends:
                blends[pair] = _blend(hot.price, cold.price, (1 - share) / damping, share / damping)
            terms.append(replace(hot, price=blends[pair]))
        if slope:
            for part, weight in ((self.weights, 1.0), (self.activations, OF_ACTIVATIONS)):
                price = slope * weight / damping
                terms += [
                    replace(term, name=f"{term.name} in memory", price=_scaled(term.price, price))
                    for term in part.terms
                ]
        constant = ms - sum(term.cost(counts) for term in terms)
        return NetworkCost("ms", self.hot.permitted, tuple(terms), constant, self)


def _sum_of_blocks(
    blocks: Sequence[FusedBlock],
    channels: ChannelGraph,
    permitted: Mapping[str, tuple[int, ...]],
    surfaces: Mapping[tuple[str, Grids], Surface],
) -> NetworkCost:
    """One term per block; blocks without free widths are in the constant."""
    terms, constant = [], 0.0
    prices: dict[object, Price] = {}  # equal blocks share a price, so that it is evaluated once
    fewest = {name: counts[0] for name, counts in permitted.items()}
    for block in blocks:
        empty = any(width.channels(fewest) == 0 for width in block.widths)
        least = tuple(grid[0] for grid in block.grids) if empty else ()
        alike = block.signature, block.grids, least
        if alike not in prices:
            price: Price = surfaces[block.signature, block.grids]
            prices[alike] = _nothing_is_free(price, least) if empty else price
        term = without_branch(channels, block.nodes, CostTerm(block.name, block.widths, prices[alike]))
        if term.widths:
            terms.append(term)
        else:
            constant += float(prices[alike]())
    return NetworkCost("ms", permitted, tuple(terms), constant)


def _bytes_written(
    blocks: Sequence[FusedBlock],
    channels: ChannelGraph,
    permitted: Mapping[str, tuple[int, ...]],
    smaller: float,
) -> NetworkCost:
    """The bytes of the blocks' results; ``smaller``: a number's size as a share of its size when traced."""
    terms, constant = [], 0.0
    for block in blocks:
        for width, size in block.written:
            term = CostTerm(f"{block.name} written", (width,), partial(np.multiply, smaller * size))
            term = without_branch(channels, block.nodes, term)
            if term.groups:
                terms.append(term)
            else:
                constant += term.cost({})
    return NetworkCost("bytes", permitted, tuple(terms), constant)


def _permitted(channels: ChannelGraph) -> dict[str, tuple[int, ...]]:
    return {group.name: group.permitted for group in channels.groups if group.free}


def _nothing_is_free(price: Price, least: tuple[int, ...]) -> Price:
    """Price a block without channels to read or write at 0; ``least``: the smallest widths with a price."""

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
