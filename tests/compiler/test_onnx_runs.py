"""smcp-compile from an ONNX file: arrays and images as samples, the file's own names in what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from onnx_files import n, weights, write
from PIL import Image
from rich.console import Console

from smcp_fx.cli.inspect import main as inspect_main
from smcp_fx.cli.table import main as table_main
from smcp_fx.compiler import CompileSettings, compile_model
from smcp_fx.compiler.judging import held_against_dense
from smcp_fx.compiler.telling import Teller
from smcp_fx.compiler.training import accuracy
from smcp_fx.errors import InputError
from smcp_fx.latency.table import LatencyTable
from smcp_fx.zoo.models import FittedModel
from smcp_fx.zoo.onnx_file import examples_of, read_network, takes_several, writer_like
from smcp_fx.zoo.pretrained import Preprocessing, preprocessing_by
from smcp_fx.zoo.samples import load_samples


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


@pytest.mark.slow
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
        outputs="map=classes",
        out=str(tmp_path / "run"),
    )
    report = compile_model(settings)
    assert report.agreement and report.predicted_fraction <= 0.6
    assert any("diverge" in note for note in report.notes)
    found = onnx.load(tmp_path / "run" / "pruned.onnx")
    assert [value.name for value in (*found.graph.input, *found.graph.output)] == [
        "the.picture",
        "gain",
        "map",
    ]
    assert {entry.key: entry.value for entry in found.metadata_props}["stride"] == "4"
    assert found.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_sample_at_a_time_whose_outputs_begin_with_positions(tmp_path: Path) -> None:
    """Recognisers in old files: one image, and scores [positions, 1, classes]."""
    held = weights(w=(5, 3, 3, 3)) | {"to": np.array([1, 5, -1])}
    nodes = [n("Conv", "x w", "c"), n("Reshape", "c to", "r"), n("Transpose", "r", perm=[2, 0, 1])]
    network = read_network(write(tmp_path, nodes, held, (1, 3, 8, 12)))
    assert not takes_several(network)
    (folder := tmp_path / "samples").mkdir()
    for index in range(8):
        np.savez(folder / f"{index}.npz", x=np.random.default_rng(index).standard_normal((3, 8, 12)))
    data = load_samples(f"npz:{folder}", Path(), {"x": torch.zeros(1, 3, 8, 12)}, Preprocessing(), 1)
    fitted = FittedModel(network, "", 0, 0, (), None, True, ("y",))
    data = held_against_dense(data, fitted, "classes", Teller(Console(quiet=True)))
    assert data.answers is not None and data.answers.kinds == {"": "classes:2"}
    assert accuracy(network, fitted, data) == 1
    samples = [data.test[index][0][None] for index in range(len(data.test))]  # type: ignore[arg-type]
    whole = [network(x).argmax(2) for x in samples]
    assert whole[0].shape == (60, 1)
    with torch.no_grad():
        next(network.parameters())[0] *= 2
    same = [network(x).argmax(2) == y for x, y in zip(samples, whole, strict=True)]
    assert accuracy(network, fitted, data) == pytest.approx(torch.stack(same).float().mean().item())


METADATA: list[tuple[dict[str, str], tuple[Any, ...]]] = [
    ({}, (0.485, 0.229, "rgb")),
    ({"Image.BitmapPixelFormat": "Bgr8", "Image.NominalPixelRange": "Normalized_1_1"}, (0.5, 0.5, "bgr")),
    ({"Image.NominalPixelRange": "NominalRange_0_255"}, (0.0, 1 / 255, "rgb")),
    ({"stride": "32", "task": "detect", "names": "{0: 'cat'}"}, (0.0, 1.0, "rgb")),
    ({"mean": "[0.1, 0.2, 0.3]", "std": "0.4"}, (0.1, 0.4, "rgb")),
    ({"mean": "unknown", "std": "0"}, (0.485, 0.229, "rgb")),
]


@pytest.mark.parametrize(("metadata", "expected"), METADATA)
def test_preprocessing_by_metadata(metadata: dict[str, str], expected: tuple[Any, ...]) -> None:
    found, told = preprocessing_by(metadata)
    assert (found.mean[0], found.std[0], found.order) == expected
    assert bool(told) == (expected != METADATA[0][1])
    given = CompileSettings(mean="0.25", channel_order="bgr").prepared(found)
    assert (given.mean[0], given.std, given.order) == (0.25, found.std, "bgr")


@pytest.mark.parametrize("shape", [(1, 3, 2, 4), (1, 2, 4, 3)])
@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_images_in_the_layout_of_the_input(shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    for index in range(2):
        Image.new("RGB", (4, 2), (255, 51, 0)).save(tmp_path / f"{index}.png")
    images = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, order=order)
    for kind, expected in ((torch.float32, [1.0, -0.6, -1.0]), (torch.uint8, [255, 51, 0])):
        data = load_samples(f"images:{tmp_path}", Path(), {"x": torch.zeros(shape, dtype=kind)}, images, 2)
        image = data.train[0][0]
        assert image.shape == shape[1:] and image.dtype == kind
        pixel = image[:, 0, 0] if shape[1] == 3 else image[0, 0]
        assert pixel.tolist() == pytest.approx(expected if order == "rgb" else expected[::-1])


def test_samples_that_do_not_fit(tmp_path: Path) -> None:
    like = {"x": torch.zeros(1, 3, 4, 4), "n": torch.zeros(1, 2)}

    def samples(spec: str, names: Any = like) -> Any:
        data = load_samples(spec, tmp_path, names, Preprocessing(), 2)
        return data.train[0]

    for name in ("empty", "npz", "wrong", "damaged", "large"):
        (tmp_path / name).mkdir()
    for index in range(2):
        np.savez(tmp_path / "npz" / f"{index}.npz", x=np.zeros((3, 4, 4)), n=np.zeros(2))
        np.savez(tmp_path / "wrong" / f"{index}.npz", x=np.zeros((3, 5, 4)), n=np.zeros(2))
        np.savez(tmp_path / "large" / f"{index}.npz", x=np.zeros((3, 4, 4)), other=np.zeros(2))
        (tmp_path / "damaged" / f"{index}.npz").write_bytes(b"PK\x03\x04")
        (tmp_path / "damaged" / f"{index}.png").write_bytes(b"no image")
    assert [t.dtype for t in samples("npz:npz")[0]] == [torch.float32] * 2
    one = {"x": like["x"]}
    for spec, names, why in (
        ("npz:gone", like, "no such folder"),
        ("npz:empty", like, "0 .npz files; two are the least"),
        ("images:gone", one, "no such folder"),
        ("images:empty", one, "0 images"),
        ("npz:wrong", like, r"'x' is of sizes \[3, 5, 4\]; one sample is \[3, 4, 4\]"),
        ("npz:large", like, "no array 'n'"),
        ("npz:damaged", like, "cannot be read as arrays"),
        ("images:damaged", one, "not a readable image"),
        ("images:npz", {"x": torch.zeros(1, 7, 4, 4)}, "0 images"),
        ("images:damaged", {"x": torch.zeros(1, 7, 4, 4)}, "no image: give --data npz"),
        ("npz:", like, "give images:FOLDER, or npz:FOLDER"),
    ):
        with pytest.raises(InputError, match=why):
            samples(spec, names)


def test_sizes_of_inputs(tmp_path: Path, net: Path) -> None:
    network = read_network(net, "3x8x12,1")
    assert takes_several(network) and [t.shape[0] for t in examples_of(network, 5)] == [5, 5]
    for size in ("3x8x13,1", "3x8x12", "0,1", "x", "8"):
        with pytest.raises(InputError, match="sizes"):
            read_network(net, size)


def test_axes_stay_open_each_by_itself(tmp_path: Path) -> None:
    """A recogniser's height becomes 1 and goes; its width is cut from a table of 20 positions."""
    held = weights(w=(8, 3, 4, 1), p=(1, 8, 1, 20)) | {
        "at": np.array([3]),
        "a2": np.array([2]),
        "z": np.array([0]),
    }
    nodes = [
        n("Conv", "x w", "c", strides=[4, 1]),
        n("Shape", "c", "s"),
        n("Gather", "s at", "wide"),
        n("Slice", "p z wide at", "q"),
        n("Add", "c q", "a"),
        n("Squeeze", "a a2", "y"),
    ]
    network = read_network(write(tmp_path, nodes, held, ("batch", 3, "height", "width")), "4x12")
    writer = writer_like(network)
    path = writer.write(network, examples_of(network, 1), tmp_path / "again.onnx", 17)
    assert not writer.closed
    session = onnxruntime.InferenceSession(path)
    for sizes in ((3, 3, 7, 19), (1, 3, 4, 5)):
        assert session.run(None, {"x": np.zeros(sizes, np.float32)})[0].shape == (sizes[0], 8, sizes[3])


def test_inspect_and_table_take_files(net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_main([f"onnx:{net}"]) == 0
    assert "first" in capsys.readouterr().out
    table = tmp_path / "wanted.sqlite"
    LatencyTable(table).close()
    wanted = ["export", str(table), str(tmp_path / "rows.json"), "--wanted", "--model", f"onnx:{net}"]
    assert table_main([*wanted, "--batch", "3"]) == 0
    assert "to measure" in capsys.readouterr().out
    assert table_main([*wanted, "--input-size", "3x9x12,1"]) == 2


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
