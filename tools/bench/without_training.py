"""Accuracy without training: what is left of trained networks at a share of their FLOPs, method by method.

    python tools/bench/pretrained/render.py fonts glyphs.npz                 the data, from a folder of fonts
    python tools/bench/without_training.py --glyphs glyphs.npz --work work --record RECORD.jsonl
    python tools/bench/without_training.py --show docs/records/without_training.jsonl --out docs/results

Three networks (`pretrained/networks.py`) are trained to their plateau once, and kept in --work; then each is pruned
from a few hundred images, with no optimiser step (`without_training_methods.py`). Every run is a line of JSON the
moment it is done; a run that the record holds is not repeated. Torch-Pruning is left out where it is not installed
(`pip install torch-pruning==1.6.1`). Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from latency import Record
from pretrained.dense import dense_network, tasks
from pretrained.networks import NETWORKS
from pretrained.tasks import Task
from without_training_methods import METHODS, Setting, UnavailableError
from without_training_report import print_tables, write_document

TARGETS = (0.5, 0.25, 0.7, 0.35)
#: Images that all methods see, and those of the runs that vary them, at one target.
IMAGES, COUNTS, VARIED = 640, (32, 128, 512, 2048, 4096), 0.35
_PACKAGES = ("smcp_fx", "torch", "torchvision", "scikit-learn", "torch-pruning")


@dataclass(frozen=True)
class Case:
    """One run: a network of a task, a method, a share of the FLOPs, calibration images of a seed, labelled or not."""

    task: str
    network: str
    method: str
    target: float
    images: int
    labels: bool
    seed: int


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """All runs, seed by seed; then those of other numbers of images."""
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for network in arguments.networks:
                for target in TARGETS:
                    for method in arguments.methods:
                        yield Case(task, network, method, target, IMAGES, True, seed)
    for images in COUNTS:
        for labels in (True, False):
            yield Case("glyphs", "resnet", "ours", VARIED, images, labels, 0)


class Bench:
    """Keeps what several runs share: data, dense networks, and what was prepared of them."""

    def __init__(self, glyphs: Path, work: Path) -> None:
        self.tasks, self.work = tasks(glyphs), work
        self.dense: dict[tuple[str, str], tuple[torch.nn.Module, float]] = {}
        self._setting: tuple[tuple[Any, ...], Setting] | None = None

    def setting(self, case: Case) -> tuple[Setting, float]:
        """What the case's network and images are, and the dense accuracy."""
        task: Task = self.tasks[case.task]
        if (case.task, case.network) not in self.dense:
            model = dense_network(task, case.network, 0, self.work)
            self.dense[case.task, case.network] = model, task.accuracy(model)
        model, accuracy = self.dense[case.task, case.network]
        key = (case.task, case.network, case.images, case.labels, case.seed)
        if self._setting is None or self._setting[0] != key:
            images, labels = task.draw(case.images, 900_000_001 + case.seed)
            self._setting = key, Setting(model, images, labels if case.labels else None, case.seed)
        return self._setting[1], accuracy


def run(arguments: argparse.Namespace) -> None:
    """Run what the record lacks."""
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    record, bench = Record(arguments.record), Bench(arguments.glyphs, arguments.work)
    said: set[str] = set()
    for case in cases(arguments):
        if time.monotonic() > deadline:
            print(f"{arguments.minutes:g} minutes are over; run again to go on")
            return
        if case.method in said or record.find("run", **asdict(case)):
            continue
        setting, dense = bench.setting(case)
        began, busy = time.perf_counter(), time.process_time()
        try:
            model, share = METHODS[case.method](setting, case.target)
        except UnavailableError as error:
            print(f"left out: {case.method}: {error}", flush=True)
            said.add(case.method)
            continue
        took, busy = time.perf_counter() - began, time.process_time() - busy
        accuracy = bench.tasks[case.task].accuracy(model)
        record.add(
            "run", **asdict(case), dense=dense, accuracy=accuracy, flops_share=share, seconds=round(took, 2),
            cpu_seconds=round(busy, 2), versions=versions(), system=platform.platform(),
        )  # fmt: skip
        images = f"{case.images} images{'' if case.labels else ' without labels'}"
        print(
            f"{case.task} {case.network} seed {case.seed}, {images}, {case.method} at {case.target:.0%}: "
            f"{accuracy:.1%} of {dense:.1%}; {took:.0f} s",
            flush=True,
        )


def versions() -> dict[str, str]:
    """Versions of what the results rest on; packages that are not installed are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glyphs", type=Path, help="file that pretrained/render.py wrote")
    parser.add_argument("--work", type=Path, help="folder for the dense networks")
    parser.add_argument("--record", type=Path, help="file of JSON lines to fill")
    parser.add_argument("--seeds", type=int, default=5, help="of calibration images")
    parser.add_argument("--tasks", nargs="+", default=["glyphs"], choices=["glyphs", "digits"])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--minutes", type=float, default=600.0, help="start nothing after so long")
    parser.add_argument("--show", type=Path, metavar="RECORD", help="print a record's tables instead")
    parser.add_argument("--out", type=Path, help="with --show: folder for the page and its pictures")
    arguments = parser.parse_args()
    if arguments.show:
        lines = [json.loads(line) for line in arguments.show.read_text(encoding="utf-8").splitlines()]
        if arguments.out:
            write_document(lines, arguments.out)
        else:
            print_tables(lines)
    elif arguments.record and arguments.glyphs and arguments.work:
        run(arguments)
    else:
        parser.error("give --glyphs, --work and --record to run, or --show to see")


if __name__ == "__main__":
    main()
