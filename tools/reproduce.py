"""Print the paper's tables with our figures where they were run, and "not run" elsewhere.

    python tools/reproduce.py resnet50
    python tools/reproduce.py all --records docs/records/paper

Our figures come only from the records (record.json) that runs of whole recipes and the knapsack benchmark wrote, put
into --records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paper import TABLES, PaperRow, PaperTable
from rich.console import Console

from smcp_fx.cli.common import consoles, guarded
from smcp_fx.recipes.record import Record, read_records

_RECORDS = Path(__file__).parent.parent / "docs" / "records" / "paper"
NOT_RUN = "not run"
_HEADINGS = {
    "top1": "Top-1, %",
    "top5": "Top-5, %",
    "fps": "FPS",
    "speedup": "speed-up",
    "mAP_gain": "mAP over SSD300-RN50, points",
    "fps_gain": "FPS over SSD300-RN50, %",
    "exactness": "exact to",
    "seconds": "seconds",
}
_DIGITS = {
    "flops": 1,
    "top1": 1,
    "top5": 2,
    "fps": 0,
    "speedup": 2,
    "mAP_gain": 2,
    "fps_gain": 0,
    "seconds": 2,
}


def our_figures(name: str, table: PaperTable, row: PaperRow, records: Sequence[Record]) -> dict[str, float]:
    """Return what was measured here for a row, by column; columns that no complete record has are missing.

    Frames per second are compared only with those of the same device and runtime.
    """
    values, dense, device = _values(name, row.method, records)
    found = {column: values[column] for column in table.columns if column in values}
    if "flops" in found:
        found["flops"] /= table.flops_unit
    if "speedup" in table.columns and "fps" in values and "fps" in dense:
        found["speedup"] = values["fps"] / dense["fps"]
    rival, _, beside = _values(name, "SSD300-RN50", records)
    if "mAP" in values and "mAP" in rival:
        found["mAP_gain"] = values["mAP"] - rival["mAP"]
    if "fps_gain" in table.columns and "fps" in values and "fps" in rival and device == beside:
        found["fps_gain"] = 100 * (values["fps"] / rival["fps"] - 1)
    return found


def _values(
    name: str, method: str, records: Sequence[Record]
) -> tuple[dict[str, float], dict[str, float], str]:
    """Return the figures of a method's last complete record, those of the unpruned network, and their device."""
    for record in reversed(records):
        if record.complete and record.row == f"{name}/{method}":
            return record.values, record.dense, record.device
    if method == "No pruning":  # measured beside every pruned network
        for record in reversed(records):
            if record.complete and record.row.startswith(f"{name}/") and record.dense:
                return record.dense, record.dense, record.device
    return {}, {}, ""


def print_table(name: str, records: Sequence[Record], console: Console) -> None:
    """Print a table of the paper with our figures beside its own."""
    table = TABLES[name]
    console.print(table.title)
    unit = {1e9: "G", 1e6: "M"}[table.flops_unit]
    headings = [_HEADINGS.get(column, f"FLOPs, {unit}") for column in table.columns]
    lines: list[list[str]] = [["method", *headings, *(f"ours: {heading}" for heading in headings)]]
    for row in table.rows:
        if row.divider:
            lines.append([])
        ours = our_figures(name, table, row, records)
        printed = [_shown(c, figure, table) for c, figure in zip(table.columns, row.figures, strict=True)]
        found = [_shown(c, ours[c], table) if c in ours else NOT_RUN for c in table.columns]
        lines.append([row.method, *printed, *found])
    for line in _aligned(lines):
        console.print(line, markup=False)
    own = [record for record in records if record.row.startswith(f"{name}/")]
    where: dict[str, list[str]] = {}
    for record in own:
        if record.complete:
            where.setdefault(_where(record), []).append(record.row.partition("/")[2])
    for place, methods in where.items():
        console.print(f"Ours, {', '.join(methods)}: {place}", markup=False)
    left_out = sum(not record.complete for record in own)
    if left_out:
        console.print(f"{left_out} records of scaled-down or changed runs are left out.")
    console.print()


def _where(record: Record) -> str:
    trained = f"total batch {record.total_batch} on {record.ranks} ranks; " if record.total_batch else ""
    versions = ", ".join(f"{key} {value}" for key, value in record.environment.items())
    return f"{trained}timed on {record.device or 'nothing'}; {versions}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines as aligned text, first column to the left; never folded, since tables go into files."""
    widths = [max(map(len, column)) for column in zip(*(line for line in lines if line), strict=True)]
    return [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        if line
        else ""
        for line in lines
    ]


def _shown(column: str, figure: float | str | None, table: PaperTable) -> str:
    if figure is None or isinstance(figure, str):
        return figure or "-"
    if column == "exactness":
        return f"{figure:.1g} ms of 255.4"
    digits = 0 if column == "flops" and table.flops_unit < 1e9 else _DIGITS[column]
    return f"{figure:.{digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=(*TABLES, "all"), help="which table of the paper")
    parser.add_argument("--records", type=Path, default=_RECORDS, metavar="FOLDER",
                        help="where the records lie (default: docs/records/paper)")  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(argv)
    console, problems = consoles()

    def run() -> int:
        records = read_records(arguments.records)
        for name in TABLES if arguments.table == "all" else (arguments.table,):
            print_table(name, records, console)
        return 0

    return guarded("reproduce", run, problems, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
