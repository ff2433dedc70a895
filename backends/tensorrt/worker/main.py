"""The worker's command line: answers a folder of requests, or another process.

FOLDER/requests.json names ONNX files and how to build and measure them. FOLDER/answers/ID.json is written as
each is done, so the same command continues an interrupted run. A separate process builds and measures: if it
dies, one request fails and a new process takes the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import PROTOCOL
from .building import PRECISIONS
from .client import WorkerProcess
from .problems import WorkerDied, WorkerError, cache_folder, read_object
from .serving import _write, serve

FORMAT = "smcp_fx tensorrt requests"
#: A request's id, which names its answer and engine files.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NEEDED = {"id": str, "onnx": str, "options": dict}
_OPTIONAL = {"engine": str, "name": str, "timing": dict, "nodes": list}
#: Engines that each builder makes before they are measured: an interruption loses no more than these.
_AHEAD = 8
_MOST_BUILDERS, _LONGEST_S = 64, 1e6
_LONGEST_WORD = 500


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the message, cut if it is very long, and exit with 2."""
        super().error(message if len(message) <= _LONGEST_WORD else f"{message[:_LONGEST_WORD]}...")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(
        prog="smcp-trt-worker",
        allow_abbrev=False,
        description="Build and measure TensorRT engines of the ONNX files that FOLDER/requests.json names. Needs "
        "Python 3.10 or newer, numpy, tensorrt and cuda-bindings, nothing else.",
    )
    parser.add_argument("folder", type=Path, nargs="?", help="folder with requests.json")
    parser.add_argument(
        "--about", action="store_true", help="say what TensorRT and GPU there are, as JSON, and end"
    )
    parser.add_argument(
        "--serve", action="store_true", help="answer JSON lines from standard input (for smcp_fx)"
    )
    parser.add_argument("--engine", type=Path, metavar="FILE",
                        help="measure an engine file that is there, say what it takes as JSON, and end")  # fmt: skip
    parser.add_argument("--onnx", type=Path, metavar="FILE",
                        help="build its engine beside an ONNX file, measure it, and tell that as JSON")  # fmt: skip
    parser.add_argument(
        "--precision", choices=tuple(PRECISIONS), default="fp16", help="of --onnx (default: fp16)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N",
                        help="of --onnx, where the file leaves it open (default: 1)")  # fmt: skip
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="which GPU (default: 0)")
    parser.add_argument("--lean", action="store_true", help="run engines with tensorrt_lean; builds nothing")
    parser.add_argument("--builders", type=int, default=1, metavar="N",
                        help="processes that build in parallel; one measures (default: 1)")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS",
                        help="give a request up after this long (default: 1800)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if requests failed, 2 for errors."""
    parser = build_parser()
    for text in sys.argv[1:] if argv is None else argv:
        if text.endswith("=--"):  # argparse would make a list of it
            parser.error(f"{text[:-3]}: expected one argument")
    arguments = parser.parse_args(argv)
    if arguments.serve:
        return serve(arguments.gpu, arguments.lean)
    files = (arguments.folder, arguments.engine, arguments.onnx)
    if not arguments.about and not any(files):
        parser.error("give the folder of requests, --onnx FILE, --engine FILE, or --about")
    if not 1 <= arguments.builders <= _MOST_BUILDERS or not 0 < arguments.timeout <= _LONGEST_S:
        parser.error(
            f"--builders must be from 1 to {_MOST_BUILDERS}, --timeout positive and at most {_LONGEST_S:g}"
        )
    command = [*_itself(), "--serve", "--gpu", str(arguments.gpu)] + (["--lean"] if arguments.lean else [])
    workers = [WorkerProcess(command, arguments.timeout) for _ in range(arguments.builders)]
    try:
        about = _about(workers[0])
        if arguments.about:
            print(json.dumps(about, indent=1))
            return 0
        if arguments.onnx is not None:
            built = _build_file(arguments.onnx, arguments.precision, arguments.batch, workers[0])
            print(json.dumps({"about": about, **built}, indent=1))
            return 0
        if arguments.engine is not None:
            print(json.dumps({"about": about, **_measure_file(arguments.engine, workers[0])}, indent=1))
            return 0
        return work_off(arguments.folder, workers, about, lambda text: print(text, flush=True))
    except WorkerError as error:
        print(f"smcp-trt-worker: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "smcp-trt-worker: interrupted; what is answered is kept, the same command goes on",
            file=sys.stderr,
        )
        return 130
    finally:
        for worker in workers:
            worker.close()


