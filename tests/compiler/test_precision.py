"""The compile command in INT8: quantised files, what they lose, and what is told and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from colours import run
from rich.console import Console

from smcp_fx.backends import get_backend
from smcp_fx.backends.base import BlockLatency
from smcp_fx.backends.onnx import quantization
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.compiler import precision as module
from smcp_fx.compiler.pricing import chosen_cost
from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.compiler.telling import Teller
from smcp_fx.errors import TableError
from smcp_fx.latency.table import LatencyTable

TRAINED = (
    "--weights",
    "good.pth",
    "--epochs",
    "0",
    "--calibration",
    "16",
    "--cost",
    "flops",
    "--target",
    "0.6",
)


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    return found


def quantised_layers(file: Path) -> list[str]:
    """The convolutions and linear layers whose weights come from bytes."""
    graph = onnx.load(file).graph
    bytes_read = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return [
        node.name for node in graph.node if node.op_type in ("Conv", "Gemm") and node.input[1] in bytes_read
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openvino"])
def test_emitted_files_are_int8_and_float_ones_lie_beside_them(
    backend: str, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_CPU_INFO", work / "cpuinfo")
    monkeypatch.setattr(module, "_LOSS", -1.0)  # look into it whatever was lost
    (work / "cpuinfo").write_text("flags\t: fpu avx2\n")
    assert run(*TRAINED, "--backend", backend, "--precision", "int8", "--int8-keep", "1") == 0
    shown, report = capsys.readouterr().out, report_of(work)
    assert shown.index("no instructions that multiply bytes") < shown.index("exporting the dense network")
    names = " ".join(
        " ".join(line[:22] for line in shown.splitlines()).split()
    )  # the table's first column wraps
    assert "accuracy, in float32" in names
    assert "latency over the dense network's in float32" in names
    facts = report["precision"]
    assert report["backend"]["precision"] == facts["name"] == "int8"
    assert facts["dense_accuracy"] == facts["pruned_accuracy"] == 1
    assert facts["fraction"] > 0
    assert facts["pruned_fraction"] > 0
    (kept,) = facts["kept"]
    assert set(facts["errors"]) == {"0", "3", "8"}
    assert sorted(facts["errors"].values(), reverse=True) == list(facts["errors"].values())
    for side in ("dense", "pruned"):
        assert set(quantised_layers(work / "out" / f"{side}.onnx")) == {"0", "3", "8"} - {kept}
        assert not quantised_layers(work / "out" / f"{side}.float.onnx")
    assert (work / "out" / "pruned.xml").exists() == (backend == "openvino")


def test_a_table_of_another_precision_is_refused(tmp_path: Path) -> None:
    backend = get_backend("onnxruntime", precision="int8")
    plain = backend.full_precision()
    assert plain is not None
    with LatencyTable(tmp_path / "table.sqlite") as table:
        row = BlockLatency(Measurement(1.0, 1.0, 1.0, 3, True))
        assert table.store.claim("conv", "{}", plain.fingerprint(), [(8,)]) == (8,)
        table.store.write("{}", plain.fingerprint(), {(8,): row})
    settings = CompileSettings(table=str(tmp_path / "table.sqlite"), precision="int8")
    with pytest.raises(TableError, match=r"holds no rows of ONNX Runtime .*, int8, .*precision"):
        chosen_cost(settings, tmp_path, backend, Teller(Console()))


def test_what_does_not_fit_is_refused_in_a_sentence(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (("--int8-keep", "2"), "only with --precision int8"),
        (("--precision", "bf16"), "kernels for them compute in no half precision"),
        (
            ("--backend", "torch", "--precision", "int8"),
            "PyTorch runs networks here in fp32, fp16 or bf16",
        ),
    ):
        assert run(*TRAINED, *flags) == 2
        assert said in capsys.readouterr().err
