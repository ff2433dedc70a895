"""One graph from the traces of a model in several modes of its modules.

The graph holds each operation once, whether all or some traces run it. If its arguments differ by trace,
a flag or `by_mode` nodes choose one, following the earlier decisions in order (`smcp_fx.tracing.mode_paths`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import count
from typing import Any

from torch import fx, nn

from smcp_fx.errors import TraceError
from smcp_fx.tracing.block_hooks import merge_notes
from smcp_fx.tracing.call_forms import Form
from smcp_fx.tracing.contexts import NO_GRAD, same_gradients
from smcp_fx.tracing.mode_paths import ModeTrace, Path, Paths
from smcp_fx.tracing.mode_reads import FRAME, VIA, leaves
from smcp_fx.tracing.mode_steps import Step, computes, in_steps, returning_other_shapes, same, structure
from smcp_fx.tracing.modes import (
    by_mode,
    conditions,
    is_by_mode,
    is_flag,
    left_out,
    owner_of_flag,
    with_branches,
)
from smcp_fx.tracing.values import FROZEN, OPAQUE


class UnexplainedError(Exception):
    """Traces differ, and no earlier decision explains why; ``paths``: modules that may be the cause."""

    def __init__(self, paths: set[str]) -> None:
        super().__init__(paths)
        self.paths = paths


@dataclass(frozen=True)
class _Choice:
    flag: str
    evaluated: Any
    trained: Any


@dataclass(frozen=True)
class _Result:
    """The result of a step."""

    number: int


@dataclass(frozen=True)
class _Returned:
    """The value that a module's call returned, at this place."""

    call: Any
    place: int


def merged(
    model: nn.Module,
    traces: Sequence[ModeTrace],
    paths: Paths,
    values: Callable[[ModeTrace], dict[str, Any]],
    forms: Sequence[Form] = (),
) -> fx.Graph:
    """Merge the traces into the first one's graph; ``values`` computes a trace's node values when needed.

    ``forms``: the traced calls that leave out optional arguments.
    Raises `UnexplainedError`, with all graphs as they were, if no decision explains a difference.
    """
    steps = in_steps(model, traces, paths, values)
    try:
        returned = _Chooser(traces, paths, steps).choose()
    except UnexplainedError:
        if reshaping := returning_other_shapes(traces, paths):
            raise UnexplainedError(reshaping) from None
        raise
    return _Writer(traces, paths, steps, returned, forms).write()


# ---- what decides -----------------------------------------------------------------------------------------------


class _Chooser:
    """Finds each step's arguments, and the flags that choose between them where traces differ."""

    def __init__(self, traces: Sequence[ModeTrace], paths: Paths, steps: list[Step]) -> None:
        self.traces, self.paths, self.steps = traces, paths, steps
        self.returned: dict[_Returned, list[tuple[Path, Any]]] = {}  # with the decisions inside the frame
        self._step_of = {node: index for index, step in enumerate(steps) for node in step.nodes.values()}

    def choose(self) -> dict[_Returned, Any]:
        """Choose each step's arguments; return the values that frames returned."""
        for step in self.steps:
            if len({structure(node) for node in step.nodes.values()}) > 1:  # outputs of several structures
                step.chosen[_ALL] = self._chosen(step, [self._all(t, node) for t, node in step.nodes.items()])
                continue
            for index, row in enumerate(zip(*(leaves(node) for node in step.nodes.values()), strict=True)):
                if not computes(step.first[1], index):
                    step.chosen[index] = row[0]
                    continue
                at = zip(step.nodes.items(), row, strict=True)
                values = [self._told(t, node, index, leaf) for (t, node), leaf in at]
                step.chosen[index] = self._chosen(step, values)
        chosen = {}
        for key, cases in self.returned.items():
            try:
                chosen[key] = _decided(cases)
            except UnexplainedError:
                raise UnexplainedError({key.call[0]} - self.paths.leaking) from None
        return chosen

    def _chosen(self, step: Step, values: list[Any]) -> Any:
        if all(same(values[0], other) for other in values[1:]):
            return values[0]
        where = [self.paths.of(self.traces[number], node) for number, node in step.nodes.items()]
        try:
            return _decided(list(zip(where, values, strict=True)))
        except UnexplainedError:
            readers = {f.path for trace in self.traces for f in trace.log.frames[1:] if f.reads}
            raise UnexplainedError(readers - self.paths.leaking) from None

    def _all(self, number: int, node: fx.Node) -> Any:
        """A whole output in terms common to all traces."""
        places = count()
        return fx.node.map_aggregate(node.args[0], lambda leaf: self._told(number, node, next(places), leaf))

    def _told(self, number: int, node: fx.Node, index: int, leaf: Any) -> Any:
        """An argument in terms common to all traces: a number, a step's result, or a frame's result."""
        if not isinstance(leaf, fx.Node):
            return leaf
        trace = self.traces[number]
        value: Any = _Result(self._step_of[leaf])
        returned = self.paths.returned(trace, node, index, leaf)
        if escaped := self.paths.escaped(trace, node, leaf, {frame for frame, _ in returned}):
            raise UnexplainedError(escaped)
        for frame, place in reversed(returned):
            key = _Returned(self.paths.call(trace, frame), place)
            self.returned.setdefault(key, []).append((self.paths.within(trace, frame), value))
            value = key
        return value


