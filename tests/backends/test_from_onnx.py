"""ONNX files as networks: operators against ONNX Runtime, patterns, sizes, and files written like them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from onnx_files import W, n, weights, write
from tolerances import assert_close
from torch import nn

import smcp_fx
from smcp_fx.backends.onnx.importing import network
from smcp_fx.backends.onnx.importing.writing import Writer
from smcp_fx.errors import BackendError, InputError

I64 = {
    name: np.array(value, np.int64)
    for name, value in {
        "one": [1], "two": [2], "zero": [0], "far": [2**62], "end": [-1], "axes": [2, 3],
        "pads": [0, 0, 1, 0, 0, 0, 2, 1],
        "flat": [0, -1], "heads": [0, 2, -1], "pick": [2, 0], "first": 0, "three": [3], "parts": [1, 3],
        "tiles": [1, 1, 2, 1],
    }.items()
}  # fmt: skip
HELD = (
    W
    | I64
    | {
        "scales": np.array([1, 1, 2, 2], np.float32),
        "six": np.float32(6),
        "nil": np.float32(0),
        "none": np.zeros(0, np.float32),
    }
)
CASES: dict[str, list[onnx.NodeProto]] = {
    **{
        kind: [n(kind)]
        for kind in (
            "Relu Sigmoid Tanh Abs Neg Exp Erf Floor Softplus Softsign HardSwish HardSigmoid LeakyRelu Elu Selu Sin "
            "Identity GlobalAveragePool GlobalMaxPool LogSoftmax Flatten Mish"
        ).split()
    },
    "conv": [n("Conv", "x w b", pads=[1, 1, 1, 1], strides=[2, 2])],
    "conv_uneven": [n("Conv", "x w", pads=[0, 1, 1, 2])],
    "conv_same": [n("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2])],
    "conv_transposed": [n("ConvTranspose", "x wt b", strides=[2, 2], pads=[1, 0, 1, 0])],
    "batch_norm": [n("BatchNormalization", "x v v v var")],
    "instance_norm": [n("InstanceNormalization", "x v v")],
    "max_pool": [n("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1)],
    "average_pool": [n("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1])],
    "clip": [n("Clip", "x nil six")],
    "any_order": [n("Mul", "r s"), n("Sigmoid", "r", "s"), n("Relu", "x", "r")],
    "softmax": [n("Softmax", axis=1)],
    "pad": [n("Pad", "x pads")],
    "pad_reflect": [n("Pad", "x pads", mode="reflect")],
    "resize_nearest": [
        n("Resize", "x none scales", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    ],
    "resize_linear": [n("Resize", "x none scales", mode="linear", coordinate_transformation_mode="half_pixel")],
    "resize_to": [n("Shape", "x", "s"), n("Mul", "s tiles", "t"), n("Resize", "x none none t", mode="linear")],
    "upsample": [n("Upsample", "x scales")],
    "resize_old": [n("Resize", "x scales")],
    "slice": [n("Slice", "x one end three")],
    "split": [n("Split", "x parts", "a b2", axis=1), n("Concat", "b2 a", axis=1)],
    "gather": [n("Gather", "x pick", axis=1)],
    "select": [n("Gather", "x first", axis=1)],
    "tile": [n("Tile", "x tiles")],
    "mean": [n("ReduceMean", axes=[2, 3], keepdims=0)],
    "norm": [n("ReduceL2", axes=[1])],
    "cumsum": [n("ReduceSum", "x axes", keepdims=0)],
    "shuffle": [n("DepthToSpace", blocksize=2)],
    "top": [n("TopK", "x two", "y i", axis=1)],
    "where": [n("Greater", "x nil", "c"), n("Where", "c x nil")],
    "attention": [
        n("Reshape", "x heads", "q"), n("Transpose", "q", "k", perm=[0, 2, 1]), n("MatMul", "q k", "s"),
        n("Softmax", "s", "p", axis=-1), n("MatMul", "p q"),
    ],
    "einsum": [n("Einsum", "x x", equation="bchw,bdhw->bcd")],
    "flat": [n("Reshape", "x flat")],
    **{f"flat_{axis}": [n("Flatten", axis=axis)] for axis in (0, 2, 4)},
    "expand": [n("Shape", "x", "s"), n("GlobalMaxPool", "x", "g"), n("Expand", "g s")],
    "sizes": [
        n("Shape", "x", "s"), n("Gather", "s three", "wide"), n("Div", "wide two", "half"),
        n("Slice", "x zero half three"),
    ],
    "filled": [n("Shape", "x", "s"), n("ConstantOfShape", "s", "z"), n("Add", "x z")],
    "chosen": [n("Size", "x", "s"), n("Cast", "s", "f", to=TensorProto.FLOAT), n("Div", "x f")],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_onnx_runtime_does(name: str, tmp_path: Path) -> None:
    opset = {"Mish": 18, "upsample": 9, "resize_old": 10}.get(name, 17)
    path = write(tmp_path, CASES[name], HELD, opset=opset)
    module = smcp_fx.from_onnx(path)
    x = torch.randn(4, 4, 40, 72)  # a size that it was not read at
    expected = ort.InferenceSession(path).run(["y"], {"x": x.numpy()})[0]
    torch.testing.assert_close(module(x), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_strides_that_are_taken_apart_are_a_reshape(tmp_path: Path) -> None:
    """An exporter writes as_strided as the places of all elements, computed from the batch."""
    held = {"four": np.array(4), "nil": np.array(0), "one": np.array(1), "all": np.array([-1]),
            "axis": np.array([1]), "channels": np.arange(4), "turned": np.arange(4)[::-1].copy()}  # fmt: skip
    for channels in ("channels", "turned"):
        nodes = [
            n("ReduceMean", "x", "m", axes=[2, 3]), n("Reshape", "m all", "flat"), n("Shape", "x", "s"),
            n("Gather", "s nil", "batch"), n("Range", "nil batch one", "rows"), n("Mul", "rows four", "r"),
            n("Unsqueeze", "r axis", "u"), n("Add", f"u {channels}", "places"), n("Gather", "flat places"),
        ]  # fmt: skip
        called = functions(smcp_fx.from_onnx(write(tmp_path, nodes, held)))
        assert (torch.index_select in called) == (channels == "turned")


def test_one_constant_that_is_spread_has_no_channels(tmp_path: Path) -> None:
    held = {"number": np.array([3.0], np.float32)}
    module = smcp_fx.from_onnx(
        write(tmp_path, [n("Shape", "x", "s"), n("Expand", "number s", "e"), n("Add", "x e")], held)
    )
    assert "new_full" in functions(module)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrent_layers(kind: str, direction: str, tmp_path: Path) -> None:
    gates, sides = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if direction == "bidirectional" else 1
    held = weights(w=(sides, gates * 5, 3), r=(sides, gates * 5, 5), b=(sides, 2 * gates * 5))
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    node = n(kind, "x w r b", "y", hidden_size=5, direction=direction, **more)
    if kind == "RNN":
        node.attribute.append(helper.make_attribute("activations", ["Tanh"] * sides))
    module = smcp_fx.from_onnx(write(tmp_path, [node], held, ("steps", "batch", 3)))
    assert any(isinstance(layer, nn.RNNBase) for layer in module.modules())


def functions(module: Any) -> list[Any]:
    """What a module's graph calls, other than modules."""
    return [node.target for node in module.graph.nodes if node.op in ("call_function", "call_method")]


