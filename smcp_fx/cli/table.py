"""smcp-table: measure, show, merge, exchange and check latency tables."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from smcp_fx.cli.common import CommandParser, consoles, guarded, interruptible, one_line
from smcp_fx.cli.networks import (
    add_network_options,
    add_targets_option,
    backend_of,
    blocks_of,
    fingerprint_of,
    network_of,
    wanted_of,
)
from smcp_fx.errors import InputError

if TYPE_CHECKING:
    from smcp_fx.latency.store import TableRow
    from smcp_fx.latency.table import HeldOutError

_EXAMPLES = """examples:
  # fill table.sqlite with what ResNet-50 needs on this machine
  smcp-table measure torchvision:resnet50
  # what is in it, and whether it is sound and complete for this model
  smcp-table show table.sqlite
  smcp-table check table.sqlite --model torchvision:resnet50
  # share the work between machines of one kind
  smcp-table measure torchvision:resnet50 --shard 2/8 --table part2.sqlite
  smcp-table merge table.sqlite part1.sqlite part2.sqlite
  # for a spreadsheet
  smcp-table export table.sqlite rows.csv
  # rows to measure on another device, and their answers
  smcp-table export table.sqlite todo.csv --wanted --onnx todo \\
      --model torchvision:resnet50 --device my-phone
  smcp-table import done.csv table.sqlite
  # the same for TensorRT on another device
  smcp-table measure torchvision:resnet50 --backend tensorrt \\
      --emit-requests todo
