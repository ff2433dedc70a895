"""The public interface is data: its names, and what importing it loads."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import smcp_fx
from smcp_fx import errors

NAMES = [
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
    "TableError",
    "Teacher",
    "TrainingWarning",
    "allocate",
    "carry_optimizer",
    "compress",
    "convert",
    "export_onnx",
    "from_onnx",
    "gather_halfway",
    "gather_importance",
    "get_backend",
    "load",
    "load_checkpoint",
    "observers",
    "prepare",
    "read_metadata",
    "recalibrate",
    "repair",
    "resize",
    "save",
    "save_checkpoint",
    "solve_knapsack",
]

HEAVY = ["onnx", "onnxscript", "onnxruntime", "tensorrt", "matplotlib", "torchvision", "networkx"]


def test_the_names_are_these() -> None:
    assert smcp_fx.__all__ == NAMES
    for name in NAMES:
        assert inspect.getdoc(getattr(smcp_fx, name)), f"{name} has no docstring"


def test_importing_loads_no_runtime_and_no_plotting() -> None:
    """Nor does it touch CUDA: a fresh process has to say so."""
    code = (
        "import sys, json, smcp_fx, torch; "
        "print(json.dumps([sorted(sys.modules), torch.cuda.is_initialized()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    loaded, cuda = json.loads(done.stdout)
    assert "smcp_fx.pruning.pruner" in loaded
    assert [name for name in HEAVY if name in loaded] == []
    assert cuda is False


def test_what_dir_tells_is_public() -> None:
    assert set(dir(smcp_fx)) == {*NAMES, "__version__", "integrations"}
    assert all(hasattr(smcp_fx, name) for name in dir(smcp_fx))
    assert smcp_fx.__version__ == version("smcp_fx")
    assert smcp_fx.integrations.lightning.PruningCallback
    with pytest.raises(AttributeError, match="no attribute 'Tensors'"):
        smcp_fx.Tensors  # noqa: B018


def test_every_error_is_of_the_family() -> None:
    family = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(family) >= 9
    for error in family:
        assert issubclass(error, smcp_fx.SmcpError)
        assert error.exit_code != 0
    assert issubclass(errors.InputError, ValueError)
