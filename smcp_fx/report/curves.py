"""Curves and scatter plots: solves, training, targets, predicted against measured latency."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from smcp_fx.report.formats import milliseconds, number, percent
from smcp_fx.report.schema import EngineRow, EpochRow, Report
from smcp_fx.report.summary import measure_word
from smcp_fx.report.svg import LETTER, Panel, dot, line, picture, rect, rounded_up, text
from smcp_fx.texts import significant

_WIDTH = 360.0


def dense_cost(report: Report) -> float | None:
    """Return the dense network's cost in the unit of the solves, if the report has it."""
    dense = report.dense
    return number(
        {"ms": dense.predicted_ms, "FLOPs": dense.flops, "parameters": dense.params}.get(report.cost)
    )


def solve_curves(report: Report) -> Markup | None:
    """Return the curves of target and cost at each solve, above the share of units whose mask changed."""
    solves = report.solves
    if not solves:
        return None
    full = dense_cost(report)
    scale, unit = (100 / full, "% of dense") if full else (1.0, report.cost)
    points = [
        (s.epoch, s.target * scale, s.cost * scale, 100 * (number(s.changed_share) or 0.0)) for s in solves
    ]
    epochs, targets, costs, shares = zip(*points, strict=True)
    top = max(100.0 if full else 0.0, rounded_up(max(*targets, *costs)))
    above, below = _two(max(number(report.epochs) or 0.0, *epochs), (0, top), (0, rounded_up(max(shares), 3)))
    body = [
        *above.y_axis(f"cost, {unit}"),
        above.curve(zip(epochs, targets, strict=True), "curve target-curve"),
    ]
    body += _key(above)
    body += below.y_axis("masks changed, % of units", about=3)
    width = max(1.2, min(6.0, below.width / (2.2 * len(solves))))
    for solve, (epoch, target, cost, share) in zip(solves, points, strict=True):
        tip = f"epoch {epoch:.2f}: target {significant(target)}, cost {significant(cost)} ({unit})"
        body.append(above.point(epoch, cost, tip, 3.0 if len(solves) <= 60 else 2.0))
        tip = f"epoch {epoch:.2f}, step {solve.step}: {share:.2f}% changed"
        if number(solve.returned) is not None:
            tip += f", {solve.returned} units returned"
        body.append(below.column(below.x(epoch) - width / 2, width, share, "bar-pruned", tip))
    body += below.x_axis("epoch of pruning")
    label = (
        f"{len(solves)} solves: cost from {significant(costs[0])} to {significant(costs[-1])} {unit}; "
        f"{shares[-1]:.1f}% of the masks changed at the last"
    )
    return picture(_WIDTH, below.bottom + 46, label, body)


def training_curves(training: Sequence[EpochRow]) -> Markup | None:
    """Return test accuracy and training loss by epoch, dense and pruning phases one after the other."""
    accuracy = {i: 100 * y for i, row in enumerate(training, 1) if (y := number(row.accuracy)) is not None}
    loss = {i: y for i, row in enumerate(training, 1) if (y := number(row.loss)) is not None}
    if not accuracy and not loss:
        return None
    floor = _floor(list(accuracy.values()))
    above, below = _two(len(training), (floor, 100), (0, rounded_up(max(loss.values(), default=1.0), 3)))
    bands, curves, start = [], [], 0
    for index, (name, rows) in enumerate(groupby(training, lambda row: row.phase)):
        end = start + len(list(rows))
        left, right = above.x(start), above.x(end)
        if index % 2:
            bands.append(rect(left, above.top, right - left, below.bottom - above.top, "phase"))
        if right - left > 8 * len(name) + 150 * (index == 0):
            bands.append(text(right - 4, above.top - 10, name, "phase-name", "end"))
        for panel, values in ((above, accuracy), (below, loss)):
            inside = [(x, max(values[x], panel.y_range[0])) for x in range(start + 1, end + 1) if x in values]
            curves.append(panel.curve(inside))
            for x, y in inside if len(training) <= 60 else []:
                shown = f"loss {significant(values[x])}" if panel is below else f"accuracy {values[x]:.1f}%"
                curves.append(panel.point(x, y, f"{name}, epoch {x - start}: {shown}", 2.5))
        start = end
    title = f"test accuracy, %{f' (from {floor:.0f})' if floor else ''}"
    axes = [*above.y_axis(title), *below.y_axis("training loss", about=3), *below.x_axis("epoch")]
    final = f"; last test accuracy {list(accuracy.values())[-1]:.1f}%" if accuracy else ""
    label = f"Training over {len(training)} epochs{final}"
    return picture(_WIDTH, below.bottom + 46, label, [*bands, *axes, *curves])