"""


def build_parser() -> CommandParser:
    """Return the command line's parser."""
    parser = CommandParser(
        prog="smcp-table",
        description="Latency tables: what the blocks of networks cost on a device. A table is one SQLite file; every "
        "row is kept as it is measured, and several processes may fill one table.",
        epilog=_EXAMPLES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="measure what a model needs and the table lacks")
    measure.add_argument("model", help="torchvision:NAME, timm:NAME, onnx:FILE, or path/to/file.py:factory")
    measure.add_argument("--table", type=Path, default=Path("table.sqlite"), metavar="FILE",
                         help="file to fill (default: table.sqlite)")  # fmt: skip
    add_network_options(measure)
    add_targets_option(measure)
    measure.add_argument("--shard", default="1/1", metavar="I/N", help="measure the I-th of N parts only")
    measure.add_argument("--retry-failed", action="store_true", help="measure rows again that failed before")
    measure.add_argument("--retry-unstable", action="store_true", help="... and those that were unstable")
    measure.add_argument("--emit-requests", type=Path, metavar="DIR",
                         help="measure nothing here: write requests for TensorRT on another device")  # fmt: skip
    measure.add_argument("--read-answers", type=Path, metavar="DIR", help="... and read what it answered")
    show = commands.add_parser("show", help="what is in a table, measured on what and when")
    show.add_argument("table", type=Path)
    show.add_argument("--block", metavar="TEXT", help="every row of the blocks whose name holds this")
    merge = commands.add_parser("merge", help="join tables of one fingerprint")
    merge.add_argument("into", type=Path, help="file to join into; made if it is not there")
    merge.add_argument("tables", type=Path, nargs="+")
    merge.add_argument("--fingerprint", metavar="KEY", help="take the rows of this one (see show)")
    export = commands.add_parser("export", help="write rows as .json or .csv")
    export.add_argument("table", type=Path)
    export.add_argument("file", type=Path, help="ends in .json or .csv")
    export.add_argument("--wanted", action="store_true",
                        help="the rows that --model lacks instead, to measure elsewhere and import")  # fmt: skip
    export.add_argument("--onnx", type=Path, metavar="FOLDER", help="... with an ONNX file for each of them")
    add_targets_option(export)
    add_network_options(export, model=True)
    take = commands.add_parser("import", help="read rows from .json or .csv")
    take.add_argument("file", type=Path)
    take.add_argument("table", type=Path)
    check = commands.add_parser("check", help="look for damage, failed, unstable and missing rows")
    check.add_argument("table", type=Path)
    add_network_options(check, model=True)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if ``check`` found problems, 2 for errors."""
    arguments = build_parser().parsed(argv)
    console, problems = consoles()
    commands = {"measure": _measure, "show": _show, "merge": _merge, "export": _export, "import": _import,
                "check": _check}  # fmt: skip
    return guarded(
        "smcp-table",
        lambda: commands[arguments.command](arguments, console),
        problems,
        debug=arguments.debug,
        interrupted="Every finished row is kept: run the same command to continue.",
        advice="Free space, or give another place.",
    )


def _measure(arguments: argparse.Namespace, console: Console) -> int:
    from smcp_fx.blocks.sharing import unique_blocks
    from smcp_fx.latency.network import Measurer
    from smcp_fx.latency.progress import duration, row_watcher
    from smcp_fx.latency.rounds import measure_for_targets
    from smcp_fx.latency.table import LatencyTable

    if arguments.emit_requests or arguments.read_answers:
        from smcp_fx.cli.table_requests import exchange

        return exchange(arguments, console, *_shard(arguments.shard))
    shard, shards = _shard(arguments.shard)
    if arguments.table.exists():  # report an unusable table before building anything
        LatencyTable(arguments.table).close()
    if arguments.targets and shards > 1:
        raise InputError("--targets needs all of the network: leave --shard out")
    backend, network = backend_of(arguments), network_of(arguments)
    for remark in backend.remarks():
        console.print(f"note: {remark}", markup=False)
    with LatencyTable(arguments.table) as table:
        mine = unique_blocks(network.blocks, shard, shards)
        with row_watcher(True) as tell:
            report = table.measure(
                mine, backend, tell, whole=not arguments.targets,
                retry_failed=arguments.retry_failed, retry_unstable=arguments.retry_unstable,
            )  # fmt: skip
        if arguments.targets and not report.failed:
            latency = network.latency(table, backend.fingerprint(), Measurer(backend))
            measure_for_targets(latency, arguments.targets)
            assert latency.report is not None
            report = latency.report.after(report)
        error = table.held_out_error(
            [b for b in mine if not _failed(b.name, report.failed)], backend.fingerprint()
        )
    console.print(
        f"{arguments.table}: {report.measured} rows measured, {report.reused} were there, "
        f"in {duration(report.seconds)}, for {len(mine)} blocks"
        + (f" (shard {arguments.shard})" if shards > 1 else "")
    )
    console.print(f"  on {one_line(backend.fingerprint().describe())}")
    if report.elsewhere:
        console.print(f"  rows that the table had at {report.elsewhere} do not count for these inputs")
    _print_errors(error, console)
    if report.repeated:
        console.print(
            f"  {report.repeated} times a row was measured again that had been unsteady, slow or unlike the others"
        )
    if report.unstable:
        console.print(
            f"  {len(report.unstable)} of the rows in use are unstable; --retry-unstable measures them again"
        )
    for name, widths, why in report.failed:
        console.print(f"  failed: {one_line(name)} at {widths}: {one_line(why)}")
    return 1 if report.failed else 0


def _print_errors(error: HeldOutError, console: Console) -> None:
    """Print the errors of rows predicted from each other."""
    from smcp_fx.latency.table import MEASURABLE_MS

    if not error.points:
        return
    console.print(
        f"  {error.points} rows as predicted by the others: off by {error.median:.1%} in the median, "
        f"{error.p95:.1%} for 95 of 100"
    )
    telling = error.telling()
    if 0 < telling.points < error.points:
        console.print(
            f"  at the {telling.points} of them that were steady and took {1e3 * MEASURABLE_MS:.0f} µs and more: "
            f"{telling.median:.1%} and {telling.p95:.1%}"
        )


def _show(arguments: argparse.Namespace, console: Console) -> int:
    from smcp_fx.cli.table_show import show
    from smcp_fx.latency.exchange import rows_of

    show(arguments.table, rows_of(arguments.table), arguments.block, console)
    return 0


def _merge(arguments: argparse.Namespace, console: Console) -> int:
    from smcp_fx.latency.exchange import merge

    done = merge(arguments.into, arguments.tables, arguments.fingerprint)
    console.print(f"{arguments.into}: {done.taken} of {done.read} rows were new or better")
    return 0


def _export(arguments: argparse.Namespace, console: Console) -> int:
    from smcp_fx.latency.exchange import export_rows, rows_of

    if not arguments.wanted:
        rows = rows_of(arguments.table)
        export_rows(rows, arguments.file)
        console.print(f"{arguments.file}: {len(rows)} rows")
        return 0
    rows = _wanted(arguments)
    export_rows(rows, arguments.file)
    console.print(
        f"{arguments.file}: {len(rows)} row{'s' * (len(rows) != 1)} to measure. Fill in hot_ms, import the file, "
        "and ask again until there are none."
        if rows
        else f"{arguments.file}: nothing to measure, the table is complete"
    )
    return 0


def _wanted(arguments: argparse.Namespace) -> list[TableRow]:
    from smcp_fx.latency.exchange import wanted_rows
    from smcp_fx.latency.table import LatencyTable

    if not arguments.model:
        raise InputError("--wanted needs --model: of which network?")
    network, fingerprint = network_of(arguments), fingerprint_of(arguments)
    with LatencyTable(arguments.table) as table:
        wanted = [
            (block, widths)
            for block, points in wanted_of(network, arguments.targets, network.blocks, table, fingerprint)
            for widths in points
        ]
    if arguments.onnx:
        _write_models(arguments.onnx, wanted)
    return wanted_rows([(b.name, b.signature, widths) for b, widths in wanted], fingerprint)


def _write_models(folder: Path, wanted: Sequence[tuple[Any, tuple[int, ...]]]) -> None:
    from smcp_fx.backends.onnx.blocks import BlockModels
    from smcp_fx.backends.onnx.export import write_model

    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(f"{'[0-9]' * 5}_*.onnx"):  # of an earlier round, with other lines
        earlier.unlink()
    models = BlockModels()
    for number, (block, widths) in enumerate(wanted, 2):  # the line of its row in a CSV file
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{number:05d}_{block.name}_{'x'.join(map(str, widths))}.onnx")
        write_model(models.model(block, widths), folder / name)


def _import(arguments: argparse.Namespace, console: Console) -> int:
    from smcp_fx.latency.exchange import import_rows

    done = import_rows(arguments.file, arguments.table)
    console.print(f"{arguments.table}: {done.taken} of {done.read} rows were new or better")
    return 0


def _check(arguments: argparse.Namespace, console: Console) -> int:
    from smcp_fx.latency.exchange import Finding, check
    from smcp_fx.latency.inputs import known_at
    from smcp_fx.latency.table import LatencyTable

    findings = check(arguments.table)
    if arguments.model:
        fingerprint, blocks = fingerprint_of(arguments), blocks_of(arguments)
        with LatencyTable(arguments.table, read_only=True) as table:
            holes = table.wanted(blocks, fingerprint, whole=False)
            elsewhere = known_at(blocks, table.store, fingerprint)
            others = [f.describe() for f in table.fingerprints() if f != fingerprint]
        if elsewhere:
            findings.append(Finding(f"rows at {elsewhere} do not count for what was asked about", False))
        if holes and others:
            findings.append(
                Finding(f"asked about {fingerprint.describe()}; it has rows of {'; '.join(others)}", False)
            )
        findings += [
            Finding(f"missing: {block.name} at {', '.join('x'.join(map(str, p)) for p in points[:6])}"
                    + (f" and {len(points) - 6} more" if len(points) > 6 else ""), True)
            for block, points in holes
        ]  # fmt: skip
    for finding in findings:
        mark = ("bad ", "red") if finding.bad else ("note", "")
        console.print(Text.assemble(mark, f" {one_line(finding.what)}"))
    bad = sum(finding.bad for finding in findings)
    console.print(f"{arguments.table}: {f'{bad} problems' if bad else 'sound'}")
    return 1 if bad else 0


# ---- shared by the commands -------------------------------------------------------------------------------------


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not re.fullmatch("[0-9]{1,9}/[0-9]{1,9}", text) or not 1 <= int(part) <= int(parts):
        raise InputError(f"--shard {text!r}: give I/N with 1 <= I <= N, such as 2/8")
    return int(part), int(parts)


def _failed(name: str, failed: Sequence[tuple[str, Any, str]]) -> bool:
    return any(other == name for other, _, _ in failed)


if __name__ == "__main__":
    sys.exit(main())
