"""The modes in which a model must be traced, so that every combination of its modules' modes is covered.

A forward that reads `training` of a module takes one of two ways, and may read `training` of other modules on it. The
model is traced in eval and in train mode. If a frame (`smcp_fx.tracing.mode_reads`) made a decision after others, of
its own or of its callers, and no trace took the other way, the model is traced again in modes that take it; one
trace takes all such ways that are compatible. A frame's decisions concern only the frame, unless it returns another
structure: then they count as its caller's.

    if self.training: h = self.drop(h)     eval: [model F]   train: [model T][drop T]   and again: [model T][drop F]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from smcp_fx.errors import TraceError
from smcp_fx.tracing.mode_reads import FRAME, VIA, ModeLog
from smcp_fx.tracing.sentences import listed_paths

#: Decisions in their order: the module's path, and its mode.
Path = tuple[tuple[str, bool], ...]
#: Modes of all modules, by path.
Modes = Mapping[str, bool]
#: A model is traced in at most this many modes; beyond that, modules that decide together must be in one
#: mode. Chosen, not measured.
_MOST = 24


@dataclass
class ModeTrace:
    """A model's graph in these modes of its modules, and the reads of the modes.

    ``values``: those of its nodes on the example inputs, if they are needed to compare graphs.
    """

    graph: fx.Graph
    modes: Modes
    log: ModeLog
    assumptions: list[str]
    values: dict[str, Any] = field(default_factory=dict)


class FormsError(TraceError):
    """Modes must be coupled, which works for one form of calls only: no arguments may be left out."""


class Paths:
    """The decisions behind each node of the traces.

    ``leaking``: modules whose decisions count as their callers', too; ``together``: for each coupled module, the one
    whose mode it must be in.
    """

    def __init__(self) -> None:
        self.leaking: set[str] = set()
        self.together: dict[str, str] = {}
        self.by_train = False  # the argument of `train()` itself decides, beyond all flags that are read
        self._decisions: dict[tuple[int, int], list[tuple[int, str, bool]]] = {}
        self._calls: dict[int, list[Any]] = {}

    def leak(self, modules: set[str]) -> None:
        """Count these modules' decisions as their callers', too."""
        self.leaking |= modules
        self._decisions.clear()
        self._calls.clear()

    def of(self, trace: ModeTrace, node: fx.Node) -> Path:
        """The decisions before the node, by the modules in whose forwards it was made."""
        decisions = self._before(trace.log, *_made(node))
        return self._distinct([*decisions, ("", trace.modes[""])] if self.by_train else decisions)

    def returned(self, trace: ModeTrace, node: fx.Node, index: int, operand: Any) -> list[tuple[int, int]]:
        """The frames that returned the node's argument ``operand``, the last first, with its place in each result."""
        source, frames = node.meta.get(VIA, {}).get(index, (None, ()))
        if source is not operand:
            return []
        return [each for each in frames if trace.log.frames[each[0]].path not in self.leaking]

    def call(self, trace: ModeTrace, number: int) -> Any:
        """A frame's identity in every trace: its module, the decisions before it, and the number of earlier calls."""
        calls = self._calls.get(id(trace.log))
        if calls is None:
            calls = self._calls[id(trace.log)] = []
            seen: dict[Any, int] = {}
            for frame in trace.log.frames:
                key = frame.path, self._distinct(self._before(trace.log, frame.parent or 0, frame.entered))
                seen[key] = seen.get(key, 0) + 1
                calls.append((*key, seen[key]))
        return calls[number]

    def points(self, trace: ModeTrace) -> dict[fx.Node, Any]:
        """Each node's place in the program: equal in two traces if the same run of a line made the nodes."""
        points: dict[fx.Node, Any] = {}
        seen: dict[Any, int] = {}
        for node in trace.graph.nodes:
            number, time = _made(node)
            reads = (read[1:] for read in self._of_frame(trace.log, number) if read[0] < time)
            point = *self.call(trace, number), self._distinct(reads)
            seen[point] = seen.get(point, 0) + 1
            points[node] = *point, seen[point]
        return points

    def within(self, trace: ModeTrace, number: int) -> Path:
        """A frame's decisions."""
        return self._distinct(read[1:] for read in self._of_frame(trace.log, number))

    def escaped(self, trace: ModeTrace, node: fx.Node, operand: fx.Node, shared: set[int]) -> set[str]:
        """The modules with decisions whose forward let the argument out other than by returning it."""
        if not trace.log.asked or operand.op == "get_attr":  # any module may read the model's own tensors
            return set()
        around, inside = _around(trace, node), _around(trace, operand)
        return {
            trace.log.frames[number].path
            for number in inside - around - shared
            if self._of_frame(trace.log, number)
        } - self.leaking

    def leaks(self, traces: Iterable[ModeTrace]) -> set[str]:
        """The modules that assign attributes, or return numbers or structures, depending on their decisions."""
        seen: dict[Any, set[str]] = {}
        paths = set[str]()
        for trace in traces:
            for number, frame in enumerate(trace.log.frames[1:], start=1):
                returned = seen.setdefault(self.call(trace, number), set())
                returned.add(frame.returned)
                if len(returned) > 1 or (frame.assigns and self._of_frame(trace.log, number)):
                    paths.add(frame.path)
        return paths - self.leaking

    def ways(self, trace: ModeTrace) -> Iterator[Path]:
        """Each decision of the trace, after those that led to it."""
        for number, frame in enumerate(trace.log.frames):
            before = self._before(trace.log, number, frame.entered)
            made = [read[1:] for read in self._of_frame(trace.log, number)]
            for count in range(1, len(made) + 1):
                yield self._distinct(before + made[:count])

    def _before(self, log: ModeLog, number: int, time: int) -> list[tuple[str, bool]]:
        parent = log.frames[number].parent
        outer = [] if parent is None else self._before(log, parent, log.frames[number].entered)
        return outer + [read[1:] for read in self._of_frame(log, number) if read[0] < time]

    def _of_frame(self, log: ModeLog, number: int) -> list[tuple[int, str, bool]]:
        """The frame's own decisions, and those that leak from the frames that it called, once they end."""
        key = id(log), number
        if key not in self._decisions:
            reads = list(log.frames[number].reads)
            for inner, frame in enumerate(log.frames if self.leaking else ()):
                if frame.parent == number and frame.path in self.leaking:
                    reads += [(frame.left, *read[1:]) for read in self._of_frame(log, inner)]
            self._decisions[key] = sorted(reads, key=lambda read: read[0])
        return self._decisions[key]

    def _distinct(self, decisions: Iterable[tuple[str, bool]]) -> Path:
        return tuple(dict.fromkeys((self.together.get(flag, flag), value) for flag, value in decisions))


