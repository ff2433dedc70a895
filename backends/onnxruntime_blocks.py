"""A block timed by ONNX Runtime as it runs inside a network.

Timed alone, a block pays for converting its input and output to the runtime's blocked layout, and for a
session run; inside a network it pays for neither. So its inputs come from small 1x1 convolutions in front of
it, as they would from the layers before, and the runtime's profiler tells the block's nodes from those:

    image (N, 1, H, W) -> [1x1 convolution, ReLU: context] -> block -> [conversion of the result: context]

A conversion *between* context and block counts: the block asks for it, as it would in the network.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from smcp_fx.backends.base import Array, BlockLatency
from smcp_fx.backends.onnx_blocks import random_values
from smcp_fx.backends.onnxruntime_profile import NodeTime, Profiler
from smcp_fx.backends.timing import (
    QUICK,
    Measurement,
    Sample,
    TimingConfig,
    stopwatch,
    summarise,
    take_sample,
    warm_up,
)

_CONTEXT = "smcp_context"
#: Up to this many channels an input is the network's own (an image), and is fed as it is.
_IMAGE_CHANNELS = 4
_FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.DOUBLE: np.float64}


def add_context(model: onnx.ModelProto) -> onnx.ModelProto:
    """Put a 1x1 convolution with ReLU in front of every input of more channels than an image, in place."""
    graph = model.graph
    nodes = []
    for value in graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if len(shape) != 4 or shape[1] <= _IMAGE_CHANNELS or kind.elem_type not in _FLOATS:
            continue
        inner, name = value.name, f"{_CONTEXT}_{value.name}"
        weight = random_values((shape[1], 1, 1, 1), _FLOATS[kind.elem_type])
        graph.initializer.append(numpy_helper.from_array(weight, f"{name}_weight"))
        nodes.append(
            helper.make_node("Conv", [f"{name}_image", f"{name}_weight"], [f"{name}_conv"], f"{name}_conv")
        )
        nodes.append(helper.make_node("Relu", [f"{name}_conv"], [name], f"{name}_relu"))
        for node in graph.node:
            for position, source in enumerate(node.input):
                if source == inner:
                    node.input[position] = name
        value.name = f"{name}_image"
        kind.shape.dim[1].dim_value = 1
    own = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *own])
    return model


def measure_block(
    model: onnx.ModelProto, threads: int = 1, spinning: bool = True, config: TimingConfig | None = None
) -> BlockLatency:
    """Measure the nodes of a block's model (all shapes fixed, as `BlockModels` makes it).

    Cold: the caches are emptied before the run, so weights and results come from memory, as in a network
    larger than the cache; the context still leaves the input in cache. Hot: the run right after.
    """
    config = config or QUICK
    outputs = [tuple(dim.dim_value for dim in v.type.tensor_type.shape.dim) for v in model.graph.output]
    add_context(model)
    feed = {value.name: _example(value) for value in model.graph.input}
    data = model.SerializeToString()
    best = _attempt(data, feed, outputs, threads, spinning, config)
    for _ in range(config.attempts - 1):
        if _calm(best):
            break
        again = _attempt(data, feed, outputs, threads, spinning, config)
        if _calm(again) or max(m.spread for m in again) < max(m.spread for m in best):
            best = again
    return BlockLatency(*best)


def _calm(measurements: Sequence[Measurement]) -> bool:
    return all(m.stable for m in measurements)


def _attempt(
    data: bytes,
    feed: dict[str, Array],
    outputs: Sequence[tuple[int, ...]],
    threads: int,
    spinning: bool,
    config: TimingConfig,
) -> tuple[Measurement, Measurement]:
    """Return (hot, cold) of one session."""
    with Profiler(data, threads, spinning) as profiler:
        timer = stopwatch(lambda: profiler.session.run(None, feed))
        warm = warm_up(timer, config)
        runs: list[list[Sample]] = []
        spent_ms, repeats, dropped = 0.0, 0, 0
        while repeats < config.min_repeats or (repeats < config.max_repeats and spent_ms < config.budget_ms):
            evict_caches()
            pair = [take_sample(timer, threads == 1) for _ in ("cold", "hot")]
            runs.append(pair)
            spent_ms += sum(sample.ms for sample in pair)
            if any(s.disturbed for s in pair) and dropped < config.droppable * config.min_repeats:
                dropped += 1
            else:
                repeats += 1
        profiles = profiler.runs()[warm:]
    block = [block_ms(nodes, outputs) for nodes in profiles]
    context = float(
        np.median([sum(n.ms for n in nodes) - ms for nodes, ms in zip(profiles, block, strict=True)])
    )
    pairs = [
        [_of_block(ms, context, sample) for ms, sample in zip(block[2 * i : 2 * i + 2], pair, strict=True)]
        for i, pair in enumerate(runs)
    ]
    calm = [pair for pair in pairs if not any(sample.disturbed for sample in pair)]
    used = calm if len(calm) >= config.min_repeats else pairs
    cold, hot = (summarise([pair[state] for pair in used], config.spread_limit) for state in (0, 1))
    return hot, cold


def _of_block(ms: float, context_ms: float, sample: Sample) -> Sample:
    """Return the block's part of a run. Of a disturbed run: at most what its thread computed beside the context."""
    if sample.disturbed:
        ms = min(ms, max(sample.ms - context_ms, 0.0))
    return Sample(ms, sample.disturbed)


def evict_caches() -> None:
    """Read through memory half again as large as the last-level cache, which leaves nothing else in it."""
    _eviction_buffer().max()


@functools.cache
def _eviction_buffer() -> Array:
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return np.ones(max(sizes) * 3 // 2 // 4, dtype=np.float32)


def block_ms(nodes: Sequence[NodeTime], outputs: Sequence[tuple[int, ...]]) -> float:
    """Return the ms of the block's own nodes in one run: all but the context and the results' conversions."""
    left = list(outputs)
    total = 0.0
    for node in reversed(nodes):
        if node.operation == "ReorderOutput" and node.output_shapes and node.output_shapes[0] in left:
            left.remove(node.output_shapes[0])
        elif not node.name.startswith(_CONTEXT):
            total += node.ms
    return total


def _example(value: onnx.ValueInfoProto) -> Array:
    kind = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in kind.shape.dim)
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if kind.elem_type in _FLOATS:
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return np.zeros(shape, dtype)
