"""Save and load: what comes back computes the same; what cannot be saved or loaded says so."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

import smcp_fx
from smcp_fx import graph_codec
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.graph_codec import decode_value, encode_value, find_class, find_function
from smcp_fx.serialization import load, read_metadata, save

Manifest = dict[str, Any]


def prune_and_convert(model: nn.Module, inputs: Tensor, seed: int = 0) -> fx.GraphModule:
    """Convert with random masks on every free group, the first unit always kept."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            # The defaults 0 and 1 would hide that they were lost.
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    prepared = smcp_fx.prepare(model, inputs)
    masks = {}
    for group in prepared.channels.groups:
        if group.free:
            masks[group.name] = torch.rand(group.size, generator=generator) > 0.4
            masks[group.name][0] = True
    assert masks
    prepared.set_masks(masks)
    return smcp_fx.convert(prepared)


def assert_same_module(left: fx.GraphModule, right: fx.GraphModule, *inputs: Any) -> None:
    """State, modes, graph and outputs (bit by bit, in eval and train mode) are equal."""
    state, loaded = left.state_dict(), right.state_dict()
    assert list(state) == list(loaded)
    for name, value in state.items():
        assert value.dtype == loaded[name].dtype
        assert value.stride() == loaded[name].stride()
        assert torch.equal(value, loaded[name]), name
    for kind in ("named_parameters", "named_buffers"):
        expected = [(name, tensor.requires_grad) for name, tensor in getattr(left, kind)()]
        assert [(name, tensor.requires_grad) for name, tensor in getattr(right, kind)()] == expected
    expected_modes = [(name, module.training) for name, module in left.named_modules()]
    assert [(name, module.training) for name, module in right.named_modules()] == expected_modes
    assert repr(left) == repr(right)
    assert [node.name for node in left.graph.nodes] == [node.name for node in right.graph.nodes]
    code, loaded_code = (
        [line for line in module.code.splitlines() if line and not line.startswith("def forward")]
        for module in (left, right)
    )
    assert code == loaded_code
    for mode in (False, True):
        outputs = []
        for module in (left, right):
            module = copy.deepcopy(module).train(mode)
            torch.manual_seed(0)  # dropout and stochastic depth draw the same numbers
            outputs.append(module(*inputs))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)


def round_trip(module: fx.GraphModule, folder: Path) -> fx.GraphModule:
    return load(save(module, folder / "model.safetensors"))


class FunctionalNetwork(nn.Module):
    """Weights used through F, a batch norm that reads `training`, and constants of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(12, 3, 3, 3))
        self.second = nn.Parameter(torch.randn(8, 12, 1, 1))
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("variance", torch.ones(12))
        self.register_buffer("shift", torch.randn(1, 1, 1, 1), persistent=False)

    def forward(self, x: Tensor, scale: float = math.inf) -> tuple[Any, ...]:
        x = F.conv2d(x, self.first, None, stride=(2, 2), padding=1)
        x = F.batch_norm(x, self.mean, self.variance, training=self.training)
        x = F.hardswish(F.conv2d(x, self.second)) + self.shift
        x = x.contiguous(memory_format=torch.channels_last).clamp(max=scale)
        corner = x[..., 1:, None, -1].to(torch.float64)
        return (x, corner.masked_fill(corner < 0, -math.inf)), x.shape[0]


class SharedModules(nn.Module):
    """One module under two names, one parameter in two modules, and parameters over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.again = self.block
        self.left, self.right, self.memory = (nn.Conv2d(8, 8, 1, bias=index != 1) for index in range(3))
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.block(self.stem(x)))
        return self.left(x) + self.right(x) + self.memory(x)


class ChannelShuffle(nn.Module):
    """A shuffle whose channels thin out, which conversion turns into index_select with an index buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 16, 3, padding=1)
        self.narrow = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.channel_shuffle(self.wide(x), 2))


class LeavesWithChildren(nn.Module):
    """Leaf modules of torch.nn that have children, functions and lists of parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, activation=F.gelu, batch_first=True)
        self.recurrent = nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.upsample = nn.Upsample(scale_factor=2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.attention(x, x, x, need_weights=False)[0])
        return self.upsample(self.recurrent(x)[0])


@pytest.fixture(scope="module")
def resnet() -> fx.GraphModule:
    torch.manual_seed(0)
    return prune_and_convert(torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 32, 32))


@pytest.fixture(scope="module")
def small() -> fx.GraphModule:
    torch.manual_seed(0)
    return prune_and_convert(SharedModules(), torch.randn(2, 3, 8, 8))


