"""Run ONNX files on a device and write down how long each takes: the rows of a latency table, answered.

    python time_onnx_files.py todo.csv todo done.csv [--threads 1]

Needs Python, NumPy and ONNX Runtime (on a phone, in Termux or the like): copy this file, ``todo.csv`` and the folder
``todo`` there, and ``done.csv`` back. It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


def milliseconds(path: Path, threads: int, seconds: float = 0.3, least: int = 20) -> float:
    """The median time of a run, after a few that are not counted."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {
        value.name: np.ones([size if isinstance(size, int) else 1 for size in value.shape], TYPES[value.type])
        for value in session.get_inputs()
    }
    for _ in range(5):
        session.run(None, feed)
    times: list[float] = []
    while len(times) < least or sum(times) < 1000 * seconds:
        began = time.perf_counter()
        session.run(None, feed)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def which(row: dict[str, str]) -> tuple[str, ...]:
    """What a row is of; files of several rounds may have the same names."""
    return tuple(row[column] for column in ("signature", "widths", "fingerprint"))


def answer(todo: Path, folder: Path, done: Path, threads: int = 1) -> int:
    """Time the files of all rows that ``done`` lacks, and return how many these were."""
    rows = read(todo)
    known = {which(row): row["hot_ms"] for row in read(done)} if done.exists() else {}
    for row in rows:
        row["hot_ms"] = row["hot_ms"] or known.get(which(row), "")
    files = {int(path.name.partition("_")[0]): path for path in folder.glob("*.onnx")}  # by the row's line
    timed = 0
    for line, row in enumerate(rows, 2):
        if row["hot_ms"]:
            continue
        row["hot_ms"] = f"{milliseconds(files[line], threads):.6g}"
        timed += 1
        print(f"{timed}: {files[line].name} {row['hot_ms']} ms", flush=True)
        with open(done, "w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(rows)
    return timed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("todo", type=Path, help="the rows that are wanted, as smcp-table export wrote them")
    parser.add_argument("folder", type=Path, help="their ONNX files")
    parser.add_argument("done", type=Path, help="the answers, for smcp-table import")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    answer(given.todo, given.folder, given.done, given.threads)
