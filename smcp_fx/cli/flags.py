"""Makes flags from the fields of a dataclass, and the dataclass from parsed flags."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields
from typing import Any, TypeVar

from smcp_fx.backends import backend_options

T = TypeVar("T")


def add_options(parser: argparse._ArgumentGroup, options: type) -> None:
    """Add a flag for each field of a config dataclass that has a help text, with its default."""
    hints = typing.get_type_hints(options)
    for entry in _options(options):
        flag = "--" + entry.name.replace("_", "-")
        help_text = str(entry.metadata.get("help", "")).replace("%", "%%")
        default = _default(entry)
        shown = "" if default in (None, (), False, True) else f" (default: {default})".replace("%", "%%")
        if hints[entry.name] is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            parser.add_argument(flag, action=action, default=default, help=help_text)
        elif hints[entry.name] == tuple[float, ...]:
            parser.add_argument(flag, type=fractions, default=default, help=help_text, metavar="A,B,...")
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


def fractions(text: str) -> tuple[float, ...]:
    """Return fractions from "0.6,0.4" or "60%,40%"."""
    try:
        targets = tuple(
            float(part.removesuffix("%")) / (100 if part.endswith("%") else 1)
            for part in map(str.strip, text.split(","))
        )
    except ValueError:
        targets = (0.0,)
    if any(not 0 < target <= 1 for target in targets):
        raise argparse.ArgumentTypeError(f"{text!r}: give fractions in (0, 1], as 0.6,0.4 or 60%,40%")
    return targets


def _plain_type(hint: Any) -> Any:
    """Return the callable that parses a flag of this type: `float | None` is a float, a Literal a string."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint if hint in (int, float, str) else str


def chosen(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Return the dataclass described by these parsed flags."""
    options = {entry.name: arguments[entry.name] for entry in _options(kind)}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only one backend has, one group per backend."""
    for title, kind in backend_options().values():
        add_options(parser.add_argument_group(title), kind)


def own_options(backend: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a backend's own options; the other backends' options are checked, too, but ignored."""
    by_backend = {name: asdict(chosen(kind, arguments)) for name, (_, kind) in backend_options().items()}
    return by_backend.get(backend, {})


def _options(kind: Any) -> list[Field[Any]]:
    return [entry for entry in fields(kind) if "help" in entry.metadata]
