"""ONNX files: what is in them, that they compute what the module does, and what is left when that fails."""

from __future__ import annotations

import errno
import json
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from models_products import TOKENS, attention_of_torch_with_one_head
from onnx import TensorProto, helper
from tolerances import assert_close
from torch import Tensor, fx, nn

import smcp_fx
from smcp_fx.backends.checking import TOLERANCES, compare_outputs, rounding
from smcp_fx.backends.onnx import export as onnx_export
from smcp_fx.backends.onnx.export import export_onnx
from smcp_fx.errors import BackendError, InputError


class Small(nn.Module):
    """Everything the exporter has to do well on: BN to fold, a residual, global pooling, a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.relu(self.bn2(self.inner(x)) + x)
        return self.fc(self.drop(torch.flatten(self.pool(x), 1)))


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    model = Small()
    with torch.no_grad():
        for bn in (model.bn, model.bn2):
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 2)
            bn.weight.normal_()
    return model


def run_file(path, *inputs):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs, strict=True)))


@pytest.mark.parametrize("opset", [17, None, 23])
def test_file_computes_what_the_module_does_at_any_batch(small, tmp_path, opset, capfd):
    small.train()
    small.inner.eval()
    graph = fx.symbolic_trace(small)
    path = export_onnx(graph, torch.randn(2, 3, 12, 12), tmp_path / "new" / "net.onnx", opset=opset)
    assert graph.training
    assert not graph.inner.training
    graph.eval()
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 12, 12)
        with torch.no_grad():
            assert np.allclose(run_file(path, x.numpy())[0], graph(x).numpy(), rtol=1e-4, atol=1e-5)
    model = onnx.load(path)
    assert [o.version for o in model.opset_import if not o.domain] == [opset or onnx_export.DEFAULT_OPSET]
    onnx.checker.check_model(model, full_check=True)
    operations = Counter(node.op_type for node in model.graph.node)
    assert operations == {"Conv": 2, "Relu": 2, "Add": 1, "GlobalAveragePool": 1, "Reshape": 1, "Gemm": 1}
    assert [n.name for n in model.graph.node if n.op_type in ("Conv", "Gemm")] == ["stem", "inner", "fc"]
    assert capfd.readouterr() == ("", "")
    assert [p.name for p in path.parent.iterdir()] == ["net.onnx"]


def runtime_takes(opset: int) -> bool:
    """Whether the installed ONNX Runtime loads a network of one node in this opset."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:  # whatever the runtime throws, it does not take it
        return False
    return True


def last_opset() -> int:
    """The newest that the installed ONNX Runtime loads."""
    return max(n for n in range(onnx_export.OLDEST_OPSET, onnx.defs.onnx_opset_version()) if runtime_takes(n))


@pytest.mark.parametrize(
    "opset", [onnx_export.OLDEST_OPSET, 18, 20, last_opset(), onnx.defs.onnx_opset_version()]
)
def test_an_opset_is_written_and_runs_or_is_refused_by_the_runtime(small, tmp_path, opset):
    """Opsets newer than the installed ONNX Runtime knows end in its refusal, and no file."""
    x = torch.randn(2, 3, 12, 12)
    assert runtime_takes(onnx_export.DEFAULT_OPSET)
    if not runtime_takes(opset):
        with pytest.raises(BackendError, match="refuses"):
            export_onnx(small, x, tmp_path / "n.onnx", opset=opset)
        assert list(tmp_path.iterdir()) == []
        return
    path = export_onnx(small, x, tmp_path / "n.onnx", opset=opset)
    model = onnx.load(path)
    assert [o.version for o in model.opset_import if not o.domain] == [opset]
    assert not {"Identity", "Cast", "Transpose", "BatchNormalization"} & {n.op_type for n in model.graph.node}
    with torch.no_grad():
        assert np.allclose(run_file(path, x.numpy())[0], small.eval()(x).numpy(), rtol=1e-4, atol=1e-5)


