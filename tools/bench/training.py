"""Time and memory of a training step with masks, importances and scales, as ratios to the plain model's.

    python tools/bench/training.py resnet18                    # 32 x 32, batch 64, CPU, one thread
    python tools/bench/training.py resnet50 --batch 8          # 224 x 224, CPU
    python tools/bench/training.py resnet50 --device cuda --dtype bf16 --channels-last --batch 64
    python tools/bench/training.py resnet50 --device cuda --dtype bf16 --channels-last --batch 64 --compile

The variants take turns in one process, so that what disturbs one disturbs all; a ratio is the median over the
rounds of a variant's time by the plain model's in the same round. On a CPU the time is the process's own (with
one thread that is what the step costs, whoever else runs); on a GPU it is the clock's, with the device idle before
and after. Memory is the peak over some steps, measured for each variant in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig

VARIANTS = {
    "plain": "the model as it is",
    "masks": "soft masks",
    "default": "soft masks, and importances every step: the defaults",
    "scales": "the same with batch-norm scales",
}
#: Between two solves, in the paper.
EVERY = 80


def build(options: argparse.Namespace, name: str) -> tuple[nn.Module, Any]:
    """A variant's model, and its pruner where importances are gathered."""
    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, options.model)(num_classes=10)
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    model = model.train().to(options.device, memory_format=layout)
    if name == "plain":
        return model, None
    config = MethodConfig(batch_norm_scaling=name == "scales")
    prepared = smcp_fx.prepare(model, images(options)[:2], target=0.5, config=config)
    free = [g for g in prepared.channels.groups if g.free]
    prepared.set_masks({g.name: torch.arange(g.size) < max(8, g.size // 2) for g in free})
    return prepared, prepared.pruner if name != "masks" else None


def images(options: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(options.batch, 3, options.side, options.side, generator=generator).to(options.device)
    return x.contiguous(memory_format=torch.channels_last) if options.channels_last else x


def stepper(options: argparse.Namespace, name: str) -> Callable[[], None]:
    """A function that trains a variant for one step."""
    model, pruner = build(options, name)
    call: Any = torch.compile(model) if options.compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    x = images(options)
    labels = torch.arange(options.batch, device=options.device) % 10
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.dtype, torch.float32)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(options.device, kind, enabled=options.dtype != "fp32"):
            loss = nn.functional.cross_entropy(call(x), labels)
        loss.backward()
        if pruner is not None:
            pruner.step()
        optimizer.step()

    return step


def timed(options: argparse.Namespace, step: Callable[[], None]) -> float:
    """Seconds of ``options.inner`` steps, divided by it."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    began = clock()
    for _ in range(options.inner):
        step()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return (clock() - began) / options.inner


def times(options: argparse.Namespace) -> dict[str, list[float]]:
    steps = {name: stepper(options, name) for name in options.variants}
    for step in steps.values():
        for _ in range(options.warmup):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in range(options.rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            found[name].append(timed(options, steps[name]))
    return found


def solve_seconds(options: argparse.Namespace) -> float:
    """The median of five solves while training, at falling targets."""
    model, pruner = build(options, "default")
    x = images(options)
    found = []
    for target in (0.9, 0.8, 0.7, 0.6, 0.5):
        model.zero_grad()
        nn.functional.cross_entropy(
            model(x), torch.arange(options.batch, device=options.device) % 10
        ).backward()
        pruner.step()
        began = time.process_time()
        solved = pruner.solve(target)
        found.append(solved.seconds if options.device == "cuda" else time.process_time() - began)
    return statistics.median(found)


def peak(options: argparse.Namespace, name: str) -> float:
    """Peak memory of three steps of one variant, in MiB; in this process, which on a CPU should be a fresh one.

    What the process holds between two steps beside the training's tensors (code, compiled or not, the traced
    graph) is not counted, nor what tracing, `prepare` and compiling took for a while.
    """
    gc.collect()
    before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
    step = stepper(options, name)
    for _ in range(2):
        step()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        code = _status("VmRSS") - _tensors_mib()
        Path("/proc/self/clear_refs").write_text(
            "5", encoding="ascii"
        )  # the peak starts from the present use
    for _ in range(3):
        step()
    if options.device == "cuda":
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    return _status("VmHWM") - code  # ru_maxrss would start from the parent's


def _tensors_mib() -> float:
    """The memory of all tensors that live, each storage once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
        found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    found = [tensor for tensor in found if tensor.device.type != "meta"]
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values()) / 2**20


def _status(field: str) -> float:
    """A field of this process's status, in MiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 2**10


def peaks(options: argparse.Namespace) -> dict[str, float]:
    """`peak` of every variant; on a CPU in processes of their own, where memory that is freed goes back at once."""
    if options.device == "cuda":
        return {name: peak(options, name) for name in options.variants}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = {}
    for name in options.variants:
        command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found[name] = float(done.stdout.split()[-1])
    return found


def masked_mib(options: argparse.Namespace) -> float:
    """The memory of the masked weights."""
    model, pruner = build(options, "default")
    layers = pruner._importance.layers
    return sum(model.get_parameter(la.weight).nbytes for la in layers) / 2**20


def print_variants(found: dict[str, list[float]], memory: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Print a line a variant, its times over the plain model's; return the numbers."""
    table: dict[str, dict[str, Any]] = {}
    plain = next(iter(found.values()))
    for name in found:
        ratios = sorted(a / b for a, b in zip(found[name], plain, strict=True))
        quarter = len(ratios) // 4
        table[name] = {
            "ms": statistics.median(found[name]) * 1e3,
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [ratios[quarter], ratios[-1 - quarter]],
            "peak_mib": memory.get(name),
        }
        row = table[name]
        extra = f"  {row['peak_mib']:8.0f} MiB" if memory else ""
        print(
            f"{row['ms']:9.2f} ms  {row['ratio']:.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}){extra}  "
            f"{VARIANTS[name]}"
        )
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=["resnet18", "resnet50"], help="of torchvision")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of autocast")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, help="of the images; 32 for ResNet-18, 224 for ResNet-50")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=1, help="steps timed at a time")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS),
                        help="the first is what others are held against (default: all)")  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="measure times alone")
    parser.add_argument("--json", help="write the numbers to this file, too")
    parser.add_argument("--peak-of", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.side = options.side or {"resnet18": 32, "resnet50": 224}[options.model]
    warnings.simplefilter("ignore", smcp_fx.TrainingWarning)
    torch.set_num_threads(options.threads)
    if options.peak_of:
        print(peak(options, options.peak_of))
        return
    found = times(options)
    memory = {} if options.no_memory else peaks(options)
    solve = solve_seconds(options)
    plain = found[options.variants[0]]
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {options.threads} thread"
    print(
        f"{options.model}, {options.side} x {options.side}, batch {options.batch}, {options.dtype}"
        f"{', channels last' if options.channels_last else ''}{', compiled' if options.compile else ', eager'}; "
        f"{where}; torch {torch.__version__}; {options.rounds} rounds"
    )
    table = print_variants(found, memory)
    share = solve / (EVERY * statistics.median(plain))
    print(f"a solve takes {solve * 1e3:.0f} ms: {share:.2%} of {EVERY} steps")
    if memory:
        print(f"the masked weights take {masked_mib(options):.0f} MiB")
    if options.json:
        record = {**vars(options), "variants": table, "solve_seconds": solve, "solve_share": share}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