def work_off(
    folder: Path, workers: Sequence[WorkerProcess], about: dict[str, Any], say: Callable[[str], None]
) -> int:
    """Answer the folder's requests that have no answers yet; return 1 if any failed."""
    requests = read_requests(folder)
    _one_device(folder, about)
    jobs = [job for job in requests["jobs"] if not _answer_file(folder, job).exists()]
    done = len(requests["jobs"]) - len(jobs)
    say(f"{len(jobs)} requests" + (f", {done} are answered" if done else "") + f"; TensorRT {about['tensorrt']}, "
        f"{about['device']}")  # fmt: skip
    began, failed = time.monotonic(), 0
    unbuilt: dict[str, str] = {}
    for number, job in enumerate(jobs, 1):
        answer = {"id": job["id"], "about": about}
        if len(workers) > 1 and number % (_AHEAD * len(workers)) == 1:
            unbuilt = _build_beside(folder, jobs[number - 1 :][: _AHEAD * len(workers)], workers)
        try:
            if job["id"] in unbuilt:
                raise WorkerError(unbuilt[job["id"]])
            answer |= _measure(folder, job, workers[0], prebuilt=len(workers) > 1)
        except WorkerError as error:
            answer["error"] = str(error)
            failed += 1
        answer["finished"] = time.time()
        _write(_answer_file(folder, job), json.dumps(answer, indent=1).encode())
        told = (
            f"{answer['measured']['median_ms']:.4f} ms"
            if "measured" in answer
            else f"failed: {answer['error']}"
        )
        say(f"{number}/{len(jobs)} {job.get('name', job['id'])}: {told}")
    say(f"{len(jobs)} requests in {time.monotonic() - began:.0f} s, {failed} failed")
    return 1 if failed else 0


def read_requests(folder: Path) -> dict[str, Any]:
    """Return the folder's requests; `WorkerError` if they are missing, damaged or of another version."""
    file = folder / "requests.json"
    if not file.exists():
        raise WorkerError(f"there is no {file}: smcp-table measure --emit-requests writes it")
    requests = read_object(file, "it cannot be read, or was cut off; write it again")
    if requests.get("format") != FORMAT or requests.get("version") != PROTOCOL:
        raise WorkerError(
            f"{file} is not a file of requests of version {PROTOCOL}; write it with this version of smcp_fx"
        )
    jobs = requests.get("jobs")
    names = set[str]()
    for number, job in enumerate(jobs if isinstance(jobs, list) else [None]):
        wrong = _wrong_with(folder, job)
        if not wrong and job["id"] in names:
            wrong = f"another has the id {job['id']!r}, too"
        if wrong:
            raise WorkerError(f"{file}: request {number} is none ({wrong}): write it again")
        names.add(job["id"])
    return requests


