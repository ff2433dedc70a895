"""A block timed by ONNX Runtime as it runs inside a network.

Timed alone, a block pays for converting its input and output to the runtime's blocked layout, and for a session
run; inside a network it pays for neither. So its inputs are written in front of it as they are in the network, by
small 1x1 convolutions for instance, and the runtime's profiler tells the block's nodes from those:

    image (N, 1, H, W) -> [1x1 convolution, ReLU: context] -> block -> [conversion of the result, its mean: context]

A conversion *between* context and block counts: the block asks for it, as it would in the network. All that is there
twice, with weights of their own (`twin`). Cold, the second counts, which runs where the first has just
run, as in a network behind the layers before; hot, the mean of both. A chain of nodes of known cost beside it tells
what the profiler adds to each.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from smcp_fx.backends.base import Array, BlockLatency
from smcp_fx.backends.onnxruntime.context import CONTEXT, add_context, random_feed
from smcp_fx.backends.onnxruntime.overhead import (
    add_reference,
    code_warmer,
    overhead,
    profiler_beside,
    without_reference,
)
from smcp_fx.backends.onnxruntime.profile import RESOLUTION_MS, NodeTime, Profiler
from smcp_fx.backends.onnxruntime.twin import add_twin, halves, is_twins
from smcp_fx.backends.timing.fading import displace_inner_caches, evict_caches
from smcp_fx.backends.timing.measuring import (
    QUICK,
    Measurement,
    Sample,
    TimingConfig,
    calm,
    stopwatch,
    summarise,
    take_sample,
    warm_up,
)
from smcp_fx.backends.timing.pace import pace
from smcp_fx.backends.timing.physics import least_ms, multiply_adds
from smcp_fx.errors import BackendError, MachineBusyError

#: Changes with the way blocks are timed: rows of another way are not mixed with these.
BLOCK_TIMING = "10"
#: From the runtime's blocked layout into the plain one.
CONVERSION = "ReorderOutput"
#: Runs in the hot state beside those that follow a cold one; a block of microseconds takes no time to repeat.
_HOT_RUNS = 25
#: So many do where a core that is slow most of the time has had them waited for this long.
_FEW_RUNS, _LONG_MS = 9, 150.0
#: So many undisturbed ones do where their interquartile range is this small a share of their median.
_ENOUGH, _AGREEING = 11, 0.03
#: Runs in the cold state: emptying the caches takes longer than all the rest. Of three the median does without one
#: that something came between; rows average the noise out, of which memory that others use, too, has more. Two do
#: where they agree.
_COLD_RUNS, _FEW_COLD_RUNS = 3, 2
_COLD_SPREAD = 3.0
#: A disturbed run tells of its block where the least that this may have taken is such a share of the most, or where
#: the rest of the run beside the usual context is so much of that.
_TELLING, _OF_CONTEXT = 0.8, 0.5
#: No block is faster than this.
_LEAST_MS = 1e-4


@dataclass(frozen=True)
class BlockInContext:
    """A block's model in its context, with its twin and the chain beside it.

    ``results``: the shapes of what the block alone hands on; ``paid``: of its inputs' conversions this share does not
    count; ``twin``: whether it has one.
    """

    data: bytes
    feed: dict[str, Array]
    results: tuple[tuple[int, ...], ...]
    paid: float
    twin: bool

    @classmethod
    def of(
        cls, model: onnx.ModelProto, read_before: Collection[int] = (), fed_by: Sequence[str] = ()
    ) -> BlockInContext:
        """Build it around a block's model, in place. ``read_before`` and ``fed_by``: as for `measure_block`."""
        paid = share_of_channels(model, read_before)
        shapes = [value.type.tensor_type.shape.dim for value in model.graph.output]
        results = tuple(tuple(dim.dim_value for dim in shape) for shape in shapes)
        twin = add_twin(add_context(model, fed_by))
        feed = random_feed(add_reference(model))
        return cls(model.SerializeToString(), feed, results, paid, twin)

    def counted(self, nodes: Sequence[NodeTime], state: str) -> tuple[list[list[NodeTime]], int]:
        """Return the parts of a run that count in a state, context in them, and how often each has the block.

        Cold, what ran second; hot, both; where the runtime mixes the two, they are one part.
        """
        nodes = without_reference(nodes)
        parts = halves(nodes) if self.twin else [list(nodes)]
        if parts is None:
            return [list(nodes)], 2
        return (parts[-1:] if state == "cold" else parts), 1

    def ms(self, nodes: Sequence[NodeTime], profiler_ms: float, state: str) -> float:
        """Return the block's ms of one run. ``profiler_ms`` is taken off every node."""
        parts, copies = self.counted(nodes, state)
        taken = [block_ms(part, self.results, profiler_ms, self.paid, copies) for part in parts]
        return sum(taken) / (copies * len(parts))


