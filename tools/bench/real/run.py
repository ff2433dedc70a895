"""What networks with public weights keep without training, beside rivals.

    tools/bench/real/fetch.sh FOLDER                                      weights, photographs, fonts: 700 MB
    PYTHONPATH=tools/bench python -m real.run FOLDER --record RECORD.jsonl
    PYTHONPATH=tools/bench python -m real.run FOLDER --record RECORD.jsonl --cost "latency 1" --targets 0.8 0.65 0.5
    PYTHONPATH=tools/bench python -m real.run FOLDER --record RECORD.jsonl --worth

All methods see the same images, and none a true label: ours does as `smcp_fx.compress` of images alone, rivals get
labels that are drawn from the dense network's predictions. "latency 1" and "latency 16" are ONNX Runtime's for so
many images (`pretrained/latency.py`), "latency 1 openvino" is OpenVINO's. Every run is a line of JSON once it is
done; a run that the record holds is not repeated. `--worth` compares the estimated worth of each group with what
narrowing it alone does, also on networks that are trained here (`--networks ResNet-50 MobileNetV2 ConvNeXt-T ViT-S`).
Rivals need torch-pruning 1.6.1. Set OMP_NUM_THREADS=1; on Linux MALLOC_MMAP_MAX_=0,
MALLOC_TRIM_THRESHOLD_=17179869184 and MALLOC_TOP_PAD_=268435456 halve the time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pretrained.command import UnavailableError, run_cases, versions
from pretrained.latency import Stopwatch
from records import Record
from torch import Tensor
from without_training_methods import METHODS, Setting

from real.networks import SUBJECTS, Judged, Subject, divergence
from real.trained import TRAINED
from smcp_fx.calibration.elimination import STOPS, Elimination, Order, Refit
from smcp_fx.calibration.gathering import weigh
from smcp_fx.calibration.objective import Objective
from smcp_fx.calibration.progress import Stretch
from smcp_fx.calibration.readers import Run, watching

OURS = "ours"
#: Those that are run, in this order.
COMPARED = (
    OURS,
    "uniform, eliminated and repaired",
    "Torch-Pruning, uniform L2",
    "Torch-Pruning, isomorphic",
    "Torch-Pruning",
)
#: What is saved, with its name on the page.
COSTS = {
    "flops": "FLOPs",
    "latency 1": "latency of one image",
    "latency 16": "latency of 16 images",
    "latency 1 openvino": "latency of one image, OpenVINO",
    "latency 16 openvino": "latency of 16 images, OpenVINO",
}
#: What groups are narrowed to where their worth is measured.
_WORTH_AT = (0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Case:
    """One run: a network, a method, a share of a cost, and how many images it is calibrated and tested by."""

    task: str
    network: str
    method: str
    cost: str
    target: float
    images: int
    tests: int
    seed: int


class Bench:
    """One network at a time, with what several runs share."""

    def __init__(self, folder: Path, record: Record) -> None:
        self._folder, self._record = folder, record
        self._known: tuple[tuple[Any, ...], Prepared] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """What a case came to; ``failed`` says why a rival did not get there."""
        prepared = self.prepared(case)
        device = {} if prepared.watch is None else {"device": prepared.watch.device}
        try:
            model, share, error = prepared.smaller(case)
            judged = prepared.subject.judge(model, prepared.dense)
        except UnavailableError:
            raise
        except Exception as problem:
            if not case.method.startswith("Torch-Pruning"):
                raise
            told = str(problem).strip().splitlines()[0][:200]
            return {"failed": f"{type(problem).__name__}: {told}", **device}
        spread = statistics.stdev(judged.divergence) / len(judged.divergence) ** 0.5
        return {
            "dense": statistics.fmean(prepared.dense.right), "accuracy": statistics.fmean(judged.right),
            "agree": statistics.fmean(judged.agree), "divergence": statistics.fmean(judged.divergence),
            "divergence_error": spread, "right": bits(judged.right), "dense_right": bits(prepared.dense.right),
            "share": share, "error": error, **device,
        }  # fmt: skip

    def prepared(self, case: Case) -> Prepared:
        """What cases of the same network, cost and images share."""
        key = case.network, case.cost, case.images, case.tests, case.seed
        if self._known is None or self._known[0] != key:
            self._known = None  # one at a time in memory
            subject = {**SUBJECTS, **TRAINED}[case.network](self._folder, case.images, case.tests)
            self._known = key, Prepared(subject, case, self._record)
        return self._known[1]


class Prepared:
    """A network with its images, and what our way and the rivals gathered of it."""

    def __init__(self, subject: Subject, case: Case, record: Record) -> None:
        self.subject, self._case, self._record = subject, case, record
        self.dense: Judged = subject.judge(subject.model)

    @cached_property
    def watch(self) -> Stopwatch | None:
        """What measures latencies; None where FLOPs count."""
        if self._case.cost == "flops":
            return None
        _, number, *backend = self._case.cost.split()
        name, images = f"{self._case.network}, {number} at a time", self.subject.images[: int(number)]
        return Stopwatch(name, self.subject.model, images, self._record, *backend)

    @cached_property
    def setting(self) -> Setting:
        """The network and images as rivals take them, with labels."""
        return self._setting(self.subject.labels(self._case.seed))

    @cached_property
    def unlabelled(self) -> Setting:
        """The same without labels, as ours takes them."""
        return self._setting(None)

    def _setting(self, labels: Tensor | None) -> Setting:
        subject, priced = self.subject, {} if self.watch is None else self.watch.pricing
        return Setting(
            subject.model, subject.images, labels, self._case.seed, batch=subject.batch, loss=subject.loss,
            head=subject.head, outputs=subject.outputs, **priced,
        )  # fmt: skip

    def smaller(self, case: Case) -> tuple[torch.nn.Module, float, float]:
        """A method's network, its share of the cost, and that share's standard error."""
        setting = self.unlabelled if case.method == OURS else self.setting
        setting.target = case.target
        if self.watch is None:
            return *METHODS[case.method](setting, case.target), 0.0
        model, _ = METHODS[case.method](setting, setting.aim(case.method))
        measured = self.watch.share(model)
        return model, measured.fraction, measured.error


def worth(prepared: Prepared) -> Iterator[dict[str, Any]]:
    """Of each group narrowed alone, its readers refitted: the estimated rise of the loss and the measured divergence.

    The estimate is what `smcp_fx.gather_importance` gives the group before anything is narrowed.
    """
    subject = prepared.subject
    elimination, orders = weighed(prepared.unlabelled)
    tests = list(zip(subject.test.split(subject.batch), prepared.dense.scores, strict=True))
    positions = tests[0][1][0, ..., 0].numel()  # estimates are means over these
    for group, order in orders.items():
        size = order.units.numel()
        for refit in order.refits if order.rises is not None else ():
            share = min(STOPS, key=lambda stop: abs(stop - refit.count / size))
            if share in _WORTH_AT:
                rises = torch.cat(
                    [divergence(_refitted(elimination, refit, x, subject), dense) for x, dense in tests]
                )
                yield {
                    "group": group, "size": size, "count": refit.count, "share": share,
                    "dense": statistics.fmean(prepared.dense.right),
                    "measured": float(rises.mean()), "error": float(rises.std()) / len(rises) ** 0.5,
                    "estimate": positions * float(order.rises[refit.count]),
                }  # fmt: skip


def weighed(setting: Setting) -> tuple[Elimination, dict[str, Order]]:
    """The whole network, and the orders in which groups go, with their rises, as `gather_importance` finds them."""
    prepared, batches = setting.free, setting.images
    torch.manual_seed(setting.seed)
    elimination = Elimination(prepared, len(batches))
    objective = Objective(prepared, outputs=setting.outputs)
    return elimination, weigh(elimination, prepared.smcp, batches, objective, Stretch(None))


@torch.no_grad()
def _refitted(elimination: Elimination, refit: Refit, x: Tensor, subject: Subject) -> Tensor:
    """The scores of the network where the layers that read a group have the weights fitted without some of it."""

    def see(run: Run) -> Tensor:
        change, offset = refit.changes[run.reader]
        return run.y + run.product(change) - run.reader.consumer.along_outputs(offset)

    with watching(elimination.whole, list(refit.changes), see):
        return subject.scores(elimination.whole(x))


def bits(values: Sequence[bool]) -> str:
    """Yes and no of each image as hex digits, the first image the highest bit of the first digit."""
    padded = [*values, *[False] * (-len(values) % 4)]
    return "".join(
        f"{int(''.join(str(int(v)) for v in padded[i : i + 4]), 2):x}" for i in range(0, len(padded), 4)
    )


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """All runs, network by network."""
    for network in arguments.networks:
        for target in arguments.targets:
            for method in arguments.methods:
                numbers = arguments.images, arguments.tests, arguments.seed
                yield Case("real", network, method, arguments.cost, target, *numbers)


def run(arguments: argparse.Namespace) -> None:
    """Run what the record lacks."""
    torch.set_num_threads(1)
    record = Record(arguments.record)
    bench = Bench(arguments.folder, record)
    if not arguments.worth:
        run_cases(
            arguments, record, cases(arguments), bench.run,
            lambda case: f"{case.network}, {case.method} at {case.target:.0%} of the {case.cost}",
        )  # fmt: skip
        return
    for network in arguments.networks:
        key = {"network": network, "images": arguments.images, "tests": arguments.tests}
        if not record.find("worth", **key):
            case = Case(
                "real", network, OURS, "flops", 0.5, arguments.images, arguments.tests, arguments.seed
            )
            for line in list(worth(bench.prepared(case))):
                record.add("worth", **key, **line, versions=versions())
            print(f"{network}: {len(record.find('worth', **key))} lines", flush=True)


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what fetch.sh filled")
    parser.add_argument("--record", type=Path, required=True, help="file of JSON lines to fill")
    parser.add_argument("--networks", nargs="+", default=list(SUBJECTS), choices=[*SUBJECTS, *TRAINED])
    parser.add_argument("--methods", nargs="+", default=list(COMPARED), choices=list(METHODS))
    parser.add_argument("--cost", default="flops", choices=list(COSTS))
    parser.add_argument("--targets", nargs="+", type=float, default=[0.8, 0.7, 0.5])
    parser.add_argument("--images", type=int, default=512, help="to calibrate by")
    parser.add_argument("--tests", type=int, default=640, help="to test by")
    parser.add_argument("--seed", type=int, default=0, help="of the labels that are drawn")
    parser.add_argument("--minutes", type=float, default=600.0, help="start nothing after so long")
    parser.add_argument("--worth", action="store_true", help="compare the worth of groups instead")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
