"""Latency rows measured elsewhere: ONNX files and requests for `smcp-trt-worker`, and its answers read back."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smcp_fx.backends.base import BlockLatency, Fingerprint
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.export import write_model
from smcp_fx.backends.tensorrt.answers import (
    OPSET,
    ROW_TIMING,
    fingerprint_of,
    measurement,
    tiny_model,
    written_block,
)
from smcp_fx.backends.tensorrt.worker import PROTOCOL
from smcp_fx.backends.tensorrt.worker.building import BuildOptions
from smcp_fx.backends.tensorrt.worker.client import archive
from smcp_fx.backends.tensorrt.worker.main import FORMAT, read_requests
from smcp_fx.backends.tensorrt.worker.problems import WorkerError
from smcp_fx.backends.timing.measuring import Measurement
from smcp_fx.errors import BackendError, TableError
from smcp_fx.latency import values
from smcp_fx.latency.store import TableRow
from smcp_fx.latency.table import RUN_SIGNATURE
from smcp_fx.storage.files import brief, parse_json, write_texts

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block

WORKER = "worker.pyz"
_AGAIN = "Take it from the device again, or delete it there and here to have it measured again"
_ALONE, _ROW = "run-alone", "run-in-a-row"


@dataclass(frozen=True)
class Answers:
    """The answers read: rows for the table, the number of unanswered requests, and the rows' device."""

    rows: tuple[TableRow, ...]
    unanswered: int
    fingerprint: Fingerprint | None


def emit_requests(
    folder: Path,
    wanted: Sequence[tuple[Block, Sequence[tuple[int, ...]]]],
    options: BuildOptions,
    *,
    retry_failed: bool = False,
) -> int:
    """Write ONNX files, requests and the worker itself into ``folder``; return how many rows are asked for.

    Requests that are already in the folder stay, with their answers; `TableError` if they have other options.
    ``retry_failed``: repeat the requests that were answered with an error, under new names, as the device has
    already answered the old ones.
    """
    options = replace(options, block=True)
    built = json.loads(json.dumps(asdict(options)))
    jobs: dict[str, dict[str, Any]] = {}
    if (folder / "requests.json").exists():
        before = _requests(folder)
        if before.get("options") != built:
            raise TableError(
                f"{folder} holds requests with other options ({before.get('options')}, not {built}): use another "
                "folder"
            )
        jobs = {job["id"]: job for job in before["jobs"]}
    models = BlockModels(OPSET)
    if _ALONE not in jobs:
        write_model(written_block(tiny_model(), options.precision), folder / "models" / "run.onnx")
        for number, repeated in ((_ALONE, False), (_ROW, True)):
            jobs[number] = {"id": number, "name": number, "onnx": "models/run.onnx", "options": built,
                            "timing": {"repeated": repeated}}  # fmt: skip
    rows = 0
    for block, points in wanted:
        for point in points:
            point_id = hashlib.sha256(json.dumps([block.signature, point]).encode()).hexdigest()[:16]
            number = _number(folder, point_id, jobs, retry_failed)
            rows += not _answer(folder, number).exists()
            if number in jobs:
                continue
            file = f"models/{point_id}.onnx"
            write_model(written_block(models.model(block, point), options.precision), folder / file)
            jobs[number] = {
                "id": number, "name": f"{block.name} {'x'.join(map(str, point))}", "onnx": file, "options": built,
                "timing": ROW_TIMING, "block": block.name, "signature": block.signature, "widths": list(point),
            }  # fmt: skip
    archive(folder / WORKER)
    record = {"format": FORMAT, "version": PROTOCOL, "options": built, "jobs": list(jobs.values())}
    write_texts({folder / "requests.json": json.dumps(record, indent=1)}, "the requests")
    return rows


def _answer(folder: Path, number: str) -> Path:
    return folder / "answers" / f"{number}.json"


def _read_answer(file: Path) -> dict[str, Any]:
    try:
        answer = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(answer, dict):
            raise TypeError("no JSON object")
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(file, error) from error
    return answer


def _unreadable(file: Path, error: Exception) -> TableError:
    return TableError(f"{file} is no answer, or was cut off: {type(error).__name__}: {error}. {_AGAIN}")


