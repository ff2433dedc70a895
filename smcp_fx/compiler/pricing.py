"""The target of the compile command: its cost, the table behind it, and the fraction of the dense cost."""

from __future__ import annotations

from pathlib import Path

from smcp_fx.backends import Backend, Engine, Fingerprint
from smcp_fx.compiler.measuring import measured_as_predicted
from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.compiler.telling import Teller
from smcp_fx.costs.binding import absolute_target
from smcp_fx.errors import TableError
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.exchange import differences
from smcp_fx.latency.table import LatencyTable
from smcp_fx.prepared import PreparedModel


def chosen_cost(settings: CompileSettings, base: Path, backend: Backend, tell: Teller) -> str | LatencyCost:
    """Return the cost's name, or the latency table's cost; ``base``: the start of relative paths.

    Raises `TableError` for a damaged table, and for a table of another device or runtime that is not allowed.
    """
    if settings.cost != "latency":
        return settings.cost
    default = settings.folder.parent / "table.sqlite"
    table = LatencyTable(base / settings.table if settings.table else default)
    foreign = None
    if settings.table:
        foreign = _foreign(table, backend.fingerprint(), settings.allow_fingerprint, tell)
    return LatencyCost(table, backend, fingerprint=foreign, progress=tell.measuring)


def _foreign(table: LatencyTable, here: Fingerprint, allowed: bool, tell: Teller) -> Fingerprint | None:
    """Return the fingerprint of rows of another device or runtime, if allowed; None for this one's rows."""
    others = table.fingerprints()
    if not others or here in others:
        return None
    listed = "; ".join(f"{other.describe()} ({differences(other, here)})" for other in others)
    if not allowed:
        raise TableError(
            f"{table.path} holds no rows of {here.describe()}, only of: {listed}. Measure into another file, fill "
            "this one with smcp-table measure, or use its rows as they are with --allow-fingerprint"
        )
    if len(others) > 1:
        raise TableError(
            f"{table.path} holds rows of {len(others)} fingerprints, none of this device ({listed}); "
            "--allow-fingerprint needs a table of one: smcp-table merge --fingerprint KEY makes it"
        )
    tell.note(
        f"latencies predicted by rows of another fingerprint, as allowed: {others[0].describe()}, not "
        f"{here.describe()} ({differences(others[0], here)}); the target is that device's, so that nothing "
        "measured here corrects it: measure the files there"
    )
    return others[0]


def dense_latency(prepared: PreparedModel, dense: Engine, cost: str | LatencyCost) -> float:
    """Return the dense network's latency in ms on the target's device: measured, or from a foreign table."""
    if not isinstance(cost, LatencyCost):
        return dense.latency().median_ms
    if cost.foreign:
        return prepared.pruner.full_cost
    return measured_as_predicted(dense, prepared.pruner.full_cost, cost.table.path)


def asked_fraction(prepared: PreparedModel, wanted: float | str, dense_ms: float) -> float:
    """Return the target as a fraction of the dense cost, 1 at most; sets the pruner's for absolute latencies.

    ``dense_ms``: the dense network's latency on the device that the target is for.
    """
    pruner = prepared.pruner
    if isinstance(wanted, str) and pruner.cost.unit == "ms":
        fraction = absolute_target(wanted, dense_ms, "ms") / dense_ms
        pruner.target = fraction * pruner.full_cost
    return min(pruner.target / pruner.full_cost, 1.0)
