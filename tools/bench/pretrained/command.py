"""What the benchmarks on trained networks share: the command line, dense networks, and a loop that can be resumed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from records import Record
from torch import nn

from pretrained.dense import add_data, dense_network
from pretrained.networks import NETWORKS
from pretrained.tasks import Task
from smcp_fx.errors import MachineBusyError

#: Seconds between two tries on a busy machine.
_WAIT = 20.0
_PACKAGES = ("smcp_fx", "torch", "torchvision", "scikit-learn", "torch-pruning", "onnxruntime", "openvino")


class UnavailableError(Exception):
    """A method cannot be run here: its package is missing, or it does not take the network."""


class DenseNetworks:
    """The trained networks, each with its test accuracy; kept once they are loaded."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._known: dict[tuple[str, str], tuple[nn.Module, float]] = {}

    def of(self, task: Task, network: str) -> tuple[nn.Module, float]:
        """Return a network of a task and its accuracy, trained where the folder does not hold it."""
        key = (task.name, network)
        if key not in self._known:
            model = dense_network(task, network, 0, self._work)
            self._known[key] = model, task.accuracy(model)
        return self._known[key]


def run_cases(
    arguments: argparse.Namespace,
    record: Record,
    cases: Iterable[Any],
    run: Callable[[Any], dict[str, Any]],
    named: Callable[[Any], str],
) -> None:
    """Run the cases (dataclasses with a ``method``) that the record lacks, a line each, until the time is over.

    A method that raises `UnavailableError` is left out from then on.
    """
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(1)
    missing: set[str] = set()
    for case in cases:
        if time.monotonic() > deadline:
            print(f"{arguments.minutes:g} minutes are over; run again to go on")
            return
        if case.method in missing or record.find("run", **asdict(case)):
            continue
        began, busy = time.perf_counter(), time.process_time()
        try:
            found = _run_when_quiet(run, case)
        except UnavailableError as error:
            print(f"left out: {case.method}: {error}", flush=True)
            missing.add(case.method)
            continue
        took = {
            "seconds": round(time.perf_counter() - began, 2),
            "cpu_seconds": round(time.process_time() - busy, 2),
        }
        record.add("run", **asdict(case), **found, **took, versions=versions())
        result = found.get("failed") or f"{found['accuracy']:.1%} of {found['dense']:.1%}"
        print(f"{named(case)}: {result}; {took['cpu_seconds']:.0f} CPU s", flush=True)


def _run_when_quiet(run: Callable[[Any], dict[str, Any]], case: Any) -> dict[str, Any]:
    """Run a case, again and again while the machine is too busy to measure on."""
    while True:
        try:
            return run(case)
        except MachineBusyError as error:
            print(f"waiting: {error}", flush=True)
            time.sleep(_WAIT)


def versions() -> dict[str, str]:
    """Versions of what the results rest on; packages that are not installed are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command_line(description: str | None, methods: Sequence[str], seeds: int) -> argparse.ArgumentParser:
    """Return the options that such benchmarks share; ``seeds``: how many by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser)
    parser.add_argument("--work", type=Path, help="folder for the dense networks")
    parser.add_argument("--record", type=Path, help="file of JSON lines to fill")
    parser.add_argument("--seeds", type=int, default=seeds, help="of calibration images, and of training")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=list(methods), choices=list(methods))
    parser.add_argument("--minutes", type=float, default=600.0, help="start nothing after so long")
    parser.add_argument("--show", type=Path, metavar="RECORD", help="print a record's tables instead")
    parser.add_argument("--out", type=Path, help="with --show: folder for the page and its pictures")
    return parser


def run_or_show(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    print_tables: Callable[[Sequence[dict[str, Any]]], None],
    write_document: Callable[[Sequence[dict[str, Any]], Path], None],
) -> None:
    """Run the benchmark, or show a record, as the command line says."""
    arguments = parser.parse_args()
    if arguments.show:
        lines = [json.loads(line) for line in arguments.show.read_text(encoding="utf-8").splitlines()]
        if arguments.out:
            write_document(lines, arguments.out)
        else:
            print_tables(lines)
    elif arguments.record and arguments.work:
        arguments.work.mkdir(parents=True, exist_ok=True)
        run(arguments)
    else:
        parser.error("give --work and --record to run, or --show to see")