GELU = [
    n("Div", "x root", "d"),
    n("Erf", "d", "e"),
    n("Add", "e one", "a"),
    n("Mul", "x a", "p"),
    n("Mul", "p half"),
]
HARD = [n("Add", "x three", "a"), n("Clip", "a nil six", "c"), n("Mul", "x c", "p"), n("Div", "p six")]
NUMBERS = {
    name: np.float32(value)
    for name, value in {
        "root": 2**0.5,
        "one": 1,
        "half": 0.5,
        "three": 3,
        "nil": 0,
        "six": 6,
        "eps": 1e-5,
        "two": 2,
    }.items()
}


@pytest.mark.parametrize(
    ("nodes", "function"),
    [(GELU, F.gelu), (HARD, F.hardswish), ([n("Sigmoid", "x", "s"), n("Mul", "s x")], F.silu)],
)
def test_activations_come_back(nodes: list[onnx.NodeProto], function: Any, tmp_path: Path) -> None:
    assert functions(smcp_fx.from_onnx(write(tmp_path, nodes, NUMBERS))) == [function]


@pytest.mark.parametrize("number", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("gate", ["Sigmoid", "HardSigmoid", "Erf", "Tanh", "Relu"])
def test_a_product_with_a_number_is_no_activation(
    gate: str, swapped: bool, number: float, tmp_path: Path
) -> None:
    held = {"number": np.float32(number)}
    nodes = [n(gate, "x", "s"), n("Mul", "number s" if swapped else "s number", "p"), n("Mul", "p number")]
    path = write(tmp_path, nodes, held)
    expected = ort.InferenceSession(path).run(["y"], {"x": np.ones((2, 4, 3, 3), np.float32)})[0]
    found = smcp_fx.from_onnx(path)(torch.ones(2, 4, 3, 3))
    assert_close(found, torch.from_numpy(expected), "slicing")


@pytest.mark.parametrize("far", [999_999_999, 2**31 - 1, 2**63 - 1])
def test_a_slice_to_a_far_end_is_open(far: int, tmp_path: Path) -> None:
    """A limit on the batch could not be exported again with an open batch."""
    held = {"nil": np.array([0]), "axis": np.array([0]), "far": np.array([far]), "one": np.array([1])}
    path = write(tmp_path, [n("Slice", "x nil far axis one", "s"), n("Relu", "s")], held)
    assert functions(smcp_fx.from_onnx(path)) == [F.relu]


def test_rounding_behind_a_cast_is_no_difference(tmp_path: Path) -> None:
    """A variance as the mean of squares minus the square of the mean, far from zero (magika)."""
    held = {"far": np.float32(1000), "axes": np.array([1], np.int64), "scale": np.float32(1 / 48)}
    nodes = [
        n("Cast", "x", "f", to=TensorProto.FLOAT), n("Add", "f far", "h"), n("Mul", "h h", "q"),
        n("ReduceSum", "q axes", "a"), n("Mul", "a scale", "m2"), n("ReduceSum", "h axes", "b"),
        n("Mul", "b scale", "m"), n("Mul", "m m", "mm"), n("Sub", "m2 mm"),
    ]  # fmt: skip
    path = write(tmp_path, nodes, held, ("batch", 48), kind=TensorProto.INT64)
    assert smcp_fx.from_onnx(path)(torch.ones(2, 48, dtype=torch.int64)).shape == (2, 1)


def test_a_layer_norm_comes_back_with_its_weights(tmp_path: Path) -> None:
    held = NUMBERS | weights(**{"norm.weight": (8,), "norm.bias": (8,)})
    nodes = [
        n("ReduceMean", "x", "m", axes=[-1]), n("Sub", "x m", "d"), n("Pow", "d two", "q"),
        n("ReduceMean", "q", "v", axes=[-1]), n("Add", "v eps", "e"), n("Sqrt", "e", "s"), n("Div", "d s", "z"),
        n("Mul", "z norm.weight", "w"), n("Add", "w norm.bias"),
    ]  # fmt: skip
    module = smcp_fx.from_onnx(write(tmp_path, nodes, held, ("batch", "steps", 8)))
    assert functions(module) == []
    layer = module.get_submodule("norm")
    assert isinstance(layer, nn.LayerNorm) and layer.normalized_shape == (8,)
    torch.testing.assert_close(layer.bias.detach(), torch.from_numpy(held["norm.bias"]))


def test_factors_and_summands_become_part_of_a_layer(tmp_path: Path) -> None:
    held = W | {"scale": weights(scale=(1, 6, 1, 1))["scale"], "conv1.weight": W["w"]}
    nodes = [n("Conv", "x conv1.weight", "c"), n("Mul", "c scale", "p"), n("Add", "p scale")]
    module = smcp_fx.from_onnx(write(tmp_path, nodes, held))
    assert functions(module) == [] and module.get_submodule("conv1").bias is not None


def test_a_vector_that_two_layers_read_is_no_tie(tmp_path: Path) -> None:
    """Exporters write equal vectors once; a layer that is called twice shares its matrix and its bias."""
    held = weights(v=(4, 4, 1, 1), w=(4, 4, 1, 1)) | {"zeros": np.zeros(4, np.float32)}
    nodes = [n("Conv", "x v zeros", "a"), n("Conv", "a w zeros", "b"), n("Conv", "b w zeros")]
    first, second, third = smcp_fx.from_onnx(write(tmp_path, nodes, held)).children()
    assert second.weight is third.weight and second.bias is third.bias
    assert first.bias is not second.bias


def test_a_batch_of_one_is_opened_where_samples_are_independent(tmp_path: Path) -> None:
    held = W | I64 | {"to": np.array([1, 4, -1], np.int64), "all": np.array([1, -1], np.int64)}
    shape = (1, 4, 6, 6)
    module = smcp_fx.from_onnx(
        write(tmp_path, [n("Reshape", "x to", "r"), n("Softmax", "r", axis=2)], held, shape)
    )
    x = torch.randn(3, 4, 6, 6)
    torch.testing.assert_close(module(x), torch.cat([module(row[None]) for row in x]))
    mixed = smcp_fx.from_onnx(write(tmp_path, [n("Softmax", "x", axis=0)], held, shape))
    assert "size" not in functions(mixed)


@pytest.mark.parametrize("beside", [False, True], ids=["one file", "weights beside it"])
def test_the_first_node_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """The search for it writes nothing, so that a folder that cannot be written to will do."""
    path = write(tmp_path, [n("Conv", "x w", "c"), n("Relu", "c", "r"), n("Sin", "r", "s"), n("Exp", "s")], W)
    if beside:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="data", size_threshold=0)
    monkeypatch.setattr(Path, "write_bytes", None)
    monkeypatch.setitem(network._RULES, "Sin", lambda b, call: b.call(torch.cos, call.inputs[0]))
    with pytest.raises(BackendError, match=r"output 'y'.*first node that differs is 'the_s' \(Sin\)"):
        smcp_fx.from_onnx(path)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_written_file_has_the_names_types_axes_and_metadata_of_the_first(kind: int, tmp_path: Path) -> None:
    held = W | weights(w2=(4, 6, 1, 1))
    if kind == TensorProto.FLOAT16:
        held = {name: value.astype(np.float16) for name, value in held.items()}
    shape = ("DynamicDimension.0", 4, "?", "wide side")
    path = write(tmp_path, [n("Conv", "x w b", "c"), n("Relu", "c", "r"), n("Conv", "r w2")], held, shape,
                 kind=kind, outputs=kind)  # fmt: skip
    model = onnx.load(path)
    model.metadata_props.add(key="stride", value="32")
    onnx.save(model, path)
    module = smcp_fx.from_onnx(path)
    writer = Writer(module.meta["onnx"])
    found = onnx.load(
        writer.write(module, tuple(t[:1] for t in module.example_input_array), tmp_path / "y.onnx", None)
    )
    x, y = found.graph.input[0], found.graph.output[0]
    assert (x.name, y.name) == ("x", "y") and not writer.closed
    assert (
        {v.type.tensor_type.elem_type for v in (x, y)}
        == {kind}
        == {t.data_type for t in found.graph.initializer}
    )
    assert [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] == [
        "DynamicDimension.0", 4, "x_2", "wide side"
    ]  # fmt: skip
    assert {entry.key: entry.value for entry in found.metadata_props}["stride"] == "32"


