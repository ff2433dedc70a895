"""The GPU's half hour: stages on stand-ins, cut and resumed; what a call runs; pages that say what is known."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from smcp_fx.backends import CompareConfig, get_backend, pytorch
from smcp_fx.backends.onnx import blocks
from smcp_fx.backends.timing.measuring import TimingConfig

_PATH = sys.path[:]
sys.path[:0] = [
    str(Path(__file__).parents[2] / "tools" / "bench"),
    str(Path(__file__).parents[1] / "backends"),
]
import fake_cuda  # noqa: E402
import fake_tensorrt  # noqa: E402
from gpu_hour import (  # noqa: E402
    compressing,
    pytorch_graphs,
    report,
    solvers,
    stages,
    targets,
    tensorrt_engines,
    tensorrt_rows,
    training_steps,
)
from gpu_hour.session import NoTimeError, Session, Settings  # noqa: E402
from gpu_hour.stages import STAGES, Stage, endings, run_next  # noqa: E402

sys.path[:] = _PATH

ONCE = TimingConfig(min_repeats=1, max_repeats=1, budget_ms=0.0, warmup_ms=0.0, attempts=1)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "state", device="cpu", small=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins' times are exact: one sample is enough."""
    monkeypatch.setattr(targets, "_COMPARE", CompareConfig(rounds=1, late_rounds=1, seconds=0.0))
    monkeypatch.setattr(pytorch_graphs, "KEEP", (0.5,))
    monkeypatch.setattr(tensorrt_engines, "KEEP", (0.5,))
    monkeypatch.setattr(tensorrt_engines, "_BUILD_S", 0.0)
    monkeypatch.setattr(pytorch, "_ROW", ONCE)
    monkeypatch.setattr(pytorch, "_MOST_IN_A_ROW", 2)


@pytest.fixture(scope="module")
def exported() -> dict[str, Any]:
    """What blocks were exported as, for all tests: an export takes half a second."""
    return {}


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch, exported: dict[str, Any]) -> None:
    """TensorRT's stand-in, in this process; blocks are not exported twice."""
    fake_tensorrt.pretend(monkeypatch)
    monkeypatch.setattr(tensorrt_rows, "get_backend", functools.partial(get_backend, in_process=True))
    export = blocks.export_side_by_side

    def once(built: list[Any], *more: Any) -> Any:
        key = str([(module.code, [tuple(x.shape) for x in inputs]) for module, inputs in built])
        if key not in exported:
            exported[key] = export(built, *more)
        return exported[key]

    monkeypatch.setattr(blocks, "export_side_by_side", once)


def names(settings: Settings) -> list[str]:
    """The figures of the record, in order."""
    return [line["figure"] for line in settings.record.find("figure")]


def values(settings: Settings, figure: str) -> dict[str, Any]:
    """A figure's last values."""
    found: dict[str, Any] = settings.record.find("figure", figure=figure)[-1]["values"]
    return found


# ---- stages on stand-ins ----------------------------------------------------------------------------------------


def test_pytorch_on_graphs_is_cut_among_its_rows_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: None
) -> None:
    fake_cuda.pretend(monkeypatch)
    settings = Settings(tmp_path, small=True)
    watched = list[int]()

    def watch(self: Session, state: Any) -> None:
        watched.append(state.measured)
        if len(watched) == 5:
            raise NoTimeError("the fifth row")

    monkeypatch.setattr(Session, "watch", watch)
    measure, asked_rows = pytorch.TorchBackend.block_latency, list[Any]()

    def fails_once(self: pytorch.TorchBackend, *row: Any) -> Any:
        asked_rows.append(row)
        if len(asked_rows) == 3:
            raise RuntimeError("out of memory")
        return measure(self, *row)

    monkeypatch.setattr(pytorch.TorchBackend, "block_latency", fails_once)
    for seconds in (60, 60):
        Session("pytorch-mobilenet_v2", settings, seconds).run(pytorch_graphs.mobilenet_v2)
    assert [line["how"] for line in settings.record.find("end")] == ["cut", "whole"]
    assert names(settings).count("dense") == 1
    rows = [line["values"] for line in settings.record.find("figure", figure="first rows")]
    assert rows[0]["measured"] == 6  # five, and what a run costs by itself
    assert rows[1]["rows_before"] == 5  # the one that failed is measured again
    for asked in (0.5, 0.3):
        found = values(settings, f"target {asked}")
        assert found["met"] and abs(found["measured"] - asked) <= 0.02
    assert values(settings, "check")["networks"] == 2 and values(settings, "check")["failed"] == 0
    assert values(settings, "dense")["fingerprint"]["settings"]["layout"] == "channels last"
    page = report.page(settings.record.lines)
    assert "| Stand-in GPU | PyTorch" in page and "Not measured yet: TensorRT's rows" in page


