"""The TensorRT worker on stand-ins of four API generations; and the names it uses, held against real bindings."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_tensorrt import RECORD, VERSIONS, built, pretend, small_model
from onnx import helper

from smcp_fx.backends.tensorrt.worker import building
from smcp_fx.backends.tensorrt.worker.client import InProcess, WorkerProcess, archive
from smcp_fx.backends.tensorrt.worker.main import FORMAT
from smcp_fx.backends.tensorrt.worker.problems import WorkerDied, WorkerError

SOURCES = sorted(Path(building.__file__).parent.glob("*.py"))
FP16, FP32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
#: What the code asks for before it uses it, or uses only from this version on: (class, name).
SINCE = {
    ("BuilderFlag", "VERSION_COMPATIBLE"): (8, 6), ("BuilderFlag", "EXCLUDE_LEAN_RUNTIME"): (8, 6),
    ("IBuilderConfig", "builder_optimization_level"): (8, 6), ("Runtime", "engine_host_code_allowed"): (8, 6),
    ("ParserError", "node_name"): (10, 0), ("ParserError", "node_operator"): (10, 0),
}  # fmt: skip
UNTIL = {
    ("NetworkDefinitionCreationFlag", "EXPLICIT_BATCH"): (10, 0), ("ILayer", "precision"): (11, 0),
    ("BuilderFlag", "PREFER_PRECISION_CONSTRAINTS"): (11, 0),
}  # fmt: skip
CLASSES = {
    "_builder": "Builder", "builder": "Builder", "network": "INetworkDefinition", "config": "IBuilderConfig",
    "parser": "OnnxParser", "profile": "IOptimizationProfile", "engine": "ICudaEngine", "_engine": "ICudaEngine",
    "context": "IExecutionContext", "_context": "IExecutionContext", "inspector": "EngineInspector",
    "_runtime": "Runtime", "layer": "ILayer", "tensor": "ITensor",
}  # fmt: skip


def names_used() -> set[tuple[str, str]]:
    """(class, name) of TensorRT's API in building.py, running.py and serving.py, by the names of variables."""
    found = set()
    for source in SOURCES:
        if source.stem not in ("building", "running", "serving"):
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            value = node.value
            last = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
            if last in RECORD[VERSIONS[0]] and last not in ("ILogger", "IProfiler"):
                found.add((last, node.attr))
            elif last in CLASSES and not (source.stem == "serving" and last != "_runtime"):
                found.add((CLASSES[last], node.attr))
    own = {("Builder", name) for name in ("build", "cache")} | {("ILayer", "get"), ("ITensor", "items")}
    return found - own


@pytest.mark.parametrize("version", RECORD)
def test_every_name_of_the_api_is_in_the_real_bindings(version: str) -> None:
    used, at = names_used(), tuple(int(part) for part in version.split(".")[:2])
    assert len(used) > 40
    missing = {
        (cls, name)
        for cls, name in used
        if name not in RECORD[version][cls]
        and SINCE.get((cls, name), (0, 0)) <= at < UNTIL.get((cls, name), (99, 0))
    }
    assert not missing
    for precision, layouts in building._LAYOUTS.items():
        assert set(layouts) <= set(RECORD[version]["TensorFormat"])
        assert building.PRECISIONS[precision] in RECORD[version]["DataType"] or (precision, at) < (
            "bg",
            (10, 0),
        )


def test_the_installed_bindings_are_as_recorded() -> None:
    trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed: the recorded names are used")
    if Path(__file__).parent in Path(trt.__file__).parents:
        pytest.skip("TensorRT is not installed: another test of this process has imported its stand-in")
    if not hasattr(trt, "Builder") or trt.__version__ not in RECORD:
        pytest.skip(f"TensorRT {trt.__version__} is not recorded: tools/record_tensorrt_names.py")
    for cls, names in RECORD[trt.__version__].items():
        assert not [name for name in names if not hasattr(getattr(trt, cls), name)], cls


def test_every_cuda_name_is_in_the_installed_bindings() -> None:
    show = "import json, cuda.bindings.runtime as r; found = dir(r)\n"
    show += "for kind in list(vars(r).values()): found += getattr(kind, '__members__', ())\nprint(json.dumps(found))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, env=environment, timeout=60
    )
    if done.returncode:
        pytest.skip("cuda-bindings is not installed")
    used = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", None)
            if isinstance(text, str) and re.fullmatch(r"cuda[A-Z]\w+", text) and text != "cudaDevAttr":
                used.add(text)
    assert len(used) > 25 and not used - set(json.loads(done.stdout))


