"""One self-contained page: the channel graph to zoom, move and search, and the reasons for pinned groups."""

from __future__ import annotations

from typing import Any

from smcp_fx.report.channel_svg import lay_out
from smcp_fx.report.rendering import render


def render_inspection(told: dict[str, Any]) -> str:
    """Return the page of a description (see `describe`) as HTML text."""
    return render(
        "inspection.html",
        package="smcp_fx.inspection",
        title=f"{told['model']}: channel graph",
        told=told,
        graph=lay_out(told["groups"], told["layers"]),
    )
