"""The plan of a run: masks, rates and targets by epoch, the channel groups, and the expected result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from smcp_fx.allocation import allocate
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.rounds import measure_for_targets
from smcp_fx.prepared import PreparedModel
from smcp_fx.pruning.pruner import Pruner
from smcp_fx.recipes.recipe import Recipe
from smcp_fx.recipes.timeline import Timeline
from smcp_fx.report.formats import count, percent
from smcp_fx.texts import amount

#: Most epochs listed one by one; for longer runs, a regular selection and the epochs where a phase begins.
_LINES = 100
#: Number of targets along the ramp with a forecast. Chosen, not measured.
_EXPECTED = 6


@dataclass(frozen=True)
class Expected:
    """The forecast for one target: ``share`` of the channels kept, and the costs."""

    target: float
    share: float
    flops: float
    cost: float


def expected(prepared: PreparedModel, targets: list[float]) -> list[Expected]:
    """Allocate for each target (in the pruner's unit) as if importances fell evenly to 0 within every group.

    Targets out of reach are left out.
    """
    cost, flops = prepared.pruner.cost, prepared.plan.flops
    values = {}
    for name, permitted in cost.permitted.items():
        kept = np.asarray(permitted, dtype=np.float64)
        values[name] = kept - kept**2 / (2 * permitted[-1])
    units = sum(counts[-1] for counts in cost.permitted.values())
    steps = []
    for target in targets:
        try:
            counts = allocate(values, cost, target).counts
        except InfeasibleBudgetError:
            continue
        share = sum(counts.values()) / units
        steps.append(Expected(target, share, flops.cost(counts), cost.cost(counts)))
    return steps


def phase(timeline: Timeline, step: int) -> str:
    """Return the pruning phase of an optimiser step."""
    schedule = timeline.schedule
    if step < schedule.first_step:
        return "warm-up"
    if step < schedule.ramp_end:
        return "ramp"
    return "refinement" if step < schedule.last_step else "cooldown, masks fixed"


def listed_epochs(timeline: Timeline) -> Iterator[int]:
    """Return the epochs (from 0) that a plan lists: all, or a regular selection and the starts of phases."""
    schedule = timeline.schedule
    epochs = math.ceil(schedule.epochs)
    stride = -(-epochs // _LINES)
    begins = {
        step // schedule.steps_per_epoch
        for step in (0, schedule.first_step, schedule.ramp_end, schedule.last_step, schedule.total_steps - 1)
    }
    begins |= {int(epoch * timeline.fraction) for epoch, _ in timeline.recipe.training.rate_steps}
    return (epoch for epoch in range(epochs) if epoch % stride == 0 or epoch in begins)


def _say(console: Console, content: RenderableType) -> None:
    """Print names as they are, not as markup."""
    console.print(content, markup=False)


def print_dense_plan(timeline: Timeline, console: Console) -> None:
    """Print the training plan of the unpruned network."""
    _print_run(timeline, console)
    _say(console, "The unpruned network is trained: no masks, no targets.")
    lines = _table("epoch", "learning rate")
    for epoch in listed_epochs(timeline):
        step = epoch * timeline.schedule.steps_per_epoch
        lines.add_row(str(epoch + 1), f"{timeline.rate(step):.3g}")
    _say(console, lines)


def print_plan(
    prepared: PreparedModel, timeline: Timeline, cost: str | LatencyCost, console: Console
) -> None:
    """Print the whole plan of a pruning run; `InfeasibleBudgetError` if its target is out of reach."""
    pruner, schedule = prepared.pruner, timeline.schedule
    priced = latency_of(pruner.cost)
    if priced is not None:  # elsewhere, nothing can measure missing rows
        measure_for_targets(priced, (pruner.target / pruner.full_cost,))
    unit, full, final = pruner.cost.unit, pruner.full_cost, pruner.target
    _print_run(timeline, console)
    _say(
        console,
        f"Pruning      warm-up to step {schedule.first_step}, ramp to {schedule.ramp_end}, refinement to "
        f"{schedule.last_step}, cooldown to {schedule.total_steps}; every {schedule.every} steps, "
        f"{timeline.solves} solves",
    )
    where = (
        f", {cost.fingerprint.describe()}, table {cost.table.path}" if isinstance(cost, LatencyCost) else ""
    )
    batch = f" at batch {timeline.recipe.latency.batch}" if isinstance(cost, LatencyCost) else ""
    _say(console, f"Cost         {_cost(full, unit)} unpruned{batch}{where}")
    _say(
        console,
        f"Target       {percent(timeline.recipe.pruning.target, trim=True)} of it: {_cost(final, unit)}",
    )
    _print_groups(prepared, console)
    _print_epochs(timeline, pruner, console)
    _print_forecast(prepared, timeline, console)


def _print_groups(prepared: PreparedModel, console: Console) -> None:
    channels = prepared.channels
    free = [group for group in channels.groups if group.free]
    _say(
        console,
        f"Groups       {len(channels.groups)}, {len(free)} of them free: {percent(channels.free_share)} of the input "
        "channels\n",
    )
    groups = _table("group", "channels", "permitted counts")
    for group in channels.groups:
        counts = group.permitted
        shown = (
            f"{counts[0]} to {counts[-1]}, {len(counts)} of them"
            if group.free
            else f"stays: {group.pinned[0]}"
        )
        groups.add_row(group.name, str(group.size), shown)
    _say(console, groups)


def _print_epochs(timeline: Timeline, pruner: Pruner, console: Console) -> None:
    schedule, unit, full = timeline.schedule, pruner.cost.unit, pruner.full_cost
    lines = _table("epoch", "masks", "learning rate", "target", "", "solves")
    for epoch in listed_epochs(timeline):
        start = epoch * schedule.steps_per_epoch
        end = min(start + schedule.steps_per_epoch, schedule.total_steps)
        aim = schedule.target(end, full, pruner.target)
        solves = timeline.solves_until(end) - timeline.solves_until(start)
        lines.add_row(
            str(epoch + 1), phase(timeline, start), f"{timeline.rate(start):.3g}", percent(aim / full),
            _cost(aim, unit), str(solves),
        )  # fmt: skip
    _say(console, lines)


def _print_forecast(prepared: PreparedModel, timeline: Timeline, console: Console) -> None:
    pruner, schedule = prepared.pruner, timeline.schedule
    unit, full = pruner.cost.unit, pruner.full_cost
    _say(
        console,
        "What the targets mean if importances fall evenly to 0 in every group (an example; the widths of a run "
        "follow its importances):",
    )
    steps = np.linspace(schedule.first_step, schedule.ramp_end, _EXPECTED)
    ways = list(dict.fromkeys(schedule.target(round(step), full, pruner.target) for step in steps))
    latency = unit == "ms"
    rows = expected(prepared, ways)
    if not rows or rows[-1].target != ways[-1]:
        pruner.check_target()  # raises, with the reason
    forecast = _table("target", "channels kept", "FLOPs", *(["latency"] if latency else []))
    for line in rows:
        forecast.add_row(
            percent(line.target / full), percent(line.share), count(line.flops),
            *([_cost(line.cost, unit)] if latency else []),
        )  # fmt: skip
    _say(console, forecast)
    if not latency:
        _say(console, "Latencies: give --table FILE to see them here.")


def _print_run(timeline: Timeline, console: Console) -> None:
    recipe, schedule = timeline.recipe, timeline.schedule
    training = recipe.training
    scale = f", {timeline.fraction:g} of the recipe's epochs" if timeline.fraction < 1 else ""
    _say(console, f"Recipe       {recipe.name}" + (f", for the paper's {recipe.row}" if recipe.row else ""))
    _say(console, f"Network      {recipe.network} at {recipe.size} x {recipe.size}")
    _say(
        console,
        f"Batch        {training.batch} on each of {timeline.ranks} rank{'s' * (timeline.ranks > 1)}, "
        f"{timeline.total_batch} in all",
    )
    _say(
        console,
        f"Steps        {schedule.total_steps}: {schedule.epochs:g} epochs of {schedule.steps_per_epoch} steps on "
        f"{timeline.images} images{scale}",
    )
    _say(console, f"Optimiser    {_optimiser(timeline)}")
    _say(
        console,
        f"Precision    {'mixed on a GPU, float32 on a CPU' if training.mixed_precision else 'float32'}",
    )


def _optimiser(timeline: Timeline) -> str:
    training = timeline.recipe.training
    parts = [
        f"SGD, momentum {training.momentum:g}, peak learning rate {timeline.peak_rate:.6g} after "
        f"{training.rate_warmup * timeline.fraction:g} epochs, then "
        + ("cosine" if training.rate_decay == "cosine" else "steps"),
        f"weight decay {training.weight_decay:g}"
        + ("" if training.batch_norm_decay else ", none on batch norms"),
    ]
    if training.bias_rate != 1:
        parts.append(f"biases at {training.bias_rate:g} times the rate")
    if training.label_smoothing:
        parts.append(f"label smoothing {training.label_smoothing:g}")
    if training.sync_batch_norm:
        parts.append("batch norms synchronised over GPUs")
    return "; ".join(parts)


def recipe_line(recipe: Recipe) -> str:
    """Return one line about a recipe, for a list."""
    if recipe.pruning.target == 1:
        return f"{recipe.name}: {recipe.network}, trained without pruning"
    target = f"{recipe.pruning.target:.0%} of the latency at batch {recipe.latency.batch}"
    return f"{recipe.name}: {recipe.network}, {target}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in ("masks", "permitted counts") else "right",
                         overflow="fold")  # fmt: skip
    return table


def _cost(value: float, unit: str) -> str:
    return amount(value, unit)