def test_axes_that_cannot_stay_open_are_closed_and_told(tmp_path: Path) -> None:
    """A recurrent layer takes any number of steps; what is added to a table of four rows has four."""
    held = weights(w=(1, 20, 3), r=(1, 20, 5), b=(1, 40), rows=(4, 1, 3))
    for nodes, closed in (
        ([n("LSTM", "x w r b", "y", hidden_size=5)], ()),
        ([n("Add", "x rows", "y")], ("axis 0 of x",)),
    ):
        path = write(tmp_path, nodes, held, ("steps", 1, 3))
        module = smcp_fx.from_onnx(path, torch.randn(4, 1, 3))
        writer = Writer(module.meta["onnx"])
        writer.write(module, module.example_input_array, tmp_path / "y.onnx", None)
        assert writer.closed == closed


def test_types_that_torch_does_not_compute_in_are_cast(tmp_path: Path) -> None:
    path = write(
        tmp_path, [n("Cast", "x", "f", to=1), n("Relu", "f")], {}, ("batch", 3), kind=TensorProto.UINT16
    )
    module = smcp_fx.from_onnx(path)
    found = Writer(module.meta["onnx"]).write(module, module.example_input_array, tmp_path / "y.onnx", None)
    assert onnx.load(found).graph.input[0].type.tensor_type.elem_type == TensorProto.UINT16
    x = np.array([[1, 2, 60000]], np.uint16)
    assert ort.InferenceSession(found).run(["y"], {"x": x})[0].tolist() == x.tolist()


def test_example_inputs_must_fit(tmp_path: Path) -> None:
    path = write(tmp_path, [n("Relu")])
    module = smcp_fx.from_onnx(path, {"x": torch.randn(1, 4, 3, 5)})
    assert isinstance(module.example_input_array, tuple) and module.example_input_array[0].shape == (
        1,
        4,
        3,
        5,
    )
    for wrong in (
        torch.randn(1, 3, 3, 5),
        torch.randn(2, 4),
        (torch.zeros(1), torch.zeros(1)),
        {"z": torch.zeros(1)},
    ):
        with pytest.raises(InputError, match="example_inputs"):
            smcp_fx.from_onnx(path, wrong)  # type: ignore[arg-type]


def test_half_precision_is_computed_in_single(tmp_path: Path) -> None:
    held = {"w": W["w"].astype(np.float16)}
    half = TensorProto.FLOAT16
    module = smcp_fx.from_onnx(write(tmp_path, [n("Conv", "x w")], held, kind=half, outputs=half))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
