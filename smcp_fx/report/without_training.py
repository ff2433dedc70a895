"""The report of a run without training, in words and figures: the trade-off curve and the repair."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from smcp_fx.report.bars import SEEN
from smcp_fx.report.formats import count, milliseconds, percent
from smcp_fx.report.schema import CalibrationFacts, Report
from smcp_fx.report.summary import measure_word


def target_head(report: Report) -> tuple[str, ...]:
    """Return the names of `target_rows`' columns."""
    word = "agreement" if report.agreement else "accuracy"
    return ("target", "cost", "latency", "of dense", word, "params", "FLOPs", "file")


def target_rows(report: Report) -> list[tuple[Any, ...]]:
    """Return the curve's figures: target, cost, latency, accuracy, size, file."""
    return [
        (
            percent(point.target, trim=True),
            percent(point.cost),
            milliseconds(point.latency_ms),
            percent(point.measured),
            percent(point.accuracy),
            count(point.params),
            count(point.flops),
            point.file,
        )
        for point in report.targets
    ]


def target_table(report: Report) -> Table | None:
    """Return the curve as a `rich` table; None without one."""
    rows = target_rows(report)
    if not rows:
        return None
    # Eight columns fit into a terminal of 80 characters.
    table = Table(title="What each target costs", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in target_head(report):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def repair_words(report: Report, facts: CalibrationFacts) -> str:
    """Return the three accuracies and the number of repaired layers in words."""
    accuracies = [percent(value) for value in (facts.dense, facts.sliced, facts.repaired)]
    stages = "dense {}, sliced {}, repaired {}".format(*accuracies)
    done, labels = sum(layer.repaired for layer in facts.layers), "with" if facts.labels else "without"
    told_by = "their labels" if facts.labels else "labels drawn by its own predictions"
    return (
        f"{measure_word(report).capitalize()}: {stages}. {done} of {len(facts.layers)} layers were fitted to what "
        f"the dense network computes on {facts.images} images {labels} labels, and {facts.norms} batch norms "
        "set. A layer that did not improve on held-out images stays as it was. Not drawn: layers with errors below "
        f"{100 * SEEN:g}% of the outputs' spread. What channels are worth: the output is taken for class "
        f"scores, and the loss is the cross entropy of {told_by}."
    )
