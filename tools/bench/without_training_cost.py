"""What pruning without training takes: CPU seconds and peak memory of each part, at full image size.

    python tools/bench/without_training_cost.py --model mobilenet_v2 --images 512 --record RECORD.jsonl

A torchvision model of random weights, images of noise. One line of JSON. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torchvision
from records import Record

import smcp_fx
from smcp_fx.calibration import gather_halfway


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--target", type=float, default=0.5)
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torchvision.models.get_model(arguments.model, weights=None).eval()
    images = torch.randn(arguments.images, 3, arguments.side, arguments.side)
    seconds: dict[str, float] = {}
    mebibytes: dict[str, float] = {"before": _peak()}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        seconds[part], mebibytes[part] = round(time.process_time() - began, 1), _peak()
        print(
            f"{part}: {seconds[part]:.1f} CPU seconds, {mebibytes[part]:.0f} MiB at most so far", flush=True
        )

    batches = list(images.split(arguments.batch))
    with timed("prepare"):
        prepared = smcp_fx.prepare(model, images[:2], target=arguments.target)
    with timed("gather_importance"):
        smcp_fx.gather_importance(prepared, batches, outputs="classes")
    with timed("gather_halfway"):
        gather_halfway(prepared, batches, outputs="classes")
    with timed("solve"):
        prepared.pruner.solve()
    with timed("convert"):
        smaller = smcp_fx.convert(prepared)
    with timed("repair"):
        report = smcp_fx.repair(smaller, prepared, batches)
    Record(arguments.record).add(
        "cost", model=arguments.model, images=arguments.images, side=arguments.side, target=arguments.target,
        cpu_seconds=seconds, peak_mebibytes=mebibytes, layers=len(report.layers),
    )  # fmt: skip


def _peak() -> float:
    """The most memory that the process has held, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 0)


if __name__ == "__main__":
    main()
