"""Pruning for the latency that ships: by rows in INT8, beside pruning for float latency and quantising afterwards.

    python tools/bench/precision.py run --glyphs glyphs.npz --work work --record precision.jsonl
    python tools/bench/precision.py accuracy --glyphs glyphs.npz --work work --record precision.jsonl
    python tools/bench/precision.py tables --record docs/records/precision.jsonl --out docs/results/precision.md

For each network (name:side x batch, trained: `precision_networks.py`), runtime and target one solve by the float rows
and one by the INT8 rows, without the corrections by measured engines that the compiler makes. `run` quantises both
networks and measures them beside the quantised dense one in interleaved rounds, the first in float, too. `accuracy`
repairs them, and reads accuracies on unseen typefaces from what the runtimes compute. Set OMP_NUM_THREADS=1. Rows,
networks and results are kept in --work as they come: run it again.
"""

from __future__ import annotations

import argparse
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from precision_networks import Enlarged, trained
from records import Record, fill, table

import smcp_fx
from smcp_fx.backends import Backend, Engine, compare, get_backend
from smcp_fx.calibration import gather_importance, repair
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.table import LatencyTable
from smcp_fx.prepare import PreparedModel, converted_full

TARGETS = (0.6, 0.4)
NETWORKS = ("resnet18:224x1", "resnet18:64x32", "mobilenet_v2:224x1", "mobilenet_v2:64x32")
RUNTIMES = ("onnxruntime", "openvino")
PRECISIONS = ("fp32", "int8")
#: Images that importances and repair see, and those that accuracies are of, by side.
_IMAGES, _TESTED = {64: 256, 224: 64}, {64: 2_000, 224: 500}


class Case:
    """One network in one runtime, prepared for rows of both precisions."""

    def __init__(self, name: str, runtime: str, task: Enlarged, work: Path) -> None:
        model, _, setting = name.partition(":")
        side, _, batch = setting.partition("x")
        self.task, self.batch = task, int(batch)
        self.images, self.labels = task.draw(_IMAGES[int(side)], 900_000_001)
        self.inputs = (torch.cat([self.images, self.images])[: self.batch],)
        self.network = trained(task, model, work)
        calibration = [array.numpy() for array in self.images[:128].split(self.batch)]
        self.backends: dict[str, Backend] = {
            "fp32": get_backend(runtime),
            "int8": get_backend(runtime, precision="int8", calibration=calibration),
        }
        (work / "tables").mkdir(exist_ok=True)
        self.table = LatencyTable(work / "tables" / f"{model}-{setting}-{runtime}.sqlite")
        self.gathered = work / f"{model}-{side}-importance.pt"
        self.prepared: dict[str, PreparedModel] = {}

    def by(self, precision: str) -> PreparedModel:
        """Return the network with its importances, priced by the rows of a precision."""
        if precision not in self.prepared:
            cost = LatencyCost(self.table, self.backends[precision])
            found = smcp_fx.prepare(self.network, self.inputs, cost=cost, check=False)
            if not self.gathered.exists():
                gather_importance(found, list(zip(self.images.split(64), self.labels.split(64), strict=True)))
                torch.save(found.state_dict(), self.gathered)
            found.load_state_dict(torch.load(self.gathered, weights_only=True))
            self.prepared[precision] = found
        return self.prepared[precision]

    def engine(self, network: torch.nn.Module, precision: str) -> Engine:
        return self.backends[precision].compile(network, self.inputs)

    @cached_property
    def dense(self) -> dict[str, Engine]:
        """The dense network in both precisions."""
        return {
            precision: self.engine(converted_full(self.by("int8")), precision) for precision in PRECISIONS
        }

    def solved(self, rows: str, target: float) -> PreparedModel:
        """Return the network with the masks of a target by the rows of a precision."""
        prepared = self.by(rows)
        prepared.pruner.target = target * prepared.pruner.full_cost
        prepared.pruner.solve()
        return prepared

    def measured(self, rows: str, target: float, **_: Any) -> dict[str, Any]:
        """Solve by the rows of a precision, and measure what that gives."""
        prepared = self.solved(rows, target)
        pruner, network = prepared.pruner, smcp_fx.convert(prepared, check=False)
        latency = latency_of(pruner.cost)
        assert latency is not None
        found: dict[str, Any] = {
            "predicted": pruner.present_cost / pruner.full_cost,
            "dense_predicted_ms": pruner.full_cost,
            "table_rows": len(self.table.rows(latency.fingerprint)),
            "unsteady_rows": len(self.table.unsteady(latency.blocks, latency.fingerprint)),
        }
        for precision in ("int8", "fp32") if rows == "fp32" else ("int8",):
            with self.engine(network, precision) as engine:
                measured = compare(self.dense[precision], engine)
            found[f"{precision}_fraction"] = measured.fraction
            found[f"{precision}_error"] = measured.error
            found[f"{precision}_rounds"] = measured.rounds
            found[f"{precision}_dense_ms"] = measured.dense.median_ms
        return found

    def accuracies(self, rows: str, target: float, **_: Any) -> dict[str, Any]:
        """Solve by the rows of a precision, repair, and test in both precisions; target 1: the dense network."""
        if target == 1:
            return self.tested(converted_full(self.by(rows)))
        prepared = self.solved(rows, target)
        network = smcp_fx.convert(prepared, check=False)
        repair(network, prepared, list(self.images.split(64)))
        return self.tested(network)

    def tested(self, network: torch.nn.Module) -> dict[str, Any]:
        images, labels = (part[: _TESTED[self.task.size]] for part in self.task.test)
        whole = len(labels) // self.batch * self.batch
        found: dict[str, Any] = {"images": whole}
        for precision in PRECISIONS:
            with self.engine(network, precision) as engine:
                outputs = [engine.run([x.numpy()])[0] for x in images[:whole].split(self.batch)]
            right = np.concatenate(outputs).argmax(1) == labels[:whole].numpy()
            found[f"{precision}_accuracy"] = float(right.mean())
        return found


