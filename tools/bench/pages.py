"""What huge pages do to the latency of whole networks, and to how well sessions repeat it.

    OMP_NUM_THREADS=1 python tools/bench/pages.py --out pages.json
    OMP_NUM_THREADS=1 python tools/bench/pages.py --out pages.json --models vgg16_bn --setting 64x1 --processes 8

ONNX Runtime, one thread, dense networks. Processes that ask for huge pages take turns with processes that do not;
each opens every file several times, as a session of its own, and measures it. Printed, and written as JSON: the
median of the sessions' latencies, and their range as a share of it, either way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from latency_networks import MODELS, SETTINGS
from rich.console import Console
from rich.table import Table

from smcp_fx.backends import TimingConfig, get_backend
from smcp_fx.backends.timing.pages import ASKING

_TIMING = TimingConfig(budget_ms=350.0, max_repeats=200, attempts=1)


def session_medians(files: list[Path], sessions: int, setting: str) -> dict[str, Any]:
    """Median ms of each file, session by session, in this process, and whether its pages are huge.

    All sessions stay open, so that each has pages of its own.
    """
    backend = get_backend("onnxruntime", threads=1)
    side, batch = SETTINGS[setting]
    inputs = (torch.randn(batch, 3, side, side),)
    open_engines, found = [], defaultdict(list)
    for file in files:
        for _ in range(sessions):
            open_engines.append(backend.open(file, inputs))
            found[file.stem].append(open_engines[-1].latency(config=_TIMING).median_ms)
    for engine in open_engines:
        engine.close()
    pages = dict(backend.fingerprint().settings).get("huge_pages", "off")
    return {"huge_pages": pages, "median_ms": found}


def in_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every session's median of each model, without ("off") and with ("on") huge pages."""
    found: dict[str, dict[str, list[float]]] = {"off": defaultdict(list), "on": defaultdict(list)}
    name, _, value = ASKING.partition("=")
    plain = {key: value for key, value in os.environ.items() if key != name}
    backend = get_backend("onnxruntime", threads=1)
    with tempfile.TemporaryDirectory() as folder:
        side, batch = SETTINGS[arguments.setting]
        for model in arguments.models:
            torch.manual_seed(0)
            module = torchvision.models.get_model(model).eval()
            backend.compile(
                module, (torch.randn(batch, 3, side, side),), Path(folder) / f"{model}.onnx"
            ).close()
        command = [
            sys.executable,
            __file__,
            "--setting",
            arguments.setting,
            "--sessions",
            str(arguments.sessions),
        ]
        for _ in range(arguments.processes):
            for asked in (plain, {**plain, name: value}):
                done = subprocess.run(
                    [*command, "--here", folder], env=asked, check=True, stdout=subprocess.PIPE
                )
                told = json.loads(done.stdout)
                for model, medians in told["median_ms"].items():
                    found[told["huge_pages"]][model] += medians
    return {
        "made_by": "tools/bench/pages.py",
        "time": time.time(),
        "system": platform.platform(),
        "fingerprint": backend.fingerprint().as_dict(),
        "setting": arguments.setting,
        "processes": arguments.processes,
        "sessions": arguments.sessions,
        "median_ms": found,
    }


def show(record: dict[str, Any]) -> Table:
    """One row a model: median and range either way."""
    table = Table("model", "median, small pages", "range", "median, huge pages", "range")
    for model in record["median_ms"]["off"]:
        cells = []
        for pages in ("off", "on"):
            ms = np.array(record["median_ms"][pages].get(model, [np.nan]))
            cells += [f"{np.median(ms):.3f} ms", f"{np.ptp(ms) / np.median(ms):.1%}"]
        table.add_row(model, *cells)
    return table


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--setting", default="64x1", choices=tuple(SETTINGS), help="image side x batch")
    parser.add_argument("--processes", type=int, default=4, help="each way (default: 4)")
    parser.add_argument("--sessions", type=int, default=3, help="of each model in a process (default: 3)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        files = sorted(arguments.here.glob("*.onnx"))
        print(json.dumps(session_medians(files, arguments.sessions, arguments.setting)))
        return
    record = in_turns(arguments)
    if not record["median_ms"]["on"] or not record["median_ms"]["off"]:
        raise SystemExit("this machine has one kind of pages only, asked for or not: nothing to compare")
    Console().print(show(record))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
