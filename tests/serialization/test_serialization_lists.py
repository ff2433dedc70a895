"""The closed lists: every class and attribute, files that reach for more, and whole files under single-bit flips."""

from __future__ import annotations

import collections
import copy
import enum
import json
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import Manifest, edit_manifest, small_model
from torch import fx, nn

import smcp_fx
from smcp_fx.errors import CheckpointError
from smcp_fx.serialization.graph_codec import decode_graph, encode_graph
from smcp_fx.serialization.safe_modules import attribute_names, check_attributes, find_class, specifications
from smcp_fx.serialization.safe_operations import TENSOR_ATTRIBUTES, functions, tensor_methods
from smcp_fx.serialization.saving import load, save
from smcp_fx.tracing.modes import by_mode


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(small_model(), tmp_path / "model.safetensors")


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Softmax2d", "SELU", "ReLU", "ReLU6"), ()),
    **dict.fromkeys(("Threshold",), (0.1, 1.0)),
    **dict.fromkeys(("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"), (8, 2)),
    **dict.fromkeys(("GroupNorm",), (2, 4)),
    **dict.fromkeys(("Bilinear", "Conv1d", "Conv2d", "Conv3d"), (4, 4, 3)),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"), (4, 4, 3)),
    **dict.fromkeys(("ConstantPad1d", "ConstantPad2d", "ConstantPad3d"), (1, 0.5)),
    **dict.fromkeys(("Unflatten",), (1, (2, 2))),
    **dict.fromkeys(("FractionalMaxPool2d", "FractionalMaxPool3d"), (2, 3)),
    **dict.fromkeys(("LPPool1d", "LPPool2d", "LPPool3d", "Fold"), (2, 2)),
    **dict.fromkeys(("Embedding", "EmbeddingBag", "Linear", "NonDynamicallyQuantizableLinear"), (4, 4)),
    **dict.fromkeys(("RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"), (4, 4)),
}


def _made(name: str) -> nn.Module:
    kind: Callable[..., nn.Module] = find_class(name, "here")
    short = name.rpartition(".")[2]
    if short in ("TransformerEncoder", "TransformerDecoder"):
        layer = nn.TransformerEncoderLayer if "En" in short else nn.TransformerDecoderLayer
        return kind(layer(8, 2), 1)
    if short == "Transformer":
        return kind(8, 2, 1, 1, 8)
    if short in _ARGUMENTS:
        return kind(*_ARGUMENTS[short])
    try:
        return kind()
    except TypeError:
        return kind(2)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_attribute_of_every_class_is_of_its_type() -> None:
    """What the classes have is accepted; each attribute by itself is refused as a value of another kind."""
    for name in specifications():
        module = _made(name)
        own = {key: value for key, value in vars(module).items() if key in attribute_names(name)}
        check_attributes(name, own, "here")
        unknown = (
            set(vars(module)) - set(own) - set(vars(nn.Module())) - {"_flat_weights", "_flat_weight_refs"}
        )
        assert not unknown, f"{name}: {unknown}"
        for attribute in own:
            for wrong in (object(), "os.system", 1 << 40, {"a": 1}, [["x"]], torch.ones(1)):
                if attribute == "name" and isinstance(wrong, str):
                    continue
                with pytest.raises(CheckpointError, match=re.escape(attribute)):
                    check_attributes(name, {**own, attribute: wrong}, "here")


def test_the_lists_name_operations_alone() -> None:
    outside = {
        *(
            "numpy",
            "tofile",
            "apply_",
            "map_",
            "map2_",
            "untyped_storage",
            "storage",
            "share_memory_",
            "data_ptr",
        ),
        *(
            "register_hook",
            "requires_grad_",
            "set_",
            "resize_",
            "module_load",
            "backward",
            "tolist",
            "pin_memory",
        ),
    }
    assert not outside & tensor_methods()
    assert not outside & set(TENSOR_ATTRIBUTES)
    assert not any(name.rpartition(".")[2] in outside for name in functions())
    assert not any(
        name in functions() for name in ("operator.call", "math.factorial", "torch.load", "torch.lobpcg")
    )


