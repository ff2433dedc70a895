"""INT8 for TensorRT: what its files hold, how networks and blocks are built, and what is refused; on a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fake_blocks import ABlock
from fake_tensorrt import pretend, small_model
from onnx import numpy_helper
from torch import Tensor, nn

from smcp_fx.backends import get_backend
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.export import export_model_proto
from smcp_fx.backends.onnx.quantization import Ranges
from smcp_fx.backends.tensorrt.answers import OPSET, written_block
from smcp_fx.backends.tensorrt.quantization import TENSORRT
from smcp_fx.backends.tensorrt.worker.client import InProcess
from smcp_fx.backends.tensorrt.worker.problems import WorkerError
from smcp_fx.errors import BackendError, InputError

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
WIDTHS = (16, 16)


class Net(nn.Module):
    """A sum of two layers, one of a layer and its own input, a position added, and layers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.three, self.up = nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 6, 2, 2)
        self.place = nn.Parameter(torch.randn(6, 1, 1))
        self.mix, self.head = nn.Parameter(torch.randn(6, 7)), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [batch, 5]."""
        x = nn.functional.relu6(self.stem(x))
        x = nn.functional.relu(self.one(x) + self.two(x))
        x = self.up(self.three(x) + x) + self.place
        return self.head(x.mean((2, 3)) @ self.mix)


@pytest.fixture(scope="module")
def images() -> Any:
    return np.random.default_rng(0).standard_normal((4, 3, 10, 10)).astype(np.float32)


@pytest.fixture(scope="module")
def exported(images: Any) -> onnx.ModelProto:
    return export_model_proto(Net().eval(), (torch.from_numpy(images),), opset=OPSET, dynamic_batch=False)


def test_files_hold_what_tensorrt_takes(exported: onnx.ModelProto, images: Any) -> None:
    found = Ranges(exported, [images], TENSORRT).quantised()
    onnx.checker.check_model(found, full_check=True)
    nodes, values = found.graph.node, {v.name: numpy_helper.to_array(v) for v in found.graph.initializer}
    writers = {name: node for node in nodes for name in node.output}
    readers = [name for node in nodes for name in node.input]
    pairs = [node for node in nodes if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    for node in pairs:  # symmetric, signed, one reader each
        assert values[node.input[2]].dtype == np.int8
        assert not values[node.input[2]].any()
        assert readers.count(node.output[0]) == 1
    layers = [node for node in nodes if node.op_type in LAYERS]
    assert sorted(node.op_type for node in layers) == ["Conv"] * 4 + ["ConvTranspose", "Gemm", "MatMul"]
    for layer in layers:
        assert writers[layer.input[0]].op_type == "DequantizeLinear"
        dequantising = writers[layer.input[1]]
        axis = next(a.i for a in dequantising.attribute if a.name == "axis")
        assert axis == (
            0 if layer.op_type in ("Conv", "Gemm") else 1
        )  # of the output channels; Gemm's are transposed
        weight = values[writers[dequantising.input[0]].input[0]]
        largest = np.abs(weight).max(axis=tuple(a for a in range(weight.ndim) if a != axis))
        np.testing.assert_allclose(values[dequantising.input[1]], largest / 127, rtol=1e-2)
        assert all(values[name].dtype == np.float32 for name in layer.input[2:])  # biases
    sums = [[writers.get(name) for name in node.input] for node in nodes if node.op_type == "Add"]
    told = [sorted(node.op_type if node else "" for node in pair) for pair in sums]
    assert told == [["Conv", "DequantizeLinear"], ["Conv", "DequantizeLinear"], ["", "ConvTranspose"]]


@pytest.mark.parametrize(("version", "flags"), [("8.5.3.1", ["FP16", "INT8"]), ("11.4.0.106", [])])
def test_a_network_is_quantised_built_and_compared(
    version: str, flags: list[str], images: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, version)
    backend = get_backend(
        "tensorrt", precision="int8", calibration=[images], in_process=True, folder=tmp_path
    )
    assert backend.fingerprint().precision == "int8"
    assert dict(backend.fingerprint().settings)["quantisation"] == "explicit qdq, s8s8, weights per channel"
    model, x = Net().eval(), torch.from_numpy(images)
    backend.keep_in_float(["one"])
    with backend.compile(model, (x,), tmp_path / "net.onnx") as engine, torch.no_grad():
        float_type = "fp16" if flags else "fp32"
        assert engine.build["types"] == {"int8": 6, float_type: 1}
        assert {"stem", "one", "two", "three", "up", "head"} - {*engine.build["quantised"]} == {"one"}
        header = (tmp_path / "net.engine").read_bytes().partition(b"\0")[0]
        assert [flag for flag in flags if f'"{flag}"'.encode() in header] == flags
        assert b"PREFER_PRECISION" not in header
        expected = model(x).numpy()
        assert 0 < np.abs(engine.run([images])[0] - expected).max() < 0.1 * np.abs(expected).max()
    plain = backend.full_precision()
    assert plain is not None
    assert plain.full_precision() is None
    assert plain.fingerprint().precision == "fp32"
    assert plain.generation == backend.generation
    assert {*backend.layer_errors(model, (x,))} >= {"stem", "one", "two", "three", "up", "head"}
    block = ABlock("conv", size=16)
    row = backend.block_latency(block, WIDTHS)
    assert row.hot.median_ms != plain.block_latency(block, WIDTHS).hot.median_ms
    backend.close()


@pytest.mark.parametrize(
    ("name", "widths", "kinds"),
    [
        ("conv", (16, 16), "iii"),
        ("conv", (3, 16), "fii"),
        ("shuffle", (16, 16), "ff"),
        ("head", (16,), "if"),
    ],
)
def test_blocks_take_and_give_bytes(name: str, widths: tuple[int, ...], kinds: str) -> None:
    """But for images and scores, and where nothing is quantised."""
    found = written_block(BlockModels(OPSET).model(ABlock(name, size=16), widths), "int8")
    onnx.checker.check_model(found, full_check=True)
    types = {"i": onnx.TensorProto.INT8, "f": onnx.TensorProto.FLOAT}
    values = (*found.graph.input, *found.graph.output)
    assert [value.type.tensor_type.elem_type for value in values] == [types[kind] for kind in kinds]


def test_what_int8_lacks_is_told(images: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, FAKE_FAULT="fp32")
    backend = get_backend("tensorrt", precision="int8", in_process=True, folder=tmp_path)
    x = (torch.from_numpy(images),)
    with pytest.raises(InputError, match="INT8 needs calibration data"):
        backend.compile(Net().eval(), x)
    backend.calibrate([images])
    with pytest.raises(
        BackendError, match=r"int8 was asked for, and .* do not compute in int8: stem in fp32"
    ):
        backend.compile(Net().eval(), x)
    with pytest.raises(WorkerError, match="the ONNX file quantises nothing"):
        InProcess().ask("build", onnx=str(small_model(tmp_path / "m.onnx")), options={"precision": "int8"})
    assert backend.remarks() == ()
    backend.about()["compute_capability"] = "6.2"
    assert "no instructions that multiply bytes" in backend.remarks()[0]