def _number(folder: Path, point_id: str, jobs: dict[str, dict[str, Any]], retry_failed: bool) -> str:
    """Return the name of a point's request; a failed one that is to be tried again is removed from ``jobs``."""
    tries = [number for number in jobs if re.fullmatch(rf"{point_id}(-[0-9]{{1,6}})?", number)]
    number = tries[-1] if tries else point_id
    if not retry_failed or not _answer(folder, number).exists():
        return number
    if "error" not in _read_answer(_answer(folder, number)):
        return number
    jobs.pop(number, None)
    return f"{point_id}-{int(number.partition('-')[2] or 1) + 1}"


def read_answers(folder: Path) -> Answers:
    """Read a folder that the worker has processed; `TableError` names the answer that cannot be read."""
    requests = _requests(folder)
    rows, unanswered = list[TableRow](), 0
    answers: dict[str, dict[str, Any]] = {}
    fingerprint: Fingerprint | None = None
    for job in requests["jobs"]:
        file = _answer(folder, job["id"])
        if not file.exists():
            unanswered += 1
            continue
        answer = _read_answer(file)
        try:
            here = _fingerprint(answer["about"], BuildOptions.from_json(job["options"]))
            latency = BlockLatency(_measured(answer["measured"])) if "measured" in answer else None
            reason = None if latency else values.text(answer["error"], "its error")
            finished = values.moment(answer["finished"], "its time")
            if answer["id"] != job["id"] or answer.get("build", job)["options"] != job["options"]:
                raise ValueError("it answers another request")
            if "signature" in job:
                block, signature = (
                    values.text(job[name], f"the request's {name}") for name in ("block", "signature")
                )
                rows.append(
                    TableRow(block, signature, values.widths(job["widths"]), here, latency, reason, finished)
                )
        except (ValueError, KeyError, TypeError, WorkerError) as error:
            raise _unreadable(file, error) from error
        if fingerprint is not None and here != fingerprint:
            raise TableError(f"{file} is of {here.describe()}, others of {fingerprint.describe()}: not mixed")
        fingerprint = here
        answers[job["id"]] = answer
    rows += _run_row(answers, fingerprint)
    return Answers(tuple(rows), unanswered, fingerprint)


def device_fingerprint(folder: Path, options: BuildOptions) -> Fingerprint | None:
    """Return the fingerprint of the device that has worked on ``folder``; None if none has."""
    file = folder / "device.json"
    if not file.exists():
        return None
    try:
        return _fingerprint(parse_json(file.read_text(encoding="utf-8")), replace(options, block=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableError(f"{file} is damaged ({error}); take it from the device again") from error


def _fingerprint(about: Any, options: BuildOptions) -> Fingerprint:
    return values.fingerprint(fingerprint_of(about, options).as_dict())


def _measured(measured: Any) -> Measurement:
    """Return the measurement in an answer; `ValueError` if it is not one."""
    stable = measured["stable"]
    fields = (*(measured[name] for name in ("median_ms", "q1_ms", "q3_ms", "repeats")), int(stable is True))
    measurement = values.measurement(fields, "hot")
    if measurement is None or not isinstance(stable, bool) or measurement.median_ms <= 0:
        raise ValueError(f"{brief(measured)} is no measurement")
    return measurement


def _run_row(answers: dict[str, dict[str, Any]], fingerprint: Fingerprint | None) -> list[TableRow]:
    sides = [answers.get(number, {}).get("measured") for number in (_ALONE, _ROW)]
    if fingerprint is None or sides[0] is None or sides[1] is None:
        return []
    ms = max(sides[0]["median_ms"] - sides[1]["median_ms"], 0.0)
    latency = BlockLatency(measurement({**sides[0], "median_ms": ms, "q1_ms": ms, "q3_ms": ms}))
    return [
        TableRow("one run", RUN_SIGNATURE, (), fingerprint, latency, None, float(answers[_ALONE]["finished"]))
    ]


def _requests(folder: Path) -> dict[str, Any]:
    try:
        return read_requests(folder)
    except WorkerError as error:
        raise BackendError(str(error)) from error
