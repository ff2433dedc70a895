"""Pictures over time and of agreement: solves, training, predicted against measured latency."""

from __future__ import annotations

from collections.abc import Sequence

from smcp_fx.report.formats import milliseconds, number, percent
from smcp_fx.report.schema import EngineRow, EpochRow, Report
from smcp_fx.report.svg import Markup, Panel, dot, line, path, picture, rect, rounded_up, text
from smcp_fx.texts import significant

_WIDTH = 360.0


def dense_cost(report: Report) -> float | None:
    """Return the dense network's cost in the unit that was solved for, if the report has it."""
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
    scale = 100 / full if full else 1.0
    unit = "% of dense" if full else report.cost
    epochs = [solve.epoch for solve in solves]
    targets = [solve.target * scale for solve in solves]
    costs = [solve.cost * scale for solve in solves]
    shares = [100 * (number(solve.changed_share) or 0.0) for solve in solves]
    last = max(number(report.epochs) or 0.0, *epochs)
    top = max(100.0 if full else 0.0, rounded_up(max(*targets, *costs)))
    above = Panel(44, 44, _WIDTH - 56, 150, (0, last), (0, top))
    below = Panel(44, 240, _WIDTH - 56, 100, (0, last), (0, rounded_up(max(shares), 3)))
    body = [
        *above.y_axis(f"cost, {unit}"),
        path([(above.x(e), above.y(t)) for e, t in zip(epochs, targets, strict=True)], "curve target-curve"),
        *_key(above, [("target-key", "target"), ("kept-key", "cost")]),
    ]
    radius = 3.0 if len(solves) <= 60 else 2.0
    for epoch, target, cost in zip(epochs, targets, costs, strict=True):
        tip = f"epoch {epoch:.2f}: target {significant(target)}, cost {significant(cost)} ({unit})"
        body.append(dot(above.x(epoch), above.y(cost), radius, "point", tip))
    body += below.y_axis("masks changed, % of units", about=3)
    width = max(1.2, min(6.0, below.width / (2.2 * len(solves))))
    for epoch, share, solve in zip(epochs, shares, solves, strict=True):
        tip = f"epoch {epoch:.2f}, step {solve.step}: {share:.2f}% changed"
        if number(solve.returned) is not None:
            tip += f", {solve.returned} units returned"
        top_y = below.y(share)
        body.append(rect(below.x(epoch) - width / 2, top_y, width, below.bottom - top_y, "bar-pruned", tip))
    body += below.x_axis("epoch of pruning")
    label = (
        f"{len(solves)} solves: cost from {significant(costs[0])} to {significant(costs[-1])} {unit}; "
        f"{shares[-1]:.1f}% of the masks changed at the last"
    )
    return picture(_WIDTH, below.bottom + 46, label, body)


