"""One self-contained page: the channel graph to zoom, move and search, and what keeps the rest whole."""

from __future__ import annotations

from importlib import resources
from typing import Any

from smcp_fx.report.channel_svg import draw_channel_graph
from smcp_fx.report.formats import percent
from smcp_fx.report.page import asset, document
from smcp_fx.report.svg import Markup, element


def render_inspection(told: dict[str, Any]) -> str:
    """Return the page of a description (see `describe`) as HTML text."""
    style = resources.files("smcp_fx.inspection").joinpath("inspect.css").read_text(encoding="utf-8")
    drawing = draw_channel_graph(told["groups"], told["layers"])
    shown = drawing or element("p", "The network has no channels to choose from.")
    main = element("main", _header(told), element("figure", shown, class_="graph-figure"), _reasons(told))
    return document(
        f"{told['model']}: channel graph", main, styles=(style,), scripts=(asset("channel_graph.js"),)
    )


def _header(told: dict[str, Any]) -> Markup:
    groups = told["groups"]
    free = [group for group in groups if not group["pinned"]]
    inputs = " and ".join("\N{MULTIPLICATION SIGN}".join(map(str, shape)) for shape in told["inputs"])
    facts = [
        f"traced with {inputs}" if inputs else "",
        f"{len(told['layers'])} convolutions and linears",
        f"{len(groups)} groups, {len(free)} of them free",
        f"{percent(told['free_share'], trim=True)} of the input channels may be pruned",
    ]
    return element(
        "header",
        element("p", "smcp_fx channel graph", class_="eyebrow"),
        element("h1", told["model"]),
        element("p", " · ".join(fact for fact in facts if fact), class_="facts"),
        *(
            [
                element(
                    "p",
                    f"Traced in regions: {', '.join(told['regions'])}. The rest stays Python: {told['untraced']['']}",
                    class_="caption",
                )
            ]
            if told["regions"]
            else []
        ),
        element(
            "p",
            "Layers run down the page. A group is a set of channels that live and die together: its line runs from "
            "the layer that first writes them to the last that reads them. Modules are folded by their paths.",
            class_="caption",
        ),
    )


def _reasons(told: dict[str, Any]) -> Markup:
    if not told["pinned"]:
        return element("p", "Nothing must stay whole.", class_="caption")
    head = element(
        "tr", *(element("th", name, scope="col") for name in ("why units must stay", "groups", "units"))
    )
    rows = [
        element(
            "tr",
            element("td", entry["reason"]),
            element("td", str(entry["groups"])),
            element("td", str(entry["units"])),
        )
        for entry in told["pinned"]
    ]
    return element(
        "section",
        element("h2", "What must stay whole"),
        element("table", element("thead", head), element("tbody", *rows), class_="reasons"),
    )
