"""The report of a run without training: the trade-off curve, and what the repair did to each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from smcp_fx.report.bars import NARROW
from smcp_fx.report.formats import count, milliseconds, percent
from smcp_fx.report.schema import CalibrationFacts, RepairRow, Report
from smcp_fx.report.svg import Markup, Panel, dot, line, path, picture, rect, text

_WIDE, _LETTER, _STEP = 560.0, 6.9, 22.0
#: Errors below this, as a share of the outputs' spread, would be written 0.0%.
_SEEN = 5e-4


def measure_word(report: Report) -> str:
    """Return the name of the quality measured: accuracy or agreement."""
    return "agreement with the dense network" if report.agreement else "accuracy"


def target_curve(report: Report, wide: float = _WIDE) -> Markup | None:
    """Return accuracy over measured latency, a point a target and the dense network; None without targets."""
    points, dense = report.targets, report.dense.accuracy
    if not points or dense is None:
        return None
    found = [(1.0, dense, "dense")]
    for point in points:
        if point.measured is not None and point.accuracy is not None:
            words = f"target {percent(point.target, trim=True)}, {milliseconds(point.latency_ms)}"
            found.append((point.measured, point.accuracy, words))
    low = min(100 * accuracy for _, accuracy, _ in found)
    right = max(100.0, *(100 * x for x, _, _ in found))
    panel = Panel(52, 30, wide - 72, 240, (0, right), (max(0.0, 10 * (low // 10) - 5), 100))
    body = [*panel.y_axis(f"{measure_word(report)}, %"), *panel.x_axis("measured latency, % of dense")]
    places = [(panel.x(100 * x), panel.y(100 * y)) for x, y, _ in found]
    body.append(path(sorted(places), "curve"))
    for (x, y), (fraction, accuracy, words) in zip(places, found, strict=True):
        tip = f"{words}: {percent(accuracy)} at {percent(fraction)} of the dense latency"
        body.append(dot(x, y, 4.0, "point", tip))
    words = f"{measure_word(report)} over measured latency at {len(points)} targets"
    return picture(wide, panel.bottom + 46, words, body, _class(wide))


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


def target_head(report: Report) -> tuple[str, ...]:
    """Return the names of `target_rows`' columns."""
    word = "agreement" if report.agreement else "accuracy"
    return ("target", "cost", "latency", "of dense", word, "params", "FLOPs", "file")


def repair_bars(layers: Sequence[RepairRow], wide: float = _WIDE) -> Markup | None:
    """Return layers' errors before repair in grey and after it in blue, as shares of their outputs' spread.

    Layers whose error is none before are left out; None if that is all.
    """
    drawn = [layer for layer in layers if not layer.left and layer.before >= _SEEN]
    if not drawn:
        return None
    longest = int(0.43 * wide / _LETTER)
    left = min(max(len(layer.path) for layer in drawn), longest) * _LETTER + 14
    top = max(100 * layer.before for layer in drawn) or 1.0
    panel = Panel(left, 8, wide - left - (130 if wide > NARROW else 92), _STEP * len(drawn), (0, top), (0, 1))
    body = panel.x_axis("error, % of the outputs' spread")
    for index, layer in enumerate(drawn):
        y, name = panel.top + _STEP * index, layer.path
        before, after = 100 * layer.before, 100 * layer.after
        after = after if layer.repaired else before
        tip = f"{name}: {before:.2f}% as sliced, {after:.2f}% as repaired, on images held out"
        body.append(text(left - 10, y + 15, name[-longest:], "label", "end"))
        body.append(rect(left, y + 3, panel.x(before) - left, 16, "bar-dense", tip, rx=1))
        body.append(rect(left, y + 6, panel.x(after) - left, 10, "bar-pruned", tip, rx=1))
        ends = f"{before:.1f} \N{RIGHTWARDS ARROW} {after:.1f}" if layer.repaired else f"{before:.1f}, kept"
        body.append(text(panel.x(max(before, after)) + 8, y + 15, ends, "value"))
    body.append(line(left, panel.top, left, panel.bottom, "baseline"))
    words = f"Errors of {len(drawn)} layers before and after repair"
    return picture(wide, panel.bottom + 46, words, body, _class(wide))


def _class(wide: float) -> str:
    return "chart" if wide > NARROW else "chart narrow"


def repair_words(report: Report, found: CalibrationFacts) -> str:
    """Return the three accuracies and the number of repaired layers in words."""
    accuracies = [percent(value) for value in (found.dense, found.sliced, found.repaired)]
    stages = "dense {}, sliced {}, repaired {}".format(*accuracies)
    done, labels = sum(layer.repaired for layer in found.layers), "with" if found.labels else "without"
    told_by = "their labels" if found.labels else "labels drawn by its own predictions"
    return (
        f"{measure_word(report).capitalize()}: {stages}. {done} of {len(found.layers)} layers were fitted to what "
        f"the dense network computes on {found.images} images {labels} labels, and {found.norms} batch norms "
        "set. A layer that did not improve on held-out images stays as it was. Not drawn: layers with errors below "
        f"{100 * _SEEN:g}% of the outputs' spread. What channels are worth: the output is taken for class "
        f"scores, and the loss is the cross entropy of {told_by}."
    )
