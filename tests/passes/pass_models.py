"""Graphs to run single passes on, and what a pass changed in them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from models import Residual, between, chain, conv, free_parameter, randomise
from torch import fx, nn

from smcp_fx.channels import ChannelGraph, build
from smcp_fx.pruning.state import PruningState
from smcp_fx.tracing.tracer import trace

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def traced(model: nn.Module) -> tuple[fx.GraphModule, ChannelGraph]:
    """A traced model with the state the passes read, and its channel graph."""
    found = trace(randomise(model).eval(), (IMAGE,))
    channels = build(found.module, found.values, multiple=1)
    found.module.add_module("smcp", PruningState(channels))
    return found.module, channels


def kinds(module: fx.GraphModule) -> Counter[Any]:
    """How many nodes of each kind: an operation for calls of functions, the type of module for calls of these."""
    return Counter(
        node.target
        if node.op == "call_function"
        else type(module.get_submodule(str(node.target)))
        if node.op == "call_module"
        else node.op
        for node in module.graph.nodes
    )


def change(before: Counter[Any], after: Counter[Any]) -> dict[Any, int]:
    return {key: after[key] - before[key] for key in before | after if after[key] != before[key]}


NETWORKS = {
    "chain": lambda: chain(8, 12, 6),
    "residual": Residual,
    "shared": lambda: between(lambda s, h: s.mid(F.relu(s.mid(h))), mid=conv(8, 8)),
    "functional": lambda: between(
        lambda s, h: F.conv2d(h, s.weight, padding=1), weight=free_parameter(8, 8, 3, 3)
    ),
    "moves": lambda: between(
        lambda s, h: (
            torch.cat(s.norm(h).split([4, 4], 1)[::-1], 1).view(h.shape[0], 2, 4, 8, 8).flatten(1, 2)
        ),
        norm=nn.GroupNorm(4, 8),
    ),
}