def test_tensorrt_chooses_its_builders_and_reaches_a_target(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, quick: None, tensorrt: None
) -> None:
    monkeypatch.setattr(tensorrt_rows, "BUILDERS", (1, 2))
    monkeypatch.setattr(tensorrt_rows, "ROWS", 2)
    for name in ("no kernels compiled", "level 2"):
        monkeypatch.delitem(tensorrt_rows.EFFORTS, name)
    assert Session("tensorrt-rows", settings, 60).run(tensorrt_rows.rows) == "whole"
    choice = values(settings, "choice")
    assert choice["builders"] in (1, 2) and choice["multiple"] == 8
    assert not any(name.startswith("effort level") for name in names(settings))  # they come with 8.6
    assert Session("tensorrt-resnet18", settings, 60).run(tensorrt_engines.resnet18) == "whole"
    assert values(settings, "target 0.5")["met"]
    assert values(settings, "check")["networks"] == 2 and values(settings, "check")["mean_error"] < 0.05
    lines = settings.record.lines
    assert all(line["versions"]["tensorrt"] == "8.5.3.1" for line in lines if line["kind"] == "end")
    assert set(report.has_run(lines)) == {"engines", "tables", "targets"}
    assert "What a row of TensorRT costs" in report.page(lines)


def test_int8_tells_types_and_outputs_and_prunes_by_its_rows(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, quick: None, tensorrt: None
) -> None:
    assert Session("int8", settings, 100).run(tensorrt_engines.int8) == "whole"
    found = values(settings, "outputs")
    assert found["build"]["types"] == {"int8": 5} and found["relative_error"] < 0.08
    assert values(settings, "target 0.5")["met"]
    assert "| INT8 |" in report.page(settings.record.lines)
    assert "INT8" in report.has_run(settings.record.lines)


def test_solvers_and_compress_tell_equal_answers_and_parts(settings: Settings) -> None:
    assert Session("solvers", settings, 60).run(solvers.solvers) == "whole"
    assert values(settings, "knapsack random-38x64")["same_choices"]
    assert values(settings, "allocation resnet50")["same_counts"]
    assert Session("compress", settings, 60).run(compressing.resnet50) == "whole"
    parts = values(settings, "512 images")["parts"]
    assert list(parts) == ["prepare", "gather importances", "solve", "convert", "repair"]
    page = report.page(settings.record.lines)
    assert "## Solvers" in page and "| 4 images | repair |" in page


