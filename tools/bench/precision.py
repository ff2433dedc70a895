"""Pruning for the latency that ships: by rows in INT8, beside pruning for float latency and quantising afterwards.

    python tools/bench/precision.py run --record precision.jsonl --tables tables --networks resnet18:64x32
    python tools/bench/precision.py tables --record docs/records/precision.jsonl --out docs/results/precision.md

For each network (name:side x batch), runtime and target one solve by the float rows and one by the INT8 rows, without
the corrections by measured engines that the compiler makes. Weights are random: they decide which channels go, not
what is left costs. Both networks are quantised and measured beside the quantised dense one in interleaved
rounds; the first is measured in float, too. Set OMP_NUM_THREADS=1. Rows and results are kept as they come: run it
again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from records import Record, fill, table

import smcp_fx
from smcp_fx.backends import Backend, Engine, compare, get_backend
from smcp_fx.calibration import gather_importance
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.table import LatencyTable
from smcp_fx.prepare import PreparedModel, converted_full

TARGETS = (0.6, 0.4)
NETWORKS = ("resnet18:224x1", "resnet18:64x32", "mobilenet_v2:224x1", "mobilenet_v2:64x32")
RUNTIMES = ("onnxruntime", "openvino")
PRECISIONS = ("fp32", "int8")


class Case:
    """One network in one runtime, prepared for rows of both precisions."""

    def __init__(self, name: str, runtime: str, tables: Path) -> None:
        model, _, setting = name.partition(":")
        side, _, batch = setting.partition("x")
        torch.manual_seed(0)
        self.shape = int(batch), 3, int(side), int(side)
        self.inputs = (torch.randn(self.shape),)
        self.network = torchvision.models.get_model(model).eval()
        images = [torch.randn(self.shape).numpy()]
        self.backends: dict[str, Backend] = {
            "fp32": get_backend(runtime),
            "int8": get_backend(runtime, precision="int8", calibration=images),
        }
        tables.mkdir(parents=True, exist_ok=True)
        self.table = LatencyTable(tables / f"{model}-{setting}-{runtime}.sqlite")
        self.prepared: dict[str, PreparedModel] = {}
        self.dense: dict[str, Engine] = {}

    def by(self, precision: str) -> PreparedModel:
        """Return the network with its importances, priced by the rows of a precision."""
        if precision not in self.prepared:
            cost = LatencyCost(self.table, self.backends[precision])
            found = smcp_fx.prepare(self.network, self.inputs, cost=cost, check=False)
            torch.manual_seed(1)
            gather_importance(found, [(torch.randn(8, *self.shape[1:]), None)])
            self.prepared[precision] = found
        return self.prepared[precision]

    def engine(self, network: torch.nn.Module, precision: str) -> Engine:
        return self.backends[precision].compile(network, self.inputs)

    def dense_engine(self, precision: str) -> Engine:
        if precision not in self.dense:
            self.dense[precision] = self.engine(converted_full(self.by(precision)), precision)
        return self.dense[precision]

    def result(self, rows: str, target: float, **_: Any) -> dict[str, Any]:
        """Solve by the rows of a precision, and measure what that gives."""
        prepared = self.by(rows)
        pruner = prepared.pruner
        pruner.target = target * pruner.full_cost
        pruner.solve()
        network = smcp_fx.convert(prepared, check=False)
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
                measured = compare(self.dense_engine(precision), engine)
            found[f"{precision}_fraction"] = measured.fraction
            found[f"{precision}_error"] = measured.error
            found[f"{precision}_rounds"] = measured.rounds
            found[f"{precision}_dense_ms"] = measured.dense.median_ms
        return found


def run(arguments: argparse.Namespace) -> None:
    record = Record(arguments.record)
    for name in arguments.networks:
        for runtime in arguments.runtimes:
            wanted = [
                {"network": name, "runtime": runtime, "rows": rows, "target": target}
                for rows in PRECISIONS
                for target in TARGETS
            ]
            missing = [key for key in wanted if not record.find("pruned", **key)]
            if not missing:
                continue
            case = Case(name, runtime, arguments.tables)
            for key in missing:
                print(record.add("pruned", **key, **case.result(**key)), flush=True)


def tables(arguments: argparse.Namespace) -> None:
    """Write the page's table: per target the network by INT8 rows beside the one by float rows."""
    keys = ("network", "runtime", "rows", "target")
    found = {tuple(line[key] for key in keys): line for line in Record(arguments.record).find("pruned")}
    lines = []
    for name, runtime, target in sorted({(n, r, t) for n, r, _, t in found}):
        by_float, by_int8 = (found.get((name, runtime, rows, target)) for rows in PRECISIONS)
        if by_float is None or by_int8 is None:
            continue
        lines.append(
            [
                name.replace(":", ", "),
                runtime,
                f"{target:.0%}",
                f"{by_float['predicted']:.1%}",
                f"{by_float['fp32_fraction']:.1%}",
                f"{by_float['int8_fraction']:.1%}",
                f"{by_int8['predicted']:.1%}",
                f"{by_int8['int8_fraction']:.1%}",
                f"{by_int8['int8_dense_ms'] / by_float['fp32_dense_ms']:.1%}",
            ]
        )
    heads = [
        "network", "runtime", "target", "by float rows: predicted", "float", "quantised", "by INT8 rows: predicted",
        "quantised", "dense INT8 over float",
    ]  # fmt: skip
    fill(arguments.out, "precision", table(heads, lines))
    misses = [
        [abs(found[key]["int8_fraction"] - key[3]) for key in found if key[2] == rows] for rows in PRECISIONS
    ]
    for rows, those in zip(PRECISIONS, misses, strict=True):
        print(f"{rows} rows: off the INT8 target by {100 * float(np.mean(those)):.1f} points on average")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--record", type=Path, required=True)
    runs.add_argument("--tables", type=Path, required=True)
    runs.add_argument("--networks", nargs="*", default=NETWORKS)
    runs.add_argument("--runtimes", nargs="*", default=RUNTIMES)
    runs.set_defaults(go=run)
    pages = commands.add_parser("tables")
    pages.add_argument("--record", type=Path, required=True)
    pages.add_argument("--out", type=Path, required=True)
    pages.set_defaults(go=tables)
    arguments = parser.parse_args()
    arguments.go(arguments)


if __name__ == "__main__":
    main()
