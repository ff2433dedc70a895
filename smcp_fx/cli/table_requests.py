"""smcp-table measure for devices without this library: writes requests, reads answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from smcp_fx.backends.tensorrt.options import EngineSettings
from smcp_fx.cli.common import one_line
from smcp_fx.cli.flags import chosen
from smcp_fx.cli.networks import network_of, wanted_of
from smcp_fx.errors import InputError

if TYPE_CHECKING:
    from smcp_fx.backends.base import Fingerprint
    from smcp_fx.backends.tensorrt.worker.building import BuildOptions
    from smcp_fx.latency.table import LatencyTable


def exchange(arguments: argparse.Namespace, console: Console, shard: int, shards: int) -> int:
    """Read a folder's answers into the table, then write the next requests; return 1 if rows failed."""
    if arguments.backend != "tensorrt":
        raise InputError(
            "--emit-requests and --read-answers are for --backend tensorrt; see also smcp-table export"
        )
    from smcp_fx.blocks.sharing import unique_blocks
    from smcp_fx.latency.table import LatencyTable
    from smcp_fx.latency.tensorrt_requests import WORKER, device_fingerprint, emit_requests, read_answers

    if arguments.retry_unstable:
        raise InputError(
            "--retry-unstable is for devices that smcp_fx runs on: answers are measured elsewhere"
        )
    options = chosen(EngineSettings, vars(arguments)).of_build(arguments.precision)
    failed = 0
    with LatencyTable(arguments.table) as table:
        network = network_of(arguments)
        mine = unique_blocks(network.blocks, shard, shards)
        fingerprint = _of_table(table, options)
        if arguments.read_answers:
            answers = read_answers(arguments.read_answers)
            taken = table.store.insert(answers.rows)
            failed = sum(row.latency is None for row in answers.rows)
            console.print(
                f"{arguments.table}: {taken} of {len(answers.rows)} rows were new or better, {failed} failed, "
                f"{answers.unanswered} requests have no answer"
            )
            for row in [row for row in answers.rows if row.latency is None][:5]:
                console.print(f"  failed: {one_line(row.name)} at {row.widths}: {one_line(row.error)}")
            fingerprint = answers.fingerprint or fingerprint
        folder: Path | None = arguments.emit_requests
        if folder is not None:
            fingerprint = device_fingerprint(folder, options) or fingerprint
        if arguments.retry_failed:
            for block in mine:
                table.store.forget_failures(block.signature, fingerprint)
        wanted = wanted_of(network, arguments.targets, mine, table, fingerprint)
        rows = sum(len(points) for _, points in wanted)
        if unsteady := table.unsteady(mine, fingerprint):
            console.print(f"  {len(unsteady)} of the rows in use are unsteady")
        if folder is None:
            console.print(f"  {rows} rows are wanted still" if rows else f"  complete for {len(mine)} blocks")
            return 1 if failed else 0
        if not wanted:
            console.print(f"complete for {len(mine)} blocks: nothing to measure")
            return 1 if failed else 0
        asked = emit_requests(folder, wanted, options, retry_failed=arguments.retry_failed)
    console.print(
        f"{folder}: {asked} rows to measure. On the device: python3 {folder.name}/{WORKER} {folder.name}. Then "
        f"--read-answers {folder}, and ask again until there are none."
    )
    return 1 if failed else 0


def _of_table(table: LatencyTable, options: BuildOptions) -> Fingerprint:
    """Return the fingerprint of the table's TensorRT rows for these options; a nameless one if there are none."""
    from smcp_fx.backends.tensorrt.answers import fingerprint_of

    nowhere = dict.fromkeys(("device", "tensorrt", "driver", "compute_capability"), "not known yet")
    nameless = fingerprint_of(nowhere, options)
    own = {"driver", "compute_capability"}
    fixed = [(name, value) for name, value in nameless.settings if name not in own]
    prints = [
        f
        for f in table.fingerprints()
        if (f.backend, f.precision) == (nameless.backend, nameless.precision)
        and [(name, value) for name, value in f.settings if name not in own] == fixed
    ]
    if len(prints) > 1:
        raise InputError(
            f"{table.path} holds TensorRT rows of {len(prints)} devices or versions "
            f"({'; '.join(f.describe() for f in prints)}): give each a table of its own"
        )
    return prints[0] if prints else nameless
