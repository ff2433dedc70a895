"""Train the dense networks to their plateau, once a seed; kept as files, and read from then on.

    PYTHONPATH=tools/bench python -m pretrained.dense --glyphs glyphs.npz --work work --seeds 1

Goes on where it was interrupted, to the nearest 50 steps. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from pretrained.networks import NETWORKS, STEPS
from pretrained.tasks import Digits, Folder, Glyphs, Task, cosine

_LR, _ADAM_LR, _BATCH, _SAVE_EVERY = 0.1, 2e-3, 64, 50


def dense_network(task: Task, name: str, seed: int, folder: Path) -> nn.Module:
    """The trained network, in eval mode; trained where the folder lacks it."""
    torch.manual_seed(seed)
    model = NETWORKS[name](task.channels, task.classes)
    path = folder / f"{task.name}-{name}-{seed}.safetensors"
    if not path.exists():
        train(model, task, round(STEPS[name] * task.steps), seed, path)
    model.load_state_dict(load_file(path))
    return model.eval()


def train(
    model: nn.Module,
    task: Task,
    steps: int,
    seed: int,
    path: Path,
    rate: float | None = None,
    batch: int = _BATCH,
) -> None:
    """SGD with Nesterov momentum, or ADAM where norms are over channels; the state is kept beside ``path``."""
    optimizer: torch.optim.Optimizer
    if any(isinstance(module, nn.LayerNorm) for module in model.modules()):
        rate = rate or _ADAM_LR
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    else:
        rate = rate or _LR
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
    unfinished, first = path.with_suffix(".part"), 0
    if unfinished.exists():
        state = torch.load(unfinished, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model.train()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * cosine(step, steps)
        images, labels = task.draw(batch, seed * 1_000_003 + step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.05).backward()
        optimizer.step()
        if (step + 1) % _SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, unfinished.with_suffix(".new"))
            unfinished.with_suffix(".new").replace(unfinished)
            print(f"{path.stem}: step {step + 1} of {steps}", flush=True)
    finished = path.with_suffix(".done")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, finished)
    finished.replace(path)
    unfinished.unlink(missing_ok=True)


def tasks(arguments: argparse.Namespace) -> dict[str, Task]:
    """The data sets that a command line asks for, by name."""
    known = {
        "glyphs": lambda: Glyphs(arguments.glyphs), "digits": Digits, "folder": lambda: Folder(arguments.folder)
    }  # fmt: skip
    return {name: known[name]() for name in arguments.tasks}


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options of the data."""
    parser.add_argument("--glyphs", type=Path, help="file that pretrained/render.py wrote")
    parser.add_argument("--folder", type=Path, help="folder of images with one folder a class")
    parser.add_argument("--tasks", nargs="+", default=["glyphs"], choices=["glyphs", "digits", "folder"])


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser)
    parser.add_argument("--work", type=Path, required=True, help="folder for the networks")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = tasks(arguments)
    for seed in range(arguments.seeds):
        for task in (known[name] for name in arguments.tasks):
            for name in arguments.networks:
                began = time.process_time()
                model = dense_network(task, name, seed, arguments.work)
                took = time.process_time() - began
                print(f"{task.name} {name} seed {seed}: {task.accuracy(model):.4f}, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
