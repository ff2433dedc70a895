"""Command lines in their surroundings: pipes that close, terminals, locales, working directories, processes."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import Running
from rich.console import Console
from run_command import run

from smcp_fx.cli.common import consoles, guarded, wait_asleep
from smcp_fx.errors import InputError
from smcp_fx.zoo.data import call_factory, load_data


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
def test_the_package_runs_as_a_module(
    arguments: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["smcp_fx", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("smcp_fx", run_name="__main__")
    assert ended.value.code == code and said in capsys.readouterr().out


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
        "import os, sys\nprint(os.environ.get('OMP_WAIT_POLICY'), *sys.argv[1:])\nsys.exit(3)\n"
    )
    assert Running(tmp_path / "told", start_again, script).wait() == (3, "passive a b \n")


def start_again(script: Path) -> None:
    """As a command of two threads, in a process of its own, does before anything else."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        os.environ.pop(name, None)
    torch.set_num_threads(2)
    sys.orig_argv = [sys.executable, str(script), "a b", ""]
    wait_asleep(None)
    print("not started")