def test_the_worker_imports_nothing_but_numpy_and_the_bindings(tmp_path: Path) -> None:
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "numpy"}, (source.name, name)
    done = subprocess.run(
        [sys.executable, "-I", str(archive(tmp_path / "w.pyz")), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "--builders" in done.stdout
    without_numpy = [sys.executable, "-S", str(tmp_path / "w.pyz"), "--help"]  # -S: nothing but the library
    done = subprocess.run(
        without_numpy, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 1 and "numpy is not installed for" in done.stderr
    old = "import runpy, sys; sys.version_info = (3, 8, 10); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", old, str(tmp_path / "w.pyz")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "Python 3.10 or newer is needed, this is 3.8" in done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_an_engine_is_built_run_timed_and_read_back(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, version)
    model = small_model(tmp_path / "m.onnx", FP16)
    worker = InProcess()
    about = worker.ask("about")
    assert (about["tensorrt"], about["device"], about["compute_capability"]) == (
        version,
        "Pretend GPU",
        "9.0",
    )
    told = built(
        worker, model, tmp_path / "m.engine", precision="fp16", tactic_sources_off=["CUBLAS", "CUDNN"]
    )
    assert (told["types"], told["nodes"], told["tf32"]) == ({"fp16": 2}, ["conv1", "relu", "conv2"], "off")
    header = json.loads((tmp_path / "m.engine").read_bytes().partition(b"\0")[0])
    weakly = version < "11" or version.startswith("8")
    assert header["flags"] == (["FP16", "PREFER_PRECISION_CONSTRAINTS"] if weakly else [])
    assert header["asked"] == (["HALF", "HALF"] if weakly else [])
    assert header["sources"] == (0b11010 if weakly else 0b11111)
    x = np.random.default_rng(1).normal(size=(2, 8, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x)
    worker.ask("run", key="e", inputs=str(tmp_path / "in.npz"), outputs=str(tmp_path / "out.npz"))
    expected = onnxruntime.InferenceSession(str(model)).run(None, {"x": x.astype(np.float16)})[0]
    assert np.array_equal(np.load(tmp_path / "out.npz")["arr_0"], expected.astype(np.float32))
    # the stand-in: 1e-3 ms a node, 1e-7 ms a weight, 2e-3 ms a launch
    work = 3e-3 + 2 * 576e-7
    alone = worker.ask("measure", key="e")["measured"]
    row = worker.ask("measure", key="e", timing={"repeated": True})["measured"]
    assert (alone["inner"], row["inner"], row["stable"]) == (1, 50, True)
    assert alone["median_ms"] == pytest.approx(work + 2e-3)
    assert row["median_ms"] == pytest.approx(work + 2e-3 / 50)
    enqueued = worker.ask("sample", key="e", graph=False, inner=10)["ms"]
    assert enqueued == pytest.approx([work + 2e-3])
    layers = worker.ask("layers", key="e", nodes=told["nodes"])["layers"]
    assert [layer["nodes"] for layer in layers] == [["conv1"], ["relu"], ["conv2"]]
    assert sum(layer["ms"] for layer in layers) == pytest.approx(work)
    assert len(list(tmp_path.glob(f"timing-{version}-Pretend_GPU-9.0.cache"))) == 1
    worker.ask("unload", key="e")
    with pytest.raises(WorkerError, match="no engine 'e' is loaded"):
        worker.ask("measure", key="e")


def test_a_block_takes_any_layout_or_says_that_it_could_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    model = small_model(tmp_path / "m.onnx", FP16)
    built(InProcess(), model, tmp_path / "m.engine", precision="fp16", block=True)
    assert json.loads((tmp_path / "m.engine").read_bytes().partition(b"\0")[0])["opened"]
    pretend(monkeypatch, FAKE_FAULT="layouts")
    told = built(InProcess(), model, tmp_path / "m.engine", precision="fp16", block=True)
    assert told["notes"] == ["plain layouts: no kernel takes the others"]


def test_an_open_batch_needs_a_profile_and_keeps_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    model, engine, worker = small_model(tmp_path / "m.onnx", batch=0), tmp_path / "m.engine", InProcess()
    with pytest.raises(WorkerError, match="leaves the batch open"):
        built(worker, model)
    assert built(worker, model, engine, batch=[1, 4, 8])["inputs"][0]["shape"] == [4, 8, 6, 6]
    shape = worker.ask("load", engine=str(engine), key="e", batch=8)["engine"]["outputs"][0]["shape"]
    assert shape == [8, 8, 6, 6]
    with pytest.raises(WorkerError, match=r"takes no input 'x' of shape \(9, 8, 6, 6\)"):
        worker.ask("load", engine=str(engine), key="e", batch=9)


@pytest.mark.parametrize("version", VERSIONS)
def test_another_precision_than_asked_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, version, FAKE_FAULT="fp32")
    engine = tmp_path / "m.engine"
    with pytest.raises(
        WorkerError, match="2 of 2 convolutions and products do not compute in fp16: conv1 in fp32"
    ):
        built(InProcess(), small_model(tmp_path / "m.onnx", FP16), engine, precision="fp16")
    assert not engine.exists()


def test_from_11_on_the_file_decides_the_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "11.4.0.106")
    with pytest.raises(WorkerError, match="fp16 was asked for, and the ONNX file is in FLOAT"):
        built(InProcess(), small_model(tmp_path / "m.onnx"), precision="fp16")


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("8.5.3.1", {"precision": "bf16"}, "TensorRT 8.5.3.1 has no bf16"),
        ("8.5.3.1", {"version_compatible": True}, "come with TensorRT 8.6"),
        ("8.5.3.1", {"optimization_level": 3}, "comes with TensorRT 8.6"),
        ("8.6.1", {"precision": "int4"}, "precision 'int4': choose from fp32, fp16, bf16"),
        ("8.6.1", {"speed": "high"}, "knows no build options speed"),
        ("8.6.1", {"tactic_sources_off": ["CUBLASS"]}, "no tactic source 'CUBLASS'"),
        ("8.6.1", {"batch": [1, 2]}, r"batch \[1, 2\]: give \[least, usual, largest\]"),
        ("8.6.1", {"batch": [4, 2, 8]}, r"batch \[4, 2, 8\]: give"),
    ],
)
def test_options_that_do_not_fit(
    version: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(WorkerError, match=message):
        built(InProcess(), small_model(tmp_path / "m.onnx"), **options)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_parser_error_is_told(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, version)
    ends = [helper.make_tensor_value_info(n, FP32, s) for n, s in (("x", [2, 3, 3]), ("y", [2]), ("z", [2]))]
    nodes = [helper.make_node("Det", ["x"], [name], f"det_{name}") for name in ("y", "z")]
    graph = helper.make_graph(nodes, "odd", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "odd.onnx")
    with pytest.raises(
        WorkerError, match=r"cannot read odd.onnx: node 0.*No importer.*node 1.*Replace the operation"
    ) as e:
        built(InProcess(), tmp_path / "odd.onnx")
    assert ("'det_z' (Det)" in str(e.value)) == (not version.startswith("8"))


@pytest.mark.parametrize(
    ("code", "told"), [("35", "no NVIDIA driver, or one older"), ("100", "no NVIDIA GPU")]
)
def test_no_driver_and_no_gpu(code: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FAKE_CUDA=code)
    with pytest.raises(WorkerError, match=f"{told}.*nvidia-smi.*--emit-requests"):
        InProcess()


def test_missing_packages_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        WorkerError, match=r"tensorrt is not installed for .*pip install tensorrt.*pypi\.nvidia\.com"
    ):
        InProcess()