@pytest.fixture
def saved(small: fx.GraphModule, tmp_path: Path) -> Path:
    return save(small, tmp_path / "model.safetensors")


def edit_manifest(path: Path, edit: Callable[[Manifest], Any]) -> None:
    """Change the manifest beside a tensor file by ``edit``."""
    manifest = json.loads(path.with_suffix(".json").read_text())
    edit(manifest)
    path.with_suffix(".json").write_text(json.dumps(manifest))


# ---- round trips ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side", "options"),
    [
        ("densenet121", 32, {}),
        ("mobilenet_v3_small", 32, {}),
        ("efficientnet_b0", 32, {}),
        ("shufflenet_v2_x0_5", 32, {}),
        ("googlenet", 32, {"aux_logits": False, "init_weights": False}),
        ("convnext_tiny", 32, {}),
        ("swin_t", 32, {}),
        ("squeezenet1_0", 32, {}),
    ],
)
def test_torchvision_models_come_back_the_same(
    name: str, side: int, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, side, side)
    converted = prune_and_convert(getattr(torchvision.models, name)(**options), inputs)
    assert_same_module(converted, round_trip(converted, tmp_path), inputs)


def test_resnet_comes_back_the_same(resnet: fx.GraphModule, tmp_path: Path) -> None:
    loaded = round_trip(resnet, tmp_path)
    assert_same_module(resnet, loaded, torch.randn(2, 3, 32, 32))
    assert type(loaded).__name__ == "ResNet"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.json", "model.safetensors"]


def test_functional_network_comes_back_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 8, 8)
    converted = prune_and_convert(FunctionalNetwork(), inputs)
    assert converted.first.shape[0] < 12
    loaded = round_trip(converted, tmp_path)
    assert_same_module(converted, loaded, inputs)
    assert loaded.shift.shape == (1, 1, 1, 1)  # not in the state dict, yet there
    assert torch.equal(loaded(inputs, 0.5)[0][0], converted(inputs, 0.5)[0][0])


def test_an_index_buffer_of_a_thinned_shuffle_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 8, 8)
    converted = prune_and_convert(ChannelShuffle(), inputs)
    assert any(node.target is torch.index_select for node in converted.graph.nodes)
    assert_same_module(converted, round_trip(converted, tmp_path), inputs)


def test_sharing_survives(small: fx.GraphModule, tmp_path: Path) -> None:
    module = copy.deepcopy(small)
    module.memory.weight.data = module.left.weight.data  # two parameters over one memory
    loaded = round_trip(module, tmp_path)
    assert_same_module(module, loaded, torch.randn(2, 3, 8, 8))
    assert loaded.left.weight is loaded.right.weight
    assert loaded.memory.weight is not loaded.left.weight
    assert loaded.memory.weight.data_ptr() == loaded.left.weight.data_ptr()
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert (
        sum("weight" in name and value.dim() == 4 for name, value in stored.items()) == 3
    )  # stem, block, left


def test_one_module_under_two_names_stays_one(tmp_path: Path) -> None:
    root = nn.Module()
    root.first = root.second = nn.Linear(2, 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("second", (graph.call_module("first", (x,)),)))
    loaded = round_trip(fx.GraphModule(root, graph), tmp_path)
    assert loaded.first is loaded.second
    assert list(loaded.state_dict()) == ["first.weight", "first.bias", "second.weight", "second.bias"]


