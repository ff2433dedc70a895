"""Do masks settle? Trains a small bottleneck ResNet on the digits under a FLOP target, variant by variant.

    python tools/bench/stability.py --seeds 5 --out stability.jsonl
    python tools/bench/stability.py --show stability.jsonl

Run it where the selection of masks or a default of `MethodConfig` changes: the table in docs/explanations/method.md
is its. For every run: the share of units whose mask changes at each solve after the ramp (median, worst), cost over
target and importance kept over its bound at every solve, and test accuracy when pruning stops and after the cooldown.
The record has one JSON line a run, and a run that it holds already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

import smcp_fx
from smcp_fx.config import MethodConfig

BATCH = 64
#: The settings that are compared; each changes only what it names.
VARIANTS = {
    "default": smcp_fx.PruningConfig(),
    "width exponent 0": MethodConfig(width_exponent=0.0),
    "width exponent 0.5": MethodConfig(width_exponent=0.5),
    "batch-norm scaling": MethodConfig(batch_norm_scaling=True),
    "memory 0.98": MethodConfig(memory=0.98),
    "no tolerance": MethodConfig(tolerance=0.0),
    "no memory": MethodConfig(memory=0.0),
    "permanent masks": MethodConfig(mask="permanent"),
    "exact allocation only": MethodConfig(width_exponent=0.0, memory=0.0, tolerance=0.0),
    "as published": MethodConfig.published(keep_first_convolution=True),
}


class Digits:
    """Scikit-learn's 1,797 digits, 60% to train on."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        images = (torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 - 0.3) / 0.4
        labels = torch.tensor(labels)
        train, test = train_test_split(range(len(labels)), test_size=0.4, stratify=labels, random_state=0)
        self.train = images[train], labels[train]
        self.test = images[test], labels[test]

    def accuracy(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            right = (model(self.test[0]).argmax(1) == self.test[1]).float().mean()
        model.train()
        return float(right)


def network() -> nn.Module:
    """A bottleneck ResNet of four blocks for 8x8 images: 4,864 units in 13 groups."""
    model = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=32)
    model.conv1 = nn.Conv2d(1, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def train(model: nn.Module, data: Digits, steps: int, lr: float, at_stop: dict[str, float]) -> None:
    """SGD under a one-cycle learning rate; prunes when the model is prepared."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    pruner = getattr(model, "pruner", None)
    images, labels = data.train
    model.train()
    for step in range(steps):
        at = step % (len(labels) // BATCH)
        if at == 0:
            order = torch.randperm(len(labels))
        batch = order[at * BATCH : (at + 1) * BATCH]
        loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        if pruner is not None:
            pruner.step()
        optimizer.step()
        rates.step()
        if pruner is not None and step + 1 == pruner.schedule.last_step:
            at_stop["accuracy"] = data.accuracy(model)


def run(variant: str, seed: int, target: float, data: Digits) -> dict[str, object]:
    """One training run, and what its solves did."""
    torch.manual_seed(seed)
    began = time.perf_counter()
    model = network()
    train(model, data, 100, 0.05, {})
    dense = data.accuracy(model)
    schedule = smcp_fx.Schedule(20, 20, warmup=1, ramp=5, cooldown=9, every=5)
    prepared = smcp_fx.prepare(
        model, data.train[0][:2], target=target, schedule=schedule, config=VARIANTS[variant]
    )
    at_stop: dict[str, float] = {}
    train(prepared, data, 400, 0.05, at_stop)
    solves = prepared.pruner.history
    settled = [solve.changed_share for solve in solves if solve.step > schedule.ramp_end]
    return {
        "variant": variant,
        "seed": seed,
        "target": target,
        "dense": dense,
        "at_stop": at_stop["accuracy"],
        "end": data.accuracy(prepared),
        "median_changed": statistics.median(settled),
        "worst_changed": max(settled),
        "changed": [round(solve.changed_share, 5) for solve in solves],
        "cost_over_target": [round(solve.cost / solve.target, 5) for solve in solves],
        "kept_over_bound": [round(solve.importance_kept / solve.bound, 5) for solve in solves],
        "returned": sum(solve.returned for solve in solves),
        "seconds": round(time.perf_counter() - began, 1),
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }


def show(path: Path) -> None:
    """The record as a table: means over the seeds, worst solves over all of them."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    table = Table(title=f"{path}: shares of the units changed at solves after the ramp; mean accuracies")
    for column in ("target", "variant", "seeds", "changed, median", "worst", "cost / target", "kept / bound"):
        table.add_column(column)
    for column in ("at stop (lowest)", "end (lowest)", "returned"):
        table.add_column(column)
    for target in sorted({row["target"] for row in rows}):
        for variant in VARIANTS:
            runs = [row for row in rows if row["variant"] == variant and row["target"] == target]
            if not runs:
                continue
            costs = [c for row in runs for c in row["cost_over_target"]]
            table.add_row(
                f"{target:.0%}",
                variant,
                str(len(runs)),
                f"{statistics.median(row['median_changed'] for row in runs):.2%}",
                f"{max(row['worst_changed'] for row in runs):.2%}",
                f"{min(costs):.3f} to {max(costs):.3f}",
                f"{min(k for row in runs for k in row['kept_over_bound']):.4f}",
                *(
                    f"{statistics.mean(row[key] for row in runs):.1%} ({min(row[key] for row in runs):.1%})"
                    for key in ("at_stop", "end")
                ),
                f"{statistics.mean(row['returned'] for row in runs):.0f}",
            )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.1, help="share of the FLOPs")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("stability.jsonl"))
    parser.add_argument("--show", type=Path, metavar="RECORD", help="print a record's table and end")
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    torch.set_num_threads(1)
    data = Digits()
    done = set()
    if args.out.exists():
        done = {
            (row["variant"], row["seed"], row["target"])
            for row in map(json.loads, args.out.read_text().splitlines())
        }
    for seed in range(args.seeds):
        for variant in args.variants:
            if (variant, seed, args.target) in done:
                continue
            row = run(variant, seed, args.target, data)
            with args.out.open("a") as record:
                record.write(json.dumps(row) + "\n")
            print(
                f"{variant}, seed {seed}: median {row['median_changed']:.2%}, worst {row['worst_changed']:.2%}, "
                f"at stop {row['at_stop']:.1%}, end {row['end']:.1%}, {row['seconds']} s",
                flush=True,
            )
    show(args.out)


if __name__ == "__main__":
    main()