# ---- as a process, and on a folder ------------------------------------------------------------------------------


def test_a_builder_that_dies_fails_one_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, FAKE_FAULT="crash:bad")
    names = ("good", "bad", "fine")
    for name in names:
        small_model(tmp_path / f"{name}.onnx", first=name)
    jobs = [{"id": n, "onnx": f"{n}.onnx", "options": {}, "layers": n == "fine"} for n in names]
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ntest "$1" = --id=0000:0A:00.0 && echo "1980, 2619, 1980, 2619, 41, 120.50"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "requests.json").write_text(json.dumps({"format": FORMAT, "version": 1, "jobs": jobs}))
    command = [sys.executable, str(archive(tmp_path / "w.pyz")), str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert first.returncode == 1, first.stderr
    assert "3 requests in" in first.stdout and "1 failed" in first.stdout
    answers = {n: json.loads((tmp_path / "answers" / f"{n}.json").read_text()) for n in names}
    assert "killed by SIGKILL; SIGKILL is mostly the system short of memory" in answers["bad"]["error"]
    assert answers["good"]["measured"]["stable"] and len(answers["fine"]["layers"]) == 3
    assert (
        answers["good"]["clocks"]["clocks.sm"] == "1980"
        and answers["good"]["clocks"]["power.draw"] == "120.50"
    )
    assert not list(tmp_path.glob("engines/*"))
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0 and "0 requests, 3 are answered" in again.stdout
    other = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "FAKE_GPU": "B"}
    )
    assert (
        other.returncode == 2
        and "answers of another device or version (device: Pretend GPU, here B)" in other.stderr
    )