def measure_block(
    model: onnx.ModelProto,
    threads: int = 1,
    spinning: bool = True,
    config: TimingConfig | None = None,
    read_before: Collection[int] = (),
    fed_by: Sequence[str] = (),
) -> BlockLatency:
    """Measure the nodes of a block's model (all shapes fixed, as `BlockModels` makes it).

    Cold: the caches are emptied before the run, so weights and results come from memory, as in a network
    larger than the cache; the context still leaves the input in cache, and a tiny network the runtime's code.
    Hot: a run right after another. ``read_before``: inputs, by position, whose conversion another block pays for.
    ``fed_by``: how each was written.
    """
    config = config or QUICK
    count, least = multiply_adds(model), least_ms(model, threads)
    block = BlockInContext.of(model, read_before, fed_by)
    found: BlockLatency | None = None
    impossible = 0.0  # a time that it cannot have taken
    for _ in range(config.attempts):
        states = _attempt(block, threads, spinning, config)
        if states is None:
            continue
        fastest = min(state.median_ms for state in states)
        if fastest + RESOLUTION_MS < least:
            impossible = fastest
            continue
        found = BlockLatency(*states) if found is None else found.steadier(BlockLatency(*states))
        if found.stable:
            break
    if found is None and impossible:
        raise BackendError(
            f"{count:,} multiply-adds seemed to take {impossible:.4g} ms, and need {least:.4g} at least on this "
            "processor: the machine was too busy for its clocks to tell. Measure again when it is idle."
        )
    if found is None:
        raise MachineBusyError(
            "no run of the block was left alone, or told how much of it others had: the machine is too busy. "
            "Measure again when it is idle."
        )
    return replace(found, pace_ms=pace().usual_ms if threads == 1 else 0.0)


def _attempt(
    block: BlockInContext, threads: int, spinning: bool, config: TimingConfig
) -> tuple[Measurement, Measurement] | None:
    """Return (hot, cold) of one session: pairs (caches emptied, or not), then hot runs alone.

    None where no run of a state tells what the block took.
    """
    node_ms = overhead(threads, spinning).node_ms
    core = pace() if threads == 1 else None
    warm_code = code_warmer(threads, spinning)
    with Profiler(block.data, threads, spinning) as profiler:
        timer = stopwatch(lambda: profiler.session.run(None, block.feed))

        warm = warm_up(timer, config)
        taken: list[tuple[str, Sample]] = []
        spent_ms = 0.0
        alone, dropped = 0, 0
        began = time.perf_counter()
        while alone < config.min_repeats or (alone < _HOT_RUNS and spent_ms < config.budget_ms):
            waited = 1e3 * (time.perf_counter() - began) >= _LONG_MS
            if alone >= _FEW_RUNS and (waited or runs_agree([s for what, s in taken if what == "hot"])):
                break
            displace_inner_caches()
            sample = take_sample(timer, core)
            taken.append(("hot", sample))
            spent_ms += sample.ms
            if sample.disturbed and dropped < config.droppable * _HOT_RUNS:
                dropped += 1
            else:
                alone += 1
        pairs, dropped = 0, 0
        while pairs < _COLD_RUNS:  # after those: a session's first runs are slower
            if pairs == _FEW_COLD_RUNS and runs_agree([s for what, s in taken if what == "cold"], pairs):
                break
            evict_caches()
            warm_code()
            pair = [take_sample(timer, core)]
            displace_inner_caches()
            pair.append(take_sample(timer, core))
            taken += zip(("cold", "hot"), pair, strict=True)
            if any(s.disturbed for s in pair) and dropped < config.droppable * _COLD_RUNS:
                dropped += 1
            else:
                pairs += 1
        timed = range(warm, warm + len(taken))
        runs = profiler.runs(timed)
    profiles = [runs[index] for index in timed]
    still = [n for n, (what, s) in zip(profiles, taken, strict=True) if what == "hot" and not s.disturbed]
    profiler_ms = profiler_beside(still or profiles, node_ms)
    own = [block.ms(nodes, profiler_ms, what) for nodes, (what, _) in zip(profiles, taken, strict=True)]
    beside = [sum(n.ms for n in nodes) - ms for nodes, ms in zip(profiles, own, strict=True)]
    # By the wall clock, which is the thread's own time in undisturbed runs alone.
    calm_beside = [ms for ms, (_, sample) in zip(beside, taken, strict=True) if not sample.disturbed]
    usual = float(np.median(calm_beside)) if calm_beside else None
    found = [
        (what, sample_of_block(ms, rest, sample, usual))
        for ms, rest, (what, sample) in zip(own, beside, taken, strict=True)
    ]
    hot, cold = ([sample for what, sample in found if what == state] for state in ("hot", "cold"))
    if not any(hot) or not any(cold):
        return None
    limit = config.spread_limit
    # No node takes less than a link of the chain does: the runtime itself needs most of that, whatever the node.
    least = block.ms([replace(node, ms=node_ms) for node in profiles[0]], 0.0, "cold")
    return (
        _summary(hot, config.min_repeats, limit, least),
        _summary(cold, _FEW_COLD_RUNS, _COLD_SPREAD * limit, least),
    )


