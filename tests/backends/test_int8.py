"""INT8 by post-training quantisation: what the files compute, what stays in float, and how blocks are measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_blocks import ABlock
from tolerances import assert_close
from torch import nn

from smcp_fx.backends import get_backend
from smcp_fx.backends.onnx import quantization
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.export import export_model_proto
from smcp_fx.backends.onnx.quantization import quantised_block, without_instructions
from smcp_fx.backends.onnxruntime.own_time import BlockInContext, own_nodes
from smcp_fx.backends.onnxruntime.profile import NodeTime, Profiler
from smcp_fx.errors import BackendError, InputError


def network() -> nn.Sequential:
    """Three layers; the second has one weight that leaves a signed byte's steps too coarse for the others."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    with torch.no_grad():
        model[2].weight[:, 0] *= 200
    return model.eval()


def images(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((count, 3, 12, 12)).astype(np.float32)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_files_are_near_the_module_and_nearer_with_the_worst_layer_in_float(name, tmp_path):
    model, x = network(), torch.from_numpy(images(4))
    backend = get_backend(name, precision="int8", calibration=[images(16)])
    with torch.no_grad():
        expected = model(x).numpy()

    def error() -> float:
        with backend.compile(model, (x,), tmp_path / "net.onnx") as engine:
            assert engine.remarks == (
                "INT8: the quantiser leaves these operations in float32: HardSwish (1)",
            )
            return float(np.square(engine.run([x.numpy()])[0] - expected).sum() / np.square(expected).sum())

    with backend.compile(model, (x,)) as in_memory, backend.compile(model, (x,), tmp_path / "a.onnx") as file:
        fixed, free = (torch.from_numpy(engine.run([x.numpy()])[0]) for engine in (in_memory, file))
        assert_close(fixed, free, "slicing")
    errors = backend.layer_errors(model, (x,))
    assert next(iter(errors)) == "2"
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    whole = error()
    backend.keep_in_float(["2"])
    assert 0 < error() < whole < 0.01
    backend.keep_in_float(["0", "2", "6"])
    with pytest.raises(BackendError, match="no layer of this network can be quantised"):
        backend.compile(model, (x,))
    backend.keep_in_float(["5"])
    with pytest.raises(InputError, match="5 cannot be kept in float: the layers are 0, 2, 6"):
        backend.compile(model, (x,))


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_layer_in_float_reads_float(name):
    """Channels of very different ranges share one scale: the layer that reads them answers for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        scales = torch.logspace(-3, 3, 8)
        model[0].weight *= scales[:, None, None, None]
        model[0].bias *= scales
        model[2].weight /= scales[None, :, None, None]
    backend = get_backend(name, precision="int8", calibration=[images(16)])
    x = torch.from_numpy(images(4))
    with torch.no_grad():
        expected = model(x).numpy()

    def error() -> float:
        with backend.compile(model.eval(), (x,)) as engine:
            found = engine.run([x.numpy()])[0]
            return float(np.sqrt(np.square(found - expected).sum() / np.square(expected).sum()))

    errors = backend.layer_errors(model, (x,))
    assert next(iter(errors)) == "2"
    assert errors["2"] > 0.1 > 5 * errors["0"]
    assert error() > 0.1
    backend.keep_in_float(["2"])
    # Without instructions for bytes their products saturate, in the layers that stay.
    assert error() < (0.04 if without_instructions() else 0.02)


def test_calibration_data_is_cut_to_a_fixed_batch():
    model = export_model_proto(network(), (torch.from_numpy(images(4)),), dynamic_batch=False)
    few = images(6)
    cut = [few[:4], np.concatenate([few[4:], few[:2]])]
    found, expected = (
        quantization.Ranges(model, batches).found.data for batches in ([few[:5], few[5:]], cut)
    )
    assert {name: found[name].range_value for name in found} == {
        name: expected[name].range_value for name in expected
    }


def test_int8_without_calibration_data_is_refused():
    backend = get_backend("onnxruntime", precision="int8")
    with pytest.raises(InputError, match="INT8 needs calibration data"):
        backend.compile(network(), (torch.from_numpy(images(1)),))
    backend.calibrate([np.zeros((2, 7, 12, 12), np.float32)])
    with pytest.raises(BackendError, match="calibration for INT8 failed"):
        backend.compile(network(), (torch.from_numpy(images(1)),))


def test_rows_of_one_precision_are_not_of_another():
    prints = {
        get_backend(name, precision=precision).fingerprint().key()
        for name in ("onnxruntime", "openvino")
        for precision in ("fp32", "int8")
    }
    assert len(prints) == 4
    assert get_backend("onnxruntime", precision="int8").full_precision().fingerprint().key() in prints
    assert get_backend("onnxruntime").full_precision() is None


def test_onnx_runtime_runs_a_block_and_its_context_on_bytes_alone():
    """Between context and block nothing is converted; what turns the context's image and mean is not the block's."""
    model = BlockModels().model(ABlock("conv", size=16), (16, 48))
    block = BlockInContext.of(model, written=quantised_block)
    with Profiler(block.data) as profiler:
        profiler.session.run(None, block.feed)
        (nodes,) = profiler.runs()
    parts, copies = block.counted(nodes, "hot")
    counted = [node.operation for part in parts for node in own_nodes(part, block.results, copies)]
    assert sorted(set(counted)) == ["QLinearAdd", "QLinearConv"]
    assert len(counted) == 4  # its own and its twin's
    turned = NodeTime(
        "Transpose_3", "Transpose", ((1, 12, 12, 3),), 1.0
    )  # an image's own: the block pays for it
    assert own_nodes([turned], [(1, 8, 12, 12)]) == [turned]


def test_a_processor_without_instructions_for_bytes_is_told(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(quantization, "_CPU_INFO", info)
    assert without_instructions() == ""  # not known
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n")
    (told,) = get_backend("onnxruntime", precision="int8").remarks()
    assert "no instructions that multiply bytes" in told
    assert get_backend("onnxruntime").remarks() == ()
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\n")
    assert get_backend("onnxruntime", precision="int8").remarks() == ()
