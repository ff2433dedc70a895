"""The most accurate network at a share of the FLOPs, for training budgets of 0, 1, 10 and 33 % of the dense training.

    apt-get download texlive-fonts-extra && dpkg -x texlive-fonts-extra_*.deb fonts
    python tools/bench/pretrained/render.py fonts glyphs.npz
    PYTHONPATH=tools/bench python -m accuracy.run --glyphs glyphs.npz --work work --record RECORD.jsonl
    PYTHONPATH=tools/bench python -m accuracy.run --show docs/records/accuracy.jsonl --out docs/results

Networks are trained to their plateau once, and kept in --work (`pretrained`). Each method's learning rate is the best
of --rates at one target and seed, judged on images of the training set's kind, not on the test images. Every run is a
line of JSON the moment it is done; a run that the record holds is not repeated. Rivals' batch norms are estimated
anew behind the training where that is better. `pip install torch-pruning==1.6.1 --no-deps` for that rival. Set
OMP_NUM_THREADS=1. ``--budgets 0 0.01 --seeds 2`` shows the main picture in under an hour.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pretrained.dense import dense_network, tasks
from pretrained.networks import NETWORKS
from pretrained.tasks import Task
from records import Record
from torch import nn
from without_training import versions
from without_training_methods import Setting, UnavailableError

import smcp_fx
from accuracy.methods import METHODS, UNTRAINED, Effort, steps_of
from accuracy.report import print_tables, write_document

TARGETS, BUDGETS, RATES = (0.25, 0.5), (0.0, 0.01, 0.1, 0.33), (0.01, 0.03, 0.1)
#: Images that all methods may choose channels by, and those that learning rates are judged by.
IMAGES, JUDGED, _JUDGED_SEED = 640, 2_000, 800_000_001


@dataclass(frozen=True)
class Case:
    """One run: a network of a task, a method, a share of the FLOPs, a budget, a peak learning rate, a seed."""

    task: str
    network: str
    method: str
    target: float
    budget: float
    rate: float
    seed: int


class Bench:
    """Keeps what several runs share: data, dense networks, and what was gathered of them."""

    def __init__(self, glyphs: Path, work: Path) -> None:
        self.tasks, self.work = tasks(glyphs), work
        self._dense: dict[tuple[str, str], tuple[nn.Module, float]] = {}
        self._setting: tuple[tuple[str, str, int], Setting] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """What a case came to."""
        task = self.tasks[case.task]
        setting, dense = self._shared(task, case)
        effort = Effort(steps_of(task, case.network, case.budget), case.rate, case.seed)
        torch.manual_seed(case.seed)
        model, share = METHODS[case.method](setting, task, case.target, effort)
        judged = _Judged(task)
        if effort.steps and not case.method.startswith("ours"):  # ours is left as the product leaves it
            settled = copy.deepcopy(model)
            smcp_fx.recalibrate(settled, setting.images)
            model = max((model, settled), key=judged.accuracy)
        return {
            "dense": dense, "accuracy": task.accuracy(model), "judged": judged.accuracy(model),
            "flops_share": share, "steps": effort.steps,
        }  # fmt: skip

    def _shared(self, task: Task, case: Case) -> tuple[Setting, float]:
        if (case.task, case.network) not in self._dense:
            model = dense_network(task, case.network, 0, self.work)
            self._dense[case.task, case.network] = model, task.accuracy(model)
        model, accuracy = self._dense[case.task, case.network]
        key = (case.task, case.network, case.seed)
        if self._setting is None or self._setting[0] != key:
            images, labels = task.draw(IMAGES, 900_000_001 + case.seed)
            self._setting = key, Setting(model, images, labels, case.seed)
        return self._setting[1], accuracy


class _Judged(Task):
    """A task whose test images are of the training set's kind, seen by no method."""

    def __init__(self, task: Task) -> None:
        self.test = task.draw(JUDGED, _JUDGED_SEED)

    def draw(self, count: int, seed: int) -> Any:
        raise NotImplementedError


def cases(arguments: argparse.Namespace, record: Record) -> Iterator[Case]:
    """All runs, budget by budget: rates at the first target and seed, then other seeds and targets at the best."""
    for budget in arguments.budgets:
        methods = [name for name in arguments.methods if budget or name in UNTRAINED]
        rates = arguments.rates if budget else [0.0]
        for task in arguments.tasks:
            for network in arguments.networks:
                first = [Case(task, network, m, arguments.targets[0], budget, 0.0, 0) for m in methods]
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
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    record, bench = Record(arguments.record), Bench(arguments.glyphs, arguments.work)
    said: set[str] = set()
    for case in cases(arguments, record):
        if time.monotonic() > deadline:
            print(f"{arguments.minutes:g} minutes are over; run again to go on")
            return
        if case.method in said or record.find("run", **asdict(case)):
            continue
        busy = time.process_time()
        try:
            found = bench.run(case)
        except UnavailableError as error:
            print(f"left out: {case.method}: {error}", flush=True)
            said.add(case.method)
            continue
        took = round(time.process_time() - busy, 2)
        record.add("run", **asdict(case), **found, cpu_seconds=took, versions=versions())
        print(
            f"{case.task} {case.network} seed {case.seed}, budget {case.budget:.0%}, {case.method} at "
            f"{case.target:.0%}, rate {case.rate:g}: {found['accuracy']:.1%} of {found['dense']:.1%}; {took:.0f} s",
            flush=True,
        )


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glyphs", type=Path, help="file that pretrained/render.py wrote")
    parser.add_argument("--work", type=Path, help="folder for the dense networks")
    parser.add_argument("--record", type=Path, help="file of JSON lines to fill")
    parser.add_argument("--seeds", type=int, default=3, help="of calibration images and of training")
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS))
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
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