def test_half_precision_holds_half_precision_weights_and_no_casts(small, tmp_path):
    small.eval()
    x = torch.randn(2, 3, 12, 12)
    path = export_onnx(small, x, tmp_path / "half.onnx", precision="fp16", metadata={"precision": "fp16"})
    model = onnx.load(path)
    floats = {t.data_type for t in model.graph.initializer if t.data_type != TensorProto.INT64}
    assert floats == {TensorProto.FLOAT16}
    kinds = [v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)]
    assert kinds == [TensorProto.FLOAT16] * 2
    operations = Counter(node.op_type for node in model.graph.node)
    assert operations == {"Conv": 2, "Relu": 2, "Add": 1, "GlobalAveragePool": 1, "Reshape": 1, "Gemm": 1}
    found = run_file(path, x.numpy().astype(np.float16))[0]
    assert found.dtype == np.float16
    with torch.no_grad():
        expected = small(x).numpy()
    assert np.abs(found - expected).max() <= 1e-2 * np.abs(expected).max()
    assert next(small.parameters()).dtype == torch.float32
    full = export_onnx(small, x, tmp_path / "full.onnx")
    assert path.stat().st_size < 0.75 * full.stat().st_size
    with pytest.raises(InputError, match="precision 'int8'"):
        export_onnx(small, x, tmp_path / "n.onnx", precision="int8")


def test_metadata_is_in_the_file_and_the_exporting_machine_is_not(small, tmp_path):
    path = export_onnx(
        small, torch.randn(2, 3, 8, 8), tmp_path / "n.onnx", metadata={"target": 0.4, "of": "me"}
    )
    properties = {p.key: p.value for p in onnx.load(path).metadata_props}
    assert properties == {"producer": "smcp_fx", "target": "0.4", "of": "me"}
    assert json.loads(properties["target"]) == 0.4
    assert b"site-packages" not in path.read_bytes()


def test_an_output_without_dimensions_stays_one(tmp_path):
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().mean()

    x = torch.randn(2, 3)
    (loss,) = run_file(export_onnx(Loss(), x, tmp_path / "n.onnx"), x.numpy())
    assert loss.shape == ()


def test_an_example_batch_of_one_stays_open_and_a_fixed_one_is_fixed(small, tmp_path):
    x = torch.randn(1, 3, 8, 8)
    free = export_onnx(small, (x,), tmp_path / "free.onnx")
    assert run_file(free, np.zeros((5, 3, 8, 8), np.float32))[0].shape == (5, 5)
    fixed = export_onnx(small, x, tmp_path / "fixed.onnx", dynamic_batch=False)
    with pytest.raises(Exception, match="Got invalid dimensions"):
        run_file(fixed, np.zeros((5, 3, 8, 8), np.float32))


def test_an_operation_onnx_lacks_is_named_with_its_module(tmp_path):
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(x)

    model = nn.Sequential()
    model.add_module("first", nn.Conv2d(3, 4, 3))
    model.add_module("odd", Odd())
    with pytest.raises(BackendError, match=r"linalg_svd.* in module 'odd'.*dynamic_batch=False"):
        export_onnx(model, torch.randn(2, 3, 8, 8), tmp_path / "n.onnx")
    assert list(tmp_path.iterdir()) == []


def test_attention_of_other_dimensions_is_written_on_four(tmp_path):
    class Windows(nn.Module):
        """[batch, 12 tokens, 8] -> heads of 3 windows of 4 tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(2, 4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.reshape(-1, 3, 4, 2, 4).transpose(2, 3)
            q = nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos(), attn_mask=self.bias)
            return nn.functional.scaled_dot_product_attention(q, q, q).transpose(2, 3).reshape(-1, 12, 8)

    class HeadsInTheBatch(nn.Module):
        """[batch, 12 tokens, 8] -> two heads beside the batch, as SAM has them."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.reshape(-1, 12, 2, 4).transpose(1, 2).flatten(0, 1)
            q = nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos(), attn_mask=q @ q.mT)
            return nn.functional.scaled_dot_product_attention(q, q, q, q[:1] @ q[:1].mT).reshape(-1, 2, 12, 4)

    x = torch.randn(2, 12, 8)
    for model in (Windows().eval(), HeadsInTheBatch().eval()):
        (found,) = run_file(export_onnx(model, x, tmp_path / "a.onnx"), torch.cat([x, x]).numpy())
        assert np.allclose(found, model(torch.cat([x, x])).detach().numpy(), atol=1e-6)


def test_attention_of_fewer_queries_keeps_its_scale(tmp_path):
    x = torch.randn(TOKENS)
    prepared = smcp_fx.prepare(
        attention_of_torch_with_one_head(), x, config=smcp_fx.PruningConfig(multiple=1)
    )
    prepared.set_masks({"q": torch.arange(8) % 3 == 0})
    model = smcp_fx.convert(prepared).eval()
    (found,) = run_file(export_onnx(model, x, tmp_path / "n.onnx"), x.numpy())
    with torch.no_grad():
        assert_close(torch.from_numpy(found), prepared.eval()(x), "slicing")


