"""Put the page together: headline, table, pictures, channel graph, provenance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from smcp_fx.report.bars import NARROW, block_bars, channel_bars, latency_bars
from smcp_fx.report.channel_svg import draw_channel_graph
from smcp_fx.report.curves import solve_curves, training_curves, validation_pairs, validation_scatter
from smcp_fx.report.formats import MISSING, milliseconds, number, percent, relative_change
from smcp_fx.report.heat_map import heat_map
from smcp_fx.report.provenance import provenance
from smcp_fx.report.schema import Report, SolveRow, WorthRow
from smcp_fx.report.summary import comparison, headline, model_name, target_line, unsteady_line
from smcp_fx.report.svg import Markup, element, join
from smcp_fx.report.without_training import (
    repair_bars,
    repair_words,
    target_curve,
    target_head,
    target_rows,
)
from smcp_fx.report.worth_curves import NARROW_ACROSS, PANELS, worth_curves
from smcp_fx.texts import significant

# The browser itself is told to fetch nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render_page(report: Report) -> str:
    """Return the whole page of a report (plain JSON values) as HTML text."""
    main = element("main", _header(report), *_pictures(report), _channels(report), provenance(report))
    return document(f"{model_name(report)}: smcp_fx report", main, scripts=(asset("channel_graph.js"),))


def document(title: str, main: Markup, *, styles: Sequence[str] = (), scripts: Sequence[str] = ()) -> str:
    """Return a whole page that fetches nothing, in the report's style; ``styles`` are added to it."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        *(element("style", Markup(style)) for style in (asset("style.css"), *styles)),
    )
    body = element("body", main, *(element("script", Markup(script)) for script in scripts))
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def asset(name: str) -> str:
    """Return the text of one of the report's style sheets and scripts."""
    return resources.files("smcp_fx.report").joinpath(name).read_text(encoding="utf-8")


def _header(report: Report) -> Markup:
    facts = [
        f"data: {report.data}" if report.data else "",
        f"asked for: {report.target}" if report.target else "",
        f"seed {report.seed}" if report.seed is not None else "",
        report.created,
    ]
    rows = [
        element(
            "tr",
            element("th", row.name, scope="row"),
            _cell(row.dense, row.spread[0]),
            _cell(row.pruned, row.spread[1], "strong"),
            _cell(row.change),
        )
        for row in comparison(report)
    ]
    columns = [element("th", name, scope="col") for name in ("", "dense", "pruned", "change")]
    parts = [
        element("p", "smcp_fx compile report", class_="eyebrow"),
        element("h1", headline(report).replace(" ms", "\N{NO-BREAK SPACE}ms")),
        element("p", " · ".join(fact for fact in facts if fact), class_="facts"),
        element(
            "div", _both(latency_bars(report), latency_bars(report, NARROW)) or Markup(""), class_="scroll"
        ),
        element(
            "div",
            element(
                "table", element("thead", element("tr", *columns)), element("tbody", *rows), class_="summary"
            ),
            class_="scroll",
        ),
        element("p", _sentence(target_line(report)), class_="caption"),
    ]
    if warning := unsteady_line(report):
        parts.append(element("p", warning, class_="warning", role="note"))
    return element("header", *parts)


def _both(wide: Markup | None, narrow: Markup | None) -> Markup | None:
    """Return the pictures for a screen and for a telephone; the page shows the one that fits."""
    return None if wide is None or narrow is None else element("div", wide, narrow, class_="fitting")


def _sentence(content: str) -> str:
    return content[:1].upper() + content[1:]


def _cell(content: str, below: str = "", class_: str | None = None) -> Markup:
    inner = [element("small", below)] if below else []
    return element("td", content, *inner, class_=class_)


def _pictures(report: Report) -> list[Markup]:
    small = [_training(report), _validation(report)]
    if report.calibration is None:  # else masks are chosen in one place, before the epochs
        small.insert(0, _solves(report))
    return [
        *_without_training(report),
        _layers(report),
        element("div", *small, class_="trio"),
        _blocks(report),
        *_surfaces(report),
    ]


