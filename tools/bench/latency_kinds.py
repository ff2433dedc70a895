"""Prune networks that are no plain CNNs by rows to half of their latency, and measure.

    python tools/bench/latency_kinds.py run --record kinds.jsonl --tables FOLDER
    python tools/bench/latency_kinds.py tables --record docs/records/latency_kinds.jsonl --out docs/results/latency.md

In Python, as in docs/guides/latency_target.md: `prepare` with a `LatencyCost` of ONNX Runtime, importances of a few
random images, one solve without correction, `convert`, and both networks as emitted, timed in turns three times.
Random weights: a latency depends on none. Needs timm, diffusers and ultralytics. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from records import Record, begin, fill, table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smcp_fx
from smcp_fx.backends import compare, get_backend
from smcp_fx.integrations.ultralytics import NarrowYolo
from smcp_fx.prepare import converted_full

TARGET, ROUNDS = 0.5, 3
_WIDTHS = (64, 128, 128, 256)


def _image_and_time() -> tuple[Tensor, ...]:
    return torch.randn(1, 3, 32, 32), torch.rand(1) * 1000


def _unet() -> nn.Module:
    down = ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D")
    up = ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D")
    model: nn.Module = importlib.import_module("diffusers").UNet2DModel(
        32, block_out_channels=_WIDTHS, down_block_types=down, up_block_types=up
    )
    return model


def _image(side: int = 224) -> tuple[Tensor, ...]:
    return (torch.randn(1, 3, side, side),)


def _timm(name: str) -> nn.Module:
    model: nn.Module = importlib.import_module("timm").create_model(name)
    return model


def _yolo(name: str) -> nn.Module:
    """The module that `PrunedYolo.prepare` prepares."""
    yolo: nn.Module = importlib.import_module("ultralytics").YOLO(f"{name}.yaml", verbose=False).model
    return NarrowYolo(yolo.float())


#: Name: the network, and inputs to draw.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "ConvNeXt-T, 224 pixels": (torchvision.models.convnext_tiny, _image),
    "ViT-S/16, 224 pixels": (partial(_timm, "vit_small_patch16_224"), _image),
    "U-Net of diffusion, 32 pixels": (_unet, _image_and_time),
    "YOLO11n, 192 pixels": (partial(_yolo, "yolo11n"), partial(_image, 192)),
    "YOLOv8n, 320 pixels": (partial(_yolo, "yolov8n"), partial(_image, 320)),
    "EfficientNet-CondConv-B0, 224 pixels": (partial(_timm, "tf_efficientnet_cc_b0_4e"), _image),
}  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Run the networks that the record lacks."""
    record, backend = Record(arguments.record), get_backend("onnxruntime", threads=1)
    begin(record, backend)
    torch.set_num_threads(1)
    for name, (make, draw) in NETWORKS.items():
        if record.find("kind", network=name):
            continue
        torch.manual_seed(0)
        model, inputs = make().eval(), draw()
        rows = smcp_fx.LatencyTable(arguments.tables / f"{name.split(',')[0].replace('/', '-')}.sqlite")
        began = time.perf_counter()
        prepared = smcp_fx.prepare(model, inputs, target=TARGET, cost=smcp_fx.LatencyCost(rows, backend))
        smcp_fx.gather_importance(prepared, [(draw(), None) for _ in range(4)], _loss)
        prepared.pruner.solve()
        seconds = time.perf_counter() - began
        whole, smaller = converted_full(prepared), smcp_fx.convert(prepared)
        with backend.compile(whole, inputs) as dense, backend.compile(smaller, inputs) as pruned:
            found = [compare(dense, pruned) for _ in range(ROUNDS)]
        print(record.add(
            "kind", network=name, free=prepared.channels.free_share, seconds=seconds,
            predicted=prepared.pruner.present_cost / prepared.pruner.full_cost,
            dense_predicted_ms=prepared.pruner.full_cost, dense_ms=found[0].dense.median_ms,
            rows=len(rows.rows(backend.fingerprint())), measured=[one.fraction for one in found],
        ), flush=True)  # fmt: skip


def _loss(outputs: Any, _: Any) -> Tensor:
    found = [value for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]
    return torch.stack([value.square().mean() for value in found]).sum()


def tables(arguments: argparse.Namespace) -> None:
    """Write the page's table."""
    rows = []
    for line in Record(arguments.record).find("kind"):
        measured = sorted(line["measured"])
        values = [f"{line[k]:.1f}" for k in ("dense_predicted_ms", "dense_ms")]
        shares = f"{line['predicted']:.1%}", f"{measured[len(measured) // 2]:.1%}"
        rows.append([line["network"], f"{line['free']:.2f}", str(line["rows"]), *values, *shares])
    heads = ["network", "free", "rows", "dense, predicted ms", "measured ms", "pruned, predicted", "measured"]
    fill(arguments.out, "kinds", table(heads, rows))


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("run")
    measure.add_argument("--tables", type=Path, required=True, help="folder of the latency tables")
    measure.set_defaults(do=run)
    page = commands.add_parser("tables")
    page.add_argument("--out", type=Path, required=True)
    page.set_defaults(do=tables)
    for command in (measure, page):
        command.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
