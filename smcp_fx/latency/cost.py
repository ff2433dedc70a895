"""Latency as a cost: a table and a runtime, which can be bound to any number of networks."""

from __future__ import annotations

from smcp_fx.backends.base import Backend, Fingerprint
from smcp_fx.blocks.cutting import cut
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InputError
from smcp_fx.latency.network import Measurer, NetworkLatency
from smcp_fx.latency.progress import Watcher
from smcp_fx.latency.residency import Residency
from smcp_fx.latency.table import LatencyTable
from smcp_fx.tracing.tracer import Traced


class LatencyCost:
    """Prices networks in ms on one backend, at the batch size of the example inputs they are prepared with.

    Args:
        table: the rows that prices are computed from.
        backend: the runtime that measures them.
        measure: measure rows that the table lacks: a few per block when a network is prepared, and later
            those behind the chosen networks' prices. Each row is kept as soon as it is measured. If false,
            nothing is measured, and a table that lacks the first rows raises `TableError`.
        progress: True shows a bar while rows are measured (a line each minute if standard error is not a terminal),
            False shows nothing; or a function that is called with a `MeasuringProgress` after every row.
        fingerprint: use rows of another device or runtime as they are, and measure nothing.
        residency: how the hot and cold states of rows are weighted; by default from the size of this machine's cache,
            or by the table's ``cold_share`` if that is set.

    Raises `InputError` for a table or backend of another type. Binding a network does not change it: each `prepare`
    makes a `NetworkLatency` of its own.
    """

    def __init__(
        self,
        table: LatencyTable,
        backend: Backend,
        *,
        measure: bool = True,
        progress: bool | Watcher = True,
        fingerprint: Fingerprint | None = None,
        residency: Residency | None = None,
    ) -> None:
        if not isinstance(table, LatencyTable):
            raise InputError(
                f"table must be a LatencyTable, as LatencyTable({str(table)!r}) opens it; not {table!r}"
            )
        if not hasattr(backend, "fingerprint"):
            raise InputError(
                f"backend must be a backend, as get_backend('onnxruntime') gives it; not {backend!r}"
            )
        self.table = table
        self.backend = backend
        self.measure = measure and fingerprint is None
        self.progress = progress
        self.fingerprint = fingerprint or backend.fingerprint()
        self.residency = residency or Residency.of_cache(backend.cache_bytes(), backend.fading_half_ms())

    @property
    def foreign(self) -> bool:
        """Whether the rows are another device's or runtime's, so that nothing measured here can confirm them."""
        return self.fingerprint != self.backend.fingerprint()

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Measure a network's first rows, and return its cost around its full size."""
        blocks = cut(traced, channels)
        measurer = Measurer(self.backend, self.progress) if self.measure else None
        latency = NetworkLatency.bind(
            traced, channels, blocks, self.table, self.fingerprint, self.residency, measurer
        )
        return latency.around(latency.full_counts)


def latency_of(cost: NetworkCost) -> NetworkLatency | None:
    """Return the latency behind a bound cost (``prepared.pruner.cost``); None if the cost is not a latency."""
    return cost.source if isinstance(cost.source, NetworkLatency) else None