def _layers(report: Report) -> Markup:
    head = (
        "layer",
        "kind",
        "inputs kept",
        "inputs",
        "outputs kept",
        "outputs",
        "reads group",
        "writes group",
    )
    rows = (
        (x.path, x.kind, x.in_kept, x.in_channels, x.out_kept, x.out_channels, x.in_group, x.out_group)
        for x in report.layers
    )
    return _figure(
        "Channels kept, layer by layer",
        "Each bar is a layer in the order they run: all output channels in grey, those kept in blue.",
        _both(channel_bars(report.layers), channel_bars(report.layers, NARROW)),
        _numbers(head, rows),
    )


def _blocks(report: Report) -> Markup:
    rows = (
        (
            b.name,
            milliseconds(b.dense_ms),
            milliseconds(b.pruned_ms),
            relative_change(b.dense_ms, b.pruned_ms),
        )
        for b in report.blocks
    )
    return _figure(
        "Latency by block",
        "Latency of each fused block by the table: dense in grey, pruned in blue.",
        _both(block_bars(report.blocks), block_bars(report.blocks, NARROW)),
        _numbers(("block", "dense", "pruned", "change"), rows),
    )


def _solves(report: Report) -> Markup:
    head = ("step", "epoch", "target", "cost", "importance kept", "bound", "changed", "returned", "seconds")
    rows = (
        (
            solve.step,
            f"{solve.epoch:.2f}",
            significant(solve.target, 4),
            significant(solve.cost, 4),
            percent(solve.importance_kept),
            percent(solve.bound),
            percent(solve.changed_share),
            solve.returned,
            f"{number(solve.seconds) or 0:.2f}",
        )
        for solve in report.solves
    )
    words = _solves_words(report.solves)
    return _figure("Solves: cost and change", words, solve_curves(report), _numbers(head, rows))


def _training(report: Report) -> Markup:
    rows = ((e.phase, e.epoch, _loss(e.loss), percent(e.accuracy)) for e in report.training)
    return _figure(
        "Training",
        "Test accuracy and training loss after each epoch.",
        training_curves(report.training),
        _numbers(("phase", "epoch", "loss", "accuracy"), rows),
    )


def _validation(report: Report) -> Markup:
    rows = (
        (name, milliseconds(predicted), milliseconds(measured), relative_change(predicted, measured))
        for name, predicted, measured in validation_pairs(report.validation)
    )
    return _figure(
        "Predicted against measured latency",
        "Each point is an engine. On the line, the prediction from the table was exact.",
        validation_scatter(report.validation),
        _numbers(("engine", "predicted", "measured", "measured over predicted"), rows),
    )


def _without_training(report: Report) -> list[Markup]:
    """The trade-off curve, and what the repair did."""
    drawn = []
    if report.targets:
        head = target_head(report)
        words = (
            "Each point is a network of its own, measured beside the dense one, with a file in this folder."
        )
        curve = _both(target_curve(report), target_curve(report, NARROW))
        drawn.append(_figure("What each target costs", words, curve, _numbers(head, target_rows(report))))
    if report.calibration is not None:
        layers = report.calibration.layers
        names = ("path", "before", "after", "repaired", "positions", "inputs", "left")
        rows = [[getattr(layer, name) for name in names] for layer in layers]
        table = _numbers(("layer", *names[1:-1], "left as it was"), rows)
        bars, words = (
            _both(repair_bars(layers), repair_bars(layers, NARROW)),
            repair_words(report, report.calibration),
        )
        drawn.append(_figure("Repaired layers", words, bars, table))
        if report.calibration.worth:
            drawn.append(_worth(report.calibration.worth))
    return drawn