def _made(node: fx.Node) -> tuple[int, int]:
    made: tuple[int, int] = node.meta.get(FRAME, (0, 0))
    return made


def _around(trace: ModeTrace, node: fx.Node) -> set[int]:
    """The frames in which the node was made."""
    number: int | None = _made(node)[0]
    numbers = set[int]()
    while number is not None:
        numbers.add(number)
        number = trace.log.frames[number].parent
    return numbers


class Exploring:
    """Traces a model in as many modes as necessary.

    ``traced(mode, others)``: the trace after `train(mode)`, with ``others`` set one by one; ``fails``: does the model
    itself fail in these modes?
    """

    def __init__(
        self, traced: Callable[[bool, Modes], ModeTrace], fails: Callable[[bool, Modes], bool]
    ) -> None:
        self._traced, self._fails = traced, fails
        self.paths = Paths()
        self.traces = [traced(False, {}), traced(True, {})]
        self._impossible: set[frozenset[tuple[str, bool]]] = set()
        self.complete()

    def go_on(self, modules: set[str]) -> bool:
        """Trace further, with these modules' decisions as their callers'; False if that cannot help."""
        if not modules and self.paths.by_train:
            return False
        self.paths.by_train = not modules
        self.paths.leak(modules)
        self.complete()
        return True

    def complete(self) -> None:
        """Trace until no way is missing."""
        while True:
            leaks = self.paths.leaks(self.traces)
            if leaks:
                self.paths.leak(leaks)
                continue
            missing = self._missing()
            if not missing:
                return
            if len(self.traces) >= _MOST:
                self._couple(set().union(*(map(frozenset, missing))))
                continue
            self._trace(missing)

    def _missing(self) -> dict[frozenset[tuple[str, bool]], Modes]:
        """Ways that no trace takes, each with the modes of a trace that reached the fork."""
        taken = [
            frozenset((self.paths.together.get(f, f), v) for f, v in t.modes.items()) for t in self.traces
        ]
        untraced: dict[frozenset[tuple[str, bool]], Modes] = {}
        for trace in self.traces:
            for way in self.paths.ways(trace):
                flag, value = way[-1]
                other = frozenset([*way[:-1], (flag, not value)])
                if other not in self._impossible and not any(other <= modes for modes in taken):
                    untraced.setdefault(other, trace.modes)
        return untraced

    def _trace(self, missing: dict[frozenset[tuple[str, bool]], Modes]) -> None:
        """Trace the first missing way, together with all others that are compatible with it."""
        way, modes = next(iter(missing.items()))
        wanted = dict(way)
        for other in missing:
            if all(wanted.get(flag, value) == value for flag, value in other):
                wanted |= dict(other)
        for asked in (wanted, dict(way)):
            others = {
                path: asked.get(self.paths.together.get(path, path), mode) for path, mode in modes.items()
            }
            if not self._fails(others[""], others):
                break
        else:
            self._impossible.add(way)
            return
        try:
            self.traces.append(self._traced(others[""], others))
        except TraceError as error:
            if type(error) is not TraceError:
                raise
            self._couple(set(asked.items()))

    def _couple(self, decisions: set[tuple[str, bool]]) -> None:
        """Require these modules to be in one mode: their joint decisions are known only for that."""
        if any(path.startswith("?") for path in self.traces[0].modes):
            raise FormsError("there are more combinations of modes and arguments than can be told.")
        flags = {flag for flag, _ in decisions}
        first = min(flags, key=lambda flag: (flag.count("."), flag))
        self.paths.leak(set())
        self.paths.together = {
            path: first if one in flags else one
            for path in self.traces[0].modes
            for one in [self.paths.together.get(path, path)]
        }
        self.traces = [t for t in self.traces if len({t.modes[f] for f in self._coupled(first)}) == 1]
        if len({t.modes[first] for t in self.traces}) < 2:
            raise TraceError(
                f"What is computed depends on the modes of {listed_paths(sorted(self._coupled(first)))} together, "
                "in more ways than can be told, and train() puts them into different ones."
            )

    def _coupled(self, first: str) -> set[str]:
        return {path for path, one in self.paths.together.items() if one == first}

    def coupled(self) -> list[list[str]]:
        """The modules that have to be in one mode."""
        groups: dict[str, list[str]] = {}
        for path, one in self.paths.together.items():
            groups.setdefault(one, []).append(path)
        return [sorted(group) for group in groups.values() if len(group) > 1]
