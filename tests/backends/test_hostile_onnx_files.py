"""Broken and hostile ONNX files: clear errors, nothing read elsewhere, memory bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_files import W, n, write

import smcp_fx
from smcp_fx.backends.onnx.importing import building, file
from smcp_fx.errors import InputError


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


def test_nothing_outside_the_folder_is_read_from_within_nodes_either(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(W["w"].tobytes())
    (folder := tmp_path / "folder").mkdir()
    tensor = onnx.load(external(folder, "../secret"), load_external_data=False).graph.initializer[0]
    branch = helper.make_graph(
        [n("Identity", "w", "o")], "b", [], [helper.make_empty_tensor_value_info("o")], [tensor]
    )
    yes = np.array(True)
    for node in (
        n("Constant", "", "c", value=tensor),
        n("If", "yes", "c", then_branch=branch, else_branch=branch),
    ):
        path = write(folder, [node, n("Relu")], {"yes": yes})
        with pytest.raises(InputError, match="outside the file's folder"):
            smcp_fx.from_onnx(path)


@pytest.mark.parametrize("value", ["-1", "1e99", "x", "9" * 40])
def test_offsets_that_are_none(value: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(W["w"].tobytes())
    for key in ("offset", "length"):
        with pytest.raises(InputError, match="cut off"):
            smcp_fx.from_onnx(external(tmp_path, "data", **{key: value}))


def test_weights_that_lie_in_one_place_count_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(W["w"].tobytes())
    model = onnx.load(external(tmp_path, "data"), load_external_data=False)
    monkeypatch.setattr(file, "_MOST_ELEMENTS", 5 * W["w"].size)
    for index in range(5):
        (path := tmp_path / "net.onnx").write_bytes(model.SerializeToString())
        smcp_fx.from_onnx(path)
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = f"w{index}"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="elements in all"):
        smcp_fx.from_onnx(path)


@pytest.mark.parametrize("name", [b"height", b"batch", b"\x01x\x12"])
def test_names_that_are_no_text(name: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, [n("Relu")])
    path.write_bytes(path.read_bytes().replace(name, name[:1] + b"\xff" + name[2:]))
    with pytest.raises(InputError, match="no text"):
        smcp_fx.from_onnx(path)


def test_functions_without_end(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]

    def function(name: str, inner: str) -> onnx.FunctionProto:
        nodes = [
            helper.make_node(inner, ["x"], ["t"], domain="own"),
            helper.make_node(inner, ["t"], ["y"], domain="own"),
        ]
        return helper.make_function("own", name, ["x"], ["y"], nodes, opsets)

    path = write(tmp_path, [helper.make_node("F39", ["x"], ["y"], domain="own")])
    for last in ("F39", "Relu"):  # a circle, and 2 ** 40 nodes
        model = onnx.load(path)
        model.opset_import.append(opsets[1])
        model.functions.extend(function(f"F{i}", f"F{i - 1}" if i else last) for i in range(40))
        (tmp_path / "many.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(InputError, match="functions call each other"):
            smcp_fx.from_onnx(tmp_path / "many.onnx")


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [n("Relu")])
    with path.open("r+b") as large:
        large.truncate(2**31 + 8)  # takes no space
    with pytest.raises(InputError, match="larger than 2 GiB"):
        smcp_fx.from_onnx(path)
    monkeypatch.setattr(building, "_MOST_CONSTANTS", 2**12)
    nodes = [n("ConstantOfShape", "many", f"c{i}") for i in range(5)]
    nodes += [n("Sum", " ".join(["x", *(f"c{i}" for i in range(5))]))]
    with pytest.raises(InputError, match="constants of more than"):
        smcp_fx.from_onnx(write(tmp_path, nodes, {"many": np.array([1024], np.int64)}, (1, 1024)))


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