def _worth(groups: Sequence[WorthRow]) -> Markup:
    words = (
        "How far the loss rises, by estimate, where a group keeps only its best channels and the layers that read "
        "them are fitted anew. Dots are what was chosen; together they are 100%. Where a curve is flat, channels "
        "cost nothing."
    )
    if len(groups) > PANELS:
        words += f" The first {PANELS} of {len(groups)} groups."
    rows = [
        (group.name, group.kept, group.size, *map(significant, pair))
        for group in groups
        for pair in zip(group.counts, group.rises, strict=True)
    ]
    head = ("group", "chosen", "of", "kept", "rise of the loss")
    drawing = _both(worth_curves(groups), worth_curves(groups, NARROW_ACROSS))
    return _figure("What channels are worth", words, drawing, _numbers(head, rows))


def _surfaces(report: Report) -> list[Markup]:
    """The latency surfaces of the dearest blocks, side by side."""
    drawn = []
    for block in report.surfaces:
        drawing = heat_map(block)
        if drawing is not None:
            chosen = " x ".join(map(str, block.chosen))
            drawn.append(
                element(
                    "figure", element("figcaption", element("p", f"{block.name}, kept {chosen}")), drawing
                )
            )
    if not drawn:
        return []
    words = (
        "The table's latencies of the slowest blocks, over the channels they may keep. Colour is the time per "
        "pair of channels: an edge is a cliff of the runtime. White dots were measured, the rest is interpolated; "
        "the frame is what was kept."
    )
    title = element("figcaption", element("h2", "Latency by channels"), element("p", words))
    return [element("figure", title, element("div", *drawn, class_="trio"))]


def _loss(value: Any) -> str:
    plain = number(value)
    return MISSING if plain is None else significant(plain)


def _solves_words(solves: Sequence[SolveRow]) -> str:
    if not solves:
        return "When masks were chosen, what they cost, and how many changed."
    pairs = [(number(solve.importance_kept), number(solve.bound)) for solve in solves]
    ratios = [kept / bound for kept, bound in pairs if kept is not None and bound]
    words = (
        f"{len(solves)} choices of masks. Above: the falling target and the cost of each choice. Below: the masks "
        "it changed."
    )
    if ratios:
        words += f" Each kept at least {percent(min(ratios))} of the importance that the best possible choice would."
    return words


def _figure(title: str, words: str, drawing: Markup | None, numbers: Markup) -> Markup:
    if drawing is None:
        content = element("p", f"{_sentence(MISSING)} in this run.", class_="missing")
        return element("figure", element("figcaption", element("h2", title)), content)
    caption = element("figcaption", element("h2", title), element("p", words))
    return element("figure", caption, element("div", drawing, class_="scroll"), numbers)


def _numbers(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    """Return the picture's numbers as a table that opens on demand."""
    lines = [
        element("tr", *(element("td", "" if cell is None else str(cell)) for cell in row)) for row in rows
    ]
    table = element(
        "table",
        element("thead", element("tr", *(element("th", name, scope="col") for name in head))),
        element("tbody", *lines),
    )
    return element(
        "details",
        element("summary", "Numbers"),
        element("div", table, class_="scroll tall"),
        class_="numbers",
    )


def _channels(report: Report) -> Markup:
    drawing = draw_channel_graph([asdict(g) for g in report.groups], [asdict(x) for x in report.layers])
    title = element("h2", "Channel graph")
    if drawing is None:
        return element("figure", title, element("p", f"{_sentence(MISSING)} in this run.", class_="missing"))
    groups = report.groups
    free = [group for group in groups if not group.pinned]
    kept, size = sum(g.kept for g in free), sum(g.size for g in free)
    words = (
        f"{len(groups)} groups of channels that live and die together, {len(free)} of them free: {kept} of "
        f"{size} channels kept. Layers run down the page; each group is a line from the layer that first writes it "
        "to the last that reads it."
    )
    return element(
        "figure", join([element("figcaption", title, element("p", words))]), drawing, class_="graph-figure"
    )