def shifted(x: torch.Tensor, by: list[int]) -> torch.Tensor:
    by[0] += 1  # as torchvision's windowed attention in three dimensions writes into its arguments
    return torch.roll(x, by[0], 1)


torch.fx.wrap("shifted")


def test_a_function_that_writes_into_its_list_is_written(tmp_path):
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shifted(self.layer(x), [1])

    x = torch.randn(2, 6)
    model = torch.fx.symbolic_trace(Shifts().eval())
    path = export_onnx(model, x, tmp_path / "s.onnx")
    assert np.allclose(run_file(path, x.numpy())[0], model(x).detach().numpy(), atol=1e-6)
    assert "layer.weight" in {tensor.name for tensor in onnx.load(path).graph.initializer}


def test_a_network_for_one_batch_size_says_so(tmp_path):
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(2, 3, -1) * 2

    x = torch.randn(2, 3, 8)
    with pytest.raises(BackendError, match="dynamic_batch=False"):
        export_onnx(Fixed(), x, tmp_path / "n.onnx")
    assert np.allclose(
        run_file(export_onnx(Fixed(), x, tmp_path / "n.onnx", dynamic_batch=False), x.numpy())[0], x * 2
    )


def test_a_numerical_difference_names_both_values_and_leaves_no_file(small, tmp_path, monkeypatch):
    def skewed(model):
        weight = next(t for t in model.graph.initializer if t.name == "fc.bias")
        values = onnx.numpy_helper.to_array(weight).copy()
        values[3] += 100.0
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        return True

    monkeypatch.setattr(onnx_export, "clean_model", skewed)
    (tmp_path / "n.onnx").write_text("the file before")
    with pytest.raises(
        BackendError, match=r"ONNX Runtime computes \S+ where PyTorch computes \S+ \(difference 100"
    ):
        export_onnx(small, torch.randn(2, 3, 8, 8), tmp_path / "n.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["n.onnx"]
    assert (tmp_path / "n.onnx").read_text() == "the file before"


def test_comparison_is_relative_to_the_scale_and_refuses_what_is_not_finite():
    a = np.array([[1000.0, 1.0]], np.float32)
    compare_outputs([a + np.float32(0.05)], [a], ["y"])
    with pytest.raises(BackendError, match="'y' differs"):
        compare_outputs([a + np.float32(0.5)], [a], ["y"])
    with pytest.raises(BackendError, match="'y' differs"):
        compare_outputs([a * np.nan], [a], ["y"])
    with pytest.raises(BackendError, match="not finite"):
        compare_outputs([a], [a * np.inf], ["y"])
    with pytest.raises(BackendError, match="shape"):
        compare_outputs([a], [a.T], ["y"])
    with pytest.raises(BackendError, match="2 outputs, the module 1"):
        compare_outputs([a, a], [a], ["y", "z"])


def test_a_full_disk_is_named_and_leaves_nothing(small, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(onnx_export.Path, "write_bytes", full)
    with pytest.raises(BackendError, match=r"no space left to write .*n\.onnx"):
        export_onnx(small, torch.randn(2, 3, 8, 8), tmp_path / "n.onnx")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_named(small, tmp_path):
    with pytest.raises(InputError, match="opset 9"):
        export_onnx(small, torch.randn(1, 3, 8, 8), tmp_path / "n.onnx", opset=9)
    with pytest.raises(InputError, match="example_inputs"):
        export_onnx(small, (), tmp_path / "n.onnx")
    with pytest.raises(
        InputError, match=r"Small does not run on example inputs of shapes \[\(1, 4, 8, 8\)\]"
    ):
        export_onnx(small, torch.randn(1, 4, 8, 8), tmp_path / "n.onnx")
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="cannot write"):
        export_onnx(small, torch.randn(1, 3, 8, 8), tmp_path / "file" / "n.onnx")


# ---- cleaning -----------------------------------------------------------------------------------------------


def test_a_model_that_writes_into_its_input_is_compared_on_what_it_was_given(tmp_path):
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[N, 3, H, W]."""
            x *= 0.5
            return self.conv(x)

    x = torch.randn(2, 3, 4, 4)
    model = smcp_fx.convert(smcp_fx.prepare(Halves(), x))
    assert export_onnx(model, x, tmp_path / "model.onnx").exists()


class Doubles(nn.Module):
    """Twice as high and wide, with a state [layers, batch, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.cell = nn.Conv2d(3, 4, 3, padding=1), nn.PixelShuffle(2), nn.GRU(4, 2, 2)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x)
        return self.up(y), self.cell(y.mean((2, 3))[None], state)[1]


def shapes_of(path):
    values = onnx.load(path).graph
    dims = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values.input]
    return dict(zip((v.name for v in values.input), dims, strict=True))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_on_another_axis_is_told(batch, tmp_path):
    """Also if one image is repeated to find a size that varies."""
    given = torch.randn(batch, 3, 4, 4), torch.zeros(2, batch, 2)
    with pytest.raises(BackendError, match=r"torch.export cannot capture Doubles.* batch on another axis"):
        export_onnx(Doubles(), given, tmp_path / "n.onnx")


