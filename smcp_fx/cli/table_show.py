"""smcp-table show: the content of a table, with its devices and times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.cli.common import one_line
from smcp_fx.errors import InputError
from smcp_fx.latency.inputs import input_shapes
from smcp_fx.latency.store import TableRow


def show(path: Path, rows: Sequence[TableRow], block: str | None, console: Console) -> None:
    """Print rows by fingerprint: one line per block, or per row of the blocks whose names hold ``block``."""
    if not rows:
        console.print(f"{path} is an empty latency table")
    by_print: dict[str, list[TableRow]] = defaultdict(list)
    for row in rows:
        by_print[row.fingerprint.key()].append(row)
    for key, of_print in by_print.items():
        first, last = (_when(pick(row.measured_at for row in of_print)) for pick in (min, max))
        failed = sum(row.latency is None for row in of_print)
        unstable = sum(row.latency is not None and not row.latency.stable for row in of_print)
        fingerprint = of_print[0].fingerprint
        console.print(Text.assemble((key, "bold"), f"  {one_line(fingerprint.describe())}"))
        console.print("  " + one_line(", ".join(f"{name} {value}" for name, value in fingerprint.settings)))
        console.print(
            f"  {len(of_print)} rows, measured {first} to {last}; {failed} failed, {unstable} unstable"
        )
        if block:
            of_print = _of_block(of_print, block)
        content = _rows_table(of_print) if block else _blocks_table(of_print)
        # Never cut numbers: lines wider than the terminal wrap.
        needed = console.measure(content, options=console.options.update(width=1000)).maximum
        console.width = max(console.width, needed)
        console.print(content)
        for row in of_print if block else ():
            if row.latency is None:
                console.print(f"  failed: {one_line(row.name)} at {_sizes(row)}: {one_line(row.error)}")


def _of_block(rows: Sequence[TableRow], name: str) -> list[TableRow]:
    chosen = [row for row in rows if name in row.name]
    if not chosen:
        names = ", ".join(dict.fromkeys(row.name for row in rows))
        raise InputError(f"the table has no block {name!r}; it has {names}")
    return sorted(chosen, key=lambda row: (row.name, row.widths))


def _blocks_table(rows: Sequence[TableRow]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for name in (
        "block",
        "input",
        "rows",
        "widths",
        "fastest in cache",
        "slowest",
        "largest spread",
        "from memory",
    ):
        table.add_column(name, justify="left" if name == "block" else "right")
    by_block: dict[str, list[TableRow]] = defaultdict(list)
    for row in rows:
        by_block[row.signature].append(row)
    for members in by_block.values():
        measured = [(row.widths, row.latency) for row in members if row.latency]
        spans = zip(*(widths for widths, _ in measured), strict=True)
        times = [latency.hot.median_ms for _, latency in measured]
        table.add_row(
            one_line(members[0].name),
            one_line("x".join(map(str, next(iter(input_shapes(members[0].signature)), ())))),
            str(len(members)),
            " x ".join(f"{min(span)}..{max(span)}" for span in spans),
            *(f"{pick(times):.4g} ms" if times else "failed" for pick in (min, max)),
            *(
                f"{max(spreads):.0%}" if (spreads := [m.spread for m in of_state if m]) else ""
                for of_state in (
                    [latency.hot for _, latency in measured],
                    [latency.cold for _, latency in measured],
                )
            ),
        )
    return table


def _rows_table(rows: Sequence[TableRow]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for column in (
        "block",
        "widths",
        "in cache",
        "spread",
        "repeats",
        "from memory",
        "spread",
        "repeats",
        "measured",
    ):
        table.add_column(column, justify="left" if column == "block" else "right")
    for row in rows:
        states = (row.latency.hot, row.latency.cold) if row.latency else ()
        cells = [cell for state in states for cell in _state_cells(state)] or ["failed", *[""] * 5]
        table.add_row(one_line(row.name), _sizes(row), *cells, _when(row.measured_at))
    return table


def _sizes(row: TableRow) -> str:
    return "x".join(map(str, row.widths))


def _state_cells(state: Measurement | None) -> tuple[str, str, str]:
    if state is None:
        return "", "", ""
    unstable = "" if state.stable else " unstable"
    return f"{state.median_ms:.4f} ms", f"{state.spread:.0%}{unstable}", str(state.repeats)


def _when(stamp: float) -> str:
    return datetime.fromtimestamp(stamp, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
