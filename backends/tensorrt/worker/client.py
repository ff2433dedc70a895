"""The worker's client: runs it in a process of its own, restarted when it dies, or in this process."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .problems import WorkerDied, WorkerError
from .serving import Session


class InProcess:
    """The worker in this process: if it crashes, so does this process."""

    generation = 0

    def __init__(self, gpu: int = 0, lean: bool = False) -> None:
        self._session = Session(gpu, lean)

    def ask(self, op: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Answer a request; ``timeout_s`` has no effect here."""
        return _checked(self._session.answer({"op": op, **arguments}))

    def close(self) -> None:
        """Nothing to end."""


class WorkerProcess:
    """The worker as a process, started at the first request and again after it died.

    ``generation`` counts the processes: engines loaded in earlier ones are gone. ``command`` ends in ``--serve``.
    ``timeout_s``: an answer that takes longer counts as a death.
    """

    def __init__(self, command: Sequence[str], timeout_s: float = 1800.0) -> None:
        self.command, self.timeout_s, self._lives = list(command), timeout_s, 0
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said: Any = None

    @property
    def generation(self) -> int:
        """The number of processes that have ended."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        return self._lives

    def ask(self, op: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Return the answer; `WorkerError` if it is an error, `WorkerDied` if none came."""
        process = self._running()
        try:
            assert process.stdin is not None
            print(json.dumps({"op": op, **arguments}), file=process.stdin, flush=True)
            line = self._answers.get(timeout=timeout_s or self.timeout_s)
        except OSError:
            line = None
        except queue.Empty:
            process.kill()
            raise self._death(f"gave no answer to {op!r} within {timeout_s or self.timeout_s:g} s") from None
        except BaseException:  # interrupted: a late answer must not be taken for the next one
            process.kill()
            self.close()
            raise
        if line is None:
            raise self._death(f"ended while it was asked to {op}")
        try:
            answer = json.loads(line)
        except (RecursionError, ValueError):
            answer = None
        if not isinstance(answer, dict):
            process.kill()
            raise self._death(f"answered {op!r} with {line[:80]!r}")
        return _checked(answer)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        self._lives += 1
        assert process.stdin is not None
        try:
            process.stdin.close()
            process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._said.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        try:
            process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
                encoding="utf-8",
            )  # fmt: skip
        except OSError as error:
            self._said.close()
            raise WorkerError(
                f"cannot start the TensorRT worker with {self.command[0]!r}: {error.strerror or error}; give the "
                "Python (3.10 or newer) that has TensorRT"
            ) from error
        self._process, self._answers = process, queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, self._answers), daemon=True).start()
        return process

    def _death(self, how: str) -> WorkerDied:
        process = self._process
        assert process is not None
        try:
            code = process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._said.seek(0)
        said = " ".join(self._said.read()[-600:].split())
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        advice = "; SIGKILL is mostly the system short of memory" if code == -signal.SIGKILL else ""
        self.close()
        return WorkerDied(f"the TensorRT worker {how} ({reason}{advice})" + (f": {said}" if said else ""))


#: Either way to answer requests.
Worker = InProcess | WorkerProcess


def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            answers.put(line)
    except ValueError:  # closed while it was read
        pass
    answers.put(None)


def _checked(answer: Mapping[str, Any]) -> dict[str, Any]:
    if not answer.get("ok"):
        raise WorkerError(str(answer.get("error", "the worker gave no reason")))
    return dict(answer)


def archive(path: Path) -> Path:
    """Write this package as one runnable file, for other Pythons and devices, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in _sources().items():
            file.writestr(f"tensorrt_worker/{name}", text)
        file.writestr("__main__.py", _MAIN)
    part.replace(path)
    return path


#: Source that older Pythons can parse, too.
_MAIN = """import sys

if sys.version_info < (3, 10):
    sys.exit("smcp-trt-worker: Python 3.10 or newer is needed, this is %d.%d" % sys.version_info[:2])
try:
    from tensorrt_worker.main import main
except ImportError as error:
    if (error.name or "tensorrt_worker").split(".")[0] == "tensorrt_worker":
        raise
    sys.exit("smcp-trt-worker: %s is not installed for %s: pip install %s" % (error.name, sys.executable, error.name))
sys.exit(main())
"""


def _sources() -> dict[str, bytes]:
    here = Path(__file__)
    return {source.name: source.read_bytes() for source in sorted(here.parent.glob("*.py"))}
