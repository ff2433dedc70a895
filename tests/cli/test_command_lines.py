"""Command lines that cannot work: one sentence, exit code 2, and nothing in the folder is other than it was."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import option_fuzzing
import pytest
import torch
from rich.console import Console

from smcp_fx.cli import compile as compile_cli
from smcp_fx.cli import inspect as inspect_cli
from smcp_fx.cli import table as table_cli
from smcp_fx.cli import train as train_cli
from smcp_fx.cli.common import consoles, guarded, wait_asleep
from smcp_fx.compiler import CompileSettings
from smcp_fx.compiler.folder import RunFolder, placed
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.storage.files import locked
from smcp_fx.zoo.data import call_factory, load_data

FILE = """
import os, sys
import torch
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )

def frozen():
    return build().requires_grad_(False)

class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = build()

    def forward(self, x):
        sys.exit(0)

def leaves():
    sys.exit(0)

def labels():
    return [(torch.zeros(1, 8, 8), -1)] * 4, [(torch.zeros(1, 8, 8), 0)]

def nothing():
    return [], []
"""
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "compile": compile_cli.main,
    "table": table_cli.main,
    "inspect": inspect_cli.main,
    "train": train_cli.main,
}
#: The previous run that stands in the folder of every command line here.
BEFORE = {
    "out/state/settings.json": "{}",
    "out/state/dense.safetensors": "of days of training",
    "out/state/pruning.safetensors": "of days more",
    "out/state/comparisons.json": "[]",
    "out/pruned.onnx": "what came of them",
}


def run(command: str, arguments: list[str]) -> int:
    try:
        return COMMANDS[command](arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model file and a run of before."""
    for name, text in {**BEFORE, "file.py": FILE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


MODEL = ["--model", "file.py:build"]
BAD = [
    ("compile --model torchvision:resnet181 --overwrite", "no classification model 'resnet181'"),
    ("compile --model file.py:leaves --overwrite", "file.py:leaves: leaves() failed: it called sys.exit(0)"),
    ("compile --model file.py:Leaving --overwrite", "called sys.exit(0) in the middle of the run"),
    ("inspect file.py:Leaving", "called sys.exit(0) in the middle of the run"),
    ("compile --model file.py:frozen --overwrite", "all its parameters are frozen"),
    ("compile --model file.py:build", "--resume, replace it by --overwrite, or give another --out"),
    ("compile --model file.py:build --resume", "settings.json is damaged: it holds no settings"),
    ("compile --model file.py:build --resume --overwrite", "give one of them"),
    ("compile --data file.py:leaves --overwrite", "it called sys.exit(0)"),
    ("compile --data file.py:labels --overwrite", "a label is -1"),
    ("compile --data file.py:nothing --overwrite", "samples must be"),
    ("compile --model file.py:build --overwrite --prune during --warmup 99", "warmup 99.0 + ramp"),
    ("compile --overwrite --cooldown -3", "--cooldown must be from 0"),
    ("compile --overwrite --ramp inf", "--ramp must be from 0"),
    ("compile --overwrite --epochs nan", "--epochs must be from 0"),
    ("compile --overwrite --epochs inf", "--epochs must be from 0"),
    ("compile --overwrite --epochs -1", "--epochs must be from 0"),
    ("compile --overwrite --dense-epochs nan", "--dense-epochs must be from 0"),
    ("compile --overwrite --lr nan", "must be positive"),
    ("compile --overwrite --weight-decay -1", "--weight-decay at least 0"),
    ("compile --overwrite --weight-decay inf", "--weight-decay at least 0"),
    ("compile --overwrite --every 0", "--every must be at least 1"),
    ("compile --overwrite --every -4", "--every must be at least 1"),
    ("compile --overwrite --seed 99999999999999999999", "--seed must be from 0"),
    ("compile --overwrite --seed -1", "--seed must be from 0"),
    ("compile --overwrite --batch 99999999999999999999 --model file.py:build", "smaller batch"),
    (
        "compile --overwrite --train-batch 99999999999999999999 --model file.py:build",
        "training images of digits",
    ),
    ("compile --overwrite --threads 100000", "threads = 100000: at most"),
    ("compile --overwrite --builders 100000", "--builders must be at most"),
    ("compile --overwrite --target nan", "not a fraction"),
    ("compile --overwrite --momentum nan", "momentum must be a number in [0, 1)"),
    ("compile --overwrite --multiple 99999999999999999999999 --threads 0", "--threads must be at least 1"),
    ("compile --overwrite --mod file.py:build", "unrecognized arguments: --mod"),
    ("compile --overwrite --vers", "unrecognized arguments: --vers"),
    ("compile --overwrite --batch many", "invalid int value: 'many'"),
    (f"compile --overwrite --batch {'9' * 5000}x", "invalid int value: '99"),
    (f"compile --overwrite --model {'x' * 5000}.py:f", "xxx..."),
    (f"table show {'x' * 5000}", "xxx..."),
    ("compile --overwrite --weights out/pruned.onnx --model file.py:build", "cannot be read as weights"),
    ("compile --overwrite --table out/pruned.onnx --model file.py:build", "no latency table"),
    ("compile --overwrite --data imagefolder:[/x]", "[/x] needs the folders train/ and val/"),
    ("compile --overwrite --model [/x].py:build", "[/x].py"),
    ("table show [/x].sqlite", "there is no latency table [/x].sqlite"),
    ("table show out/pruned.onnx", "is no latency table"),
    ("table show", "the following arguments are required: table"),
    ("table", "the following arguments are required: COMMAND"),
    ("table measure file.py:build --input-size 1x999999x999999 --table t", "smaller images"),
    ("table measure file.py:build --batch 99999999999999999999 --table t", "smaller batch"),
    ("table measure file.py:build --threads 100000 --table t", "threads = 100000: at most"),
    ("table measure file.py:leaves --table t", "it called sys.exit(0)"),
    ("table measure file.py:build --shard \u00b2/3 --table t", "give I/N with 1 <= I <= N"),
    ("table measure file.py:build --shard 0/3 --table t", "give I/N with 1 <= I <= N"),
    ("table measure file.py:build --retry --table t", "unrecognized arguments: --retry"),
    ("table import out/pruned.onnx t", "must end in .json or .csv"),
    ("inspect file.py:build --input-size 1x999999x999999", "smaller images"),
    ("inspect file.py:build --html out", "cannot write the channel graph"),
    ("inspect file.py:leaves", "it called sys.exit(0)"),
    ("inspect", "the following arguments are required: model"),
    ("train resnet50-30 --seed -1", "--seed must be from 0"),
    ("train resnet50-31", "there is no recipe 'resnet50-31'"),
    ("train resnet50-30 --fraction nan", "--fraction must be in (0, 1]"),
    ("train resnet50-30 --set training.batch=1e999", "training.batch must be a whole number"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words[:80] for words, _ in BAD])
def test_what_cannot_work_is_one_sentence_and_changes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    command, *arguments = words.split()
    if command == "compile" and "--out" not in arguments:
        arguments += ["--out", "out"]
    before = content(here)
    assert run(command, arguments) == 2
    shown = capsys.readouterr().err
    assert said in " ".join(shown.split())
    assert "Traceback" not in shown and len(shown) < 1500
    assert shown.count("\n") == 1, shown
    assert content(here) == before


def test_odd_values_for_any_option_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few drawn ones; `python tests/cli/option_fuzzing.py 5000` for as many as one has the time for."""
    option_fuzzing.cut_off(monkeypatch.setattr)
    for name, value in option_fuzzing.FAKE_GPU.items():
        monkeypatch.setenv(name, value)
    files = option_fuzzing.before()
    for number in range(48):
        command = option_fuzzing.drawn(number, seed=0)
        with option_fuzzing.folder(files) as here:
            ended, wrong = option_fuzzing.fault(command, here)
        assert not wrong, (ended, command)


@pytest.mark.parametrize("out", ["", "   ", "file.py", "file.py/out", "out\udcff", "a\0b"], ids=repr)
def test_folders_that_are_none_are_told(here: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    before = content(here)
    assert run("compile", [*MODEL, "--out", out]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert content(here) == before


def test_compile_alone_prints_its_help(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(here)
    assert run("compile", []) == 2
    told = capsys.readouterr().out
    assert "--model" in told and "40% of its latency" in told and "%%" not in told
    assert content(here) == before


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_tells_its_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, ["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"smcp-{command} 0.")


# ---- the folder of a run ----------------------------------------------------------------------------------------


def settings(**options: Any) -> CompileSettings:
    return placed(CompileSettings(**options))


def test_runs_without_a_folder_are_numbered_and_the_last_is_resumed(here: Path) -> None:
    assert settings().folder == here / "runs" / "compile"
    for expected in ("compile", "compile-2", "compile-3"):
        folder = settings().folder
        assert folder.name == expected
        (folder / "state").mkdir(parents=True)
    assert settings(resume=True).folder.name == "compile-3"
    (here / "runs" / "compile-x" / "y").mkdir(parents=True)
    (here / "runs" / "compile-9").mkdir()  # empty: nobody's
    assert settings().folder.name == "compile-4"
    assert settings(out="mine").folder == here / "mine"


def test_a_second_run_keeps_out_of_a_folder_and_what_it_made_goes(here: Path) -> None:
    first, second = (RunFolder(settings(out="new/deep"), {"settings": {}}) for _ in range(2))
    first.look()
    with first.held():
        first.begin()
        with pytest.raises(InputError, match="another run works in"), second.held():
            pass
    with pytest.raises(ZeroDivisionError), RunFolder(settings(out="other/deep"), {}).held():
        _ = 1 / 0
    assert not (here / "other").exists()
    second.look()  # no checkpoint was written: nothing is lost
    (here / "new" / "deep" / "report.html").touch()
    with pytest.raises(CheckpointError, match=r"holds a run \(report\.html\)"):
        second.look()


@pytest.mark.parametrize("file", ["pruned-mine.onnx", "photo.jpg", "state/mine.safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_begins_in_no_folder_of_other_files(here: Path, file: str, overwrite: bool) -> None:
    """It would delete what has the names of its own; `--out /` and `--out .` are slips, besides."""
    (here / "mine" / "state").mkdir(parents=True)
    (here / "mine" / ".gitkeep").touch()
    folder = RunFolder(settings(out="mine", overwrite=overwrite), {})
    folder.look()
    (here / "mine" / file).touch()
    with pytest.raises(CheckpointError, match=f"holds files that are no run's \\({file}\\)"):
        folder.look()
    with pytest.raises(CheckpointError, match=r"/ holds files that are no run's \(.*\)"):
        RunFolder(settings(out="/", overwrite=overwrite), {}).look()


def test_a_lock_ends_with_its_process(here: Path) -> None:
    held = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, time; f = open('lock', 'a'); fcntl.flock(f, 2); print(1, flush=True); "
         "time.sleep(60)"], stdout=subprocess.PIPE)  # fmt: skip
    assert held.stdout is not None
    held.stdout.readline()
    with pytest.raises(InputError, match="told"), locked(here / "lock", "told"):
        pass
    held.kill()
    held.communicate()
    with locked(here / "lock", "told"):
        pass


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"settings": []}', "[" * 100_000, '"\\ud800"', "\xff"])
def test_damaged_settings_are_told(here: Path, text: str) -> None:
    (here / "out" / "state" / "settings.json").write_bytes(text.encode("latin-1"))
    folder = RunFolder(settings(out="out", resume=True), {"settings": {"a": 1}, "config": {}})
    with pytest.raises(CheckpointError, match=r"settings\.json .*start without --resume"):
        folder.look()


# ---- terminals --------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    assert guarded("smcp", write, Console(stderr=True), debug=False) == 141
    assert capsys.readouterr().err == ""


def test_advice_to_free_space_is_for_full_disks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(number: int) -> Callable[[], int]:
        def run() -> int:
            raise OSError(number, os.strerror(number), "a[/x]b")

        return run

    problems = consoles()[1]
    assert guarded("smcp", fail(28), problems, debug=False, advice="Free space.") == 2
    assert guarded("smcp", fail(22), problems, debug=False, advice="Free space.") == 2
    full, other = capsys.readouterr().err.splitlines()
    assert full == "smcp: No space left on device: a[/x]b. Free space."
    assert other == "smcp: Invalid argument: a[/x]b"


def test_too_little_memory_is_told_and_other_errors_are_not_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> Callable[[], int]:
        def run() -> int:
            raise error

        return run

    problems = consoles()[1]
    words = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate"
    for error in (MemoryError(), RuntimeError(words)):
        assert guarded("smcp", fail(error), problems, debug=False) == 2
        assert "not enough memory" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a fault"):
        guarded("smcp", fail(RuntimeError("a fault")), problems, debug=False)


def test_a_terminal_without_the_letters_shows_escapes(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    told = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(told, "ascii"))
    assert run("table", ["show", "größe.sqlite"]) == 2
    sys.stderr.flush()
    assert b"gr\\xf6\\xdfe.sqlite" in told.getvalue()


@pytest.mark.parametrize("command", [["train", "--list"], ["compile"]])
def test_a_pipe_that_closes_ends_a_listing(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(command[0], command[1:]) == 141


@pytest.mark.parametrize(("command", "code"), [(["train", "--list"], 0), (["compile"], 2)])
def test_a_closed_output_is_no_fault(command: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shell's ``>&-`` leaves it."""
    monkeypatch.setattr(sys, "stdout", None)
    assert run(command[0], command[1:]) == code
    sys.stdout.close()


def test_a_working_directory_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run("table", ["show", "t.sqlite"]) == 2
    assert "the working directory cannot be read" in capsys.readouterr().err


def test_locale_c_and_no_home(here: Path) -> None:
    """The command as a process, where the environment gives nothing."""
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-m", "smcp_fx.cli.table", "show", "gr\xf6\xdfe.sqlite".encode()]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"not text in ascii" in done.stderr and done.stderr.count(b"\n") == 1


def test_relative_paths_begin_where_the_command_was_given(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory that changes the directory does not change what the other options name."""
    monkeypatch.chdir("/")
    assert isinstance(call_factory("file.py:build", here), torch.nn.Module)
    with pytest.raises(InputError, match=r"file\.py:nothing: samples must be"):
        load_data("file.py:nothing", here)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [([], 2, "python -m smcp_fx compile"), (["compile", "--version"], 0, "smcp-compile")],
)
def test_the_package_runs_as_a_module(arguments: list[str], code: int, said: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "smcp_fx", *arguments], capture_output=True, text=True)
    assert ended.returncode == code and said in ended.stdout


def test_threads_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command starts itself again, once, unless it has one thread or is called by another program."""
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda *given: started.append(given))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "smcp_fx.cli.train", "recipe"])
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    threads = 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    wait_asleep(None)
    threads = 2
    wait_asleep(["recipe"])
    assert not started
    wait_asleep(None)
    wait_asleep(None)  # the second time as the command that was started
    assert started == [(sys.executable, [sys.executable, "-m", "smcp_fx.cli.train", "recipe"])]
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.skipif(os.name != "posix", reason="commands start themselves again on POSIX alone")
def test_a_command_that_starts_itself_again_says_everything_once(tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(
        "import os, sys\nfrom smcp_fx.cli.common import wait_asleep\nwait_asleep(None)\n"
        "print(os.environ.get('OMP_WAIT_POLICY'), *sys.argv[1:])\nsys.exit(3)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    ended = subprocess.run(
        [sys.executable, script, "a b", ""], env={**environment, "OMP_NUM_THREADS": "2"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "passive a b \n", "")
