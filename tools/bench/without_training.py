"""Accuracy without training: what is left of trained networks at a share of their FLOPs or latency.

    python tools/bench/pretrained/render.py fonts glyphs.npz                 the data, from a folder of fonts
    python tools/bench/without_training.py --glyphs glyphs.npz --work work --record RECORD.jsonl --cost flops
    python tools/bench/without_training.py --glyphs glyphs.npz --work work --record RECORD.jsonl --cost latency
    python tools/bench/without_training.py --glyphs glyphs.npz --work work --record RECORD.jsonl --images
    python tools/bench/without_training.py --show docs/records/without_training.jsonl --out docs/results

Three networks (`pretrained/networks.py`) are trained to their plateau once, and kept in --work; then each is pruned
from a few hundred images, with no optimiser step (`without_training_methods.py`). Latency is that of emitted files in
ONNX Runtime: every method is asked for less until its network is within the target (`pretrained/latency.py`). Every
run is a line of JSON the moment it is done; a run that the record holds is not repeated. Torch-Pruning is left out
where it is not installed (`pip install --no-deps torch-pruning==1.6.1`). Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pretrained.command import DenseNetworks, command_line, run_cases, run_or_show
from pretrained.dense import tasks
from pretrained.latency import Stopwatch
from pretrained.tasks import Task
from records import Record
from without_training_methods import METHODS, Setting
from without_training_report import COMPARED, print_tables, write_document

TARGETS = (0.5, 0.25, 0.7, 0.35)
#: Images that all methods see, and those of the runs that vary them, at one target.
IMAGES, COUNTS, VARIED = 640, (32, 64, 128, 256, 512, 1024, 2048, 4096), 0.35
#: Methods that have the widths of another one, which latencies depend on.
_WIDTHS = {"ours without repair": "ours", "random": "uniform L2"}


@dataclass(frozen=True)
class Case:
    """One run: a network of a task, a method, a share of a cost, calibration images of a seed, labelled or not."""

    task: str
    network: str
    method: str
    cost: str
    target: float
    images: int
    labels: bool
    seed: int


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """All runs, seed by seed; or those of other numbers of images."""
    if arguments.images:
        for images in COUNTS:
            for labels in (True, False):
                yield Case(arguments.tasks[0], "resnet", "ours", "flops", VARIED, images, labels, 0)
        return
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for network in arguments.networks:
                for target in TARGETS:
                    for method in arguments.methods:
                        yield Case(task, network, method, arguments.cost, target, IMAGES, True, seed)


class Bench:
    """Keeps what several runs share: data, dense networks, and what was prepared of them."""

    def __init__(self, arguments: argparse.Namespace, record: Record) -> None:
        self.tasks, self.dense = tasks(arguments), DenseNetworks(arguments.work)
        self._record = record
        self._watches: dict[str, Stopwatch] = {}
        self._setting: tuple[tuple[Any, ...], Setting] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """What a case came to; ``share``: of the FLOPs or of the latency, as measured."""
        task = self.tasks[case.task]
        dense, accuracy = self.dense.of(task, case.network)
        watch = self._watch(task, case.network, dense) if case.cost == "latency" else None
        setting = self._shared(task, case, dense, watch)
        setting.target = case.target
        aim = case.target if watch is None else setting.aim(_WIDTHS.get(case.method, case.method))
        model, share = METHODS[case.method](setting, aim)
        found = {"dense": accuracy, "accuracy": task.accuracy(model)}
        if watch is None:
            return found | {"share": share, "error": 0.0}
        measured = watch.share(model)
        return found | {"share": measured.fraction, "error": measured.error}

    def _watch(self, task: Task, network: str, dense: torch.nn.Module) -> Stopwatch:
        name = f"{task.name}-{network}"
        if name not in self._watches:
            self._watches[name] = Stopwatch(name, dense, task.draw(IMAGES, 0)[0], self._record)
        return self._watches[name]

    def _shared(self, task: Task, case: Case, dense: torch.nn.Module, watch: Stopwatch | None) -> Setting:
        key = (case.task, case.network, case.cost, case.images, case.labels, case.seed)
        if self._setting is None or self._setting[0] != key:
            images, labels = task.draw(case.images, 900_000_001 + case.seed)
            priced = {} if watch is None else watch.pricing
            self._setting = key, Setting(dense, images, labels if case.labels else None, case.seed, **priced)
        return self._setting[1]


def run(arguments: argparse.Namespace) -> None:
    """Run what the record lacks."""
    record = Record(arguments.record)
    bench = Bench(arguments, record)

    def named(case: Case) -> str:
        images = f"{case.images} images{'' if case.labels else ' without labels'}"
        asked = f"{case.method} at {case.target:.0%} of the {case.cost}"
        return f"{case.task} {case.network} seed {case.seed}, {images}, {asked}"

    run_cases(arguments, record, cases(arguments), bench.run, named)


def main() -> None:
    """Parse the command line and run it."""
    parser = command_line(__doc__, list(METHODS), seeds=5)
    parser.set_defaults(methods=list(COMPARED), networks=["resnet", "vgg", "mobilenet"])
    parser.add_argument("--cost", default="flops", choices=["flops", "latency"])
    parser.add_argument("--images", action="store_true", help="vary the number of images instead")
    run_or_show(parser, run, print_tables, write_document)


if __name__ == "__main__":
    main()
