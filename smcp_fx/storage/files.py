"""Writes text files completely or not at all, and reads JSON from untrusted sources."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smcp_fx.errors import InputError, SmcpError

if sys.platform != "win32":
    import fcntl

#: Errors of file systems without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
#: Least characters of JSON per list or object: empty ones take twenty times their text in memory. The value codec
#: never writes fewer: {"list": []}.
_CHARACTERS_A_CONTAINER = 6


def write_texts(texts: Mapping[Path, str], name: str) -> None:
    """Write all the texts or none; make missing directories.

    Raises `SmcpError` if writing fails; earlier files are then untouched. ``name``: the content's name in the
    message.
    """
    beside: dict[Path, Path] = {}
    try:
        for target in texts:  # otherwise a rename could fail after others succeeded
            check_replaceable(target)
        for target, content in texts.items():
            beside[target] = target.with_name(target.name + ".part")
            target.parent.mkdir(parents=True, exist_ok=True)
            beside[target].write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
        for target, part in beside.items():
            os.replace(part, target)
    except OSError as error:
        for part in beside.values():
            with contextlib.suppress(OSError):  # report the first error
                part.unlink()
        places = ", ".join(dict.fromkeys(str(target.parent) for target in texts))
        raise SmcpError(
            f"cannot write {name} into {places}: {error.strerror or error}. Free space there, or give another "
            "directory"
        ) from error


def check_replaceable(path: Path) -> None:
    """Raise `OSError` if ``path`` cannot hold a file, or if a file would replace a device or pipe."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError:  # it is missing, or writing it reports the reason
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, f"{path} is a directory")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{path} is a device or pipe")


@contextlib.contextmanager
def locked(file: Path, refusal: str) -> Iterator[None]:
    """Hold a file's lock; if another process holds it, the `InputError` begins with ``refusal``."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(open(file, "a+", encoding="utf-8"))
            if sys.platform != "win32":
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{refusal} (it holds {file}): wait for it, or give another --out") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InputError(f"cannot write {file}: {error.strerror or error}") from error
        yield


def read_json(path: Path, error: type[SmcpError], advice: str) -> Any:
    """Return the value in a JSON file, of any type; its strings can be written as UTF-8.

    ``error`` names the file if it is missing, not text, not JSON, cut off, nested too deep, or would take far more
    memory than its size. ``advice`` ends the message.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise error(f"{path} cannot be read: {reason}; {advice}") from problem
    try:
        return parse_json(text)
    except ValueError as problem:
        raise error(f"{path} is not JSON, or was cut off: {problem}; {advice}") from problem


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; `ValueError` as `bounded_json`, or for a string that is no UTF-8."""
    value = bounded_json(text)
    if "\\u" in text:  # a lone surrogate
        json.dumps(value, ensure_ascii=False).encode()
    return value


def bounded_json(text: str) -> Any:
    """Return the value of a JSON text; `ValueError` if it is invalid, too deep, or too dense with lists."""
    if (text.count("[") + text.count("{")) * _CHARACTERS_A_CONTAINER > len(text) + 1024:
        raise ValueError("it consists of empty lists and objects")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def brief(value: Any) -> str:
    """Return a value as one line of at most 80 characters, for messages."""
    try:
        shown = repr(value)
    except RecursionError:
        shown = f"a {type(value).__name__} nested too deep"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
