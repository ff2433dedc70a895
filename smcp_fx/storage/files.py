"""Texts that are whole or not there, written beside their places and renamed; and JSON from other hands."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smcp_fx.errors import InputError, SmcpError

if sys.platform != "win32":
    import fcntl

#: What file systems say that have no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
#: So many characters of JSON there must be for each list and object, since empty ones take twenty times their text.
#: The value codec writes no fewer: {"list": []}.
_CHARACTERS_A_CONTAINER = 6


def write_texts(texts: Mapping[Path, str], what: str) -> None:
    """Write all the texts or none; directories are made where they are missing.

    Raises `SmcpError` when that fails; what stood there before still stands. ``what`` names the content in the
    message.
    """
    beside = {target: target.with_name(target.name + ".part") for target in texts}
    try:
        for target, content in texts.items():
            if target.is_dir():  # else the renaming would fail, when others may have their names already
                raise IsADirectoryError(errno.EISDIR, f"{target} is a directory")
            target.parent.mkdir(parents=True, exist_ok=True)
            beside[target].write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
        for target, part in beside.items():
            os.replace(part, target)
    except OSError as error:
        for part in beside.values():
            with contextlib.suppress(OSError):  # the first error is the one to tell
                part.unlink()
        places = ", ".join(dict.fromkeys(str(target.parent) for target in texts))
        raise SmcpError(
            f"cannot write {what} into {places}: {error.strerror or error}. Free space there, or give another "
            "directory"
        ) from error


@contextlib.contextmanager
def locked(file: Path, told: str) -> Iterator[None]:
    """Hold a file's lock, which ends with the process; `InputError` begins with ``told`` where another holds it."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(open(file, "a+", encoding="utf-8"))
            if sys.platform != "win32":
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{told} (it holds {file}): wait for it, or give another --out") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InputError(f"cannot write {file}: {error.strerror or error}") from error
        yield


def read_json(path: Path, error: type[SmcpError], advice: str) -> Any:
    """Return what a JSON file holds, of whatever type; its strings can be written as UTF-8.

    ``error`` names the file where it is missing, no text, no JSON, cut off, nested too deep, or would take far more
    memory than the file. ``advice`` ends the message.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text in UTF-8"
        raise error(f"{path} cannot be read: {reason}; {advice}") from problem
    try:
        return parse_json(text)
    except ValueError as problem:
        raise error(f"{path} is no JSON, or was cut off: {problem}; {advice}") from problem


def parse_json(text: str) -> Any:
    """Return what JSON holds; `ValueError` as for `bounded_json`, and where a string cannot be written as UTF-8."""
    found = bounded_json(text)
    if "\\u" in text:  # half a pair of surrogates
        json.dumps(found, ensure_ascii=False).encode()
    return found


def bounded_json(text: str) -> Any:
    """Return what JSON holds; `ValueError` where it is none, too deep, or too many lists for its length."""
    if (text.count("[") + text.count("{")) * _CHARACTERS_A_CONTAINER > len(text) + 1024:
        raise ValueError("it is made of lists and objects that hold nothing")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def brief(value: Any, limit: int = 80) -> str:
    """Return a value as a message shows it: one line, not longer than ``limit``."""
    try:
        told = repr(value)
    except RecursionError:
        told = f"a {type(value).__name__} nested too deep"
    return told if len(told) <= limit else f"{told[: limit - 3]}..."
