"""smcp_fx makes convolutional networks as fast as asked.

prepared = smcp_fx.prepare(model, example_inputs, target=0.3)
...                       # train as usual; prepared.pruner.step() before each optimizer.step()
smaller = smcp_fx.convert(prepared)
"""

from __future__ import annotations

from smcp_fx.channels import ChannelGraph
from smcp_fx.config import PruningConfig
from smcp_fx.prepare import PreparedModel, convert, prepare
from smcp_fx.schedule import Schedule

__all__ = [
    "ChannelGraph",
    "PreparedModel",
    "PruningConfig",
    "Schedule",
    "convert",
    "prepare",
]