def test_training_steps_are_cut_and_resumed_by_kind(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    asked = list[str]()

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command[command.index("--dtype") + 1])
        if len(asked) == 2:
            raise subprocess.TimeoutExpired(command, 1.0)
        one = {"ms": 2.0, "ratio": 1.0, "peak_mib": 100.0}
        told = {"batch": 128, "variants": {"plain": one, "default": {**one, "ratio": 1.1}},
                "solve_seconds": 0.1, "solve_share": 0.01}  # fmt: skip
        Path(command[command.index("--json") + 1]).write_text(json.dumps(told), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(training_steps.subprocess, "run", run)
    assert Session("training", settings, 60).run(training_steps.eager) == "cut"
    assert Session("training", settings, 60).run(training_steps.eager) == "whole"
    assert asked == ["bf16", "fp16", "fp16"]
    assert "| eager, fp16, batch 128 | 2.0 ms | 1.100 |" in report.page(settings.record.lines)


# ---- what keeps them going --------------------------------------------------------------------------------------


def test_a_figure_is_measured_once_a_device_and_an_error_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    asked = list[str]()

    def work(session: Session) -> None:
        session.attempt("bad", lambda: {"ms": 1 / len(asked[:0])})
        session.figure("good", lambda: asked.append("good") or {"ms": 1.0})

    for _ in range(2):
        assert Session("a", settings, 60).run(work) == "error"
    assert names(settings) == ["bad", "good", "bad"]
    assert asked == ["good"] and "ZeroDivisionError" in values(settings, "bad")["error"]
    monkeypatch.setattr(Settings, "device_name", property(lambda self: "another GPU"))
    Session("a", settings, 60).run(work)
    assert asked == ["good", "good"]


def test_time_ends_a_stage_in_the_middle_of_a_figure(settings: Settings) -> None:
    def work(session: Session) -> None:
        session.figure("first", lambda: {"ms": 1.0})
        session.figure("second", lambda: time.sleep(5) or {"ms": 2.0})

    began = time.monotonic()
    assert Session("a", settings, 0.2).run(work) == "cut"
    assert time.monotonic() - began < 4
    assert names(settings) == ["first"]


def test_a_call_runs_what_is_ready_and_fits(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = list[str]()
    monkeypatch.setattr(stages, "_apart", lambda stage, settings, seconds: ran.append(stage.name) or "ended")
    monkeypatch.setattr(Settings, "has_tensorrt", property(lambda self: "tensorrt-rows" in ran))
    large = Settings(settings.state, device="cpu")
    for name, how in (("pytorch-resnet50", "whole"), ("solvers", "error"), ("training", "cut")):
        large.record.add("end", stage=name, device=large.device_name, how=how)
    run_next(large, 100)
    assert ran == ["pytorch-mobilenet_v2", "training", "compress"]
    said = capsys.readouterr().out
    assert "tensorrt-rows: not now, there is no TensorRT yet" in said
    assert "training-compiled: not now, 100 s are left, it needs 120 s" in said
    ran[:] = ["tensorrt-rows"]
    run_next(large, 1000, ("solvers", "tensorrt-resnet50"), again=True)
    assert ran[1:] == ["tensorrt-resnet50", "solvers"]
    assert all(stage.most <= 480 for stage in STAGES)


def test_a_stage_that_does_not_end_is_ended_and_told(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(stages, "_GRACE", 0.2)
    monkeypatch.setattr(stages.subprocess, "Popen", lambda command, **more: start(["sleep", "60"], **more))
    stage = Stage("solvers", "solvers:solvers", 0, 1)
    assert "did not end" in stages._apart(stage, settings, 0.1)
    assert endings(settings) == {"solvers": "cut"}
    monkeypatch.setattr(stages.subprocess, "Popen", lambda command, **more: start(["false"], **more))
    assert stages._apart(stage, settings, 5) == "exit code 1"
    assert endings(settings) == {"solvers": "error"}


def test_the_least_effort_is_taken_that_is_quicker_and_gives_the_same_rows() -> None:
    def figure(seconds: float, ms: float, apart: float = 0.01) -> dict[str, Any]:
        return {"seconds_a_row": seconds, "ms": [ms, 2 * ms], "apart": apart}

    whole = {"as it is": figure(2.0, 1.0)}
    least = tensorrt_rows.least_effort
    assert least({**whole, "level 1": figure(1.0, 1.01), "level 2": figure(1.5, 1.0)}) == "level 1"
    for other in (figure(1.0, 1.1), figure(1.0, 1.0, 0.2), figure(1.9, 1.0), {"error": "no"}):
        assert least({**whole, "level 1": other}) == "as it is"
    assert least({"as it is": {"error": "no"}, "level 1": figure(1.0, 1.0)}) == "as it is"


# ---- pages ------------------------------------------------------------------------------------------------------


def test_the_pages_say_what_the_record_holds() -> None:
    lines = report.Record(report.RECORD).lines
    assert (report.ROOT / report.PAGE).read_text(encoding="utf-8") == report.page(lines)
    for name, text in report.MARKED.items():
        assert report.marked((report.ROOT / name).read_text(encoding="utf-8")) == text(lines), name


def test_what_is_claimed_follows_the_record() -> None:
    def line(stage: str, figure: str, **told: Any) -> dict[str, Any]:
        return {"kind": "figure", "stage": stage, "figure": figure, "device": "NVIDIA H100",
                "versions": {"tensorrt": "8.5.3.1", "torch": "2.11.0"}, "values": told}  # fmt: skip

    lines = list[dict[str, Any]]()
    assert report.sentence(lines) == "TensorRT: engines, tables, targets, INT8 on a stand-in only."
    assert report.guide(lines).startswith("!!! warning")
    for claim, found in (
        ("engines", line("tensorrt-resnet50", "dense", median_ms=1.0)),
        ("tables", line("tensorrt-resnet50", "check", networks=3)),
        ("targets", line("tensorrt-resnet50", "target 0.5", met=True)),
        ("INT8", line("int8", "outputs", relative_error=0.01)),
    ):
        assert claim not in report.has_run([*lines, {**found, "values": {"error": "no"}}])
        lines.append(found)
        assert list(report.has_run(lines)) == list(report.CLAIMS[: len(lines)])
    assert "stand-in" not in report.sentence(lines) and report.guide(lines).startswith("!!! note")
    assert report.readme(lines).startswith(
        "checked on an NVIDIA H100 with 8.5.3.1: engines, tables, targets, INT8 ("
    )
    missed = line("tensorrt-resnet50", "target 0.5", met=False)
    assert "targets" not in report.has_run([*lines[:2], missed])
