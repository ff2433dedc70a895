"""What the TensorRT worker takes from files: timing caches, engines, requests, answers; damaged, or of another."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import fuzzing
import numpy as np
import pytest
from fake_tensorrt import built, pretend, small_model

from smcp_fx.backends.tensorrt.worker.building import BuildOptions
from smcp_fx.backends.tensorrt.worker.client import InProcess
from smcp_fx.backends.tensorrt.worker.main import FORMAT, _measure, read_requests, work_off
from smcp_fx.backends.tensorrt.worker.problems import WorkerError, cache_folder
from smcp_fx.errors import TableError
from smcp_fx.latency.tensorrt_requests import device_fingerprint, read_answers

JOB = {"id": "a", "onnx": "a.onnx", "options": {}}
ABOUT = {"device": "D", "tensorrt": "8.6.1", "driver": "1", "compute_capability": "9.0"}
MEASURED = {"median_ms": 1.0, "q1_ms": 1.0, "q3_ms": 1.0, "repeats": 9, "stable": True}


def test_the_timing_cache_is_read_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    for name in ("first", "second"):
        built(InProcess(), small_model(tmp_path / "m.onnx", first=name))
    assert next(tmp_path.glob("*.cache")).read_bytes() == b"first;second;"


@pytest.mark.parametrize("content", [b"damaged", b"of another GPU;"])
def test_a_timing_cache_that_cannot_be_used_is_begun_afresh(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    cache = tmp_path / "timing-8.5.3.1-Pretend_GPU-9.0.cache"
    cache.write_bytes(content)
    built(InProcess(), small_model(tmp_path / "m.onnx"))
    assert cache.read_bytes() == b"conv1;"


def test_builders_beside_each_other_share_a_timing_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    workers = [InProcess(), InProcess()]
    for name, worker in (("a", workers[0]), ("b", workers[1]), ("c", workers[0])):
        built(worker, small_model(tmp_path / "m.onnx", first=name))
    content = next(tmp_path.glob("*.cache")).read_bytes()
    assert sorted(content.rstrip(b";").split(b";")) == [b"a", b"b", b"c"]


def test_memory_is_given_back_where_it_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    worker, model = InProcess(), small_model(tmp_path / "m.onnx")
    cuda = importlib.import_module("cuda.bindings.runtime")
    malloc = cuda.cudaMalloc
    before = len(cuda._buffers)

    def full(size: int) -> tuple[Any, ...]:
        taken = len(cuda._buffers) > before
        return (cuda.cudaError_t.cudaErrorMemoryAllocation, 0) if taken else malloc(size)

    monkeypatch.setattr(cuda, "cudaMalloc", full)
    with pytest.raises(WorkerError, match=r"the GPU's memory is full\. Use a smaller batch"):
        built(worker, model)
    assert len(cuda._buffers) == before
    monkeypatch.setattr(cuda, "cudaMalloc", malloc)
    job = {"id": "a", "onnx": model.name, "options": {}, "timing": {"speed": "high"}}
    with pytest.raises(WorkerError, match="speed"):
        _measure(tmp_path, job, worker, prebuilt=False)
    assert len(cuda._buffers) == before


def test_buffers_are_filled_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    device = importlib.import_module("smcp_fx.backends.tensorrt.worker.device").Device()
    pool, found = np.arange(1, 8, dtype=np.uint16), np.zeros(40, np.uint16)
    address = device("cudaMalloc", 80)
    device.fill(address, pool, 74)
    device.download(found, address)
    assert found.tolist() == [*np.resize(pool, 37), 0, 0, 0]


@pytest.mark.parametrize(("version", "gpu"), [("8.6.1", ""), ("8.5.3.1", "Other GPU")])
@pytest.mark.parametrize("described", [True, False])
def test_engines_of_other_devices_and_versions_are_refused(
    version: str, gpu: str, described: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = tmp_path / "m.engine"
    pretend(monkeypatch)
    built(InProcess(), small_model(tmp_path / "m.onnx"), engine)
    pretend(monkeypatch, version, **({"FAKE_GPU": gpu} if gpu else {}))
    if not described:
        (tmp_path / "m.engine.json").unlink()
    with pytest.raises(
        WorkerError, match=r"another device or version|cannot load.*not compatible.*build it again"
    ):
        InProcess().ask("load", engine=str(engine), key="e")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (lambda plan, text: (plan[:-9], text), r"its description says \d+: it was cut off or changed"),
        (lambda plan, text: (plan, text[:30]), "m.engine.json is damaged .* copy it again"),
        (lambda plan, text: (plan, "[]"), r"m\.engine\.json is damaged \(it holds no object\)"),
    ],
    ids=["engine", "description", "list"],
)
def test_files_that_were_cut_off_are_named(
    content: Any, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    engine, text = tmp_path / "m.engine", tmp_path / "m.engine.json"
    built(InProcess(), small_model(tmp_path / "m.onnx"), engine)
    left = content(engine.read_bytes(), text.read_text())
    engine.write_bytes(left[0])
    text.write_text(left[1])
    with pytest.raises(WorkerError, match=told):
        InProcess().ask("load", engine=str(engine), key="e")


def test_the_lean_runtime_runs_version_compatible_engines_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, "8.6.1")
    model = small_model(tmp_path / "m.onnx")
    for name in ("plain", "lean"):
        built(InProcess(), model, tmp_path / f"{name}.engine", lean=name == "lean")
    pretend(monkeypatch, "10.16.1.11")
    worker = InProcess(lean=True)
    assert worker.ask("about")["tensorrt"] == "10.16.1.11"
    worker.ask("load", engine=str(tmp_path / "lean.engine"), key="e")
    assert worker.ask("measure", key="e")["measured"]["median_ms"] > 0
    with pytest.raises(
        WorkerError, match=r"tensorrt_lean runs version-compatible ones only: build it from m\.onnx"
    ):
        worker.ask("load", engine=str(tmp_path / "plain.engine"), key="p")
    with pytest.raises(WorkerError, match=r"tensorrt_lean 10.16.1.11 only runs engines"):
        built(worker, model)
    built(InProcess(), model, tmp_path / "newer.engine", version_compatible=True)
    pretend(monkeypatch, "8.6.1")
    with pytest.raises(WorkerError, match=r"another device or version \(tensorrt 10.16.1.11, here 8.6.1\)"):
        InProcess(lean=True).ask("load", engine=str(tmp_path / "newer.engine"), key="n")


@pytest.mark.parametrize(
    ("requests", "told"),
    [
        (None, "there is no .*requests.json: smcp-table measure --emit-requests"),
        ([], "requests.json is damaged"),
        ({"version": 2, "jobs": []}, "not a file of requests of version 1"),
        ({}, "request 0 is none"),
        ({"jobs": {"a": JOB}}, "request 0 is none"),
        ({"jobs": [JOB, {**JOB, "options": []}]}, "request 1 is none"),
        ({"jobs": [{"id": "a"}]}, r"request 0 is none \(id, onnx and options\)"),
    ],
)
def test_requests_that_are_none_are_refused(requests: Any, told: str, tmp_path: Path) -> None:
    if requests is not None:
        whole = {"format": FORMAT, "version": 1, **requests} if isinstance(requests, dict) else requests
        (tmp_path / "requests.json").write_text(json.dumps(whole))
    with pytest.raises(WorkerError, match=told):
        read_requests(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"id": "../../../x"}, "the id '../../../x' may hold letters"),
        ({"id": "/tmp/x"}, "may hold letters"),
        ({"id": ".."}, "may hold letters"),
        ({"id": "a\n"}, "may hold letters"),
        ({"id": ""}, "may hold letters"),
        ({"id": "x" * 101}, "may hold letters"),
        ({"id": "ａ"}, "may hold letters"),
        ({"onnx": "/etc/hostname"}, "lies outside of"),
        ({"onnx": "../a.onnx"}, "lies outside of"),
        ({"onnx": "models/../../a.onnx"}, "lies outside of"),
        ({"onnx": "link/a.onnx"}, "lies outside of"),
        ({"onnx": "a\0b"}, "null byte"),
        ({"engine": "/tmp/a.engine"}, "lies outside of"),
        ({"engine": "../a.engine"}, "lies outside of"),
        ({"engine": "link/a.engine"}, "lies outside of"),
        ({"engine": "requests.json"}, "must end in .engine"),
        ({"engine": 3}, "engine is 3"),
        ({"name": []}, r"name is \[\]"),
        ({"timing": "fast"}, "timing is 'fast'"),
        ({"nodes": {}}, "nodes is {}"),
    ],
    ids=str,
)
def test_requests_reach_nothing_outside_of_their_folder(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = tmp_path / "todo"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    requests = {"format": FORMAT, "version": 1, "jobs": [JOB, {**JOB, "id": "b", **change}]}
    (folder / "requests.json").write_text(json.dumps(requests))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(WorkerError, match=f"request 1 is none .*{told}"):
        work_off(folder, [], ABOUT, print)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["answers", "engines", "cache"])
def test_links_of_the_folder_are_followed_before_anything_is_written(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    folder, outside = tmp_path / "todo", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / name).symlink_to(outside)
    small_model(folder / "a.onnx")
    (folder / "requests.json").write_text(json.dumps({"format": FORMAT, "version": 1, "jobs": [JOB]}))
    worker = InProcess()
    about = {key: value for key, value in worker.ask("about").items() if key != "ok"}
    if name == "cache":
        assert work_off(folder, [worker], about, print) == 1
        assert "lies outside of" in json.loads((folder / "answers" / "a.json").read_text())["error"]
    else:
        with pytest.raises(WorkerError, match="lies outside of"):
            work_off(folder, [worker], about, print)
    assert not list(outside.iterdir())


def test_two_requests_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "requests.json").write_text(json.dumps({"format": FORMAT, "version": 1, "jobs": [JOB, JOB]}))
    with pytest.raises(WorkerError, match=r"request 1 is none .*another has the id 'a', too"):
        read_requests(tmp_path)


def test_an_answer_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    small_model(tmp_path / "a.onnx")
    (tmp_path / "answers").write_text("a file where the folder belongs")
    (tmp_path / "requests.json").write_text(json.dumps({"format": FORMAT, "version": 1, "jobs": [JOB]}))
    with pytest.raises(WorkerError, match=r"cannot write .*answers"):
        work_off(tmp_path, [InProcess()], ABOUT, print)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"precision": []}, "precision"),
        ({"tf32": 1}, "tf32"),
        ({"batch": 3}, "batch"),
        ({"batch": [1, "2", 3]}, "batch"),
        ({"workspace_mib": True}, "workspace_mib"),
        ({"optimization_level": "5"}, "optimization_level"),
        ({"tactic_sources_off": [1]}, "tactic_sources_off"),
    ],
    ids=str,
)
def test_options_of_another_type_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(WorkerError, match=told):
        BuildOptions.from_json(options)


def test_timing_caches_are_kept_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cache_folder() == tmp_path / "smcp_fx"


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_a_damaged_device_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "requests.json").write_text(json.dumps({"format": FORMAT, "version": 1, "jobs": []}))
    (tmp_path / "device.json").write_text(content)
    with pytest.raises(WorkerError, match=r"device\.json is damaged"):
        work_off(tmp_path, [], {}, print)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"measured": {"median_ms": 1.0}}, "KeyError"),
        ({"measured": None}, "TypeError"),
        ({"measured": {**MEASURED, "median_ms": float("nan")}}, "hot_ms is nan"),
        ({"finished": None}, "its time is None"),
        ({"about": []}, "TypeError"),
        ({"id": "b"}, "it answers another request"),
        ({"build": {"options": {"precision": "fp32"}}}, "it answers another request"),
        ({"build": 3}, "TypeError"),
    ],
)
def test_bad_answers_are_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    options = {"precision": "fp16"}
    job = {"id": "a", "onnx": "a.onnx", "options": options, "signature": "s", "block": "b", "widths": [8]}
    requests = {"format": FORMAT, "version": 1, "options": options, "jobs": [job]}
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    answer = {"id": "a", "about": ABOUT, "measured": MEASURED, "finished": 1.0, "build": {"options": options}}
    file = tmp_path / "answers" / "a.json"
    file.parent.mkdir()
    file.write_text(json.dumps(answer))
    assert [row.latency.hot.median_ms for row in read_answers(tmp_path).rows if row.latency] == [1.0]
    file.write_text(json.dumps({**answer, **change}))
    with pytest.raises(
        TableError, match=f"a.json is no answer, or was cut off: .*{told}.* from the device again"
    ):
        read_answers(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{}", '{"device": '])
def test_a_bad_device_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(content)
    with pytest.raises(TableError, match=r"device\.json is damaged"):
        device_fingerprint(tmp_path, BuildOptions())


@pytest.mark.parametrize("name", ["m.engine", "m.engine.json", "timing-8.5.3.1-Pretend_GPU-9.0.cache"])
def test_damaged_engines_descriptions_and_caches_are_told_or_harmless(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As many as ``SMCP_FX_FUZZ`` says; what TensorRT itself makes of a plan is not tried here, it is a stand-in."""
    pretend(monkeypatch)
    model, worker = small_model(tmp_path / "m.onnx"), InProcess()
    built(worker, model, tmp_path / "m.engine")
    whole = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def read(changed: bytes) -> None:
        for file, content in whole.items():
            file.write_bytes(content)
        (tmp_path / name).write_bytes(changed)
        if name.endswith(".cache"):
            built(InProcess(), model)
        else:
            worker.ask("load", engine=str(tmp_path / "m.engine"), key="e")
            worker.ask("unload", key="e")

    mutators = (fuzzing.of_bytes, fuzzing.of_json) if name.endswith(".json") else (fuzzing.of_bytes,)
    failed, held = fuzzing.kinds_of_failure(
        (tmp_path / name).read_bytes(), mutators, read, (WorkerError,), fuzzing.cases(100)
    )
    assert not failed
    assert held["read" if name.endswith(".cache") else "refused"] > 10
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".part"]
