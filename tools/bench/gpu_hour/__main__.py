"""Half an hour on a GPU: `PYTHONPATH=tools/bench python -m gpu_hour run --state DIR --minutes 8`; see README.md."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from gpu_hour.session import Settings
from gpu_hour.stages import STAGES, endings, run_next


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="gpu_hour", description=__doc__)
    parser.add_argument(
        "--state", type=Path, default=Path(".gpu_hour"), help="folder of record, table and caches"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a trial")
    parser.add_argument("--small", action="store_true", help="small networks and images, for a trial")
    parser.add_argument(
        "--worker-python", default=os.environ.get("TRT_PYTHON"), help="Python that has TensorRT"
    )
    parser.add_argument("--no-library-tactics", action="store_true", help="TensorRT without cuBLAS and cuDNN")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="the next stages that fit the time")
    run.add_argument("--minutes", type=float, default=8.0)
    run.add_argument("--stages", nargs="+", default=(), choices=[stage.name for stage in STAGES])
    run.add_argument("--again", action="store_true", help="also stages that ended in an error")
    one = commands.add_parser("stage", help="one stage in this process")
    one.add_argument("name", choices=[stage.name for stage in STAGES])
    one.add_argument("--seconds", type=float, default=480.0)
    commands.add_parser("list", help="all stages, and how they ended")
    report = commands.add_parser("report", help="write the pages from the record")
    report.add_argument("record", type=Path, nargs="?", help="default: docs/records/gpu.jsonl")
    arguments = parser.parse_args()
    if arguments.command == "report":
        from gpu_hour.report import RECORD, write_pages

        write_pages(arguments.record or RECORD)
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_hour: PyTorch finds no GPU here; --device cpu --small is a trial", file=sys.stderr)
        return 2
    settings = Settings(
        arguments.state,
        arguments.device,
        arguments.small,
        arguments.worker_python,
        arguments.no_library_tactics,
    )
    if arguments.command == "list":
        ended = endings(settings)
        for stage in STAGES:
            print(f"{stage.name:22} {ended.get(stage.name, ''):6} {stage.least:4.0f} to {stage.most:.0f} s")
        return 0
    if arguments.command == "run":
        run_next(settings, 60 * arguments.minutes, arguments.stages, arguments.again)
        return 0
    stage = next(stage for stage in STAGES if stage.name == arguments.name)
    stage.run(settings, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
