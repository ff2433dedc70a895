"""The most accurate network at a share of the latency (or FLOPs), for budgets of 0, 1, 10 and 33% of the training.

    apt-get download texlive-fonts-extra && dpkg -x texlive-fonts-extra_*.deb fonts
    python tools/bench/pretrained/render.py fonts glyphs.npz
    PYTHONPATH=tools/bench python -m accuracy.run --glyphs glyphs.npz --work work --record RECORD.jsonl
    PYTHONPATH=tools/bench python -m accuracy.run --show docs/records/accuracy.jsonl --out docs/results

Networks are trained to their plateau once, and kept in --work (`pretrained`). Each method's learning rate is the best
of --rates at one target and seed, judged on images of the training set's kind, not on the test images. Every run is a
line of JSON the moment it is done; a run that the record holds is not repeated. Rivals' batch norms are estimated
anew behind the training where that is better. `pip install torch-pruning==1.6.1 --no-deps` for that rival. Set
OMP_NUM_THREADS=1. The record's 818 runs took 7,118 CPU seconds, the 486 at a share of the latency 5,589, beside
training the dense networks.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from pretrained.command import DenseNetworks, command_line, run_cases, run_or_show
from pretrained.dense import tasks
from pretrained.latency import Stopwatch
from pretrained.tasks import Task, accuracy_on
from pretrained.torch_pruning_path import flops
from records import Record
from torch import Tensor, nn
from without_training_methods import METHODS as CHOICES
from without_training_methods import Setting, recalibrated

from accuracy.methods import METHODS, Effort, chooser, steps_of
from accuracy.report import print_tables, write_document

TARGETS, BUDGETS, RATES = (0.25, 0.4, 0.6), (0.0, 0.01, 0.1, 0.33), (0.01, 0.03, 0.1)
#: Images that all methods may choose channels by, and those that learning rates are judged by.
IMAGES, JUDGED, _JUDGED_SEED = 640, 2_000, 800_000_001


@dataclass(frozen=True)
class Case:
    """One run: a network of a task, a method, a share of a cost, a budget, a peak learning rate, a seed."""

    task: str
    network: str
    method: str
    cost: str
    target: float
    budget: float
    rate: float
    seed: int


class Bench:
    """Keeps what several runs share: data, dense networks, and what was gathered of them."""

    def __init__(self, arguments: argparse.Namespace, record: Record) -> None:
        self.tasks, self.dense = tasks(arguments), DenseNetworks(arguments.work)
        self._record, self._work = record, arguments.work
        self._watches: dict[str, Stopwatch] = {}
        self._setting: tuple[tuple[str, str, str, int], Setting] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """What a case came to."""
        task = self.tasks[case.task]
        dense, accuracy = self.dense.of(task, case.network)
        watch, setting = self._watch(task, case, dense), self._shared(task, case, dense)
        setting.target = case.target
        dense_steps = steps_of(task, case.network, 1.0)
        effort = Effort(round(case.budget * dense_steps), case.rate, case.seed, dense_steps)
        aim = case.target if watch is None else setting.aim(chooser(case.method))
        torch.manual_seed(case.seed)
        model, _ = METHODS[case.method](setting, task, aim, effort)
        judging = self._judging(case.task)
        judged = accuracy_on(judging, model)
        if effort.steps and not case.method.startswith("ours"):  # ours is left as the product leaves it
            settled = recalibrated(copy.deepcopy(model), setting)
            again = accuracy_on(judging, settled)
            model, judged = (settled, again) if again > judged else (model, judged)
        share = None if watch is None else watch.share(model)
        return {
            "dense": accuracy, "accuracy": task.accuracy(model), "judged": judged, "steps": effort.steps,
            "flops_share": flops(model, task.example) / flops(dense, task.example),
            "latency_share": share and share.fraction, "latency_error": share and share.error,
        }  # fmt: skip

    @cache  # noqa: B019 - there is one bench
    def _judging(self, task: str) -> tuple[Tensor, Tensor]:
        """Images of the training set's kind, seen by no method."""
        return self.tasks[task].draw(JUDGED, _JUDGED_SEED)

    def _watch(self, task: Task, case: Case, dense: nn.Module) -> Stopwatch | None:
        if case.cost == "flops":
            return None
        name = f"{case.task}-{case.network}"
        if name not in self._watches:
            images, _ = task.draw(IMAGES, 0)
            self._watches[name] = Stopwatch(name, dense, images, self._record)
        return self._watches[name]

    def _shared(self, task: Task, case: Case, dense: nn.Module) -> Setting:
        key = (case.task, case.network, case.cost, case.seed)
        if self._setting is None or self._setting[0] != key:
            images, labels = task.draw(IMAGES, 900_000_001 + case.seed)
            watch = self._watch(task, case, dense)
            priced = {} if watch is None else watch.pricing
            self._setting = key, Setting(dense, images, labels, case.seed, **priced)
        return self._setting[1]


def cases(arguments: argparse.Namespace, record: Record) -> Iterator[Case]:
    """All runs, budget by budget: rates at the first target and seed, then other seeds and targets at the best."""
    for budget in arguments.budgets:
        methods = [name for name in arguments.methods if budget or name in CHOICES]
        rates = arguments.rates if budget else [0.0]
        for task in arguments.tasks:
            for network in arguments.networks:
                first = [
                    Case(task, network, m, arguments.cost, arguments.targets[0], budget, 0.0, 0)
                    for m in methods
                ]
                yield from (replace(case, rate=rate) for case in first for rate in rates)
                for seed in range(arguments.seeds):
                    for target in arguments.targets:
                        for case in first:
                            rate = best_rate(record, case, rates)
                            if rate is not None:
                                yield replace(case, rate=rate, seed=seed, target=target)


def best_rate(record: Record, case: Case, rates: list[float]) -> float | None:
    """The rate of the best run of this case, by the images that rates are judged by; None where none was possible."""
    keys = {name: value for name, value in asdict(case).items() if name != "rate"}
    tried = [line for line in record.find("run", **keys) if line["rate"] in rates]
    return max(tried, key=lambda line: line["judged"])["rate"] if tried else None


def run(arguments: argparse.Namespace) -> None:
    """Run what the record lacks."""
    record = Record(arguments.record)
    bench = Bench(arguments, record)

    def named(case: Case) -> str:
        return (
            f"{case.task} {case.network} seed {case.seed}, budget {case.budget:.0%}, {case.method} at "
            f"{case.target:.0%} of the {case.cost}, rate {case.rate:g}"
        )

    run_cases(arguments, record, cases(arguments, record), bench.run, named)


def main() -> None:
    """Parse the command line and run it."""
    parser = command_line(__doc__, list(METHODS), seeds=3)
    parser.add_argument("--cost", default="latency", choices=["latency", "flops"])
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS))
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    run_or_show(parser, run, print_tables, write_document)


if __name__ == "__main__":
    main()
