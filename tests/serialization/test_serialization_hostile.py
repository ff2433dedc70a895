"""Manifests made to run code or to reach what a model may not reach: all refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import (
    Manifest,
    edit_manifest,
    small_model,
)
from torch import nn

from smcp_fx.errors import CheckpointError
from smcp_fx.serialization.graph_codec import find_function
from smcp_fx.serialization.safe_modules import find_class
from smcp_fx.serialization.safe_operations import functions
from smcp_fx.serialization.saving import load, save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(small_model(), tmp_path / "model.safetensors")


HOSTILE_FUNCTIONS = [
    *("os.system", "torch.os.system", "posix.system", "subprocess.run", "builtins.eval", "builtins.exec"),
    *(
        "builtins.__import__",
        "torch.load",
        "torch.save",
        "torch.hub.load",
        "torch.compile",
        "torch.from_file",
    ),
    *("torch.classes.load_library", "torch.ops.load_library", "torch.nn.functional.boolean_dispatch"),
    *("torch.nn.functional.importlib.import_module", "torch.utils.cpp_extension.load", "torch.jit.load"),
    *("operator.call", "operator.attrgetter", "operator.methodcaller", "math.__loader__.load_module"),
    *("torchvision.io.write_file", "torchvision.models.resnet18", "torchvision.models.resnet.resnet18"),
    *(
        "torchvision.models._api.get_model",
        "torchvision.ops.../../os.system",
        "timm.models._hub.load_state_dict_from_hf",
    ),
    *("timm.create_model", "timm.models._helpers.load_checkpoint", "smcp_fx.load", "../../evil.run", "", "."),
]


@pytest.mark.parametrize("name", HOSTILE_FUNCTIONS)
def test_functions_outside_the_list_are_refused(saved: Path, name: str) -> None:
    def edit(manifest: Manifest) -> None:
        node = next(node for node in manifest["graph"] if node["op"] == "call_function")
        node["target"] = name

    edit_manifest(saved, edit)
    # A package that is not installed cannot be asked which of its functions are safe: refused all the same.
    with pytest.raises(CheckpointError, match=r"not one that a saved model may call|cannot be imported"):
        load(saved)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "builtins.eval",
            "os.PathLike",
            "subprocess.Popen",
            "torch.nn.modules.module.torch",
            "collections.OrderedDict",
        ),
        *(
            "torch.nn.modules.container.OrderedDict",
            "torch.nn.modules...conv.Conv2d",
            "torch.nn.Conv2d",
            "Conv2d",
            7,
        ),
        *("torch.fx.GraphModule", "torch.jit.ScriptModule", "torch.nn.modules.conv.Conv2d.__init__", None),
    ],
)
def test_classes_outside_the_list_are_refused(saved: Path, name: Any) -> None:
    edit_manifest(saved, lambda manifest: manifest["modules"][1].update({"class": name}))
    with pytest.raises(CheckpointError, match="not a module class that a saved model may hold"):
        load(saved)


def _evil(path: Path) -> str:
    return f"open({str(path.parent / 'evil')!r}, 'w').close()"


def _node(manifest: Manifest, op: str) -> dict[str, Any]:
    return next(node for node in manifest["graph"] if node["op"] == op)


def _call(op: str, target: str, *args: Any) -> Callable[[Manifest, str], None]:
    """Put a node that uses the input behind it."""

    def edit(manifest: Manifest, _: str) -> None:
        node = {"name": "evil", "op": op, "target": target, "args": list(args), "kwargs": {}}
        manifest["graph"].insert(1, node)

    return edit


X = {"node": "x"}
HOSTILE: dict[str, Callable[[Manifest, str], Any]] = {
    "code in an argument": lambda m, evil: m["graph"][0].update(target=f"x=({evil})"),
    "code in an annotation": lambda m, evil: m["graph"][0].update(target=f"x:({evil})"),
    "code in a node's name": lambda m, evil: m["graph"][0].update(name=f"x;{evil}"),
    "code in a method": lambda m, evil: _call("call_method", f"abs();{evil}", X)(m, evil),
    "code in a keyword": lambda m, evil: _node(m, "call_module")["kwargs"].update({f"a=({evil}),b": 1}),
    "code in a path": lambda m, evil: _call("get_attr", f'stem"), {evil}, ("')(m, evil),
    "code in the class": lambda m, evil: m.update({"class": f"A:\n {evil}\nclass B"}),
    "code in a child's name": lambda m, evil: m["modules"][1].update(path=f'a"+{evil}+"'),
    "path traversal in a node": _call("get_attr", "../../etc/passwd"),
    "path traversal in a module": lambda m, _: m["modules"][1].update(path="../../etc/passwd"),
    "attribute of every object": _call("get_attr", "__class__.__init__.__globals__"),
    "module's own table": _call("get_attr", "_parameters"),
    "method of the model": _call("get_attr", "to_folder"),
    "a module as a value": _call("get_attr", "stem"),
    "call of a parameter": _call("call_module", "stem.weight", X),
    "private getattr": _call("call_function", "builtins.getattr", X, "__class__"),
    "getattr of raw memory": _call("call_function", "builtins.getattr", X, "untyped_storage"),
    "getattr by a node": _call("call_function", "builtins.getattr", X, X),
    "raw memory": _call("call_method", "untyped_storage", X),
    "private method": _call("call_method", "__reduce_ex__", X, 2),
    "method of another object": _call("call_method", "system", X, "true"),
    "later node": _call("call_method", "abs", {"node": "stem"}),
    "unknown operation": _call("exec", "x"),
    "autocast as code": lambda m, evil: m["graph"][1].update(autocast=evil),
    "autocast switched on": lambda m, _: m["graph"][1].update(autocast=1),
    "unknown value": lambda m, _: m["graph"][1]["args"].append({"pickle": "gASV"}),
    "evaluated value": lambda m, _: m["graph"][1]["args"].append({"eval": "1"}),
    "class as attribute": lambda m, _: m["modules"][1]["attributes"].update(__class__="torch.nn.Linear"),
    "forward as attribute": lambda m, _: m["modules"][1]["attributes"].update(
        forward={"function": "math.sqrt"}
    ),
    "hooks as attribute": lambda m, _: m["modules"][1]["attributes"].update(_forward_hooks={"dict": []}),
    "function as attribute": lambda m, _: m["modules"][1]["attributes"].update(
        note={"function": "os.system"}
    ),
    "parameter over a table": lambda m, _: m["modules"][1]["parameters"].update(_modules=None),
    "order of no dimensions": lambda m, _: m["tensors"][0].update(layout=[0, 0, 0, 0]),
    "module twice": lambda m, _: m["modules"].append(m["modules"][1]),
    "parent after child": lambda m, _: m["modules"].append(m["modules"].pop(0)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(saved: Path, name: str) -> None:
    edit_manifest(saved, lambda manifest: HOSTILE[name](manifest, _evil(saved)))
    with pytest.raises(CheckpointError):
        load(saved)
    assert sorted(file.name for file in saved.parent.iterdir()) == ["model.json", "model.safetensors"]


@pytest.mark.parametrize("pair", [False, True])
def test_a_tensor_in_the_place_of_a_number_is_told_and_not_printed(
    saved: Path, pair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To print one, PyTorch imports modules, which loading a file does not."""

    def edit(manifest: Manifest) -> None:
        stem = next(module for module in manifest["modules"] if module["path"] == "stem")
        tensor = {"tensor": "stem.weight"}
        stem["attributes"]["dilation"] = {"tuple": [tensor, 1]} if pair else tensor

    def printed(*_: Any, **__: Any) -> str:
        raise AssertionError("a tensor was printed")

    edit_manifest(saved, edit)
    monkeypatch.setattr(torch.Tensor, "__repr__", printed)
    with pytest.raises(
        CheckpointError, match=f"'stem': {'a tuple of tensors' if pair else 'a tensor'} is not a value"
    ):
        load(saved)


def test_no_function_of_the_list_leaves_the_tensor_libraries() -> None:
    homes = ("torch", "_operator", "math")
    others = ("builtins.dict builtins.getattr builtins.len builtins.list builtins.round builtins.tuple "
              "collections.OrderedDict smcp_fx.tracing.modes.by_mode "
              "smcp_fx.tracing.constant_values.overwritten smcp_fx.tracing.modes.left_out").split()  # fmt: skip
    for name, function in functions().items():
        if name in others:
            continue
        module = getattr(function, "__module__", None) or "torch"  # torch's own builtins have none
        assert f"{module}.{function.__name__}".startswith(homes), name
        assert find_function(name, "here") is function
        assert not any(word in name for word in ("load", "save", "file", "compile", "script", "import")), name
    assert find_class("torch.nn.modules.conv.Conv2d", "here") is nn.Conv2d
