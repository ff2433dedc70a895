"""The printed summary as plain text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from smcp_fx.report import Report, summary_table


def summary_text(report: Report) -> str:
    """Return what a terminal of 100 characters shows, without trailing blanks."""
    table = summary_table(report)
    caption, table.caption = str(table.caption or ""), None
    table.title_justify = "left"
    out = io.StringIO()
    console = Console(file=out, width=100, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(table)
    for line in caption.splitlines():
        console.print(Text(f"  {line}"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"