def test_an_engine_file_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "8.6.1")
    engine = tmp_path / "m.engine"
    built(InProcess(), small_model(tmp_path / "m.onnx"), engine, lean=True)
    header = json.loads(engine.read_bytes().partition(b"\0")[0])
    assert {"VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"} <= set(header["flags"])
    command = [sys.executable, str(archive(tmp_path / "w.pyz")), "--engine", str(engine)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    told = json.loads(done.stdout)
    work = 3e-3 + 2 * 576e-7
    assert told["alone"]["median_ms"] == pytest.approx(work + 2e-3)
    assert told["in a row"]["median_ms"] == pytest.approx(work + 2e-3 / 50)
    assert told["engine"]["inputs"][0]["shape"] == [2, 8, 6, 6]


def test_an_onnx_file_is_built_and_measured_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, "8.6.1", HOME=str(tmp_path))
    model = small_model(tmp_path / "m.onnx", batch=0)
    command = [sys.executable, str(archive(tmp_path / "w.pyz")), "--onnx", str(model), "--batch", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    told = json.loads(done.stdout)
    assert (tmp_path / "m.engine").exists() and told["file"] == str(tmp_path / "m.engine")
    assert told["build"] == json.loads((tmp_path / "m.engine.json").read_text())
    assert told["engine"]["inputs"][0]["shape"] == [3, 8, 6, 6] and told["build"]["types"] == {"fp16": 2}
    assert told["alone"]["median_ms"] == pytest.approx(3e-3 + 2 * 576e-7 + 2e-3)
    assert [layer["nodes"] for layer in told["layers"]] == [["conv1"], ["relu"], ["conv2"]]


def test_an_interrupted_question_leaves_no_answer_for_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = "import sys, time, json\nfor n, line in enumerate(sys.stdin):\n"
    slow += "    time.sleep(0.2)\n    print(json.dumps({'ok': True, **json.loads(line)}), flush=True)\n"
    worker = WorkerProcess([sys.executable, "-c", slow])
    worker.ask("first")
    with monkeypatch.context() as patch:

        def interrupt(timeout: float) -> str:
            raise KeyboardInterrupt

        patch.setattr(worker, "_answers", SimpleNamespace(get=interrupt))
        with pytest.raises(KeyboardInterrupt):
            worker.ask("second")
    assert worker.ask("third")["op"] == "third"
    worker.close()


def test_a_builder_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, FAKE_FAULT="hang:conv1")
    model = small_model(tmp_path / "m.onnx")
    worker = WorkerProcess([sys.executable, str(archive(tmp_path / "w.pyz")), "--serve"])
    worker.ask("about")
    with pytest.raises(WorkerDied, match="gave no answer to 'build' within 1 s"):
        worker.ask("build", timeout_s=1.0, onnx=str(model), options={})
    worker.close()


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="cannot start the TensorRT worker with '/no/python'"):
        WorkerProcess(["/no/python", "--serve"]).ask("about")
    dying = WorkerProcess([sys.executable, "-c", "raise SystemExit('no libnvinfer')"])
    with pytest.raises(WorkerDied, match=r"\(exit code 1\): no libnvinfer"):
        dying.ask("about")
