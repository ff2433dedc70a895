"""Join all calls of all regions in one graph, for the channel graph, the costs and the passes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.regions.carriers import carried_channels
from smcp_fx.regions.finding import Region, Split
from smcp_fx.regions.running import CALL, Joined
from smcp_fx.regions.wiring import Passage, Source, Wiring, observe
from smcp_fx.tracing.block_hooks import merge_numbers
from smcp_fx.tracing.contexts import pin_layers
from smcp_fx.tracing.copying import sharing
from smcp_fx.tracing.example_runs import images_in, record, run_eager, same_values
from smcp_fx.tracing.modes import with_branches
from smcp_fx.tracing.multiply_adds import MultiplyAdds
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.values import ORIGIN, PASSED_ON


def join_regions(model: nn.Module, inputs: tuple[Any, ...], split: Split) -> tuple[Traced, Joined]:
    """Run the model once more to see how the regions are wired, and join their graphs.

    The result's module shares the model's submodules. Raises `TraceError` if the joined graph computes something
    different from the calls.
    """
    wiring = observe(model, inputs, split.regions)
    if wiring.bared:  # Python reads these weights at full size
        why = "code that was not traced reads its weights"
        rest = tuple(region for region in split.regions if region.path not in wiring.bared)
        stopped = split.stopped | {path: f"{path!r}: {why}" for path in sorted(wiring.bared)}
        if not rest:
            raise TraceError(f"{split.stopped['']} Of {', '.join(sorted(wiring.bared))}, {why}.")
        return join_regions(model, inputs, Split(rest, stopped))
    graph = _Graph(wiring)
    frozen = {number for number, call in enumerate(wiring.calls) if call.region.path in wiring.frozen}
    pin_layers(model, [node for node in graph.graph.nodes if node.meta.get(CALL) in frozen])
    module = sharing(model, graph.graph)
    outputs, values, work = record(module, tuple(graph.inputs))
    with MultiplyAdds() as counted:
        run_eager(model, inputs)
    graph.end.meta[PASSED_ON] = _passed_on(wiring, outputs)
    first = {call.region.path: number for number, call in reversed(list(enumerate(wiring.calls)))}
    regions = tuple(region for region in split.regions if region.path in first)
    numbers = tuple(first[region.path] for region in regions)
    joined = Joined(
        regions,
        numbers,
        tuple(wiring.sources[number] for number in numbers),
        tuple(graph.names[number] for number in numbers),
        split.stopped,
        tuple((call.region.path, tuple(own)) for call, own in zip(wiring.calls, graph.entering, strict=True)),
    )
    said = dict.fromkeys(sentence for region in regions for sentence in region.assumptions)
    outside = max(counted.total - sum(work.values()), 0)
    images, tensors = images_in(inputs), tuple(graph.inputs)
    return Traced(module, values, tuple(said), work, images, outside, inputs=tensors), joined


class _Graph:
    """The graph of all calls. What untraced code passes in becomes an input, and what it reads becomes an output.

    ``inputs``: their tensors; ``names``: by call, the nodes of its arguments; ``entering``: by call, its
    arguments that are inputs of the graph, with their places.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.graph = fx.Graph()
        self.inputs: list[Tensor] = []
        self.names: list[tuple[str, ...]] = []
        self.entering: list[list[tuple[str, int]]] = []
        self._last: fx.Node | None = None
        ends: list[list[Any]] = []
        for number, (call, sources) in enumerate(zip(wiring.calls, wiring.sources, strict=True)):
            self.entering.append([])
            starts = [
                ends[source.call][source.place]
                if source.call is not None
                else self._carried(self._input(number, place, call), source, ends)
                for place, source in enumerate(sources)
            ]
            self.names.append(tuple(start.name for start in starts))
            ends.append(_copy(self.graph, call.region, starts, number))
        self.end = self.graph.output(tuple(tuple(tensors) for tensors in ends))
        self.end.meta[ORIGIN] = "leaves the traced regions for code that was not traced"
        self.graph.lint()
        with_branches(self.graph)

    def _carried(self, start: fx.Node, source: Source, ends: list[list[Any]]) -> fx.Node:
        """Return the input, or a node that gives it the channels of other calls' outputs."""
        if not source.maps:
            return start
        maps = [ends[call][place] for call, place in source.maps]
        return self.graph.call_function(carried_channels, (start, *maps))

    def _input(self, number: int, place: int, call: Passage) -> fx.Node:
        """Return a new input for an argument of the call, which untraced code passes."""
        with self.graph.inserting_after(self._last):  # by numbers: a module's name may be no identifier
            start = self._last = self.graph.placeholder(f"call_{number}_{place}")
        start.meta[ORIGIN] = f"comes into region {call.region.path!r} from code that was not traced"
        self.entering[-1].append((start.name, place))
        self.inputs.append(call.copies[place])
        return start


def _passed_on(wiring: Wiring, outputs: Any) -> tuple[int, ...]:
    """Return which outputs are only passed on; `TraceError` if any output differs from the calls'."""
    passed_on: list[int] = []
    index = 0
    for number, call in enumerate(wiring.calls):
        results = [leaf for leaf in pytree.tree_leaves(outputs[number]) if isinstance(leaf, Tensor)]
        if not same_values(call.output_copies, results):
            raise TraceError(
                f"the joined graph of the traced parts computes something else than {call.region.path!r} does. "
                "Something outside the traced parts changes a tensor in place; write it out of place."
            )
        passed_on += [index + place for place in range(len(results)) if place not in wiring.read[number]]
        index += len(results)
    return tuple(passed_on)


def _copy(graph: fx.Graph, region: Region, starts: list[fx.Node], number: int) -> list[Any]:
    """Copy a region's graph for one call, and return the nodes of its outputs."""
    placed: dict[fx.Node, fx.Node] = {}
    remaining = iter(starts)
    for node in region.graph.nodes:
        if node.op == "placeholder":
            placed[node] = next(remaining)
            merge_numbers(placed[node], [node])
        elif node.op == "output":
            results = fx.node.map_arg(node.args[0], lambda n: placed[n])
            return pytree.tree_leaves(results) if region.output is not None else [results]
        else:
            placed[node] = graph.node_copy(node, lambda n: placed[n])
            placed[node].meta[CALL] = number
    raise AssertionError("a graph without output")
