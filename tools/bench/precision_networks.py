"""Trained networks for the benchmark of precisions: torchvision's, on glyphs enlarged to 64 pixels, and tiled to 224.

    PYTHONPATH=tools/bench python tools/bench/precision_networks.py --glyphs glyphs.npz --work work

Those at 64 pixels are trained from nothing, those at 224 from these. Goes on where it was interrupted. Set
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from pretrained.dense import train
from pretrained.tasks import Glyphs, accuracy_on
from safetensors.torch import load_file
from torch import Tensor, nn

#: Optimiser steps, by network and side, and images a step. Short: longer training would reach more.
_STEPS = {64: {"resnet18": 800, "mobilenet_v2": 400}, 224: {"resnet18": 20, "mobilenet_v2": 20}}
_BATCH = {64: 64, 224: 32}
_TEST = {64: 4_000, 224: 1_000}
_RATES = {64: 0.1, 224: 0.02}
#: Pixels of a glyph's side. At 224 pixels glyphs are tiles, so that the networks need little further training.
_TILE = 64


class Enlarged(Glyphs):
    """The glyphs on images of ``size`` pixels: enlarged to 64, then repeated to fill the image."""

    def __init__(self, file: Path, size: int) -> None:
        super().__init__(file)
        self.size = size
        images, labels = self.test
        self.test = _enlarged(images[: _TEST[size]], size), labels[: _TEST[size]]

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """So many training images and their labels."""
        images, labels = super().draw(count, seed)
        return _enlarged(images, self.size), labels


def _enlarged(images: Tensor, size: int) -> Tensor:
    tile, copies = min(size, _TILE), -(-size // _TILE)
    tiles = F.interpolate(images, size=tile, mode="bilinear", align_corners=False)
    return tiles.repeat(1, 1, copies, copies)[..., :size, :size].contiguous()


def trained(task: Enlarged, name: str, folder: Path) -> nn.Module:
    """The network in eval mode; trained where the folder lacks it."""
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, num_classes=task.classes)
    file = folder / f"{name}-{task.size}.safetensors"
    if not file.exists():
        if task.size != 64:
            model.load_state_dict(load_file(folder / f"{name}-64.safetensors"))
        train(model, task, _STEPS[task.size][name], 0, file, rate=_RATES[task.size], batch=_BATCH[task.size])
    model.load_state_dict(load_file(file))
    return model.eval()


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glyphs", type=Path, required=True, help="file that pretrained/render.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="folder for the networks")
    parser.add_argument("--sides", type=int, nargs="+", default=list(_STEPS), choices=list(_STEPS))
    parser.add_argument("--networks", nargs="+", default=["resnet18", "mobilenet_v2"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for side in arguments.sides:
        task = Enlarged(arguments.glyphs, side)
        for name in arguments.networks:
            model = trained(task, name, arguments.work)
            print(f"{name} at {side}: {accuracy_on(task.test, model):.4f}", flush=True)


if __name__ == "__main__":
    main()
