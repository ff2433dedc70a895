"""Text that MkDocs takes from the code: help of commands, options, fields, and names that no page lists.

Pages hold marks: `<!-- help: smcp-table measure -->`, `<!-- options: PruningConfig -->`, `<!-- other names -->`,
`<!-- fields of report.json -->`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HELPER = "iframe-worker.js"
_HELP = re.compile(r"<!-- help: ([^>]+?) -->")
_OPTIONS = re.compile(r"<!-- options: (\w+) -->")
_OTHER_NAMES = "<!-- other names -->"
_REPORT = "<!-- fields of report.json -->"
#: Characters a line of help.
_COLUMNS = "100"


def on_startup(**_: Any) -> None:
    """Lay the package out as it is installed, for mkdocstrings to read: `passes` and `backends` inside it."""
    package = ROOT / "build" / "docs_source" / "smcp_fx"
    package.mkdir(parents=True, exist_ok=True)
    for source in [*(ROOT / "smcp_fx").iterdir(), ROOT / "passes", ROOT / "backends"]:
        link = package / source.name
        if not link.is_symlink():
            link.symlink_to(source)
    for link in package.iterdir():
        if not link.exists():  # moved since the last build
            link.unlink()


def on_post_page(output: str, **_: Any) -> str:
    """Take the search's helper from the site itself, so that it works without a network."""
    return output.replace('"https://unpkg.com/iframe-worker/shim"', f'"{HELPER}"')


def on_post_build(config: Any, **_: Any) -> None:
    """Copy that helper into every folder of pages."""
    site = Path(config["site_dir"])
    for folder in {page.parent for page in site.rglob("*.html")}:
        if folder != site:
            (folder / HELPER).write_text((site / "assets" / HELPER).read_text())
    (site / HELPER).write_text((site / "assets" / HELPER).read_text())


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the marks of a page (MkDocs calls this)."""
    markdown = _HELP.sub(lambda match: f"```text\n{help_of(*match[1].split())}```", markdown)
    markdown = _OPTIONS.sub(lambda match: options_table(match[1]), markdown)
    markdown = markdown.replace(_REPORT, report_tables()) if _REPORT in markdown else markdown
    return markdown.replace(_OTHER_NAMES, other_names(markdown)) if _OTHER_NAMES in markdown else markdown


def help_of(command: str, *arguments: str) -> str:
    """Return what an installed command prints for ``--help``."""
    (entry,) = entry_points(group="console_scripts", name=command)
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            entry.load()([*arguments, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return re.sub(r"^usage: \S+", f"usage: {command}", printed.getvalue())


def options_table(name: str) -> str:
    """Return a table of a config dataclass's fields: name, default, what it does."""
    from smcp_fx import config

    rows = ["| option | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(getattr(config, name)):
        told = field.metadata.get("help", "")
        rows.append(f"| `{field.name}` | `{field.default!r}` | {told.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def report_tables() -> str:
    """Return tables of the fields of report.json: of the report itself, then of each entry in it."""
    from smcp_fx.report import schema

    kinds = [kind for kind in vars(schema).values() if dataclasses.is_dataclass(kind)]
    parts = []
    for kind in sorted(kinds, key=lambda kind: kind is not schema.Report):
        fields = dataclasses.fields(kind)
        homes = [f.name for other in kinds for f in dataclasses.fields(other) if kind.__name__ in str(f.type)]
        title = ", ".join(f"`{name}`" for name in homes) or "The whole"
        rows = [f"| `{f.name}` | {f.metadata['help']} |" for f in fields]
        parts += [f"### {title}\n", f"{kind.__doc__}\n", "| field | meaning |\n|---|---|", *rows, ""]
    return "\n".join(parts)


def other_names(markdown: str) -> str:
    """Return directives for the public names that the page does not list."""
    import smcp_fx

    listed = set(re.findall(r"^::: smcp_fx\.(?:\w+\.)*(\w+)$", markdown, re.MULTILINE))
    errors = vars(smcp_fx.errors)  # they have a heading of their own
    missing = [name for name in smcp_fx.__all__ if name not in listed and name not in errors]
    if not missing:
        return ""
    return "\n\n".join(["## More", *(f"::: smcp_fx.{name}" for name in missing)]) + "\n"
