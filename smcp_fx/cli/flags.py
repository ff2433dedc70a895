"""Flags from the fields of a dataclass, and the dataclass from the flags given."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def add_options(parser: argparse._ArgumentGroup, options: type, without: type | None = None) -> None:
    """Add a flag for each field of a config dataclass (except ``without``), with its default and help."""
    hints = typing.get_type_hints(options)
    left_out = {entry.name for entry in fields(without)} if without is not None else set()
    for entry in fields(options):
        if entry.name in left_out:
            continue
        flag = "--" + entry.name.replace("_", "-")
        help_text = str(entry.metadata.get("help", "")).replace("%", "%%")
        default = _default(entry)
        shown = "" if default in (None, (), False, True) else f" (default: {default})".replace("%", "%%")
        if hints[entry.name] is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            parser.add_argument(flag, action=action, default=default, help=help_text)
        elif hints[entry.name] == tuple[float, ...]:
            parser.add_argument(flag, type=_numbers, default=default, help=help_text, metavar="A,B,...")
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="*", default=default, help=help_text, metavar="NAME")
        else:
            choices = entry.metadata.get("choices") or None
            kind = _plain_type(hints[entry.name])
            word = "N" if kind in (int, float) else entry.name.rpartition("_")[2].upper()
            parser.add_argument(
                flag,
                type=kind,
                default=default,
                choices=choices,
                help=help_text + shown,
                metavar=None if choices else word,
            )


def _default(entry: Field[Any]) -> Any:
    return None if entry.default is MISSING else entry.default


def _numbers(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    return tuple(float(part) for part in text.split(",") if part.strip())


def _plain_type(hint: Any) -> Any:
    """Return the callable that parses a flag of this type: `float | None` is a float, a Literal a string."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint if hint in (int, float, str) else str


def chosen(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Return the dataclass described by these parsed flags."""
    given = {entry.name: arguments[entry.name] for entry in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
