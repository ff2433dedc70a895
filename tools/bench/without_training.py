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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pretrained.command import DenseNetworks, command_line, obey, run_cases
from pretrained.dense import tasks
from pretrained.tasks import Task
from records import Record
from without_training_methods import METHODS, Setting
from without_training_report import print_tables, write_document

TARGETS = (0.5, 0.25, 0.7, 0.35)
#: Images that all methods see, and those of the runs that vary them, at one target.
IMAGES, COUNTS, VARIED = 640, (32, 128, 512, 2048, 4096), 0.35


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
            yield Case(arguments.tasks[0], "resnet", "ours", VARIED, images, labels, 0)


class Bench:
    """Keeps what several runs share: data, dense networks, and what was prepared of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.tasks, self.dense = tasks(arguments), DenseNetworks(arguments.work)
        self._setting: tuple[tuple[Any, ...], Setting] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """What a case came to."""
        task = self.tasks[case.task]
        dense, accuracy = self.dense.of(task, case.network)
        model, share = METHODS[case.method](self._shared(task, case, dense), case.target)
        return {"dense": accuracy, "accuracy": task.accuracy(model), "flops_share": share}

    def _shared(self, task: Task, case: Case, dense: torch.nn.Module) -> Setting:
        key = (case.task, case.network, case.images, case.labels, case.seed)
        if self._setting is None or self._setting[0] != key:
            images, labels = task.draw(case.images, 900_000_001 + case.seed)
            self._setting = key, Setting(dense, images, labels if case.labels else None, case.seed)
        return self._setting[1]


def run(arguments: argparse.Namespace) -> None:
    """Run what the record lacks."""
    bench = Bench(arguments)

    def named(case: Case) -> str:
        images = f"{case.images} images{'' if case.labels else ' without labels'}"
        return f"{case.task} {case.network} seed {case.seed}, {images}, {case.method} at {case.target:.0%}"

    run_cases(arguments, Record(arguments.record), cases(arguments), bench.run, named)


def main() -> None:
    """Parse the command line and run it."""
    obey(command_line(__doc__, list(METHODS), seeds=5), run, print_tables, write_document)


if __name__ == "__main__":
    main()