def test_leaves_with_children_functions_and_parameter_lists(tmp_path: Path) -> None:
    torch.manual_seed(0)
    traced = fx.symbolic_trace(LeavesWithChildren())
    loaded = round_trip(traced, tmp_path)
    inputs = torch.randn(2, 3, 8)
    assert_same_module(traced, loaded, inputs)
    assert type(loaded.attention.out_proj) is type(traced.attention.out_proj)
    assert loaded.encoder.activation is F.gelu
    assert loaded.recurrent._flat_weights[0] is loaded.recurrent.weight_ih_l0
    loaded(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_modes_frozen_parameters_layout_and_dtype_survive(small: fx.GraphModule, tmp_path: Path) -> None:
    module = copy.deepcopy(small).train().to(memory_format=torch.channels_last)
    module.stem.eval()
    module.stem.weight.requires_grad_(False)
    module.left.to(torch.bfloat16)
    module.register_buffer("unused", torch.zeros(0, 3, dtype=torch.int64))
    module.block.get_submodule("0").bias = None
    for transposed in (module.left, module.memory):
        transposed.weight.data = transposed.weight.data.to(torch.float32)
    module.left.bias.data = module.left.bias.data.float()
    module.memory.bias.data = module.memory.bias.data.expand(8)[::1]
    loaded = round_trip(module, tmp_path)
    assert_same_module(module, loaded, torch.randn(2, 3, 8, 8))
    assert loaded.stem.weight.is_contiguous(memory_format=torch.channels_last)
    assert loaded.training
    assert not loaded.stem.training
    assert loaded.block.get_submodule("0").bias is None


def test_dictionaries_and_nested_constants_come_back(tmp_path: Path) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    other = graph.placeholder("other", default_value=(1, [2.0, math.inf], None))
    part = graph.call_function(
        operator.getitem, (x, (..., slice(graph.call_method("dim", (x,)), None), None))
    )
    graph.output({"part": part, "rest": [other, (x, {"size": torch.Size([1, 2]), "type": torch.int8})]})
    traced = fx.GraphModule(nn.Module(), graph)
    loaded = round_trip(traced, tmp_path)
    inputs = torch.randn(2, 5)
    assert loaded(inputs)["part"].shape == (2, 3, 1)
    assert torch.equal(loaded(inputs)["part"], inputs[..., 2:, None])
    assert loaded(inputs)["rest"][0] == (1, [2.0, math.inf], None)
    assert loaded(inputs)["rest"][1][1] == {"size": torch.Size([1, 2]), "type": torch.int8}


def test_a_view_with_gaps_is_saved_by_value(tmp_path: Path) -> None:
    root = nn.Module()
    root.register_buffer("every_other", torch.arange(12.0).reshape(2, 6)[:, ::2])
    root.register_buffer("expanded", torch.ones(1, 1).expand(2, 3))
    graph = fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.get_attr("every_other"), graph.get_attr("expanded"))))
    loaded = round_trip(fx.GraphModule(root, graph), tmp_path)
    assert torch.equal(loaded(), torch.tensor([[1.0, 3, 5], [7, 9, 11]]))


def test_the_loaded_model_trains_copies_and_is_pruned_again(resnet: fx.GraphModule, tmp_path: Path) -> None:
    loaded = round_trip(resnet, tmp_path).train()
    inputs = torch.randn(4, 3, 32, 32)
    before = copy.deepcopy(loaded)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    F.cross_entropy(loaded(inputs), torch.arange(4)).backward()
    optimizer.step()
    assert all(
        not torch.equal(new, old)
        for (name, new), old in zip(loaded.named_parameters(), before.parameters(), strict=True)
        if name.endswith("conv1.weight")
    )
    assert_same_module(before, copy.deepcopy(before), inputs)
    again = prune_and_convert(loaded, inputs, seed=1)
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in loaded.parameters())
    assert_same_module(again, round_trip(again, tmp_path), inputs)


def test_the_loaded_model_exports_to_onnx(small: fx.GraphModule, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from smcp_fx.backends.onnx_export import export_onnx

    inputs = torch.randn(2, 3, 8, 8)
    loaded = round_trip(small, tmp_path)
    file = export_onnx(loaded, inputs, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), small.eval()(inputs), rtol=1e-4, atol=1e-4)