def test_any_axis_stays_open_by_the_inputs_name_or_place(tmp_path):
    model, given = Doubles().eval(), (torch.randn(1, 3, 4, 4), torch.randn(2, 1, 2))
    named = {"x": {0: "batch", -1: "width"}, "state": {1: "batch"}}
    placed = {0: {0: "batch", 3: "width"}, 1: {1: "batch"}}
    for number, axes in enumerate((named, placed)):
        path = export_onnx(model, given, tmp_path / f"{number}.onnx", dynamic_axes=axes)
        assert shapes_of(path) == {"x": ["batch", 3, 4, "width"], "state": [2, "batch", 2]}
    other = (torch.randn(3, 3, 4, 7), torch.randn(2, 3, 2))
    found = run_file(path, *(tensor.numpy() for tensor in other))
    with torch.no_grad():
        for mine, theirs in zip(found, model(*other), strict=True):
            assert np.allclose(mine, theirs, atol=1e-6)


def test_sides_of_images_stay_open_where_an_outputs_follow(tmp_path):
    """Networks that ask for an even size, too; those that give classes have their size fixed."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.up(self.down(x))], 1)

    x, other = torch.randn(2, 3, 8, 8), torch.randn(1, 3, 6, 10)
    path = export_onnx(Skips(), x, tmp_path / "dense.onnx")
    assert shapes_of(path) == {"x": ["batch", 3, "height", "width"]}
    assert run_file(path, other.numpy())[0].shape == (1, 7, 6, 10)
    fixed = export_onnx(Skips(), x, tmp_path / "fixed.onnx", dynamic_axes={})
    assert shapes_of(fixed) == {"x": [2, 3, 8, 8]}
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    more_samples_if_larger = (nn.Flatten(0), nn.Unflatten(0, (-1, 256)))
    for after in (pooled, more_samples_if_larger):
        path = export_onnx(nn.Sequential(nn.Conv2d(3, 4, 1), *after), x, tmp_path / "sized.onnx")
        assert shapes_of(path)["input"] == ["batch", 3, 8, 8]


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"y": {0: "b"}}, "no input 'y'; give 'input'"),
        ({"input": {4: "b"}}, r"dynamic_axes\['input'\].*no axis 4"),
        ({"input": {0: "b", 2: "b"}}, "'b' is 2 in 'input' and 8"),
        ({"input": {0: 5}}, "5 is no name"),
        ({"input": {2: "height", -2: "rows"}}, "names an axis again that is 'height'"),
        ([0], "must be a dict"),
    ],
)
def test_axes_that_are_not_there_are_named(small, tmp_path, axes, told):
    with pytest.raises(InputError, match=told):
        export_onnx(nn.Sequential(small), torch.randn(2, 3, 8, 8), tmp_path / "n.onnx", dynamic_axes=axes)
    assert list(tmp_path.iterdir()) == []


def test_an_axis_that_cannot_stay_open_is_told(tmp_path):
    fixed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(BackendError, match="fewer axes open in dynamic_axes"):
        export_onnx(
            fixed, torch.randn(2, 3, 8, 8), tmp_path / "n.onnx", dynamic_axes={"input": {2: "height"}}
        )
    assert list(tmp_path.iterdir()) == []


class Ranks(nn.Module):
    """Rows in the order of scores that are nearly equal."""

    def forward(self, x: Tensor) -> Tensor:
        return x[(1 + 1e-6 * x.sum(1)).argsort(stable=True)]


@pytest.mark.parametrize(("model", "moves"), [(nn.Linear(4, 3), False), (Ranks(), True)])
def test_an_order_that_near_ties_decide_is_told_from_rounding(model: nn.Module, moves: bool) -> None:
    x = torch.randn(64, 4)
    (limit,) = rounding(model, (x,), [model(x).detach().numpy()])
    assert (limit > 0.1) if moves else (0 < limit < TOLERANCES["float32"])
