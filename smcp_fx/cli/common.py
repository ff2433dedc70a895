"""Shared code of the command lines: argument parsing, consoles, and errors as one paragraph."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar, cast

import torch
from rich.console import Console
from rich.text import Text

from smcp_fx.errors import SmcpError, is_out_of_memory

Main = TypeVar("Main", bound=Callable[..., int])

#: Errors of a disk that is full or read-only.
_NO_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
#: The exit code of a command whose reader went away, as in shells after SIGPIPE.
_BROKEN_PIPE = 141
_LONGEST_WORD = 500


class _Help(argparse.HelpFormatter):
    """Wraps sentences to the terminal; leaves texts of several lines (examples) as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviations, with --version, and with errors in one sentence."""

    def __init__(self, *arguments: object, **options: object) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", _Help)
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        if " " not in self.prog:  # not a subcommand's parser
            name = f"%(prog)s {version('smcp_fx')}"
            self.add_argument("--version", action="version", version=name, help="print the version and end")

    def error(self, message: str) -> NoReturn:
        """Print the message and end with 2."""
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")

    def parsed(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse ``argv`` (the process's own arguments by default)."""
        _tell_any_text()
        try:
            os.getcwd()
        except OSError as error:
            self.error(
                f"the working directory cannot be read ({error.strerror}): change to one that is there"
            )
        words = sys.argv[1:] if argv is None else list(argv)
        for text in words:
            try:
                text.encode()
            except UnicodeEncodeError:
                self.error(
                    f"{text!r} is not text in {sys.getfilesystemencoding()}: runtimes cannot open such names; rename "
                    "the file or folder, or set a UTF-8 locale (LC_ALL=C.UTF-8)"
                )
            if "\0" in text:
                self.error(f"{text!r} holds a null character")
            if text.endswith("=--"):  # argparse would make a list of it
                self.error(f"argument {text[:-3]}: expected one argument")
        return self.parse_args(words)


def interruptible(main: Main) -> Main:
    """Let Ctrl-C end a command with one word, even while it loads libraries."""

    @functools.wraps(main)
    def run(*arguments: Any) -> int:
        try:
            return main(*arguments)
        except KeyboardInterrupt:
            print("\nInterrupted.", file=sys.stderr)
            return 130

    return cast(Main, run)


def wait_asleep(argv: Sequence[str] | None) -> None:
    """Restart a command with OpenMP threads that sleep while they wait, unless the user has chosen otherwise.

    By default threads spin. On shared cores, a spinning thread then stops the one that it waits for: beside a
    busy process, a step of ResNet-18 on two cores took 0.8 to 3.3 s with spinning, 0.4 s with sleeping ones.
    PyTorch reads the choice on loading. A call with ``argv`` is part of another program: it does not restart.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys()
    if argv is None and not chosen and os.name == "posix" and torch.get_num_threads() > 1:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def consoles() -> tuple[Console, Console]:
    """Return the consoles for results (stdout) and problems (stderr); both print text without markup."""
    return (
        _Console(highlight=False, soft_wrap=True, emoji=False, markup=False),
        _Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False),
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the error to `guarded`; `rich` would end the process with a failure."""
        raise


def guarded(
    command: str,
    run: Callable[[], int],
    problems: Console,
    *,
    debug: bool,
    interrupted: str | Callable[[], str] = "",
    advice: str = "Free space, or give another place.",
) -> int:
    """Run a command, report errors in one paragraph, and return the exit code.

    With ``debug``, errors are raised as they are. ``interrupted`` extends the message on Ctrl-C, ``advice``
    the message of a failed write.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        more = interrupted if isinstance(interrupted, str) else interrupted()
        problems.print(f"\nInterrupted. {more}".rstrip())
        return 130
    except BrokenPipeError:  # `| head` has read enough
        _give_up_stdout()
        return _BROKEN_PIPE
    except SmcpError as error:
        if debug:
            raise
        tell(problems, command, error)
        return error.exit_code
    except OSError as error:
        if debug:
            raise
        if not error.filename:  # perhaps of standard output: the rest of its buffer would fail, too
            _give_up_stdout()
        where = f": {error.filename}" if error.filename else ""
        more = f". {advice}" if error.errno in _NO_PLACE else ""
        tell(problems, command, f"{error.strerror or error}{where}{more}")
        return 2
    except SystemExit as stopped:  # our own code never does this during a run
        if debug:
            raise
        caller = traceback.extract_tb(stopped.__traceback__)[-1]
        place = f"{caller.filename}:{caller.lineno}"
        tell(problems, command, f"{place} called sys.exit({stopped.code!r}) in the middle of the run")
        return 2
    except (MemoryError, RuntimeError) as error:
        if debug or not is_out_of_memory(error):
            raise
        tell(
            problems,
            command,
            "there is not enough memory: take a smaller batch or smaller images, or another machine",
        )
        return 2


def tell(problems: Console, command: str, message: object) -> None:
    """Print an error as one paragraph."""
    problems.print(Text.assemble((f"{command}:", "red"), " ", one_line(message)))


def one_line(text: object) -> str:
    """Return foreign text as one line, without terminal control characters or endless words."""
    words = "".join(c if c.isprintable() else " " for c in str(text)).split()
    return " ".join(word if len(word) <= _LONGEST_WORD else f"{word[:200]}...{word[-100:]}" for word in words)


def _tell_any_text() -> None:
    """Make standard output and error print characters that their encoding lacks as escapes.

    If the caller closed a stream, drop its output: it must not go into a file that gets the stream's number.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _give_up_stdout() -> None:
    """Discard unwritten output: writing it at exit would fail again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        except (OSError, ValueError):  # a stream without a file number
            return