#: The place of a whole output among the leaves.
_ALL = -1


def _decided(cases: list[tuple[Path, Any]]) -> Any:
    """The value as a function of the decisions that led to it."""
    values = [value for _, value in cases]
    if all(same(values[0], other) for other in values[1:]):
        return values[0]
    if not all(path for path, _ in cases) or len({path[0][0] for path, _ in cases}) > 1:
        raise UnexplainedError(set())
    sides = [[(path[1:], value) for path, value in cases if path[0][1] is side] for side in (False, True)]
    evaluated, trained = (_decided(side) if side else None for side in sides)
    if not sides[0] or not sides[1]:
        return trained if sides[1] else evaluated
    return evaluated if same(evaluated, trained) else _Choice(cases[0][0][0][0], evaluated, trained)


# ---- the graph --------------------------------------------------------------------------------------------------


class _Writer:
    """Writes the steps into the first trace's graph."""

    def __init__(
        self,
        traces: Sequence[ModeTrace],
        paths: Paths,
        steps: list[Step],
        returned: dict[_Returned, Any],
        forms: Sequence[Form],
    ) -> None:
        self.forms = forms
        self.traces, self.paths, self.steps, self.returned = traces, paths, steps, returned
        self.graph = traces[0].graph
        self._made: dict[Any, fx.Node] = {}

    def write(self) -> fx.Graph:
        before = next(iter(self.graph.nodes))  # the last node that is placed
        for step in self._in_order():
            number, node = step.first
            if number:
                with self.graph.inserting_after(before):
                    copied = self.graph.node_copy(node, lambda n: n)
                step.made = copied
            else:
                step.made = node
            before = step.made
            trained = [made for number, made in step.nodes.items() if self.traces[number].modes[""]]
            merge_notes(step.made, step.nodes.values())
            same_gradients(step.made, trained or list(step.nodes.values()))
            self._fill(step)
        self._keep_effects()
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1:]
        for flag in [node for node in self.graph.nodes if is_flag(node)]:
            if last:
                last[0].append(flag)
        for node in self.graph.nodes:
            node.meta.pop(FRAME, None)
            node.meta.pop(VIA, None)
        return with_branches(self.graph)

    def _in_order(self) -> list[Step]:
        """The steps in an order that fits every trace, each after all steps that it may read."""
        after: list[set[int]] = [set() for _ in self.steps]
        last: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            for trace in step.nodes:
                after[number] |= {last[trace]} if trace in last else set()
                last[trace] = number
            for value in step.chosen.values():
                after[number] |= self._reads(value)
        sorter = TopologicalSorter(dict(enumerate(after)))
        try:
            sorter.prepare()
        except CycleError:
            raise TraceError(
                "parts of the model run in one order in some modes of its modules, and in another in others, which a "
                "graph does not do."
            ) from None
        ordered: list[Step] = []
        ready: list[int] = []
        while sorter.is_active():
            for number in sorter.get_ready():
                heappush(ready, number)
            sorter.done(number := heappop(ready))
            ordered.append(self.steps[number])
        return ordered

    def _reads(self, value: Any) -> set[int]:
        """The steps that a chosen value may come from."""
        if isinstance(value, _Result):
            return {value.number}
        if isinstance(value, _Returned):
            return self._reads(self.returned[value])
        if isinstance(value, _Choice):
            return self._reads(value.evaluated) | self._reads(value.trained)
        numbers = set[int]()
        if isinstance(value, (tuple, list, dict, slice)):
            fx.node.map_aggregate(value, lambda leaf: numbers.update(self._reads(leaf)))
        return numbers

    def _fill(self, step: Step) -> None:
        node = step.made
        assert node is not None
        if _ALL in step.chosen:
            node.args = (self._written(node, step.chosen[_ALL]),)
            return
        places = count()
        arguments = [self._written(node, step.chosen[index]) for index in range(len(step.chosen))]
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda _: arguments[next(places)]
        )

    def _written(self, node: fx.Node, value: Any) -> Any:
        """A chosen value as an argument; nodes that choose it are written before ``node``."""
        if isinstance(value, _Returned):
            return self._written(node, self.returned[value])
        if isinstance(value, _Result):
            return self.steps[value.number].made
        if isinstance(value, _Choice):
            evaluated, trained = (self._written(node, side) for side in (value.evaluated, value.trained))
            if evaluated is False and trained is True:
                return self._flag(value.flag)
            return self._chosen_before(node, value.flag, evaluated, trained)
        if isinstance(value, (tuple, list, dict, slice)):
            return fx.node.map_aggregate(
                value,
                lambda leaf: self._written(node, leaf) if isinstance(leaf, (_Result, _Returned)) else leaf,
            )
        return value

    def _chosen_before(self, node: fx.Node, flag: str, evaluated: Any, trained: Any) -> fx.Node:
        key = flag, _hashable(evaluated), _hashable(trained)
        if key not in self._made:
            with self.graph.inserting_before(node):
                chosen = self.graph.call_function(by_mode, (self._flag(flag), evaluated, trained))
            if node.op != "output":
                chosen.meta = _of_a_choice(node)
            self._made[key] = chosen
        return self._made[key]

    # ---- nodes that run for their effect ----------------------------------------------------------------

    def _keep_effects(self) -> None:
        """Keep nodes that a mode runs for their effect: a batch norm counts, a random number is drawn."""
        step_of = {step.made: step for step in self.steps}
        # The nodes that each trace needs, as far as known.
        runs: list[set[fx.Node]] = [set() for _ in self.traces]
        for node in reversed(list(self.graph.nodes)):
            step = step_of.get(node)
            for number, (trace, needed) in enumerate(zip(self.traces, runs, strict=True)):
                there = node in needed or not node.users
                if step is not None and node.op.startswith("call"):
                    there = number in step.nodes
                if not there:
                    continue
                if is_by_mode(node):
                    flag, evaluated, trained = node.args
                    assert isinstance(flag, fx.Node)
                    mode = trace.modes[owner_of_flag(flag)]
                    fx.node.map_arg(trained if mode else evaluated, needed.add)
                else:
                    needed.update(node.all_input_nodes)
            if step is None or not node.op.startswith("call"):
                continue
            everywhere = len(step.nodes) == len(self.traces)
            if not node.users and everywhere:
                continue
            if any(node not in runs[number] for number in step.nodes) or not node.users:
                self._for_its_effect(node, step)
        self._check()

    def _for_its_effect(self, node: fx.Node, step: Step) -> None:
        """Record the modes in which a node runs although it has no reader there."""
        cases = [self.paths.of(self.traces[number], made) for number, made in step.nodes.items()]
        flag, *sides = self._when(node, cases)
        self._chosen_after(node, node, flag, sides)

    def _when(self, node: fx.Node, cases: list[Path]) -> tuple[str, Any, Any]:
        """A flag, and for each of its two values: the node, None, or a nested choice of the same form."""
        if not all(cases):
            return "", node, node
        sides: list[Any] = []
        for side in (False, True):
            there = [case[1:] for case in cases if case[0][1] is side]
            choice = self._when(node, there) if there else None
            sides.append(node if choice is not None and choice[1] is node and choice[2] is node else choice)
        return cases[0][0][0], *sides

    def _chosen_after(self, point: fx.Node, node: fx.Node, flag: str, sides: Sequence[Any]) -> fx.Node:
        """Write the choice after ``point``, its nested choices first."""
        values = []
        for side in sides:
            if isinstance(side, tuple):
                point = side = self._chosen_after(point, node, side[0], side[1:])
            values.append(side)
        owner = self._flag(flag)
        with self.graph.inserting_after(point):
            chosen = self.graph.call_function(by_mode, (owner, *values))
        chosen.meta = _of_a_choice(node)
        return chosen

    def _check(self) -> None:
        """Raise `TraceError` unless the graph runs the nodes of each trace."""
        when = conditions(self.graph.nodes)
        for number, trace in enumerate(self.traces):
            modes = {n.name: trace.modes[owner_of_flag(n)] for n in self.graph.nodes if is_flag(n)}
            for step in self.steps:
                node = step.made
                assert node is not None
                runs = any(all(modes[flag] is side for flag, side in case) for case in when[node])
                if node.op.startswith("call") and runs is not (number in step.nodes):
                    raise TraceError(
                        f"{node.name!r} runs in some modes of the model's modules only, which depend on each other "
                        "in a way that a graph does not hold."
                    )

    def _flag(self, owner: str) -> fx.Node:
        """The node that reads a module's `training`, or that tells which arguments are left out."""
        for other in self.graph.nodes:
            if is_flag(other) and owner_of_flag(other) == owner:
                flag: fx.Node = other
                return flag
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            form = next((form for form in self.forms if form.key == owner), None)
            if form is None:
                return self.graph.create_node("get_attr", f"{owner}.training" if owner else "training")
            inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
            return self.graph.call_function(left_out, (tuple(inputs[i] for i in form.places), form.defaults))


def _of_a_choice(node: fx.Node) -> dict[str, Any]:
    """The meta of a choice: the node's, but a choice has gradients and is never opaque or frozen."""
    return {key: value for key, value in node.meta.items() if key not in (NO_GRAD, OPAQUE, FROZEN)}


def _hashable(tree: Any) -> Any:
    return tree if isinstance(tree, fx.Node) else repr(tree)
