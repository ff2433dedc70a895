"""ONNX files as networks: operators against ONNX Runtime, patterns, sizes, and hostile files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import smcp_fx
from smcp_fx.backends.onnx.importing import network
from smcp_fx.backends.onnx.importing.writing import take_over
from smcp_fx.errors import BackendError, InputError

IMAGE = ("batch", 4, "height", "width")
_RANDOM = np.random.default_rng(0)


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights by name."""
    return {name: _RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    folder: Path,
    nodes: list[onnx.NodeProto],
    held: dict[str, Any] | None = None,
    shape: tuple[int | str, ...] = IMAGE,
    opset: int = 17,
    kind: int = TensorProto.FLOAT,
    outputs: int | None = TensorProto.FLOAT,
) -> Path:
    """Write a network from "x" to "y"."""
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", outputs, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (held or {}).items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def n(kind: str, inputs: str = "x", result: str = "y", **attributes: Any) -> onnx.NodeProto:
    """A node, named after its result."""
    return helper.make_node(
        kind, inputs.split(), result.split(), name=f"the_{result.split()[0]}", **attributes
    )


W = weights(w=(6, 4, 3, 3), wt=(4, 6, 2, 2), b=(6,), m=(16, 5), v=(4,))
W["var"] = np.abs(W["v"]) + 0.5
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
    "softmax": [n("Softmax", axis=1)],
    "pad": [n("Pad", "x pads")],
    "pad_reflect": [n("Pad", "x pads", mode="reflect")],
    "resize_nearest": [
        n("Resize", "x none scales", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    ],
    "resize_linear": [n("Resize", "x none scales", mode="linear", coordinate_transformation_mode="half_pixel")],
    "resize_to": [n("Shape", "x", "s"), n("Mul", "s tiles", "t"), n("Resize", "x none none t", mode="linear")],
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
    opset = 18 if name == "Mish" else 17
    path = write(tmp_path, CASES[name], HELD, opset=opset)
    module = smcp_fx.from_onnx(path)
    x = torch.randn(4, 4, 40, 72)  # a size that it was not read at
    expected = ort.InferenceSession(path).run(["y"], {"x": x.numpy()})[0]
    torch.testing.assert_close(module(x), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


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
    held = W | {"scale": _RANDOM.standard_normal((1, 6, 1, 1)).astype(np.float32), "conv1.weight": W["w"]}
    nodes = [n("Conv", "x conv1.weight", "c"), n("Mul", "c scale", "p"), n("Add", "p scale")]
    module = smcp_fx.from_onnx(write(tmp_path, nodes, held))
    assert functions(module) == [] and module.get_submodule("conv1").bias is not None


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


def test_the_first_node_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [n("Relu", "x", "r"), n("Sin", "r", "s"), n("Exp", "s")])
    monkeypatch.setitem(network._RULES, "Sin", lambda b, call: b.call(torch.cos, call.inputs[0]))
    with pytest.raises(BackendError, match=r"output 'y'.*first node that differs is 'the_s' \(Sin\)"):
        smcp_fx.from_onnx(path)


def test_a_pruned_file_has_the_names_and_metadata_of_the_first(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        [n("Conv", "x w b", "c"), n("Relu", "c", "r"), n("Conv", "r w2")],
        W | weights(w2=(4, 6, 1, 1)),
    )
    model = onnx.load(path)
    model.metadata_props.add(key="stride", value="32")
    onnx.save(model, path)
    module = smcp_fx.from_onnx(path)
    prepared = smcp_fx.prepare(
        module, module.example_input_array, target=0.6, config=smcp_fx.PruningConfig(multiple=1)
    )
    smcp_fx.gather_importance(prepared, torch.randn(8, 4, 16, 16), outputs="values")
    prepared.pruner.solve()
    smaller = smcp_fx.convert(prepared)
    pruned = smcp_fx.export_onnx(smaller, module.example_input_array, tmp_path / "pruned.onnx")
    take_over(pruned, module.meta["onnx"])
    found = onnx.load(pruned)
    assert [v.name for v in (*found.graph.input, *found.graph.output)] == ["x", "y"]
    assert {entry.key: entry.value for entry in found.metadata_props}["stride"] == "32"
    assert found.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def external(folder: Path, location: str, **more: str) -> Path:
    """A file whose weight is in another."""
    path = write(folder, [n("Conv", "x w")], {"w": W["w"]})
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "net.weights").write_bytes(b"12345678" + W["w"].tobytes())
    module = smcp_fx.from_onnx(external(tmp_path, "net.weights", offset="8"))
    torch.testing.assert_close(next(module.parameters()).detach(), torch.from_numpy(W["w"]))


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "link", ""])
def test_nothing_is_read_outside_the_folder(location: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(W["w"].tobytes())
    (folder := tmp_path / "folder").mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="outside the file's folder"):
        smcp_fx.from_onnx(external(folder, location))


@pytest.mark.parametrize("size", [3, 10_000])
def test_weights_that_are_cut_off_or_missing(size: int, tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(W["w"].tobytes()[:100])
    with pytest.raises(InputError, match="cut off"):
        smcp_fx.from_onnx(external(tmp_path, "cut", offset=str(size)))
    with pytest.raises(InputError, match="not beside it"):
        smcp_fx.from_onnx(external(tmp_path, "gone"))


HUGE = np.array([2**20, 2**20], np.int64)
REFUSED: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "missing": ([n("Add", "x gone")], "'gone', which nothing before it makes"),
    "cycle": ([n("Add", "x z"), n("Relu", "y", "z")], "a cycle"),
    "twice": ([n("Relu"), n("Exp")], "made twice"),
    "unknown": ([n("Loop", "x x")], "the_y.*cannot be imported"),
    "foreign": ([n("FusedConv", "x x", domain="com.microsoft")], "FusedConv of com.microsoft"),
    "quantised": ([n("DynamicQuantizeLinear", "x", "y s z")], "quantised.*--precision int8"),
    "huge": ([n("ConstantOfShape", "huge", "h"), n("Add", "x h")], "the_h.*elements"),
    "expanded": ([n("Expand", "x huge")], "the_y"),
    "unfit": ([n("Concat", "x v4", axis=2)], "No size that was tried"),
    "attribute": ([n("Conv", "x w", strides=[1, 2, 3])], "the_y"),
    "axis": ([n("Softmax", axis=9)], "axis 9"),
    "training": ([n("BatchNormalization", "x v v v var", "y m s", training_mode=1)], "model.eval"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_imported_are_refused_by_node(name: str, tmp_path: Path) -> None:
    nodes, why = REFUSED[name]
    with pytest.raises(InputError, match=why):
        smcp_fx.from_onnx(write(tmp_path, nodes, W | {"huge": HUGE, "v4": W["w"]}))


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(InputError, match="no such file"):
        smcp_fx.from_onnx(path)
    for content in (b"", b"\xff" * 64, write(tmp_path, [n("Relu")]).read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(InputError):
            smcp_fx.from_onnx(path)


def test_tensors_that_lie_about_their_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, [n("Conv", "x w")], {"w": W["w"]})
    for dims in ([2**40, 2**40], [-1, 4], [7, 4, 3, 3]):
        model = onnx.load(path)
        model.graph.initializer[0].dims[:] = dims
        (tmp_path / "lie.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(InputError, match="'w'"):
            smcp_fx.from_onnx(tmp_path / "lie.onnx")


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
