"""Save and load: what comes back computes the same."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torchvision
from models import without_repeats
from processes import Running
from saved_models import (
    ChannelShuffle,
    FunctionalNetwork,
    LeavesWithChildren,
    assert_same_module,
    prune_and_convert,
    round_trip,
)
from thin_networks import thin_convnext, thin_densenet, thin_shufflenet, thin_swin_t
from tolerances import assert_close
from torch import fx, nn
from without_torchvision import run_without_torchvision

import smcp_fx
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.serialization.saving import load, read_metadata, save


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (thin_densenet, {}),
        (torchvision.models.mobilenet_v3_small, {}),
        (thin_shufflenet, {}),
        (thin_convnext, {}),
        (thin_swin_t, {}),
        (torchvision.models.squeezenet1_0, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_torchvision_models_come_back_the_same(
    build: Callable[..., nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 32, 32)
    converted = prune_and_convert(without_repeats(build(**options)), inputs)
    assert_same_module(converted, round_trip(converted, tmp_path), inputs)


def test_resnet_comes_back_the_same(resnet: fx.GraphModule, tmp_path: Path) -> None:
    loaded = round_trip(resnet, tmp_path)
    assert_same_module(resnet, loaded, torch.randn(2, 3, 32, 32))
    assert type(loaded).__name__ == "ResNet"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.json", "model.safetensors"]


def test_functional_network_comes_back_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 8, 8)
    converted = prune_and_convert(FunctionalNetwork(), (inputs, 0.5))  # `scale` stays an input
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
    import onnxruntime

    from smcp_fx.backends.onnx.export import export_onnx

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
    code, told = Running(tmp_path / "told", run_without_torchvision, path, tmp_path / "expected").wait()
    assert code == 0, told
    assert float(told) < 1e-5  # another number of threads may sum in another order


class Moved(nn.Module):
    """Operators of torchvision, and layers of torch that ask whether tensors are nested."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.where, self.moved = (
            nn.Conv2d(3, 18, 3, padding=1),
            torchvision.ops.DeformConv2d(3, 8, 3, padding=1),
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Any) -> Any:
        box = torch.tensor([[0.0, 1.0, 1.0, 6.0, 6.0]])
        cut = torchvision.ops.roi_align(self.moved(x, self.where(x)), box, 2)
        return self.encoder(cut.flatten(2).mT)


def test_operators_of_libraries_come_back_and_are_traced_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 8, 8)
    loaded = round_trip(prune_and_convert(Moved(), inputs), tmp_path)
    assert_close(smcp_fx.prepare(loaded, inputs).eval()(inputs), loaded.eval()(inputs), "identity")


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
