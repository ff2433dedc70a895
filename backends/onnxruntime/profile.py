"""ONNX Runtime's profiler: how long each node of each run took."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import onnxruntime as ort

from smcp_fx.backends.onnxruntime.session import create_session, session_options

_SUFFIX = "_kernel_time"
#: Marks of a node's event, and of the event that ends a run.
_KERNEL, _RUN = f'{_SUFFIX}"', '"model_run"'
#: An event's duration and its name, as JSON; the order of the arguments that follow varies.
_EVENT = re.compile(r'"dur" :(\d+),.*?"name" :("(?:[^"\\]|\\.)*")')
#: The profiler's clock counts microseconds.
RESOLUTION_MS = 0.001


@dataclass(frozen=True)
class NodeTime:
    """One node in one run: the runtime's name for it, its operation, its outputs' shapes, and its ms."""

    name: str
    operation: str
    output_shapes: tuple[tuple[int, ...], ...]
    ms: float


class Profiler:
    """A session with profiling on, in a context manager; `runs` ends the profiling and reads it.

    Every run is on inputs of the same shapes.
    """

    def __init__(self, model: Path | bytes, threads: int = 1, spinning: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="smcp_fx_profile_")
        options = session_options(threads, spinning)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / "ort")
        try:
            self._session: ort.InferenceSession | None = create_session(model, options)
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def session(self) -> ort.InferenceSession:
        """The session to run."""
        assert self._session is not None
        return self._session

    def runs(self, wanted: Collection[int] | None = None) -> list[list[NodeTime]]:
        """Return the nodes of every run so far, in order of execution, and end the profiling.

        ``wanted``: runs to read, by position; the others' lists are empty (reading takes longer than running).
        """
        runs: list[list[NodeTime]] = []
        events: list[str] = []  # one per line
        known: list[tuple[str, NodeTime]] = []
        for line in Path(self.session.end_profiling()).read_text().splitlines():
            if _KERNEL in line:
                events.append(line)
            elif _RUN in line:
                read = wanted is None or len(runs) in wanted
                runs.append(_nodes(events, known) if read else [])
                events = []
        return runs

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        self._folder.cleanup()


def _nodes(events: Sequence[str], known: list[tuple[str, NodeTime]]) -> list[NodeTime]:
    """Return the nodes of a run. ``known`` is filled by the first run: in the others, only the times differ.

    Reading every event's JSON would take twice as long, and longer than most nodes run.
    """
    nodes = []
    for position, line in enumerate(events):
        match = _EVENT.search(line)
        if match is not None and position < len(known) and known[position][0] == match[2]:
            same = known[position][1]
            node = NodeTime(same.name, same.operation, same.output_shapes, int(match[1]) / 1e3)
        else:
            node = _node(line)
            if match is not None and position == len(known):
                known.append((match[2], node))
        nodes.append(node)
    return nodes


def _node(line: str) -> NodeTime:
    event = json.loads(line.rstrip().rstrip(","))
    arguments = event["args"]
    shapes = tuple(
        tuple(int(n) for n in next(iter(shape.values()))) for shape in arguments.get("output_type_shape", ())
    )
    return NodeTime(
        event["name"].removesuffix(_SUFFIX), arguments.get("op_name", ""), shapes, event["dur"] / 1e3
    )
