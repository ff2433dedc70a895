"""Run one of the commands in this process."""

from __future__ import annotations

from collections.abc import Callable

from smcp_fx.cli import compile as compile_cli
from smcp_fx.cli import inspect as inspect_cli
from smcp_fx.cli import table as table_cli
from smcp_fx.cli import train as train_cli

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "compile": compile_cli.main,
    "table": table_cli.main,
    "inspect": inspect_cli.main,
    "train": train_cli.main,
}


def run(command: str, arguments: list[str]) -> int:
    """The exit code."""
    try:
        return COMMANDS[command](arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)
