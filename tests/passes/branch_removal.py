"""A network with groups that keep nothing."""

from __future__ import annotations

import torch
from models import randomise
from torch import Tensor, fx, nn

from smcp_fx.channels import ChannelGraph, build
from smcp_fx.pruning.state import PruningState
from smcp_fx.tracing.tracer import trace

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def without(model: nn.Module, *groups: str) -> tuple[fx.GraphModule, ChannelGraph, Tensor]:
    """A traced model, its channel graph, and the units kept: none of these groups, whose readers have zeros."""
    found = trace(randomise(model).eval(), (IMAGE,))
    channels = build(found.module, found.values, multiple=1)
    found.module.add_module("smcp", PruningState(channels))
    keep = torch.ones(channels.free_units.numel(), dtype=torch.bool)
    for name in groups:
        keep[channels[name].units] = False
        for path in channels[name].consumers:
            nn.init.zeros_(found.module.get_parameter(f"{path}.weight"))
    return found.module, channels, keep
