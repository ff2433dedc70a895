"""What pruning without training takes: each part in forward passes over the images, and the peak memory.

    python tools/bench/without_training_cost.py --model mobilenet_v2 --images 512 --record RECORD.jsonl

A torchvision or timm model of random weights, images of noise. Beside it, in the same run: one pass of gradients and
a step of Torch-Pruning's Taylor importance, and elimination alone (inputs gathered, channels ordered). A pass is the
CPU time of running the model on all images, which other work on the machine disturbs less than seconds; it is
measured first and last, and the mean counts. One line of JSON. Needs torch-pruning 1.6.1, and timm for its models;
set OMP_NUM_THREADS to the number of threads.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from records import Record
from torch import Tensor, nn

import smcp_fx
from smcp_fx.calibration import solve_best
from smcp_fx.calibration.batches import each_batch
from smcp_fx.calibration.elimination import Elimination


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
    torch.manual_seed(0)
    model = _model(arguments.model).eval()
    batches = list(torch.randn(arguments.images, 3, arguments.side, arguments.side).split(arguments.batch))
    seconds: dict[str, float] = {}
    mebibytes: dict[str, float] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = work()
        seconds[part], mebibytes[part] = round(time.process_time() - began, 2), _peak()
        print(
            f"{part}: {seconds[part] / seconds['pass']:.2f} passes, {mebibytes[part]:.0f} MiB at most so far",
            flush=True,
        )
        return result

    def run() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    model(batches[0][:2])
    timed("pass", run)
    prepared = timed("prepare", lambda: smcp_fx.prepare(model, batches[0][:2], target=arguments.target))
    timed("gather_importance", lambda: smcp_fx.gather_importance(prepared, batches, outputs="classes"))
    timed("solve_best", lambda: solve_best(prepared, batches, outputs="classes"))
    smaller = timed("convert", lambda: smcp_fx.convert(prepared))
    report = timed("repair", lambda: smcp_fx.repair(smaller, prepared, batches))
    timed("elimination alone", lambda: _eliminate(model, batches))
    timed("Torch-Pruning, Taylor", lambda: _taylor(model, batches, arguments.target))
    timed("last pass", run)
    seconds["pass"] = (seconds["pass"] + seconds.pop("last pass")) / 2
    Record(arguments.record).add(
        "cost", model=arguments.model, images=arguments.images, side=arguments.side, target=arguments.target,
        threads=torch.get_num_threads(), cpu_seconds=seconds, peak_mebibytes=mebibytes, layers=len(report.layers),
    )  # fmt: skip


def _model(name: str) -> nn.Module:
    if name in torchvision.models.list_models():
        return torchvision.models.get_model(name, weights=None)
    import timm

    made: nn.Module = timm.create_model(name)
    return made


def _eliminate(model: nn.Module, batches: list[Tensor]) -> None:
    """Order the channels of all groups by what the others make up for, without gradients."""
    prepared = smcp_fx.prepare(model, batches[0][:2], check=False)
    elimination = Elimination(prepared, len(batches))
    for batch in each_batch(batches):
        elimination.add(batch)
    for name in prepared.smcp.free_masks():
        elimination.order(name)


def _taylor(model: nn.Module, batches: list[Tensor], target: float) -> None:
    """Gradients of all images, and one step to the share of channels that has about this share of the FLOPs."""
    import torch_pruning

    model = copy.deepcopy(model)
    for batch in batches:
        scores = model(batch)
        nn.functional.cross_entropy(scores, scores.argmax(1)).backward()
    head = [part for part in model.modules() if isinstance(part, nn.Linear)][-1]
    torch_pruning.pruner.MetaPruner(
        model, batches[0][:1], importance=torch_pruning.importance.GroupTaylorImportance(),
        pruning_ratio=1 - target**0.5, ignored_layers=[head],
    ).step()  # fmt: skip


def _peak() -> float:
    """The most memory that the process has held, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 0)


if __name__ == "__main__":
    main()
