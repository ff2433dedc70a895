"""Names in an ONNX file: inputs, outputs and the batch's axis are called what users call them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import smcp_fx
from smcp_fx.errors import InputError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.conv(left)
        return found, found.mean((2, 3)) + right


LEFT, RIGHT = torch.randn(2, 3, 5, 5), torch.randn(2, 4)


def test_the_batch_is_called_so_and_inputs_as_in_forward(tmp_path: Path) -> None:
    graph = onnx.load(smcp_fx.export_onnx(Two(), (LEFT, RIGHT), tmp_path / "a.onnx")).graph
    assert [value.name for value in graph.input] == ["left", "right"]
    for value in (*graph.input, *graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"


def test_inputs_and_outputs_get_the_names_given(tmp_path: Path) -> None:
    model = Two().eval()
    names = {"input_names": ["image", "bias"], "output_names": ["map", "scores"]}
    path = smcp_fx.export_onnx(model, (LEFT, RIGHT), tmp_path / "b.onnx", **names)
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(path)
    found = session.run(["scores", "map"], {"image": LEFT.numpy(), "bias": RIGHT.numpy()})
    with torch.no_grad():
        expected = model(LEFT, RIGHT)
    for one, other in zip(found, reversed(expected), strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-6)


def test_values_inside_give_way_to_names_given(tmp_path: Path) -> None:
    inside = onnx.load(smcp_fx.export_onnx(Two(), (LEFT, RIGHT), tmp_path / "a.onnx")).graph
    made = [name for node in inside.node for name in node.output]
    mean = next(name for name in made if name not in {value.name for value in inside.output})
    names = {"input_names": ["conv.weight", "conv.bias"], "output_names": ["c", mean]}
    path = smcp_fx.export_onnx(Two(), (LEFT, RIGHT), tmp_path / "b.onnx", **names)
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(path)
    assert [value.name for value in session.get_inputs()] == names["input_names"]
    assert [value.name for value in session.get_outputs()] == names["output_names"]


def test_weights_may_be_called_as_the_exporter_calls_values(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(4):
                self.register_parameter(f"val_{index}", nn.Parameter(torch.randn(4, 4)))
            self.register_buffer("val_4", torch.randn(4, 4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in range(5):
                x = nn.functional.layer_norm(x @ getattr(self, f"val_{index}"), (4,))
            return x.reshape(-1, 2, 2)

    smcp_fx.export_onnx(Named(), torch.randn(3, 4), tmp_path / "c.onnx")  # compared with the module


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"input_names": ["image"]}, "input_names must be 2 names, for left, right"),
        ({"output_names": "ab"}, "output_names must be 2 names"),
        ({"input_names": ["same", "same"]}, "must be unique"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, names: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        smcp_fx.export_onnx(Two(), (LEFT, RIGHT), tmp_path / "c.onnx", **names)
    assert list(tmp_path.iterdir()) == []
