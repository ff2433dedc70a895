"""smcp-compile from an ONNX file: arrays and images as samples, the file's own names in what is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from PIL import Image

from smcp_fx.compiler import CompileSettings, compile_model
from smcp_fx.errors import InputError
from smcp_fx.zoo import answers


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A file of two inputs, with entries of metadata."""

    draw, f = np.random.default_rng(0), onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["the.picture", "first.weight"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Reshape", ["gain", "to"], ["g"]),
        helper.make_node("Mul", ["r", "g"], ["m"]),
        helper.make_node("Conv", ["m", "second.weight"], ["map"]),
    ]
    held = {
        "first.weight": draw.standard_normal((16, 3, 3, 3)).astype(np.float32),
        "second.weight": draw.standard_normal((5, 16, 3, 3)).astype(np.float32),
        "to": np.array([-1, 1, 1, 1]),
    }
    graph = helper.make_graph(
        nodes, "both",
        [helper.make_tensor_value_info("the.picture", f, ("batch", 3, 8, 12)),
         helper.make_tensor_value_info("gain", f, ("batch", 1))],
        [helper.make_tensor_value_info("map", f, None)],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.metadata_props.add(key="stride", value="4")
    onnx.save(model, tmp_path / "both.onnx")
    return tmp_path / "both.onnx"


def test_arrays_by_input_name(net: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "samples").mkdir()
    draw = np.random.default_rng(0)
    for index in range(12):
        arrays = {"the.picture": draw.standard_normal((3, 8, 12)), "gain": draw.random((1, 1))}
        np.savez(
            folder / f"{index}.npz", **{name: array.astype(np.float32) for name, array in arrays.items()}
        )
    settings = CompileSettings(
        model=f"onnx:{net}",
        data=f"npz:{folder}",
        epochs=0,
        cost="flops",
        target="0.6",
        out=str(tmp_path / "run"),
    )
    report = compile_model(settings)
    assert report.agreement and report.predicted_fraction <= 0.6
    assert any("scores of 5 classes" in note for note in report.notes)
    assert any("diverge" in note for note in report.notes)
    found = onnx.load(tmp_path / "run" / "pruned.onnx")
    assert [value.name for value in (*found.graph.input, *found.graph.output)] == [
        "the.picture",
        "gain",
        "map",
    ]
    assert {entry.key: entry.value for entry in found.metadata_props}["stride"] == "4"
    assert found.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_what_does_not_fit_is_told_first(net: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "images").mkdir()
    for index in range(2):
        Image.new("RGB", (4, 4)).save(folder / f"{index}.png")
        np.savez(folder / f"{index}.npz", picture=np.zeros(3))
    for data, epochs, why in (
        (f"images:{folder}", 0, "not one image: give npz"),
        (f"npz:{folder}", 0, "no array 'the.picture'"),
        ("digits", 0, "give images:FOLDER"),
        (f"images:{folder}", 1, "without training: give --epochs 0"),
    ):
        settings = CompileSettings(model=f"onnx:{net}", data=data, epochs=epochs, out=str(tmp_path / "run"))
        with pytest.raises(InputError, match=why):
            compile_model(settings)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 20), (4, 5, 3, 3), (4, 1), (4, 1, 3, 3), (4, 7, 4)])
def test_gradients_of_drawn_labels_are_no_rounding(shape: tuple[int, ...]) -> None:
    output = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = answers.drawn_labels((output,), torch.Generator().manual_seed(0))
    answers.loss(output, labels).backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None and float(output.grad.abs().mean()) > 1e-4
    same = (output.detach(),)
    assert answers.agreement(same, same) == pytest.approx(4) and answers.divergence(same, same) < 1e-6
