"""Give every option of every command odd values, and see that it is told in a sentence and nothing is lost.

    python tests/cli/option_fuzzing.py 5000 [seed] [--whole]

The options come from the parsers. Each command line runs in a process of its own, in a folder that holds a run of
before; what computes for long is cut off where it would begin. ``--whole``: not cut off (some seconds each).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smcp_fx.backends.tensorrt.worker import main as worker_cli
from smcp_fx.cli import compile as compile_cli
from smcp_fx.cli import inspect as inspect_cli
from smcp_fx.cli import table as table_cli
from smcp_fx.cli import train as train_cli
from smcp_fx.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1]))

SECONDS = 60
_LONGEST = 2000
_MEMORY = 12 << 30
#: Values that belong nowhere, or elsewhere.
ODD = (
    *("nan", "inf", "-inf", "-1", "-0.5", "0", "1", "2", "1.5", "1e-320", "1e300", "1e999", "9" * 30, "9" * 5000),
    *(str(value) for value in (2**31, 2**63, 2**64, -(2**63) - 1)),
    *("", " ", "\t", "x", "-", "--", "-x", "=", ",", ",,", "1,nan", "0.5,0.5", "1e-9,1", "%s", "{}", "None", "true"),
    *("größe", "\u0663", "\u00b2", "1_0", "0x10", "\udcff", "a\0b", "a\nb", "\x1b[2J", "[/x]", "x" * 5000, "\u202e"),
    *("out", "file.py", "t.sqlite", "table.csv", "missing/deep/file", "file.py/under", "/"),
    *(".", "..", "../../x", "~", "t.sqlite/", "file.py:", ":build", "file.py:build"),
    *("file.py:FILE", "file.py:os", "torchvision:", "timm:x", "torchvision:get_model", "imagefolder:", "images:out"),
    *("3x8x8", "1x8x8", "1x0x8", "8x", "x8", "-1x8x8", "1x8x8x8", "999999x999999x999999", "12 ms", "-3 ms", "nan ms"),
    *("1 KFLOPs", "1e999 ms", "cpu", "cuda:99", "meta", "mps", "2/1", "1/2", "training.batch", "size=nan", "a.b.c=1"),
)  # fmt: skip
FILE = """
import os
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )
"""
_MODEL = ["--model", "file.py:build"]
_SIZE = ["--input-size", "1x8x8"]
#: Command lines that work, whose options get values.
LINES: tuple[tuple[str, ...], ...] = (
    ("compile", *_MODEL, "--out", "new", "--epochs", "0", "--cost", "flops", "--calibration", "8"),
    ("compile", *_MODEL, "--out", "new", "--prune", "during", "--epochs", "1", "--dense-epochs", "0.1"),
    ("compile", *_MODEL, "--out", "out", "--overwrite", "--table", "new.sqlite"),
    ("table", "measure", "file.py:build", *_SIZE, "--table", "t.sqlite"),
    ("table", "measure", "file.py:build", *_SIZE, "--table", "t.sqlite", "--backend", "tensorrt",
     "--emit-requests", "asked"),
    ("table", "show", "t.sqlite"),
    ("table", "merge", "joined.sqlite", "t.sqlite"),
    ("table", "export", "t.sqlite", "rows.csv"),
    ("table", "export", "t.sqlite", "rows.csv", "--wanted", *_MODEL, *_SIZE),
    ("table", "import", "table.csv", "new.sqlite"),
    ("table", "check", "t.sqlite", *_MODEL, *_SIZE),
    ("inspect", "file.py:build", *_SIZE),
    ("train", "resnet50-30", "--dry-run", "--cost", "flops", "--set", "size=64"),
    ("train", "resnet50-30", "--data", "out", "--cost", "params", "--out", "out"),
    ("worker", "todo"),
    ("worker", "--onnx", "todo/a.onnx"),
)  # fmt: skip
_MAINS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[list[str]], int]]] = {
    "compile": (compile_cli.build_parser, compile_cli.main),
    "table": (table_cli.build_parser, table_cli.main),
    "inspect": (inspect_cli.build_parser, inspect_cli.main),
    "train": (train_cli.build_parser, train_cli.main),
    "worker": (worker_cli.build_parser, worker_cli.main),
}
FAKE_GPU = {"FAKE_TENSORRT": "10.16.1.11", "PYTHONPATH": str(Path(__file__).parents[1] / "backends/fake_gpu")}
#: The run of before, and whatever else a user has in the folder.
BEFORE = {
    "file.py": FILE,
    "notes.txt": "mine",
    "out/state/settings.json": "{}",
    "out/state/dense.safetensors": "of days of training",
    "out/pruned.onnx": "what came of them",
}


def before() -> dict[str, bytes]:
    """Its content, with a latency table and what is exchanged with other devices."""
    from test_damaged_files import JOB, rows

    from smcp_fx.latency.exchange import export_rows
    from smcp_fx.latency.store import LatencyStore

    made = {name: text.encode() for name, text in BEFORE.items()}
    requests = {"format": worker_cli.FORMAT, "version": worker_cli.PROTOCOL, "jobs": [JOB]}
    made["todo/requests.json"] = json.dumps(requests).encode()
    sys.path.append(str(Path(__file__).parents[1] / "backends"))
    from fake_tensorrt import small_model

    with tempfile.TemporaryDirectory() as folder:
        table, csv = Path(folder) / "t.sqlite", Path(folder) / "table.csv"
        store = LatencyStore(table)
        store.insert(rows())
        store.close()
        export_rows(rows(), csv)
        made |= {path.name: path.read_bytes() for path in (table, csv)}
        made["todo/a.onnx"] = small_model(Path(folder) / "a.onnx").read_bytes()
    return made


def flags(line: tuple[str, ...]) -> list[str]:
    """The options of a command line that take a value, and "" for each word that it gives by place."""
    parser = _MAINS[line[0]][0]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[line[1]]
    found = [
        action.option_strings[0] for action in parser._actions if action.option_strings and action.nargs != 0
    ]
    return found + [""] * sum(not action.option_strings for action in parser._actions)


def drawn(number: int, seed: int) -> list[str]:
    """A command line: one that works, with an odd value or two."""
    draw = random.Random(f"{seed} {number}")
    line = list(LINES[number % len(LINES)])
    for _ in range(draw.choice((1, 1, 1, 2))):
        flag, value = draw.choice(flags(LINES[number % len(LINES)])), draw.choice(ODD)
        if flag:
            line += [flag + "=" + value] if draw.random() < 0.3 else [flag, value]
        else:
            first = 2 if line[0] == "table" else 1
            given = next((at for at, word in enumerate(line) if word.startswith("--")), len(line))
            line[draw.randrange(first, max(given, first + 1)) :][:1] = []
            line.insert(min(draw.randrange(first, given + 1), given), value)
    return line


@contextlib.contextmanager
def folder(files: dict[str, bytes]) -> Iterator[Path]:
    """A new working directory with the files of before, and a latency table."""
    was = os.getcwd()
    with tempfile.TemporaryDirectory() as made:
        here = Path(made)
        for name, data in files.items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_bytes(data)
        os.chdir(here)
        try:
            yield here
        finally:
            os.chdir(was)


def content(here: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(here)): path.read_bytes() if path.is_file() else None
        for path in sorted(here.rglob("*"))
        if "__pycache__" not in path.parts
    }


def cut_off(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """What computes for long ends where it would begin: a run that replaces files, and a measurement."""
    from smcp_fx.compiler.folder import RunFolder
    from smcp_fx.latency.table import LatencyTable
    from smcp_fx.recipes import run as recipe_run

    def reached(*_: Any, **__: Any) -> Any:
        raise InputError("reached")

    for owner, name in ((RunFolder, "begin"), (LatencyTable, "measure"), (recipe_run, "_load_task")):
        put(owner, name, reached)


def fault(command: list[str], here: Path) -> tuple[str, str]:
    """Run a command line in this process; return how it ended, and what is wrong with that, or ""."""
    before = content(here)
    told, shown = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
            code = _MAINS[command[0]][1](command[1:])
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 99
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "raised", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"[:500]
    said = told.getvalue()
    after = content(here)
    lost = [name for name, value in before.items() if after.get(name, b"") != value]
    named = any(part in word for name in lost for part in (name, Path(name).name) for word in command)
    if code not in (0, 1, 2, 3):
        return "ended", f"exit code {code}"
    if "Traceback" in said or len(said) > _LONGEST:
        return "ended", f"a message of {len(said)} characters: {said[:300]}"
    if code == 2 and not said.strip():
        return "ended", "exit code 2 without a word"
    if lost and (code == 2 or not named):
        return "ended", f"{', '.join(lost)} lost"
    return ("reached" if "reached" in said else f"exit {code}"), ""


def run(count: int, seed: int, whole: bool = False) -> dict[str, Any]:
    """Run ``count`` command lines, each in a process that is forked from this one."""
    warnings.simplefilter("ignore")
    context = multiprocessing.get_context("fork")
    told, faults, files = Counter[str](), list[str](), before()
    for number in range(count):
        command = drawn(number, seed)
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(command, files, writing, whole))
        began = time.monotonic()
        process.start()
        writing.close()
        ended, wrong = ("hang", f"{SECONDS} s") if not reading.poll(SECONDS) else ("", "")
        if not ended:
            try:
                ended, wrong = reading.recv()
            except EOFError:
                process.join()
                ended, wrong = "died", f"the process ended ({process.exitcode})"
        if process.is_alive():
            process.kill()
        process.join()
        told[ended] += 1
        if wrong:
            faults.append(f"case {number}: {[word[:80] for word in command]}: {wrong}")
            print(ascii(faults[-1]), f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {"count": count, **told, "faults": faults}


def _work(command: list[str], files: dict[str, bytes], sender: Any, whole: bool) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if not whole:
        cut_off()
    with folder(files) as here:
        sender.send(fault(command, here))


def plain() -> dict[str, tuple[str, str]]:
    """How each command line ends without an odd value; then what it loads is there when processes are forked."""
    ended, files = {}, before()
    os.environ |= {
        "FAKE_TENSORRT": "10.16.1.11",
        "PYTHONPATH": str(Path(__file__).parents[1] / "backends/fake_gpu"),
    }
    for line in LINES:
        with folder(files) as here:
            ended[" ".join(line)] = fault(list(line), here)
    return ended


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    cut_off() if "--whole" not in sys.argv else None
    print(json.dumps(plain(), indent=1))
    outcome = run(given[0], given[1] if len(given) > 1 else 0, "--whole" in sys.argv)
    print(json.dumps(outcome, indent=1))
