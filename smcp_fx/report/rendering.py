"""Pages from the templates beside this file: one file per page, style and script inside, text escaped."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from smcp_fx.report.formats import MISSING, count, duration, milliseconds, number, percent, relative_change
from smcp_fx.report.svg import pixels
from smcp_fx.texts import significant

_HOME = "smcp_fx.report"
_FILTERS = {each.__name__: each for each in (count, duration, milliseconds, number, percent, significant)}


def render(template: str, *, package: str = _HOME, **values: Any) -> str:
    """Return the page of a template: the report's, or another ``package``'s, which may extend those."""
    return _pages(package).get_template(template).render(**values)


@cache
def _pages(package: str) -> Environment:
    loader = ChoiceLoader([PackageLoader(name) for name in (package, _HOME)])
    pages = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters.update(_FILTERS, px=pixels)
    pages.globals.update(asset=asset, change=relative_change, missing=MISSING)
    pages.tests["inside"] = _is_inside
    return pages


def asset(name: str, package: str = _HOME) -> Markup:
    """Return the text of a style sheet or a script."""
    return Markup(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def _is_inside(path: str) -> bool:
    """Whether a path is a file in the report's folder: not another page, and not a script."""
    return "://" not in path and not path.lower().lstrip().startswith(("javascript:", "data:"))