def test_a_process_without_torchvision_loads_and_runs(resnet: fx.GraphModule, tmp_path: Path) -> None:
    inputs = torch.randn(2, 3, 32, 32)
    path = save(resnet, tmp_path / "model.safetensors")
    outputs = {"inputs": inputs, "outputs": copy.deepcopy(resnet).eval()(inputs).detach()}
    safetensors.torch.save_file(outputs, tmp_path / "expected")
    script = """
import sys
sys.modules["torchvision"] = None  # any import of it fails
import safetensors.torch, torch
from smcp_fx.serialization import load
expected = safetensors.torch.load_file(sys.argv[2])
torch.set_num_threads(1)
found = load(sys.argv[1]).eval()(expected["inputs"])
print(float((found - expected["outputs"]).abs().max() / expected["outputs"].abs().max()))
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tmp_path / "expected")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-5  # another number of threads may sum in another order


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torchvision.ops.stochastic_depth, (x, 0.5, "row", True)))
    path = save(fx.GraphModule(nn.Module(), graph), tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "torchvision.ops.stochastic_depth", None)
    with pytest.raises(CheckpointError, match=r"node 'stochastic_depth'.*install it"):
        load(path)


def test_map_location_moves_tensors_and_device_constants(tmp_path: Path) -> None:
    root = nn.Module()
    root.register_buffer("offset", torch.ones(3))
    graph = fx.Graph()
    x = graph.placeholder("x")
    moved = graph.call_method("to", (x,), {"device": torch.device("cpu")})
    graph.output(graph.call_function(torch.add, (moved, graph.get_attr("offset"))))
    path = save(fx.GraphModule(root, graph), tmp_path / "model.safetensors")
    assert load(path, map_location=torch.device("meta"))(torch.ones(3)).device.type == "meta"
    assert torch.equal(load(path)(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(InputError, match="map_location"):
        load(path, map_location="nowhere")


def test_metadata_is_kept(small: fx.GraphModule, tmp_path: Path) -> None:
    metadata = {"target": 0.4, "kept": {"conv1": 24}, "source": "torchvision:resnet18", "steps": [1, None]}
    path = save(small, tmp_path / "new" / "model.safetensors", metadata=metadata)
    assert read_metadata(path) == metadata
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest["libraries"]["torch"] == torch.__version__.partition("+")[0]
    assert manifest["tensor_file"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


VALUES = [
    *(None, True, 0, -3, 2**70, 0.1, "text", 1 + 2j, ..., torch.float16, torch.bool),
    *(math.inf, -math.inf, torch.channels_last, torch.preserve_format, torch.strided, torch.Size([2, 3])),
    *((), (1,), [1, (2, [3.5])], {"a": (1, None), 2: [True]}, slice(1, None), slice(0, 8, 2), range(2, 9, 3)),
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    encoded = json.loads(json.dumps(encode_value(value, "here", lambda _: None), allow_nan=False))
    decoded = decode_value(encoded, "here", {})
    assert decoded == value
    assert type(decoded) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(decode_value(encode_value(math.nan, "here", lambda _: None), "here", {}))


# ---- what cannot be saved -------------------------------------------------------------------------------------


@fx.wrap
def user_function(x: Tensor) -> Tensor:
    return x + 1


class UserBlock(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return user_function(x)


def test_a_users_function_is_refused_with_its_node_and_module(tmp_path: Path) -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), UserBlock())))
    with pytest.raises(CheckpointError, match=r"node 'user_function' \(in module '1\.1'\).*user_function"):
        save(traced, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def _hooked(module: fx.GraphModule) -> None:
    module.stem.register_forward_hook(lambda *_: None)


def _parametrised(module: fx.GraphModule) -> None:
    nn.utils.parametrizations.weight_norm(module.stem)


def _users_class(module: fx.GraphModule) -> None:
    module.stem = UserBlock()


def _odd_attribute(module: fx.GraphModule) -> None:
    module.stem.note = {1, 2}


def _lambda_attribute(module: fx.GraphModule) -> None:
    module.stem.note = lambda x: x


def _sparse_weight(module: fx.GraphModule) -> None:
    module.stem.weight = nn.Parameter(torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_hooked, "module 'stem'.*has hooks"),
        (_parametrised, "module 'stem'.*remove_parametrizations"),
        (_users_class, "module 'stem'.*UserBlock"),
        (_odd_attribute, "module 'stem', attribute 'note'.*set"),
        (_lambda_attribute, "module 'stem', attribute 'note'.*lambda"),
        (_sparse_weight, r"module 'stem'.*'stem\.weight'.*sparse"),
    ],
)
def test_modules_a_file_cannot_hold_are_refused(
    small: fx.GraphModule, tmp_path: Path, change: Callable[[fx.GraphModule], None], message: str
) -> None:
    module = copy.deepcopy(small)
    change(module)
    with pytest.raises(CheckpointError, match=message):
        save(module, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_input_errors(small: fx.GraphModule, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match="safetensors"):
        save(small, tmp_path / "model.pt")
    with pytest.raises(InputError, match="Conv2d"):
        save(nn.Conv2d(1, 1, 1), path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="convert"):
        save(smcp_fx.prepare(SharedModules(), torch.randn(2, 3, 8, 8)), path)
    for metadata in ({"a": torch.ones(1)}, {"a": math.nan}):
        with pytest.raises(InputError, match="metadata"):
            save(small, path, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_earlier_files(
    small: fx.GraphModule, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = {file: file.read_bytes() for file in saved.parent.iterdir()}
    changed = copy.deepcopy(small)
    changed.stem.weight.data.zero_()
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"smcp_fx.serialization.os.{function}", full_disk)
            with pytest.raises(CheckpointError, match="No space left"):
                save(changed, saved)
        assert {file: file.read_bytes() for file in saved.parent.iterdir()} == before


# ---- files that do not load -----------------------------------------------------------------------------------


def _remove_tensors(path: Path) -> None:
    path.unlink()


def _remove_manifest(path: Path) -> None:
    path.with_suffix(".json").unlink()


def _truncate_tensors(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _truncate_manifest(path: Path) -> None:
    text = path.with_suffix(".json").read_text()
    path.with_suffix(".json").write_text(text[: len(text) // 2])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _foreign_json(path: Path) -> None:
    path.with_suffix(".json").write_text('{"weight_map": {}}')


def _not_json(path: Path) -> None:
    path.with_suffix(".json").write_bytes(b"\x80\x02PK")


def _nested_too_deep(path: Path) -> None:
    path.with_suffix(".json").write_text("[" * 100_000)


def _other_version(path: Path) -> None:
    edit_manifest(path, lambda manifest: manifest.update(version=2))


def _foreign_tensors_of_the_right_hash(path: Path) -> None:
    safetensors.torch.save_file({"other": torch.ones(3)}, path)
    content = path.read_bytes()
    digest = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    edit_manifest(path, lambda manifest: manifest.update(tensor_file=digest))


def _no_safetensors(path: Path) -> None:
    path.write_bytes(b"hello")
    digest = {"sha256": hashlib.sha256(b"hello").hexdigest(), "bytes": 5}
    edit_manifest(path, lambda manifest: manifest.update(tensor_file=digest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_tensors, "no model file .*keep both"),
        (_remove_manifest, "no manifest file .*keep both"),
        (_truncate_tensors, "is cut off: .*again"),
        (_truncate_manifest, "is damaged .*again"),
        (_flip_a_bit, "sha256 differs.*save again"),
        (_foreign_json, "not a manifest of smcp_fx.save"),
        (_not_json, "is damaged .*again"),
        (_nested_too_deep, "is damaged .*again"),
        (_other_version, r"format version 2.*reads version 1.*torch "),
        (_foreign_tensors_of_the_right_hash, "holds other tensors"),
        (_no_safetensors, "is damaged .*again"),
    ],
)
def test_bad_files_are_one_clear_paragraph(saved: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(saved)
    assert str(saved.with_suffix("")) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mixed_up_pair_is_noticed(resnet: fx.GraphModule, saved: Path) -> None:
    other = save(resnet, saved.parent / "other.safetensors")
    saved.with_suffix(".json").write_bytes(other.with_suffix(".json").read_bytes())
    other.with_suffix(".json").unlink()
    with pytest.raises(CheckpointError, match=r"cut off|different saves"):
        load(saved)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a .*safetensors file"):
        load(tmp_path / "model.pt")


@pytest.mark.parametrize("key", ["graph", "modules", "tensors", "class", "tensor_file"])
@pytest.mark.parametrize("wrong", [None, 3, [], [{}], {"a": 1}], ids=repr)
def test_manifests_with_wrong_parts_are_checkpoint_errors(saved: Path, key: str, wrong: Any) -> None:
    edit_manifest(saved, lambda manifest: manifest.update({key: wrong}))
    with pytest.raises(CheckpointError):
        load(saved)
    edit_manifest(saved, lambda manifest: manifest.pop(key))
    with pytest.raises(CheckpointError):
        load(saved)


def test_every_manifest_with_one_line_missing_is_refused_or_whole(saved: Path) -> None:
    """No part of the graph, modules or tensors can be lost without an error or a changed model."""
    for key in ("graph", "modules", "tensors"):
        for index in range(len(json.loads(saved.with_suffix(".json").read_text())[key])):
            original = saved.with_suffix(".json").read_bytes()
            edit_manifest(saved, lambda manifest, key=key, index=index: manifest[key].pop(index))
            with pytest.raises(CheckpointError):
                load(saved)
            saved.with_suffix(".json").write_bytes(original)


# ---- hostile manifests ----------------------------------------------------------------------------------------

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


def test_no_function_of_the_list_leaves_the_tensor_libraries() -> None:
    homes = ("torch", "_operator", "math", "builtins.getattr")
    for name, function in graph_codec._functions().items():
        module = getattr(function, "__module__", None) or "torch"  # torch's own builtins have none
        assert f"{module}.{function.__name__}".startswith(homes), name
        assert find_function(name, "here") is function
        assert not any(word in name for word in ("load", "save", "file", "compile", "script", "import")), name
    assert find_class("torch.nn.modules.conv.Conv2d", "here") is nn.Conv2d
