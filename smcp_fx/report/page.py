"""The page of a compile run: draws the pictures; `templates/report.html` holds the words around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from smcp_fx.report.bars import block_bars, channel_bars, latency_bars, repair_bars
from smcp_fx.report.channel_svg import lay_out
from smcp_fx.report.curves import (
    solve_curves,
    target_curve,
    training_curves,
    validation_pairs,
    validation_scatter,
)
from smcp_fx.report.formats import number
from smcp_fx.report.heat_map import heat_map
from smcp_fx.report.rendering import render
from smcp_fx.report.schema import CalibrationFacts, Report, SolveRow, TableFacts
from smcp_fx.report.summary import comparison, described, headline, model_name, target_line, unsteady_line
from smcp_fx.report.svg import fitting
from smcp_fx.report.without_training import repair_words, target_head, target_rows
from smcp_fx.report.worth_curves import PANELS, worth_curves


def render_page(report: Report) -> str:
    """Return the whole page of a report (plain JSON values) as HTML text."""
    facts = report.calibration or CalibrationFacts()
    surfaces = [(block, drawing) for block in report.surfaces if (drawing := heat_map(block)) is not None]
    table = report.table or TableFacts()
    return render(
        "report.html",
        title=f"{model_name(report)}: smcp_fx report",
        headline=headline(report).replace(" ms", "\N{NO-BREAK SPACE}ms"),
        facts=(
            report.data and f"data: {report.data}",
            report.target and f"asked for: {report.target}",
            "" if report.seed is None else f"seed {report.seed}",
            report.created,
        ),
        report=report,
        drawn={
            "latency": fitting(lambda wide: latency_bars(report, wide)),
            "targets": fitting(lambda wide: target_curve(report, wide), 560.0),
            "repair": fitting(lambda wide: repair_bars(facts.layers, wide), 560.0),
            "worth": fitting(lambda wide: worth_curves(facts.worth, wide)),
            "layers": fitting(lambda wide: channel_bars(report.layers, wide)),
            "solves": solve_curves(report),
            "training": training_curves(report.training),
            "validation": validation_scatter(report.validation),
            "blocks": fitting(lambda wide: block_bars(report.blocks, wide)),
        },
        comparison=comparison(report),
        target_line=target_line(report),
        unsteady=unsteady_line(report),
        target_head=target_head(report),
        target_rows=target_rows(report),
        repair_words=repair_words(report, facts),
        panels=PANELS,
        least_kept=_least_kept(report.solves),
        validation=validation_pairs(report.validation),
        surfaces=surfaces,
        graph=lay_out([asdict(group) for group in report.groups], [asdict(layer) for layer in report.layers]),
        table=table,
        foreign=described(table.fingerprint),
    )


def _least_kept(solves: Sequence[SolveRow]) -> float | None:
    """Return the least share of the reachable importance that a choice of masks kept."""
    pairs = [(number(solve.importance_kept), number(solve.bound)) for solve in solves]
    return min((kept / bound for kept, bound in pairs if kept is not None and bound), default=None)
