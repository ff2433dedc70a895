"""A report over a real channel graph, for the tests of what is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smcp_fx
from smcp_fx.report import schema


class Small(nn.Module):
    """A residual block, a concat and a depthwise convolution, so that groups of each kind appear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))
        self.side = nn.Sequential(nn.Conv2d(16, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24))
        self.head = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.body(x))
        x = torch.cat([x, self.side(x)], 1)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def real() -> schema.Report:
    """A report over a real channel graph; its measurements are made-up numbers that no two places share."""
    prepared = smcp_fx.prepare(Small(), torch.randn(2, 3, 8, 8))
    prepared.set_masks({"body.0": torch.arange(32) < 8, "stem": torch.arange(16) % 2 == 0})
    counts = prepared.pruner.counts
    groups = tuple(
        schema.GroupRow(g.name, g.size, counts.get(g.name, g.size), g.consumers, g.producers, g.pinned)
        for g in prepared.channels.groups
    )
    smaller = dict(smcp_fx.convert(prepared).named_modules())
    layers = []
    for layer in prepared.channels.layers:
        module: Any = smaller[layer.path]
        outputs = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        inputs = module.in_features if isinstance(module, nn.Linear) else module.in_channels
        layers.append(
            schema.LayerRow(
                path=layer.path,
                kind=layer.kind,
                in_channels=layer.input_channels.numel(),
                in_kept=inputs,
                out_channels=layer.output_channels.numel(),
                out_kept=outputs,
                in_group="side.0" if layer.kind == "depthwise" else "",
                out_group=layer.path,
            )
        )
    return schema.Report(
        model="torchvision:resnet18",
        data="digits",
        seed=17,
        created="2030-01-02T03:04:05+00:00",
        target="40%",
        target_fraction=0.4,
        predicted_fraction=0.3967,
        measured_fraction=4.213 / 10.51,
        measured_fraction_q1=0.3987,
        measured_fraction_q3=0.4032,
        measured_fraction_error=0.0016,
        measured_rounds=7,
        correction=1.0345,
        cost="ms",
        batch=32,
        epochs=6,
        backend={
            "backend": "onnxruntime",
            "device": "A Processor",
            "runtime": "ONNX Runtime",
            "version": "9.8.7",
            "threads": 1,
            "precision": "float32",
            "settings": {"spinning": "off"},
        },
        versions={"torch": "5.6.7", "python": "3.99"},
        seconds={"train": 62.0, "measure": 3700.0},
        dense=schema.Side(0.9861, 10.51, 10.37, 10.72, True, 10.83, 11_172_042, 555e6),
        pruned=schema.Side(0.9764, 4.213, 4.186, 4.254, True, 4.297, 2_841_110, 1.9e8),
        layers=tuple(layers),
        groups=groups,
        solves=tuple(
            schema.SolveRow(
                step=30 * step,
                epoch=step / 2,
                target=10.83 * 0.4 ** (step / 6),
                cost=10.7 * 0.4 ** (step / 6),
                importance_kept=0.9,
                bound=0.9125,
                changed_share=0.06 / step,
                returned=3,
                seconds=0.25,
            )
            for step in range(1, 7)
        ),
        training=tuple(
            schema.EpochRow(epoch, phase, 1 / epoch, 0.97 + 0.002 * epoch)
            for phase in ("dense", "prune")
            for epoch in range(1, 7)
        ),
        validation=(schema.EngineRow("dense", 10.83, 10.51), schema.EngineRow("emitted", 4.297, 4.213)),
        blocks=(schema.BlockRow("stem", 6.25, 2.5), schema.BlockRow("body.0", 3.75, 1.25)),
        table=schema.TableFacts(
            path="latency.sqlite",
            rows=812,
            measured=790,
            seconds=61.4,
            for_solves=41,
            repeated=17,
            reused=22,
            unstable=5,
            held_out_points=64,
            held_out_median=0.0131,
            held_out_p95=0.0472,
        ),
        files={"pruned": "pruned.onnx"},
        notes=("The stem was adapted.",),
    )
