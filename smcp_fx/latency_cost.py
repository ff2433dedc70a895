"""The latency of a network as a cost: its blocks, priced by a latency table."""

from __future__ import annotations

from collections.abc import Callable

from smcp_fx.backends.base import Backend
from smcp_fx.blocks import FusedBlock, cut
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import CostTerm, NetworkCost
from smcp_fx.latency_table import LatencyTable, MeasureReport, Progress
from smcp_fx.tracing import Traced


class LatencyCost:
    """Prices a network in ms on one backend, at the batch size of the example inputs it is prepared with.

    What the table lacks is measured first, unless ``measure`` is false, when it is a `TableError`.
    ``blocks`` and ``report`` are set once a network was bound.
    """

    def __init__(
        self,
        table: LatencyTable,
        backend: Backend,
        *,
        measure: bool = True,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.table = table
        self.backend = backend
        self.measure = measure
        self.progress = progress
        self.blocks: list[FusedBlock] = []
        self.report: MeasureReport | None = None

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Bind to a network: one term a block, the blocks without free widths in the constant."""
        self.blocks = cut(traced, channels)
        if self.measure:
            self.report = self.table.measure(self.blocks, self.backend, self.progress)
        fingerprint = self.backend.fingerprint()
        terms, constant = [], 0.0
        for block in self.blocks:
            price = self.table.price(block, fingerprint)
            if block.widths:
                terms.append(CostTerm(block.name, block.widths, price))
            else:
                constant += float(price())
        permitted = {group.name: group.permitted for group in channels.groups if group.free}
        return NetworkCost("ms", permitted, tuple(terms), constant)
