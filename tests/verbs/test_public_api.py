"""The public interface is data: its names, and what importing it loads."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import pytest

import smcp_fx
from smcp_fx import errors
from smcp_fx.config import Method, MethodConfig

NAMES = [
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

HEAVY = "onnx onnxscript onnxruntime openvino tensorrt matplotlib torchvision networkx torch._dynamo".split()


def test_the_names_are_these() -> None:
    assert smcp_fx.__all__ == NAMES
    for name in NAMES:
        assert inspect.getdoc(getattr(smcp_fx, name)), f"{name} has no docstring"


def test_importing_loads_no_runtime_and_no_plotting() -> None:
    """Nor does it touch CUDA: a fresh process has to say so."""
    code = (
        "import sys, json, smcp_fx, smcp_fx.backends, smcp_fx.latency.table, torch; "
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


def test_moved_names_work_with_a_warning() -> None:
    """For one release: each says where it is now, and is the same object there."""
    assert len(smcp_fx._MOVED) == 8 and not set(smcp_fx._MOVED) & set(NAMES)
    for name, home in smcp_fx._MOVED.items():
        with pytest.warns(DeprecationWarning, match=f"{name} is now {home}.{name}"):
            found = getattr(smcp_fx, name)
        assert found is getattr(importlib.import_module(home), name)


def test_options_of_the_method_still_work_in_the_config_with_a_warning() -> None:
    """The five options of every user are the config's fields; what a method's option makes is equal in both."""
    users = ["multiple", "exclude", "widths", "layer_pruning", "layer_pruning_in"]
    assert [entry.name for entry in fields(smcp_fx.PruningConfig)] == users
    assert len(fields(MethodConfig)) == 15
    for name in Method.__annotations__:
        value = getattr(smcp_fx.PruningConfig(), name)
        assert value == getattr(MethodConfig(), name) == getattr(Method, name)
        with pytest.warns(DeprecationWarning, match="MethodConfig"):
            old = smcp_fx.PruningConfig(multiple=4, **{name: value})
        assert old == MethodConfig(multiple=4, **{name: value}) and pickle.loads(pickle.dumps(old)) == old


def test_every_error_is_of_the_family() -> None:
    family = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(family) >= 9
    for error in family:
        assert issubclass(error, smcp_fx.SmcpError)
        assert error.exit_code != 0
    assert issubclass(errors.InputError, ValueError)
