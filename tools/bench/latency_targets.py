"""Ask smcp-compile for 70, 50 and 30% of networks' latency, and measure what it emits.

    python tools/bench/latency_targets.py run --record targets.jsonl --pairs resnet18:64x1 vgg16_bn:64x1
    python tools/bench/latency_targets.py tables --record targets.jsonl --out docs/results/latency.md

As users do it: each target is a run of `compile_model`, from random weights, on a few random images (a latency
depends on neither), with its table, its prediction and its search. Then both files are compared once more in a new
process. Every result is a line of JSON the moment it is there: run again to go on. On a machine that is too busy to
measure, runs wait and begin again. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from latency_networks import SETTINGS
from records import Record, begin, fill, table
from rich.console import Console

from smcp_fx.backends import CompareConfig, compare, get_backend
from smcp_fx.compiler import CompileSettings, compile_model
from smcp_fx.config import PruningConfig
from smcp_fx.errors import MachineBusyError, TableError

TARGETS = (0.7, 0.5, 0.3)
PAIRS = (
    "resnet18:64x1", "resnet18:64x32", "mobilenet_v2:64x1", "shufflenet_v2_x1_0:64x1", "efficientnet_b0:64x1",
    "resnet50:64x1", "vgg16_bn:64x1", "densenet121:64x1",
)  # fmt: skip
#: A target counts as met within this.
MET = 0.03
#: The comparison in a new process.
COMPARE = CompareConfig(error=0.005, longest_seconds=10.0)
#: What channels are chosen by.
IMAGES = 48
#: Seconds between two tries on a machine that is too busy; and how often a run may refuse its table.
WAIT, REFUSALS = 20.0, 5
_NETWORK = """
import torch, torchvision

def network():
    torch.manual_seed(0)
    return torchvision.models.{model}()

def data():
    images = torch.randn({images}, 3, {side}, {side}, generator=torch.Generator().manual_seed(0))
    return (torch.utils.data.TensorDataset(images, torch.arange({images}) % 10),) * 2
"""


def run(arguments: argparse.Namespace) -> None:
    """Run the pairs and targets that the record lacks."""
    record = Record(arguments.record)
    begin(record, get_backend("onnxruntime", threads=1))
    rows = arguments.table or arguments.record.with_suffix(".sqlite")
    deadline = time.monotonic() + 60 * arguments.minutes
    for pair in arguments.pairs:
        model, _, setting = pair.partition(":")
        for asked in TARGETS:
            key = {"model": model, "setting": setting, "asked": asked}
            refused = 0
            while not record.find("target", **key) and time.monotonic() < deadline and refused < REFUSALS:
                try:
                    found = sought(model, setting, asked, rows.absolute())
                except (MachineBusyError, TableError) as error:
                    refused += isinstance(error, TableError)
                    print(f"{pair} {asked}: {error}", flush=True)
                    time.sleep(WAIT)
                else:
                    print(record.add("target", **key, refused=refused, **found), flush=True)


def sought(model: str, setting: str, asked: float, rows: Path) -> dict[str, Any]:
    """One run of the compiler, and its files compared again."""
    side, batch = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "network.py", Path(folder) / "out"
        file.write_text(_NETWORK.format(model=model, images=IMAGES, side=side))
        settings = CompileSettings(
            model=f"{file}:network", data=f"{file}:data", target=str(asked), batch=batch, dense_epochs=0,
            epochs=0, table=str(rows), out=str(out),
        )  # fmt: skip
        report = compile_model(settings, PruningConfig(), Console(quiet=True))
        tried = json.loads((out / "state" / "comparisons.json").read_text())
        told = subprocess.run(
            [sys.executable, __file__, "again", str(out), "--shape", str(batch), "3", str(side), str(side)],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    assert report.table is not None
    return {
        "measured": report.measured_fraction,
        "error": report.measured_fraction_error,
        "predicted": report.predicted_fraction,
        "dense_predicted_ms": report.dense.predicted_ms,
        "dense_ms": report.dense.latency_ms,
        "pruned_ms": report.pruned.latency_ms,
        "tried": [{"name": c["name"], "measured": c["measured"]["fraction"]} for c in tried],
        "rows": report.table.measured,
        "seconds": dict(report.seconds),
        **json.loads(told),
    }


def again(arguments: argparse.Namespace) -> None:
    """Compare the files of a run in this process."""
    backend, images = get_backend("onnxruntime", threads=1), torch.randn(arguments.shape)
    engines = [backend.open(arguments.folder / f"{side}.onnx", (images,)) for side in ("dense", "pruned")]
    found = compare(*engines, COMPARE)
    print(json.dumps({"again": found.fraction, "again_error": found.error}))


def tables(arguments: argparse.Namespace) -> None:
    """Write the record's table into a document."""
    fill(arguments.out, "targets", of_record(Record(arguments.record)))


def of_record(record: Record) -> str:
    """Every pair's files against what was asked for."""
    found = record.find("target")
    rows = []
    for model, setting in dict.fromkeys((x["model"], x["setting"]) for x in found):
        of_pair = {x["asked"]: x for x in record.find("target", model=model, setting=setting)}
        rows.append([model, setting, *(_cell(of_pair.get(asked)) for asked in TARGETS)])
    told = {
        name: np.array([abs(x[key] - x["asked"]) for x in found])
        for name, key in (("as the run measured them", "measured"), ("in a process of their own", "again"))
    }
    words = "; ".join(
        f"{name}, {(off <= MET).sum()} of {len(off)} are within 3 points ({100 * off.max():.1f} at most)"
        for name, off in told.items()
    )
    head = ["model", "setting", *(f"asked {asked:.0%}" for asked in TARGETS)]
    return f"{table(head, rows)}\n\nEmitted files: {words}."


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    names = [x["name"] for x in line["tried"]]
    networks = sum(name.startswith("last masks") and not name.endswith("again") for name in names)
    return f"{line['measured']:.1%}, {line['again']:.1%} ± {100 * line['again_error']:.1f} ({networks})"


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure what the record lacks")
    measure.add_argument("--record", type=Path, required=True, help="file of JSON lines to fill")
    measure.add_argument("--table", type=Path, help="latency table to use (default: beside the record)")
    measure.add_argument("--pairs", nargs="+", default=PAIRS, help="model:setting")
    measure.add_argument("--minutes", type=float, default=120.0, help="start nothing after so long")
    files = commands.add_parser("again", help="compare the files of a run, in a process of its own")
    files.add_argument("folder", type=Path)
    files.add_argument("--shape", type=int, nargs=4, required=True)
    told = commands.add_parser("tables", help="write the table of a record into a document")
    told.add_argument("--record", type=Path, required=True)
    told.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    {"run": run, "again": again, "tables": tables}[arguments.command](arguments)


if __name__ == "__main__":
    main()
