"""smcp_fx makes convolutional networks as fast as asked.

    prepared = smcp_fx.prepare(model, example_inputs, target=0.3)
    ...                       # train as usual, with prepared.pruner.step() before each optimizer.step()
    smaller = smcp_fx.convert(prepared)

The names below are the public interface. Those that need a runtime's package load it when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from smcp_fx.allocation import Allocation, allocate
from smcp_fx.calibration import RepairReport, compress, gather_importance, recalibrate, repair
from smcp_fx.channels import ChannelGraph
from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.config import PruningConfig
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import SmcpError
from smcp_fx.knapsack import KnapsackSolution, solve_knapsack
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable
from smcp_fx.own_class import resize
from smcp_fx.prepare import PreparedModel, convert, prepare
from smcp_fx.pruning import observers
from smcp_fx.pruning.loop_watch import TrainingWarning
from smcp_fx.schedule import Schedule
from smcp_fx.serialization.saving import load, save

__all__ = [
    "Allocation",
    "ChannelGraph",
    "KnapsackSolution",
    "LatencyCost",
    "LatencyTable",
    "NetworkCost",
    "PreparedModel",
    "PruningConfig",
    "RepairReport",
    "Schedule",
    "SmcpError",
    "TrainingWarning",
    "allocate",
    "compress",
    "convert",
    "export_onnx",
    "gather_importance",
    "load",
    "load_checkpoint",
    "observers",
    "prepare",
    "recalibrate",
    "repair",
    "resize",
    "save",
    "save_checkpoint",
    "solve_knapsack",
]


def export_onnx(
    converted: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    path: Path | str,
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model in eval mode as an ONNX file and return its path.

    The file is run in ONNX Runtime on random inputs and compared with the model before it gets its name.
    ``opset`` (17 and later; a recent one by default); ``dynamic_batch`` leaves the first axis of every input
    open; ``metadata`` goes into the file. Raises `BackendError` for what ONNX cannot express and for results
    that differ, `InputError` for inputs and opsets that do not fit.
    """
    from smcp_fx.backends.onnx.export import export_onnx as export

    return export(
        converted, example_inputs, path, opset=opset, dynamic_batch=dynamic_batch, metadata=metadata
    )
