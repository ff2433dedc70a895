"""What prepared models, pruners and channel graphs say of themselves, held against the models."""

from __future__ import annotations

import re

import torch
from torch import nn
from torchvision.models import resnet18

import smcp_fx
from smcp_fx.prepared import PreparedModel


def columns(line: str) -> list[str]:
    return re.split(r"  +", line)


def prepared_resnet() -> PreparedModel:
    return smcp_fx.prepare(resnet18(), torch.randn(1, 3, 64, 64), check=False)


def test_a_summary_lists_what_is_kept_and_what_it_costs() -> None:
    prepared = prepared_resnet()
    prepared.set_masks({"layer1.0.conv1": torch.arange(64) < 16})
    tables = [
        {columns(line)[0]: columns(line)[1:] for line in part.splitlines()}
        for part in prepared.summary().split("\n\n")
    ]
    layers, groups = tables[1:]
    assert layers["layer1.0.conv2"] == ["16 of 64", "64 of 64", "9,216", "2.36 M"]  # 16 * 64 * 9 on 16 x 16
    assert layers["fc"] == ["512 of 512", "1000 of 1000", "513 k", "512 k"]
    smaller = smcp_fx.convert(prepared, check=False)
    parameters = sum(p.numel() for p in smaller.parameters())
    assert f"{parameters / 1e6:.1f} M" == layers["all"][0]
    assert groups["layer1.0.conv1"][0] == "16 of 64"
    assert f"{parameters / 1e6:.1f} M of 11.7 M parameters" in repr(prepared)


def test_the_parts_of_a_summary_make_up_the_whole() -> None:
    prepared = prepared_resnet()
    for cost in (prepared.plan.flops, prepared.plan.parameters):
        for counts in (cost.full_counts, cost.smallest_counts):
            assert abs(sum(cost.by_name(counts).values()) + cost.rest - cost.cost(counts)) < 1e-6 * cost.cost(
                counts
            )


def test_pruner_and_graph_say_where_they_stand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8), target=0.5)
    assert "0 solves" in repr(prepared.pruner) and "multiply-adds unpruned" in repr(prepared.pruner)
    prepared(torch.randn(2, 3, 8, 8)).square().mean().backward()
    prepared.pruner.step()
    solve = prepared.pruner.solve()
    assert "1 solve>" in repr(prepared.pruner)
    (row,) = [line for line in prepared.pruner.summary().splitlines() if line.startswith(f"{solve.step} ")]
    assert f"{solve.importance_kept:.1%}" in row
    told = prepared.channels.summary()
    assert "<ChannelGraph: 3 groups, 1 of them free" in told
    (group,) = [columns(line) for line in told.splitlines() if line.startswith("0 ")]
    assert group == ["0", "16", "0", "2", "it may go"]
    assert "reaches the network's output" in told