def target_curve(report: Report, wide: float = 560.0) -> Markup | None:
    """Return accuracy over measured latency, a point per target and the dense one; None without targets."""
    dense = report.dense.accuracy
    if not report.targets or dense is None:
        return None
    points = [(100.0, 100 * dense, "dense")]
    for point in report.targets:
        if point.measured is not None and point.accuracy is not None:
            words = f"target {percent(point.target, trim=True)}, {milliseconds(point.latency_ms)}"
            points.append((100 * point.measured, 100 * point.accuracy, words))
    low, right = min(accuracy for _, accuracy, _ in points), max(share for share, _, _ in points)
    panel = Panel(52, 30, wide - 72, 240, (0, right), (max(0.0, 10 * (low // 10) - 5), 100))
    body = [*panel.y_axis(f"{measure_word(report)}, %"), *panel.x_axis("measured latency, % of dense")]
    body.append(panel.curve(sorted((share, accuracy) for share, accuracy, _ in points)))
    for share, accuracy, words in points:
        tip = f"{words}: {percent(accuracy / 100)} at {percent(share / 100)} of the dense latency"
        body.append(panel.point(share, accuracy, tip))
    label = f"{measure_word(report)} over measured latency at {len(report.targets)} targets"
    return picture(wide, panel.bottom + 46, label, body)


def validation_scatter(validation: Sequence[EngineRow]) -> Markup | None:
    """Return predicted against measured latency with the diagonal; None without pairs."""
    pairs = validation_pairs(validation)
    if not pairs:
        return None
    top = rounded_up(1.04 * max(max(predicted, measured) for _, predicted, measured in pairs))
    panel = Panel(44, 44, _WIDTH - 56, 296, (0, top), (0, top))
    body = [
        *panel.y_axis("measured, ms", about=5),
        *panel.x_axis("predicted by the table, ms", about=5),
        line(panel.x(0), panel.y(0), panel.x(top), panel.y(top), "diagonal"),
        text(panel.x(top) - 14, panel.y(top) + 34, "equal", "note", "end"),
    ]
    apart = [
        100 * (measured - predicted) / predicted if predicted else None for _, predicted, measured in pairs
    ]
    for (name, predicted, measured), off in zip(pairs, apart, strict=True):
        error = "no prediction" if off is None else f"{off:+.1f}%"
        tip = f"{name}: predicted {milliseconds(predicted)}, measured {milliseconds(measured)} ({error})"
        body.append(panel.point(predicted, measured, tip, 5.0))
    body += _point_names(pairs, panel)
    worst = max((abs(off) / 100 for off in apart if off is not None), default=None)
    label = f"{len(pairs)} engines, predicted against measured; farthest apart {percent(worst)}"
    return picture(_WIDTH, panel.bottom + 46, label, body)


def validation_pairs(validation: Sequence[EngineRow]) -> list[tuple[str, float, float]]:
    """Return (name, predicted ms, measured ms) of the entries that have both."""
    pairs = [(entry.name, number(entry.predicted_ms), number(entry.measured_ms)) for entry in validation]
    return [(name, p, m) for name, p, m in pairs if p is not None and m is not None]


def _point_names(pairs: Sequence[tuple[str, float, float]], panel: Panel) -> list[Markup]:
    """Name the points at their lower right; move each name down until it is clear of the names above."""
    drawn: list[Markup] = []
    taken: list[tuple[float, float, float]] = []
    for name, predicted, measured in sorted(pairs, key=lambda pair: -pair[2]):
        x, y, length = panel.x(predicted), panel.y(measured), len(name) * LETTER
        left, at = (x + 10, y + 14) if x + 10 + length <= panel.right + 8 else (x - 10 - length, y + 4)
        while any(
            abs(at - other) < 13 and left < end and begin < left + length for begin, end, other in taken
        ):
            at += 13
        if at <= panel.bottom - 4:  # otherwise there is no room; the tooltip names it
            taken.append((left, left + length, at))
            drawn.append(text(left, at, name, "label"))
    return drawn


def _two(last: float, upper: tuple[float, float], lower: tuple[float, float]) -> tuple[Panel, Panel]:
    """Return two panels over the same epochs, one above the other."""
    wide, epochs = _WIDTH - 56, (0.0, float(last))
    return Panel(44, 44, wide, 150, epochs, upper), Panel(44, 240, wide, 100, epochs, lower)


def _floor(accuracies: Sequence[float]) -> float:
    """Return the start of the accuracy axis: below nine tenths of the epochs. The worst lie on the axis."""
    usual = sorted(accuracies)[len(accuracies) // 10] if accuracies else 0.0
    return next((floor for floor in (90.0, 80.0, 60.0) if usual >= floor + 2), 0.0)


def _key(panel: Panel) -> list[Markup]:
    at, right = panel.top - 10, panel.right
    return [
        line(right - 118, at - 4, right - 104, at - 4, "curve target-curve"),
        text(right - 98, at, "target", "note"),
        dot(right - 39, at - 4, 3.5, "point"),
        text(right - 28, at, "cost", "note"),
    ]