def _nodes(*calls: tuple[str, str, list[Any], dict[str, Any]]) -> Callable[[Manifest], None]:
    def edit(manifest: Manifest) -> None:
        manifest["graph"][1:1] = [
            {"name": f"evil_{index}", "op": op, "target": target, "args": args, "kwargs": kwargs}
            for index, (op, target, args, kwargs) in enumerate(calls)
        ]

    return edit


X = {"node": "x"}
GETATTR = "builtins.getattr"
ATTACKS: dict[str, Callable[[Manifest], Any]] = {
    "a sort key that writes files": _nodes(
        ("call_method", "detach", [X], {}),
        ("call_method", "numpy", [{"node": "evil_0"}], {}),
        ("call_function", GETATTR, [{"node": "evil_1"}, "tofile"], {}),
        ("call_method", "sort", [{"list": ["evil"]}], {"key": {"node": "evil_2"}}),
    ),
    "a bound method": _nodes(("call_function", GETATTR, [X, "apply_"], {})),
    "a method with a default": _nodes(("call_function", GETATTR, [X, "shape", "y"], {})),
    "a method of a string": _nodes(("call_method", "split", ["a b"], {})),
    "a method of a list": _nodes(("call_method", "sort", [{"list": [X]}], {})),
    "a method of a list behind a module": _nodes(
        ("call_module", "block.2", [{"list": [X]}], {}), ("call_method", "sort", [{"node": "evil_0"}], {})
    ),
    "a method of a list behind an operator": _nodes(
        ("call_function", "operator.add", [{"list": [1]}, {"list": [2]}], {}),
        ("call_method", "sort", [{"node": "evil_0"}], {}),
    ),
    "a method of an argument's default": lambda m: (
        m["graph"][0]["args"].append({"list": ["b", "a"]}),
        _nodes(("call_method", "sort", [X], {}))(m),
    ),
    "a method called without its object": _nodes(("call_method", "abs", [], {"self": X})),
    "a folded name": _nodes(("call_function", GETATTR, [X, "\uff55ntyped_storage"], {})),
    "a folded method": _nodes(("call_method", "\uff55ntyped_storage", [X], {})),
    "a folded double underscore": _nodes(
        ("call_function", GETATTR, [X, "\uff3f\uff3fclass\uff3f\uff3f"], {})
    ),
    "a folded argument": lambda m: m["graph"][0].update(target="\uff53elf"),
    "a keyword": lambda m: m["graph"][0].update(name="for"),
    "torch as an argument": lambda m: m["graph"][0].update(target="torch"),
    "an array": _nodes(("call_method", "numpy", [X], {})),
    "shared memory": _nodes(("call_method", "share_memory_", [X], {})),
    "a function as an argument": _nodes(("call_method", "abs", [X, {"function": "torch.relu"}], {})),
    "text of any length": _nodes(("call_function", "operator.mod", ["%1000000000d", 1], {})),
    "a tuple of any length": _nodes(("call_function", "operator.mul", [{"tuple": [1]}, 10**12], {})),
    "a module in itself": lambda m: m["modules"].append({"path": "again_", "same_as": ""}),
    "a module in its part": lambda m: m["modules"].insert(3, {"path": "block.x", "same_as": "block"}),
    "a convolution of any size": lambda m: next(entry for entry in m["modules"] if entry["path"] == "stem")[
        "attributes"
    ].update(out_channels=10**12),
    "a size that is not the tensor's": lambda m: next(
        entry for entry in m["modules"] if entry["path"] == "stem"
    )["attributes"].update(out_channels=9),
    "deep values": _nodes(("call_method", "abs", [X, json.loads('{"list": [' * 60 + "1" + "]}" * 60)], {})),
    "an import of any module": _nodes(("call_function", "timm.models._hub.hf_split", [X], {})),
    "an attribute of no class": lambda m: m["modules"][1]["attributes"].update(note=1),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_files_that_reach_for_more_are_refused(saved: Path, name: str) -> None:
    edit_manifest(saved, ATTACKS[name])
    with pytest.raises(CheckpointError):
        load(saved)


def test_doubling_modules_are_refused(saved: Path) -> None:
    def edit(manifest: Manifest) -> None:
        plain = {"class": "torch.nn.modules.module.Module", "training": True}
        tables: Manifest = {"attributes": {}, "parameters": {}, "buffers": {}}
        path = "deep"
        for _ in range(40):
            manifest["modules"].append({"path": path, **plain, **tables})
            path += ".a"
        for _ in range(39):
            path = path.rpartition(".")[0]
            manifest["modules"].append({"path": path.rpartition(".")[0] + ".b", "same_as": path})

    edit_manifest(saved, edit)
    with pytest.raises(CheckpointError, match="more than"):
        load(saved)


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    draw = random.Random(0)
    for file in (saved, saved.with_suffix(".json")):
        content = file.read_bytes()
        for bit in draw.sample(range(8 * len(content)), 150) + list(
            range(8 * len(content) - 160, 8 * len(content))
        ):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises(CheckpointError):
                load(saved)
        file.write_bytes(content)
    load(saved)


def test_one_model_gives_the_same_bytes(saved: Path) -> None:
    code = "import sys; from smcp_fx.serialization.saving import load, save; save(load(sys.argv[1]), sys.argv[2])"
    again = saved.parent / "again.safetensors"
    for _ in range(3):
        save(small_model(), again)
        assert again.read_bytes() == saved.read_bytes()
    run = subprocess.run([sys.executable, "-c", code, str(saved), str(again)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for suffix in (".safetensors", ".json"):
        assert again.with_suffix(suffix).read_bytes() == saved.with_suffix(suffix).read_bytes()


class Colour(enum.Enum):
    RED = 1


def test_attributes_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    module = copy.deepcopy(small_model())
    module.stem.type = "a block's name"
    module.stem.note = {1, 2}
    module.left.colour, module.right.home, module.memory.call = Colour.RED, Path("/home"), lambda x: x
    module.__overloads__ = {}
    loaded = load(save(module, tmp_path / "model.safetensors"))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded.eval()(x), module.eval()(x))
    assert not hasattr(loaded.stem, "note")
    assert callable(loaded.stem.type)


def test_module_names_with_signs_come_back(tmp_path: Path) -> None:
    root = nn.Module()
    for name in ("block(0)", "a b", "x:y", "c{0}%s"):
        root.add_module(name, nn.Linear(2, 2))
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name in root._modules:
        x = graph.call_module(name, (x,))
    graph.output(x)
    module = fx.GraphModule(root, graph)
    loaded = load(save(module, tmp_path / "model.safetensors"))
    assert torch.equal(loaded(torch.ones(1, 2)), module(torch.ones(1, 2)))


class _OfTwoModes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.aux, self.head = (nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1))

    def forward(self, x: torch.Tensor) -> Any:
        """[N, 3, H, W]."""
        h = self.stem(x)
        h = h * torch.rand_like(h) if self.training else h.relu()
        out = collections.OrderedDict(out=self.head(h))
        if self.training:
            out["aux"] = self.aux(h)
        return out


@pytest.mark.parametrize("way", ["save", "pickle"])
def test_each_mode_comes_back(tmp_path: Path, way: str) -> None:
    x = torch.randn(2, 3, 5, 5)
    module = smcp_fx.convert(smcp_fx.prepare(_OfTwoModes(), x))
    loaded = (
        load(save(module, tmp_path / "model.safetensors"))
        if way == "save"
        else pickle.loads(pickle.dumps(module))
    )
    assert type(loaded(x)) is collections.OrderedDict
    for training in (True, False):
        for one in (module, loaded):
            one.train(training)
        outputs = []
        for one in (module, loaded):
            torch.manual_seed(0)
            outputs.append(one(x))
        assert outputs[0].keys() == outputs[1].keys() == ({"out", "aux"} if training else {"out"})
        assert all(torch.equal(a, b) for a, b in zip(outputs[0].values(), outputs[1].values(), strict=True))


@pytest.mark.parametrize("flag", [fx.Node, True, None])
def test_a_choice_that_is_not_by_a_mode_is_refused(flag: Any) -> None:
    """The flag's name is written into generated code."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(by_mode, (x if flag is fx.Node else flag, x, x)))
    with pytest.raises(CheckpointError, match="mode"):
        decode_graph(encode_graph(graph), torch.device("cpu"))


def test_made_up_manifests_do_nothing_that_a_model_does_not_do() -> None:
    command = [sys.executable, str(Path(__file__).with_name("manifest_fuzzing.py")), "300", "0"]
    outcome = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert outcome["count"] == 300
    assert outcome["faults"] == []
    assert outcome["refused"] > 50
    assert outcome["ran"] > 5
