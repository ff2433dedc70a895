"""Pruning to 70% of the latency measured on this machine, in ONNX Runtime on one thread.

python examples/latency_target.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from toy import accuracy, loader, network

import smcp_fx
from smcp_fx.backends import compare


def main(folder: Path) -> nn.Module:
    """Train and prune; returns the smaller model. The latency table and the ONNX files lie in ``folder``."""
    torch.manual_seed(0)
    model, batches = network(), loader(32)
    # --8<-- [start:prune]
    epochs = 4
    backend = smcp_fx.get_backend("onnxruntime", threads=1)
    table = smcp_fx.LatencyTable(folder / "table.sqlite")  # prepare fills it
    example = next(iter(batches))[0]  # the latency is that of a batch of this size
    schedule = smcp_fx.Schedule.scaled(epochs, steps_per_epoch=len(batches))
    prepared = smcp_fx.prepare(
        model,
        example,
        target=0.7,
        cost=smcp_fx.LatencyCost(table, backend),
        schedule=schedule,
        config=smcp_fx.PruningConfig(multiple=16),  # fewer rows to measure
    )
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    for _ in range(epochs):
        prepared.train()
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(prepared(images), labels).backward()
            prepared.pruner.step()
            optimizer.step()
    smaller = smcp_fx.convert(prepared)
    # --8<-- [end:prune]
    # --8<-- [start:measure]
    whole = smcp_fx.export_onnx(model.eval(), example, folder / "dense.onnx")
    small = smcp_fx.export_onnx(smaller.eval(), example, folder / "smaller.onnx")
    engines = [backend.open(path, (example,)) for path in (whole, small)]
    # --8<-- [end:measure]
    pruner = prepared.pruner
    print(f"predicted {pruner.present_cost:.3f} of {pruner.full_cost:.3f} ms")
    print(f"measured {compare(*engines)}")
    print(f"accuracy {accuracy(smaller):.1%}")
    return smaller


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
