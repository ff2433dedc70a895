"""Text files that are whole or not there: written beside their places, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from smcp_fx.errors import SmcpError


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
