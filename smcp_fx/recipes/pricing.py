"""The cost that a recipe's target limits: the latency by a table, FLOPs or parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smcp_fx.backends import Backend, Fingerprint, get_backend
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable
from smcp_fx.recipes.recipe import Recipe
from smcp_fx.recipes.settings import RunSettings


def recipe_cost(recipe: Recipe, settings: RunSettings, ranks: int) -> str | LatencyCost:
    """Return a cost for `smcp_fx.prepare`: "flops", "params", or the latency of ``settings.table``.

    Missing rows of this device and runtime are measured, but only by a single process. Rows of another device
    are used as they are: a network is often trained on one device and deployed on another.

    Raises `InputError` for a latency without a table, `TableError` for a table that lacks rows.
    """
    if settings.cost != "latency":
        if settings.table is not None:
            raise InputError(f"--cost {settings.cost} needs no --table; leave one of them out")
        return settings.cost
    if settings.table is None:
        raise InputError(
            f"the target of recipe {recipe.name} is a latency, at batch {recipe.latency.batch}: give the table of "
            f"the device that the network is for (--table FILE). A dry run on that device measures one first: "
            f"smcp-train {recipe.name} --dry-run --table FILE --backend NAME. --cost flops prunes FLOPs instead, "
            "which is another experiment"
        )
    if ranks > 1 and not Path(settings.table).is_file():
        raise TableError(
            f"there is no latency table {settings.table}, and several ranks cannot measure one: run smcp-train "
            f"{recipe.name} --dry-run --table FILE first"
        )
    table = LatencyTable(settings.table)
    runtime = _runtime(settings)
    foreign = _foreign(table, runtime, settings.fingerprint)
    return LatencyCost(table, runtime, measure=ranks == 1, fingerprint=foreign)


def runtime_here(settings: RunSettings) -> Backend | None:
    """Return the runtime of ``settings.table`` if its rows are of this very device, else None."""
    if settings.table is None or settings.cost != "latency":
        return None
    runtime = _runtime(settings)
    foreign = _foreign(LatencyTable(settings.table), runtime, settings.fingerprint)
    return runtime if foreign is None else None


def _runtime(settings: RunSettings) -> Backend:
    options: dict[str, Any] = {"threads": settings.threads}
    if settings.backend_device is not None:
        options["device"] = settings.backend_device
    return get_backend(settings.backend, **options)


def _foreign(table: LatencyTable, runtime: Backend, key: str | None) -> Fingerprint | None:
    """Return the fingerprint of the rows to use as they are; None for rows of this device and runtime."""
    prints = table.fingerprints()
    here = runtime.fingerprint()
    if key is None:
        if not prints or here in prints:
            return None
        matching = prints
    else:
        matching = [one for one in prints if one.key().startswith(key)]
    if len(matching) == 1:
        return None if matching[0] == here else matching[0]
    listed = "; ".join(f"{one.key()}: {one.backend}, {one.describe()}" for one in prints)
    raise TableError(
        f"{table.path} holds no rows of {here.describe()}"
        + (f" and none under --fingerprint {key}" if key else "")
        + f"; it has {listed or 'none at all'}. Choose rows with --fingerprint KEY, or give another table"
    )
