"""What ONNX Runtime's profiler adds to every node's time, and what a run costs beside its nodes.

The profiler's own work counts into the times that it reports: a node of 0.4 us shows as 2 us. A chain of small
convolutions at two lengths, timed without the profiler, has a slope that is the true cost of a node; what the
profiler says above that is its own, and the rest of the chain's time is what a run costs without any node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from smcp_fx.backends.base import Array
from smcp_fx.backends.onnxruntime_profile import Profiler
from smcp_fx.backends.onnxruntime_session import create_session, session_options
from smcp_fx.backends.pace import TOLERANCE, pace
from smcp_fx.backends.timing import Sample, Timer, calm, stopwatch, take_sample

_CHANNELS, _SIZE = 16, 2
_LENGTHS = (8, 48)
_RUNS = 120
#: So many undisturbed ones of them say enough.
_ENOUGH = 24


@dataclass(frozen=True)
class Overhead:
    """``profiler_ms``: what the profiler adds to each node; ``run_ms``: what a run costs beside its nodes."""

    profiler_ms: float
    run_ms: float


#: What was measured, and the core's usual pace then.
_known: dict[tuple[int, bool], tuple[float, Overhead]] = {}


def overhead(threads: int = 1, spinning: bool = True) -> Overhead:
    """Measure both (half a second), once a process, and again where the core's usual pace became another."""
    usual_ms = pace().usual_ms if threads == 1 else 1.0
    found = _known.get((threads, spinning))
    if found is None or not 1 / TOLERANCE <= usual_ms / found[0] <= TOLERANCE:
        _known[threads, spinning] = usual_ms, _measured(threads, spinning)
    return _known[threads, spinning][1]


def _measured(threads: int, spinning: bool) -> Overhead:
    feed = {"x": np.zeros((1, _CHANNELS, _SIZE, _SIZE), np.float32)}
    options = session_options(threads, spinning)
    sessions = [create_session(_chain(length), options) for length in _LENGTHS]
    timers = [stopwatch(functools.partial(session.run, None, feed)) for session in sessions]
    turns = [[_sample(timer, threads) for timer in timers] for _ in range(_RUNS)][_RUNS // 4 :]
    short, long = (
        float(np.median([s.ms for s in calm(samples, _ENOUGH)])) for samples in zip(*turns, strict=True)
    )
    node = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
    # The first profile of a process pays for the memory that it is written to.
    shown = float(
        np.median([_profiled_node_ms(_chain(_LENGTHS[1]), feed, threads, spinning) for _ in range(3)])
    )
    return Overhead(max(shown - node, 0.0), max(short - _LENGTHS[0] * node, 0.0))


def _profiled_node_ms(model: bytes, feed: dict[str, Array], threads: int, spinning: bool) -> float:
    """Return what the profiler shows for a node of the chain: the mean of the middle half of the runs' means."""
    with Profiler(model, threads, spinning) as profiler:
        timer = stopwatch(lambda: profiler.session.run(None, feed))
        samples = [_sample(timer, threads) for _ in range(_RUNS)][_RUNS // 4 :]
        runs = profiler.runs()[_RUNS // 4 :]
    times = [float(np.mean([node.ms for node in run if node.operation == "Conv"])) for run in runs]
    samples = [Sample(ms, sample.disturbed) for ms, sample in zip(times, samples, strict=True)]
    means = np.sort([sample.ms for sample in calm(samples, _ENOUGH)])
    return float(means[len(means) // 4 : -(len(means) // 4)].mean())


def _sample(timer: Timer, threads: int) -> Sample:
    return take_sample(timer, pace() if threads == 1 else None)


def _chain(length: int) -> bytes:
    """Return a serialised chain of 1x1 convolutions that the runtime fuses with nothing."""
    shape = [1, _CHANNELS, _SIZE, _SIZE]
    weight = np.eye(_CHANNELS, dtype=np.float32).reshape(_CHANNELS, _CHANNELS, 1, 1)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x" if i == 0 else f"y{i - 1}", f"w{i}"], [f"y{i}"], f"conv{i}")
            for i in range(length)
        ],
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(f"y{length - 1}", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weight, f"w{i}") for i in range(length)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


@functools.cache
def code_warmer(threads: int = 1, spinning: bool = True) -> Callable[[], object]:
    """Return a function that runs a tiny network of every common kind of node.

    Run after the caches were emptied, it brings the runtime's code back but hardly any data: as in a network,
    where a block's weights may be cold, but its kernels are those of the blocks before.
    """
    session = create_session(_sampler(), session_options(threads, spinning))
    feed = {"x": np.ones((1, _CHANNELS, 8, 8), np.float32)}
    return functools.partial(session.run, None, feed)


def _sampler() -> bytes:
    c = _CHANNELS
    shapes = {"w1": (c, c, 1, 1), "w3": (c, c, 3, 3), "wd": (c, 1, 3, 3), "wg": (c, c)}
    node: Callable[..., onnx.NodeProto] = helper.make_node
    pads = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    graph = helper.make_graph(
        [
            node("Conv", ["x", "w1"], ["a"], "pointwise"),
            node("Relu", ["a"], ["b"]),
            node("Conv", ["b", "w3"], ["c"], "dense", **pads),
            node("Conv", ["c", "wd"], ["d"], "depthwise", group=c, **pads),
            node("Sigmoid", ["d"], ["e"]),
            node("Mul", ["d", "e"], ["f"]),
            node("Add", ["f", "b"], ["g"]),
            node("MaxPool", ["g"], ["h"], **pads),
            node("GlobalAveragePool", ["h"], ["i"]),
            node("Flatten", ["i"], ["j"]),
            node("Gemm", ["j", "wg"], ["y"]),
        ],
        "sampler",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, c, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, c])],
        [numpy_helper.from_array(np.full(shape, 0.01, np.float32), name) for name, shape in shapes.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data