def runs_agree(samples: Sequence[Sample], enough: int = _ENOUGH) -> bool:
    """Whether so many undisturbed runs, the context in them, agree so well that more would not move their median."""
    times = [sample.ms for sample in samples if not sample.disturbed]
    if len(times) < enough:
        return False
    q1, median, q3 = np.percentile(times, [25, 50, 75])
    return bool(q3 - q1 <= _AGREEING * median)


def _summary(runs: list[Sample | None], few: int, spread_limit: float, least_ms: float) -> Measurement:
    """Summarise the undisturbed samples; not stable where most were disturbed. None: of a run that tells nothing.

    Among many disturbed ones some pass for undisturbed: of 2,400 measurements of one row those with more than half
    of their samples disturbed were off by over a fifth in 22 % of cases, the others in 2 % at most.
    """
    samples = [sample for sample in runs if sample]
    found = summarise(calm(samples, few), spread_limit, RESOLUTION_MS)
    mostly = 2 * sum(not sample.disturbed for sample in samples) >= len(runs)
    return replace(found, median_ms=max(found.median_ms, least_ms, _LEAST_MS), stable=found.stable and mostly)


def sample_of_block(
    ms: float, context_ms: float, sample: Sample, usual_context_ms: float | None
) -> Sample | None:
    """Return the block's part of a run, or None where a disturbed run does not tell it.

    ``ms``, ``context_ms``: of the block's nodes and of all others by the wall clock, others' time on the core among
    it. ``usual_context_ms``: what those others take in undisturbed runs, where there were any.

    Of a disturbed run ``sample.ms`` is what the thread computed. The block took that at most, and what its nodes took
    by the wall clock; at least it took what the thread computed beyond the context's time, were that its own. The
    nearer the two are, the more the run tells. Where the usual context is known it bounds the block, too, as well as
    contexts are alike: badly, where the block is little beside its context.
    """
    if not sample.disturbed:
        return Sample(ms)
    most, least = min(ms, sample.ms), sample.ms - context_ms
    if least >= _TELLING * most > 0:
        return Sample(most, disturbed=True)
    if usual_context_ms is None:
        return None
    told = min(most, max(least, sample.ms - usual_context_ms))
    return Sample(told, disturbed=True) if told > 0 and told >= _OF_CONTEXT * usual_context_ms else None


def block_ms(
    nodes: Sequence[NodeTime],
    results: Sequence[tuple[int, ...]],
    profiler_ms: float = 0.0,
    paid: float = 0.0,
    copies: int = 1,
) -> float:
    """Return the ms of the block's `own_nodes` in one run.

    ``profiler_ms`` is taken off every node. ``paid``: of the inputs' conversions this share does not count.
    """
    return sum(
        (1 - paid if node.operation == CONVERSION else 1.0) * (node.ms - profiler_ms)
        for node in own_nodes(nodes, results, copies)
    )


def own_nodes(
    nodes: Sequence[NodeTime], results: Sequence[tuple[int, ...]], copies: int = 1
) -> list[NodeTime]:
    """Return a block's nodes of one run, last to first: all but context and the conversions of its ``results``.

    Of a result either itself is converted, for the context to read, or the mean that the context takes of it.
    ``copies``: 2 where the nodes of the block and of its twin ran in turns.
    """
    own, left, seen = list[NodeTime](), copies * list(results), set[bool]()
    for node in reversed(nodes):
        if node.operation == CONVERSION:
            shape = node.output_shapes[0] if node.output_shapes else ()
            result = next((r for r in left if shape in (r, (*r[:2], *(1 for _ in r[2:])))), None)
            if result is None:
                own.append(node)
            else:
                left.remove(result)
        elif CONTEXT not in node.name:
            own.append(node)
            seen.add(is_twins(node))
            if len(results) == 1:  # what came before converted an input, of the result's shape perhaps
                del left[copies - len(seen) :]
    return own


def share_of_channels(model: onnx.ModelProto, positions: Collection[int]) -> float:
    """Return which share of the inputs' channels these inputs have."""
    if not positions:
        return 0.0
    shapes = [value.type.tensor_type.shape.dim for value in model.graph.input]
    channels = [shape[1].dim_value if len(shape) > 1 else 1 for shape in shapes]
    return sum(count for position, count in enumerate(channels) if position in positions) / sum(channels)
