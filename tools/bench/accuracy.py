"""The method's claims, tested: accuracy at equal cost, method by method and seed by seed.

    python tools/bench/accuracy.py --record docs/records/accuracy.jsonl --seeds 5    run what the record lacks (hours)
    python tools/bench/accuracy.py --record docs/records/accuracy.jsonl --minutes 30 --only "uniform width" soft
    python tools/bench/accuracy.py --show docs/records/accuracy.jsonl                print the tables; writes nothing
    python tools/bench/accuracy.py --show docs/records/accuracy.jsonl --out docs/results    the page, and its pictures

A small ResNet on moved, noisy digits (`accuracy_task.py`); the methods are in `accuracy_methods.py`, what they are
compared with in `accuracy_rivals.py`, the claims in `accuracy_claims.py`. Every run is a line of JSON the moment it
is done, and a run that the record holds is not repeated. Latencies are ONNX Runtime's, one thread, dense and pruned
in turns. Dense networks and the latency table are kept beside the record, in --work. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accuracy_methods import METHODS, Case, Outcome, UnavailableError, blocks, run_case, schedule_of
from accuracy_report import print_tables, write_document
from accuracy_task import Effort, SmallResNet, Task, dense_network
from latency_networks import Network
from records import Record

import smcp_fx
from smcp_fx.backends import TimingConfig, get_backend, measure_interleaved
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable

_TIMING = TimingConfig(min_repeats=9, max_repeats=30, budget_ms=250.0, attempts=1, warmup_ms=200.0)
_PACKAGES = ("smcp_fx", "torch", "torchvision", "onnxruntime", "scikit-learn", "torch-pruning")


@dataclass(frozen=True)
class Start:
    """A seed's dense network, and its test accuracy."""

    dense: SmallResNet
    accuracy: float


class Meter:
    """FLOPs and measured latency of a network by the units it keeps, as shares of the dense one's."""

    def __init__(self, task: Task, table: LatencyTable) -> None:
        self.backend = get_backend("onnxruntime", threads=1)
        self.cost = LatencyCost(table, self.backend)
        plain = smcp_fx.PruningConfig(multiple=1)
        skeleton = smcp_fx.prepare(SmallResNet().eval(), task.example, config=plain)
        self.network = Network(skeleton, (task.example,))
        self.channels = skeleton.channels
        self.flops = skeleton.pruner.cost
        self.dense = self.network.engine(self.flops.full_counts)

    def flops_share(self, counts: dict[str, int]) -> float:
        """FLOPs over those of the dense network."""
        return self.flops.cost(counts) / self.flops.cost(self.flops.full_counts)

    def latency(self, outcome: Outcome) -> dict[str, Any]:
        """Measured ms of the dense and of the pruned network, in turns, and their quotient."""
        if (
            min(outcome.counts.values()) > 0
        ):  # the weights' values do not matter: one export serves all widths
            engine = self.network.engine(outcome.counts)
        else:
            engine = self.backend.compile(outcome.model.eval(), self.network.inputs)
        with engine:
            dense, pruned = measure_interleaved([self.dense, engine], config=_TIMING)
        return {
            "dense_ms": dense.median_ms,
            "pruned_ms": pruned.median_ms,
            "share": pruned.median_ms / dense.median_ms,
            "stable": dense.stable and pruned.stable,
        }

    def layers(self, counts: dict[str, int]) -> list[dict[str, Any]]:
        """Input and output channels of every layer, and those kept, in the order they run."""
        rows = []
        for layer in self.channels.layers:
            full = self.flops.full_counts
            row: dict[str, Any] = {"path": layer.path}
            for side, labels in (("in", layer.input_channels), ("out", layer.output_channels)):
                width = self.channels.width(labels)
                row |= {f"{side}_channels": width.channels(full), f"{side}_kept": width.channels(counts)}
            rows.append(row)
        return rows


