"""The folder of a compile run: held by one run at a time, and never overwritten unless asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from smcp_fx.compiler.settings import CompileSettings, as_record
from smcp_fx.config import PruningConfig
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.storage.files import brief, locked, read_json, write_texts

#: The folder of a run without --out: this, or this with the next number.
_DEFAULT = Path("runs/compile")
#: Names that a new run's folder may hold; names that begin with a dot are allowed, too.
_EMPTY = {"lost+found", "state"}
_SETTINGS = "settings.json"


def placed(settings: CompileSettings) -> CompileSettings:
    """Return the settings with the absolute folder of their run, since the working directory may change.

    Without ``out`` it is runs/compile or the next free number (runs/compile-2); to resume, the last one.
    """
    if settings.out is not None:
        return replace(settings, out=str(Path(settings.out).absolute()))
    taken = {}
    for folder in [_DEFAULT, *_DEFAULT.parent.glob(f"{_DEFAULT.name}-*")]:
        number = folder.name.removeprefix(_DEFAULT.name).removeprefix("-") or "1"
        with contextlib.suppress(OSError):
            if number.isascii() and number.isdigit() and any(folder.iterdir()):
                taken[int(number)] = folder
    last = max(taken, default=0)
    if settings.resume and taken:
        folder = taken[last]
    else:
        folder = _DEFAULT.with_name(f"{_DEFAULT.name}-{last + 1}") if last else _DEFAULT
    return replace(settings, out=str(folder.absolute()))


def how_to_go_on(settings: CompileSettings, config: PruningConfig) -> str:
    """Say how to continue an interrupted run of these settings (after `placed`): by --resume, if begun."""
    text = settings.folder / "state" / _SETTINGS
    try:
        begun = json.loads(text.read_text(encoding="utf-8")) == as_record(settings, config)
    except (OSError, ValueError):
        begun = False
    if not begun:
        return "Nothing had begun: give the same command again."
    if not settings.trains:
        return "Without training there is nothing to resume: give the same command again, with --overwrite."
    return f"Continue with the same command and --resume (state in {settings.folder / 'state'})."


class RunFolder:
    """The folder of ``settings`` (after `placed`), for a run with this ``record`` of its settings."""

    def __init__(self, settings: CompileSettings, record: Mapping[str, Any]) -> None:
        self.folder, self.state = settings.folder, settings.folder / "state"
        self._resume, self._overwrite, self._record = settings.resume, settings.overwrite, record
        self._trains = settings.trains
        self._file = self.state / _SETTINGS
        self._begun = False

    def look(self) -> None:
        """Raise `CheckpointError` if a run would be lost, or if there is none to resume; change nothing."""
        try:
            if self._resume:
                self._compare()
                return
            ours = self._file.exists()
            there = [f"state/{file.name}" for file in sorted(self.state.glob("*.safetensors"))]
            if self.folder.is_dir():
                names = sorted(file.name for file in self.folder.iterdir() if file.name not in _EMPTY)
                there = [name for name in names if not name.startswith(".")] + there
        except OSError as error:
            raise InputError(f"cannot read {self.folder}: {error.strerror or error}") from error
        listed = f"{', '.join(there[:4])}{', ...' if len(there) > 4 else ''}"
        if there and not ours:  # a run would replace files of the same names
            raise CheckpointError(
                f"{self.folder} holds files that are no run's ({listed}): give an --out that is new or empty"
            )
        if there and not self._overwrite:
            resumed = "go on with it by --resume, " if self._trains else ""
            raise CheckpointError(
                f"{self.folder} holds a run ({listed}): {resumed}replace it by --overwrite, or give another --out"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other runs out; remove it again if nothing was begun."""
        new = [path for path in (self.state, self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror or error}") from error
        lock = self.state / "lock"
        existed = lock.exists()
        try:
            with locked(lock, f"another run works in {self.folder}"):
                try:
                    yield
                finally:
                    if not self._begun and not existed:
                        lock.unlink(missing_ok=True)
        finally:
            if not self._begun:
                with contextlib.suppress(OSError):  # not empty: leave it
                    for path in new:
                        path.rmdir()

    def begin(self) -> None:
        """Write down a new run's settings, and delete the state of an earlier run."""
        self._begun = True
        if self._resume:
            return
        try:
            left = (*self.state.glob("*.safetensors"), *self.state.glob("comparisons.json"))
            for old in (*left, *self.folder.glob("pruned-*")):
                old.unlink()
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror or error}") from error
        write_texts({self._file: json.dumps(self._record, indent=1)}, "the run's settings")

    def _compare(self) -> None:
        """Raise `CheckpointError` if the run to resume was started with other settings."""
        if not self._file.exists():
            raise CheckpointError(f"there is no run to resume in {self.folder}; start it without --resume")
        before = read_json(
            self._file, CheckpointError, "start without --resume, in another --out or with --overwrite"
        )
        if not isinstance(before, dict) or not all(
            isinstance(before.get(part), dict) for part in self._record
        ):
            raise CheckpointError(
                f"{self._file} is damaged: it holds no settings; start without --resume, in another --out or with "
                "--overwrite"
            )
        changed = [
            f"{key}: {brief(before[part].get(key))} -> {value!r}"
            for part in self._record
            for key, value in self._record[part].items()
            if before[part].get(key) != value
        ]
        if changed or before != self._record:
            said = "; ".join(changed) or "fields that this version does not have"
            raise CheckpointError(
                f"the run in {self.folder} was started with other settings ({said[:600]}); resume it with the same, "
                "or start afresh in another --out"
            )
