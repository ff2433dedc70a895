"""smcp_fx makes convolutional networks as fast as asked.

    prepared = smcp_fx.prepare(model, example_inputs, target=0.3)
    ...                       # train as usual, with prepared.pruner.step() before each optimizer.step()
    smaller = smcp_fx.convert(prepared)

The names below are the public interface. A function that needs a runtime's package loads it when called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.backends import get_backend, import_runtime
from smcp_fx.calibration import compress, gather_importance, recalibrate, repair
from smcp_fx.carried_optimizers import carry_optimizer
from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.config import PruningConfig
from smcp_fx.errors import (
    BackendError,
    CheckpointError,
    InfeasibleBudgetError,
    InputError,
    SmcpError,
    TableError,
    TraceError,
    TrainingError,
)
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable
from smcp_fx.own_class import resize
from smcp_fx.prepare import PreparedModel, convert, prepare
from smcp_fx.pruning import observers
from smcp_fx.pruning.loop_watch import TrainingWarning
from smcp_fx.regions import graph_of
from smcp_fx.schedule import Schedule
from smcp_fx.serialization.saving import load, save
from smcp_fx.training.teacher import Teacher

__all__ = [
    "BackendError",
    "CheckpointError",
    "InfeasibleBudgetError",
    "InputError",
    "LatencyCost",
    "LatencyTable",
    "PreparedModel",
    "PruningConfig",
    "Schedule",
    "SmcpError",
    "TableError",
    "Teacher",
    "TraceError",
    "TrainingError",
    "TrainingWarning",
    "carry_optimizer",
    "compress",
    "convert",
    "export_onnx",
    "from_onnx",
    "gather_importance",
    "get_backend",
    "load",
    "load_checkpoint",
    "observers",
    "prepare",
    "recalibrate",
    "repair",
    "resize",
    "save",
    "save_checkpoint",
]

#: The new homes of names that this module had; until version 0.2 they work here, with a warning.
_MOVED = {
    "Allocation": "smcp_fx.allocation",
    "ChannelGraph": "smcp_fx.channels",
    "KnapsackSolution": "smcp_fx.knapsack",
    "NetworkCost": "smcp_fx.cost_model",
    "RepairReport": "smcp_fx.calibration",
    "allocate": "smcp_fx.allocation",
    "read_metadata": "smcp_fx.serialization.saving",
    "solve_knapsack": "smcp_fx.knapsack",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "integrations"])


def __getattr__(name: str) -> Any:
    """Load on request: the installed version, callbacks for training frameworks, moved names."""
    if name == "__version__":
        return importlib.metadata.version("smcp_fx")
    if name == "integrations":
        return importlib.import_module("smcp_fx.integrations")
    if name in _MOVED:
        home = _MOVED[name]
        warnings.warn(f"smcp_fx.{name} is now {home}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'smcp_fx' has no attribute {name!r}")


def export_onnx(
    converted: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    path: Path | str,
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    dynamic_axes: Mapping[str | int, Mapping[int, str] | Sequence[int]] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model in eval mode as an ONNX file and return its path.

    If a model was traced in regions, export each region by itself (``converted.backbone``): it takes and
    returns the tensors of its arguments and results one by one.

    The first axis of every input stays open, as "batch", and so do the sides of images that outputs have, too
    (``height``, ``width``, ``depth``). ``dynamic_axes`` names the axes that stay open instead, by the input's name or
    place, as PyTorch's exporter takes them: ``{"x": {0: "batch", 2: "time"}, "state": {1: "batch"}}``. Axes of one
    name have one size. ``dynamic_batch=False`` fixes all.

    The file is run in ONNX Runtime on random inputs, at another size of each open axis too, and compared with the
    model before it gets its name. ``opset`` (17 and later; a recent one by default); ``input_names`` and
    ``output_names`` replace those of the model's forward and the exporter's; ``metadata`` goes into the file. Raises
    `BackendError` without ONNX Runtime, for what ONNX cannot express and for results that differ, `InputError` for
    inputs, axes and opsets that do not fit.
    """
    export = import_runtime("smcp_fx.backends.onnx.export", "export_onnx", "pip install onnxruntime")
    written: Path = export.export_onnx(
        graph_of(converted),
        example_inputs,
        path,
        opset=opset,
        dynamic_batch=dynamic_batch,
        dynamic_axes=dynamic_axes,
        input_names=input_names,
        output_names=output_names,
        metadata=metadata,
    )
    return written


def from_onnx(
    path: Path | str, example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None
) -> fx.GraphModule:
    """Return the network of an ONNX file as a graph module of torch.nn modules, in eval mode, to prune and train.

    Modules have the names that the file's weights and nodes have; batch norms, layer norms, recurrent layers and
    activations come back as such where exporters took them apart. Half precision is computed in float32. Axes that
    are open in the file stay open; a batch of one sample is opened if the network computes each sample alone.

    Before it is returned, its outputs are compared with those of ONNX Runtime on random inputs, at two sizes where
    axes are open. ``example_inputs`` (a tensor, several in the file's order, or a dict by name) give the
    first size, if no size that is tried fits. The module's ``example_input_array`` holds the compared inputs.

    Raises `InputError` for a file that is damaged, reads outside its folder, is quantised, or holds an operator that
    cannot be imported, naming the node; `BackendError` where outputs differ by more than rounding, naming the first
    node that differs, and without ONNX Runtime.
    """
    read = import_runtime("smcp_fx.backends.onnx.importing.reading", "from_onnx", "pip install onnxruntime")
    module: fx.GraphModule = read.from_onnx(path, example_inputs)
    return module