def versions() -> dict[str, str]:
    """Versions of what the results rest on; packages that are not installed are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(arguments: argparse.Namespace) -> None:
    """Run what the record lacks, a seed of every case before the next seed."""
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(1)
    work = arguments.work or arguments.record.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    record, task = Record(arguments.record), Task(Effort())
    wanted = ordered(arguments.only or METHODS, arguments.seeds)
    about = {"effort": asdict(task.effort), "versions": versions(), "system": platform.platform()}
    with LatencyTable(work / "table.sqlite") as table:
        meter = Meter(task, table)
        about["device"] = meter.cost.fingerprint.describe()
        starts: dict[int, Start] = {}
        said: set[str] = set()
        for seed, case in wanted:
            if time.monotonic() > deadline:
                print(f"{arguments.minutes:g} minutes are over; run again to go on")
                return
            if not record.find("run", **asdict(case), seed=seed):
                if seed not in starts:
                    dense = dense_network(task, seed, work)
                    starts[seed] = Start(dense, task.accuracy(dense))
                line = one_run(case, seed, task, starts[seed], meter, said)
                if line is not None:
                    told(record.add("run", **asdict(case), seed=seed, **line, **about))


def ordered(methods: Sequence[str], seeds: int) -> list[tuple[int, Case]]:
    """The runs in their order: block by block, in each seed by seed."""
    return [
        (seed, case)
        for block in blocks()
        for seed in range(seeds)
        for case in block
        if case.method in methods
    ]


def one_run(
    case: Case, seed: int, task: Task, start: Start, meter: Meter, said: set[str]
) -> dict[str, Any] | None:
    """One line of the record; None, and a word once, for what cannot run here."""
    began, busy = time.perf_counter(), time.process_time()
    try:
        outcome = run_case(case, start.dense, task, seed, meter.cost)
    except UnavailableError as error:
        if case.method not in said:
            print(f"left out: {case.method}: {error}", flush=True)
            said.add(case.method)
        return None
    except InfeasibleBudgetError as error:
        return {"infeasible": str(error), "smallest": error.smallest, "budget": error.budget}
    ramp_end = schedule_of(case.method, task).ramp_end
    return {
        "accuracy": {
            "dense": start.accuracy,
            "at_stop": outcome.at_stop,
            "end": task.accuracy(outcome.model),
        },
        "flops_share": meter.flops_share(outcome.counts),
        "latency": meter.latency(outcome),
        "counts": outcome.counts,
        "layers": meter.layers(outcome.counts),
        "changed": [round(solve.changed_share, 5) for solve in outcome.solves],
        "ramp_solves": sum(solve.step <= ramp_end for solve in outcome.solves),
        "returned": sum(solve.returned for solve in outcome.solves),
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - busy, 2),
    }


def told(line: dict[str, Any]) -> None:
    """Print a line of the record for people."""
    about = f"seed {line['seed']}, {line['method']}, {line['target']:.0%} of {line['cost']}"
    if "infeasible" in line:
        print(f"{about}: {line['infeasible']}", flush=True)
        return
    accuracy, latency = line["accuracy"], line["latency"]
    at_stop = "" if accuracy["at_stop"] is None else f", at stop {accuracy['at_stop']:.1%}"
    print(
        f"{about}: dense {accuracy['dense']:.1%}{at_stop}, end {accuracy['end']:.1%}; "
        f"FLOPs {line['flops_share']:.1%}, latency {latency['share']:.1%}; {line['seconds']:.0f} s",
        flush=True,
    )


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, help="file of JSON lines to fill")
    parser.add_argument("--work", type=Path, help="folder for dense networks and the latency table")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--minutes", type=float, default=600.0, help="start nothing after so long")
    parser.add_argument("--show", type=Path, metavar="RECORD", help="print a record's tables instead")
    parser.add_argument("--out", type=Path, help="with --show: folder for accuracy.md and its pictures")
    arguments = parser.parse_args()
    if arguments.show:
        lines = [json.loads(line) for line in arguments.show.read_text(encoding="utf-8").splitlines()]
        if arguments.out:
            write_document(lines, arguments.out)
        else:
            print_tables(lines)
    elif arguments.record:
        run(arguments)
    else:
        parser.error("give --record to run, or --show to see")


if __name__ == "__main__":
    main()
