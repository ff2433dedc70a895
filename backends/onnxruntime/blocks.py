"""A block timed by ONNX Runtime as it runs inside a network.

Timed alone, a block pays for converting its input and output to the runtime's blocked layout, and for a session
run; inside a network it pays for neither. So nodes before it write its inputs as the network would, usually small 1x1
convolutions, and the runtime's profiler tells the block's nodes from these:

    image (N, 1, H, W) -> [1x1 convolution, ReLU: context] -> block -> [conversion of the result, its mean: context]

A conversion *between* context and block counts, as the block needs it in the network too. All of this is there twice,
with different weights (`twin`). In the cold state only the second copy counts: it runs right after the first, as a
block in a network runs after other layers. In the hot state the mean of both counts. A chain of nodes of known cost
beside them shows what the profiler adds to each node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import onnx

from smcp_fx.backends.base import BlockLatency
from smcp_fx.backends.onnxruntime.overhead import code_warmer, overhead, profiler_beside
from smcp_fx.backends.onnxruntime.own_time import BlockInContext
from smcp_fx.backends.onnxruntime.profile import RESOLUTION_MS, NodeTime, Profiler
from smcp_fx.backends.timing.block_runs import (
    COLD_SPREAD,
    FEW_COLD_RUNS,
    LEAST_MS,
    BlockRuns,
    sample_of_block,
    steadiest,
)
from smcp_fx.backends.timing.measuring import (
    QUICK,
    Measurement,
    Sample,
    TimingConfig,
    calm,
    stopwatch,
    summarise,
    warm_up,
)
from smcp_fx.backends.timing.pace import pace
from smcp_fx.backends.timing.physics import least_ms, multiply_adds

#: The version of the way blocks are timed. It is part of the fingerprint, so that rows of different versions
#: are never mixed.
BLOCK_TIMING = "10"


def measure_block(
    model: onnx.ModelProto,
    threads: int = 1,
    spinning: bool = True,
    config: TimingConfig | None = None,
    read_before: Collection[int] = (),
    fed_by: Sequence[str] = (),
    written: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
) -> BlockLatency:
    """Measure the nodes of a block's model (all shapes fixed, as `BlockModels` makes it).

    Cold: the caches are emptied before the run, so that weights and results come from memory, as in a network larger
    than the cache. The input is in cache all the same, as the context has just written it, and so is the runtime's
    code, as a tiny network has just run it. Hot: a run right after another. ``read_before``: inputs, by position,
    whose conversion another block pays for. ``fed_by``: how the network writes each input.
    ``written``: quantises a model, if the network is; None if it is in float.
    """
    config = config or QUICK
    # Bytes are multiplied many times as fast as floats; processors do not tell their highest speed.
    count, least = multiply_adds(model), least_ms(model, threads) if written is None else 0.0
    block = BlockInContext.of(model, read_before, fed_by, written)
    # The profiler's clock may round a time down.
    latency = steadiest(
        lambda: _attempt(block, threads, spinning, config), config.attempts, count, least - RESOLUTION_MS
    )
    return replace(latency, pace_ms=pace().usual_ms if threads == 1 else 0.0)


def _attempt(
    block: BlockInContext, threads: int, spinning: bool, config: TimingConfig
) -> tuple[Measurement, Measurement] | None:
    """Return (hot, cold) of one session; None if no run of a state is usable."""
    node_ms = overhead(threads, spinning).node_ms
    with Profiler(block.data, threads, spinning) as profiler:
        runs = BlockRuns(
            stopwatch(lambda: profiler.session.run(None, block.feed)), pace() if threads == 1 else None
        )
        warm = warm_up(runs.timer, config)
        runs.take_hot(config)
        runs.take_cold(config, code_warmer(threads, spinning))  # last, as a session's first runs are slower
        timed = range(warm, warm + len(runs.samples))
        by_run = profiler.runs(timed)
    profiles = [by_run[index] for index in timed]
    hot, cold = _block_samples(block, runs, profiles, node_ms)
    if not any(hot) or not any(cold):
        return None
    # No node is faster than a link of the chain, most of whose time is the runtime's own.
    least = block.ms([replace(node, ms=node_ms) for node in profiles[0]], 0.0, "cold")
    return (
        _summary(hot, config.min_repeats, config.spread_limit, least),
        _summary(cold, FEW_COLD_RUNS, COLD_SPREAD * config.spread_limit, least),
    )


def _block_samples(
    block: BlockInContext, runs: BlockRuns, profiles: Sequence[Sequence[NodeTime]], node_ms: float
) -> tuple[list[Sample | None], list[Sample | None]]:
    """Return the block's part of each run, hot and cold; None for an unusable run."""
    taken = list(zip(profiles, runs.states, runs.samples, strict=True))
    still = [nodes for nodes, state, sample in taken if state == "hot" and not sample.disturbed]
    profiler_ms = profiler_beside(still or profiles, node_ms)
    own = [block.ms(nodes, profiler_ms, state) for nodes, state, _ in taken]
    # These are wall-clock times, which equal the thread's own time in undisturbed runs only.
    beside = [sum(node.ms for node in nodes) - ms for nodes, ms in zip(profiles, own, strict=True)]
    calm_beside = [ms for ms, sample in zip(beside, runs.samples, strict=True) if not sample.disturbed]
    usual = float(np.median(calm_beside)) if calm_beside else None
    by_state: dict[str, list[Sample | None]] = {"hot": [], "cold": []}
    for ms, rest, (_, state, sample) in zip(own, beside, taken, strict=True):
        by_state[state].append(sample_of_block(ms, rest, sample, usual))
    return by_state["hot"], by_state["cold"]


def _summary(runs: list[Sample | None], few: int, spread_limit: float, least_ms: float) -> Measurement:
    """Summarise the undisturbed samples; not stable if most were disturbed. Unusable runs are None.

    If many samples are disturbed, some pass for undisturbed: of 2,400 measurements of one row, those with
    most of their samples disturbed were off by over a fifth in 22% of cases, the others in at most 2%.
    """
    samples = [sample for sample in runs if sample]
    summary = summarise(calm(samples, few), spread_limit, RESOLUTION_MS)
    mostly = 2 * sum(not sample.disturbed for sample in samples) >= len(runs)
    median = max(summary.median_ms, least_ms, LEAST_MS)
    return replace(summary, median_ms=median, stable=summary.stable and mostly)