def run(arguments: argparse.Namespace) -> None:
    """Measure latencies, or accuracies, that the record lacks."""
    record = Record(arguments.record)
    pairs = [(rows, target) for rows in PRECISIONS for target in TARGETS]
    if arguments.kind == "accuracy":
        pairs.insert(0, ("int8", 1.0))
    for name in arguments.networks:
        for runtime in arguments.runtimes:
            wanted = [
                {"network": name, "runtime": runtime, "rows": rows, "target": target}
                for rows, target in pairs
            ]
            missing = [key for key in wanted if not record.find(arguments.kind, **key)]
            if not missing:
                continue
            side = int(name.partition(":")[2].partition("x")[0])
            case = Case(name, runtime, Enlarged(arguments.glyphs, side), arguments.work)
            result = case.accuracies if arguments.kind == "accuracy" else case.measured
            for key in missing:
                print(record.add(arguments.kind, **key, **result(**key)), flush=True)


def tables(arguments: argparse.Namespace) -> None:
    """Write the page's tables: per target the network by INT8 rows beside the one by float rows."""
    record = Record(arguments.record)
    keys = ("network", "runtime", "rows", "target")
    found, tested = (
        {tuple(line[key] for key in keys): line for line in record.find(kind)}
        for kind in ("pruned", "accuracy")
    )
    latencies, accuracies = [], []
    for name, runtime, target in sorted({(n, r, t) for n, r, _, t in found}):
        start = [name.replace(":", ", "), runtime, f"{target:.0%}"]
        by_float, by_int8 = (found.get((name, runtime, rows, target)) for rows in PRECISIONS)
        if by_float and by_int8:
            shares = (
                by_float["predicted"], by_float["fp32_fraction"], by_float["int8_fraction"], by_int8["predicted"],
                by_int8["int8_fraction"], by_int8["int8_dense_ms"] / by_float["fp32_dense_ms"],
            )  # fmt: skip
            latencies.append(start + [f"{share:.1%}" for share in shares])
        dense = tested.get((name, runtime, "int8", 1.0))
        pruned = [tested.get((name, runtime, rows, target)) for rows in PRECISIONS]
        if dense and all(pruned):
            lines = [line for line in (dense, *pruned) if line]
            shares = [line[f"{precision}_accuracy"] for line in lines for precision in PRECISIONS]
            accuracies.append(start + [f"{share:.1%}" for share in shares])
    heads = ["network", "runtime", "target"]
    fill(arguments.out, "precision", table([
        *heads, "by float rows: predicted", "float", "quantised", "by INT8 rows: predicted", "quantised",
        "dense INT8 over float",
    ], latencies))  # fmt: skip
    fill(arguments.out, "accuracy", table([
        *heads, "dense: float", "quantised", "by float rows: float", "quantised", "by INT8 rows: float", "quantised",
    ], accuracies))  # fmt: skip
    for rows in PRECISIONS:
        misses = [abs(line["int8_fraction"] - key[3]) for key, line in found.items() if key[2] == rows]
        print(f"{rows} rows: off the INT8 target by {100 * float(np.mean(misses)):.1f} points on average")
    losses = [line["fp32_accuracy"] - line["int8_accuracy"] for line in tested.values()]
    if losses:
        mean, most = (100 * float(f(losses)) for f in (np.mean, np.max))
        print(f"quantising costs {mean:.2f} points of accuracy on average, {most:.2f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, kind in (("run", "pruned"), ("accuracy", "accuracy")):
        runs = commands.add_parser(name)
        runs.add_argument("--record", type=Path, required=True)
        runs.add_argument("--glyphs", type=Path, required=True, help="file that pretrained/render.py wrote")
        runs.add_argument("--work", type=Path, required=True, help="folder for networks and tables")
        runs.add_argument("--networks", nargs="*", default=NETWORKS)
        runs.add_argument("--runtimes", nargs="*", default=RUNTIMES)
        runs.set_defaults(go=run, kind=kind)
    pages = commands.add_parser("tables")
    pages.add_argument("--record", type=Path, required=True)
    pages.add_argument("--out", type=Path, required=True)
    pages.set_defaults(go=tables)
    arguments = parser.parse_args()
    arguments.go(arguments)


if __name__ == "__main__":
    main()