def training_curves(training: Sequence[EpochRow]) -> Markup | None:
    """Return test accuracy and training loss by epoch, dense and pruning phases one after the other."""
    if not training:
        return None
    phases: list[tuple[str, int, int]] = []
    for index, entry in enumerate(training):
        name = entry.phase
        if phases and phases[-1][0] == name:
            phases[-1] = (name, phases[-1][1], index + 1)
        else:
            phases.append((name, index, index + 1))
    accuracy = [(i + 1.0, number(entry.accuracy)) for i, entry in enumerate(training)]
    loss = [(i + 1.0, number(entry.loss)) for i, entry in enumerate(training)]
    drawn_accuracy = [(x, 100 * y) for x, y in accuracy if y is not None]
    drawn_loss = [(x, y) for x, y in loss if y is not None]
    if not drawn_accuracy and not drawn_loss:
        return None
    floor = _floor([y for _, y in drawn_accuracy])
    across = (0.0, float(len(training)))
    above = Panel(44, 44, _WIDTH - 56, 150, across, (floor, 100))
    below = Panel(
        44, 240, _WIDTH - 56, 100, across, (0, rounded_up(max((y for _, y in drawn_loss), default=1.0), 3))
    )
    body: list[Markup] = []
    for index, (name, start, end) in enumerate(phases):
        left, right = above.x(start), above.x(end)
        if index % 2:
            body.append(rect(left, above.top, right - left, below.bottom - above.top, "phase"))
        if right - left > 8 * len(name) + 150 * (index == 0):
            body.append(text(right - 4, above.top - 10, name, "phase-name", "end"))
    body += [
        *above.y_axis(f"test accuracy, %{f' (from {floor:.0f})' if floor else ''}"),
        *below.y_axis("training loss", about=3),
    ]
    small = 2.5 if len(training) <= 60 else 0.0
    for panel, points, what in ((above, drawn_accuracy, "accuracy"), (below, drawn_loss, "loss")):
        for name, start, end in phases:
            inside = [(x, y) for x, y in points if start < x <= end]
            body.append(path([(panel.x(x), panel.y(max(y, panel.y_range[0]))) for x, y in inside], "curve"))
            for x, y in inside if small else []:
                shown = f"{y:.1f}%" if what == "accuracy" else significant(y)
                tip = f"{name}, epoch {x - start:.0f}: {what} {shown}"
                body.append(dot(panel.x(x), panel.y(max(y, panel.y_range[0])), small, "point", tip))
    body += below.x_axis("epoch")
    final = f"; last test accuracy {drawn_accuracy[-1][1]:.1f}%" if drawn_accuracy else ""
    return picture(_WIDTH, below.bottom + 46, f"Training over {len(training)} epochs{final}", body)


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
    for name, predicted, measured in pairs:
        off = f"{100 * (measured - predicted) / predicted:+.1f}%" if predicted else "no prediction"
        tip = f"{name}: predicted {milliseconds(predicted)}, measured {milliseconds(measured)} ({off})"
        body.append(dot(panel.x(predicted), panel.y(measured), 5, "point", tip))
    body += _point_names(pairs, panel)
    worst = max(abs(m - p) / p for _, p, m in pairs if p) if any(p for _, p, _ in pairs) else None
    label = f"{len(pairs)} engines, predicted against measured; farthest apart {percent(worst)}"
    return picture(_WIDTH, panel.bottom + 46, label, body)


def validation_pairs(validation: Sequence[EngineRow]) -> list[tuple[str, float, float]]:
    """Return (name, predicted ms, measured ms) of the entries that have both."""
    found = []
    for entry in validation:
        predicted, measured = number(entry.predicted_ms), number(entry.measured_ms)
        if predicted is not None and measured is not None:
            found.append((entry.name, predicted, measured))
    return found


def _point_names(pairs: Sequence[tuple[str, float, float]], panel: Panel) -> list[Markup]:
    """Name the points at their lower right, each name moved down until it is clear of those above."""
    drawn: list[Markup] = []
    taken: list[tuple[float, float, float]] = []
    for name, predicted, measured in sorted(pairs, key=lambda pair: -pair[2]):
        x, y = panel.x(predicted), panel.y(measured)
        length = len(name) * 6.9
        right = x + 10 + length <= panel.right + 8
        left = x + 10 if right else x - 10 - length
        at = y + 14 if right else y + 4
        while any(
            abs(at - other) < 13 and left < end and begin < left + length for begin, end, other in taken
        ):
            at += 13
        if at > panel.bottom - 4:
            continue  # no room: its tip names it
        taken.append((left, left + length, at))
        drawn.append(text(left, at, name, "label"))
    return drawn


def _floor(accuracies: Sequence[float]) -> float:
    """Return where the accuracy axis starts: below nine tenths of the epochs. The worst lie on the axis."""
    ordered = sorted(accuracies)
    usual = ordered[len(ordered) // 10] if ordered else 0.0
    return next((floor for floor in (90.0, 80.0, 60.0) if usual >= floor + 2), 0.0)


def _key(panel: Panel, entries: Sequence[tuple[str, str]]) -> list[Markup]:
    drawn: list[Markup] = []
    x = panel.right
    for class_, name in reversed(entries):
        x -= len(name) * 7.0
        drawn.append(text(x, panel.top - 10, name, "note"))
        x -= 20
        if class_ == "kept-key":
            drawn.append(dot(x + 9, panel.top - 14, 3.5, "point"))
        else:
            drawn.append(line(x, panel.top - 14, x + 14, panel.top - 14, "curve target-curve"))
        x -= 8
    return drawn
