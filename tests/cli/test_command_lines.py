"""Command lines that cannot work: one sentence, exit code 2, and nothing in the folder is other than it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import option_fuzzing
import pytest
from run_command import COMMANDS, run

from smcp_fx.compiler import CompileSettings
from smcp_fx.compiler.folder import RunFolder, placed
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.storage.files import locked


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


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
    ("compile --overwrite --momentum 0.5", "unrecognized arguments: --momentum"),
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
    """One of each kind of line; `python tests/cli/option_fuzzing.py 5000` for as many as one has the time for."""
    option_fuzzing.cut_off(monkeypatch.setattr)
    for name, value in option_fuzzing.FAKE_GPU.items():
        monkeypatch.setenv(name, value)
    files = option_fuzzing.before()
    for number in range(len(option_fuzzing.LINES)):
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