def _wrong_with(folder: Path, job: Any) -> str:
    """Return what is wrong with a request, or "". Its files must lie in the folder."""
    if not isinstance(job, dict) or not all(
        isinstance(job.get(name), kind) for name, kind in _NEEDED.items()
    ):
        return ", ".join(list(_NEEDED)[:-1]) + f" and {list(_NEEDED)[-1]}"
    for name, kind in _OPTIONAL.items():
        if not isinstance(job.get(name), (kind, type(None))):
            return f"{name} is {repr(job[name])[:80]}"
    if not _ID.fullmatch(job["id"]):
        return f"the id {job['id'][:80]!r} may hold letters, digits, '.', '_' and '-' only"
    if job.get("engine") and not job["engine"].endswith(".engine"):
        return f"engine {job['engine'][:80]!r} must end in .engine"
    try:
        for file in (folder / job["onnx"], _engine_file(folder, job), _answer_file(folder, job)):
            _inside(folder, file)
    except (WorkerError, OSError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _inside(folder: Path, file: Path) -> Path:
    """Return ``file``; `WorkerError` if it lies outside the folder, links followed."""
    if not file.resolve().is_relative_to(folder.resolve()):
        raise WorkerError(f"{str(file)[:200]} lies outside of {folder}")
    return file


def _measure(folder: Path, job: dict[str, Any], worker: WorkerProcess, prebuilt: bool) -> dict[str, Any]:
    try:
        if prebuilt:
            built = worker.ask("load", engine=str(_engine_file(folder, job)), key="job")
        else:
            built = _build(folder, job, worker, "job")
        measured = worker.ask("measure", key="job", timing=job.get("timing"))
        found = {"build": built["build"], "measured": measured["measured"]}
        found["clocks"] = worker.ask("clocks")["clocks"]
        if job.get("layers"):
            found["layers"] = worker.ask("layers", key="job", nodes=job.get("nodes"))["layers"]
    except WorkerDied:
        raise
    except WorkerError:  # free its memory for the next engine
        with contextlib.suppress(WorkerError):
            worker.ask("unload", key="job")
        raise
    finally:
        if not job.get("engine"):
            _forget_engine(folder, job)
    worker.ask("unload", key="job")
    return found


def _build_file(onnx: Path, precision: str, batch: int, worker: WorkerProcess) -> dict[str, Any]:
    """Build an engine beside its ONNX file, and measure it and its layers."""
    if not onnx.is_file():
        raise WorkerError(f"there is no file {onnx}")
    engine, options = onnx.with_suffix(".engine"), {"precision": precision, "batch": [batch] * 3}
    cache = cache_folder()
    build = worker.ask("build", onnx=str(onnx), options=options, engine=str(engine), cache=str(cache))[
        "build"
    ]
    measured = _measure_file(engine, worker)
    layers = worker.ask("layers", key="file", nodes=build["nodes"])["layers"]
    return {"file": str(engine), "build": build, **measured, "layers": layers}


def _measure_file(engine: Path, worker: WorkerProcess) -> dict[str, Any]:
    """Measure an engine file: single runs, and runs in a row."""
    loaded = worker.ask("load", engine=str(engine), key="file")["engine"]
    sides = {"alone": {}, "in a row": {"repeated": True}}
    return {
        "engine": loaded,
        **{
            side: worker.ask("measure", key="file", timing=timing)["measured"]
            for side, timing in sides.items()
        },
    }


def _build(folder: Path, job: dict[str, Any], worker: WorkerProcess, key: str | None) -> dict[str, Any]:
    keep = key is None or job.get("engine")
    return worker.ask(
        "build", onnx=str(_inside(folder, folder / job["onnx"])), options=job["options"], key=key,
        cache=str(_inside(folder, folder / "cache")),
        engine=str(_engine_file(folder, job)) if keep else None,
    )  # fmt: skip


def _build_beside(
    folder: Path, jobs: Sequence[dict[str, Any]], workers: Sequence[WorkerProcess]
) -> dict[str, str]:
    """Build all engines with all workers in parallel; return the errors by request id."""
    left, failed, lock = list(jobs), dict[str, str](), threading.Lock()

    def build(worker: WorkerProcess) -> None:
        while True:
            with lock:
                if not left:
                    return
                job = left.pop(0)
            try:
                _build(folder, job, worker, None)
            except WorkerError as error:
                failed[job["id"]] = str(error)

    threads = [threading.Thread(target=build, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def _about(worker: WorkerProcess) -> dict[str, Any]:
    try:
        return {key: value for key, value in worker.ask("about").items() if key != "ok"}
    except WorkerDied as error:
        raise WorkerError(f"{error}. TensorRT and cuda-bindings must fit the driver's CUDA") from error


def _one_device(folder: Path, about: dict[str, Any]) -> None:
    """Refuse to mix answers of different devices or versions."""
    file = folder / "device.json"
    fixed = ("tensorrt", "device", "compute_capability", "driver")
    if file.exists():
        before = read_object(file, f"delete it if all answers in {folder} are this device's")
        other = [
            f"{name}: {str(before.get(name))[:200]}, here {about[name]}"
            for name in fixed
            if before.get(name) != about[name]
        ]
        if other:
            raise WorkerError(
                f"{folder} holds answers of another device or version ({'; '.join(other)}): latencies are not mixed. "
                "Use a copy of the folder without answers/ and device.json"
            )
    _write(file, json.dumps(about, indent=1).encode())


def _answer_file(folder: Path, job: dict[str, Any]) -> Path:
    return _inside(folder, folder / "answers" / f"{job['id']}.json")


def _engine_file(folder: Path, job: dict[str, Any]) -> Path:
    return _inside(folder, folder / str(job.get("engine") or f"engines/{job['id']}.engine"))


def _forget_engine(folder: Path, job: dict[str, Any]) -> None:
    file = _engine_file(folder, job)
    for path in (file, file.with_name(f"{file.name}.json")):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise WorkerError(f"cannot delete {path}: {error.strerror or error}") from error


def _itself() -> list[str]:
    """Return the command that runs this package again: the archive it came in, or the installed module."""
    inside = Path(__file__).parent.parent
    if inside.is_file():  # a zip file
        return [sys.executable, str(inside)]
    return [sys.executable, "-m", __package__ or "tensorrt_worker"]
