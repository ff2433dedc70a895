"""The time that ONNX Runtime's profiler adds to every node, and a run's own cost outside its nodes.

The times that the profiler reports include its own work: a node of 0.4 us shows as 2 us. Chains of small
convolutions of two lengths, timed without the profiler, give the true cost of a node (by the difference) and
of a run without any node (the rest).

The profiler writes to memory, so its cost depends on other processes' writes: 1.7 to 4.1 us per node within
one minute on a shared machine. So every profiled model has such a chain, which shows the present cost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from smcp_fx.backends.onnx.chain import CHAIN, CHAIN_SHAPE, CHANNELS, chain, chain_feed, chain_model
from smcp_fx.backends.onnxruntime.profile import RESOLUTION_MS, NodeTime
from smcp_fx.backends.onnxruntime.session import create_session, session_options
from smcp_fx.backends.timing.measuring import Sample, Timer, calm, stopwatch, summarise, take_sample
from smcp_fx.backends.timing.pace import pace

#: Nodes in the short and in the long chain. Chosen, not measured.
_LENGTHS = (8, 48)
#: Rounds, and runs of both chains in each. All of it takes 25 ms. Chosen, not measured.
_ROUNDS, _RUNS = 3, 60
#: After this many disturbed rounds we make do with them; a round is undisturbed if this many of its runs are.
#: Chosen, not measured.
_MOST_DISTURBED, _ENOUGH = 2, 12
#: The number of a chain's nodes beside a block. Chosen, not measured.
_BESIDE = 8


@dataclass(frozen=True)
class Overhead:
    """``run_ms``: a run's own cost outside its nodes; ``node_ms``: a chain's node without the profiler."""

    run_ms: float
    node_ms: float


#: By threads and spinning: when to measure again, and the last result.
_known: dict[tuple[int, bool], tuple[float, Overhead]] = {}
#: Seconds until it is measured again; more if the core was disturbed all the while, as it then takes 3 to 17 s.
_AGAIN_S, _AGAIN_DISTURBED_S = 2.0, 30.0
#: A new figure counts only if it is lower by this factor: the lowest of many equal ones is merely the luckiest.
#: Chosen, not measured.
_FASTER = 0.95


def overhead(threads: int = 1, spinning: bool = True) -> Overhead:
    """Return the lowest figure of this process so far; measure again if the last time is seconds ago.

    Disturbances only ever make a run longer, and the core's pace does not show all of them. A process that measured
    only once got a third too much, and subtracted that from every node of every row.
    """
    key, now = (threads, spinning), time.monotonic()
    if key not in _known or now >= _known[key][0]:
        measured, calm_rounds = _measured(threads, spinning)
        if key in _known:
            before = _known[key][1]
            measured = measured if measured.node_ms < _FASTER * before.node_ms else before
        _known[key] = time.monotonic() + (_AGAIN_S if calm_rounds else _AGAIN_DISTURBED_S), measured
    return _known[key][1]


def add_reference(model: onnx.ModelProto) -> onnx.ModelProto:
    """Put a chain beside the model's own nodes, in place; its result is one more output."""
    nodes, weights, image, result = chain(_BESIDE)
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(weights)
    model.graph.input.append(image)
    model.graph.output.append(result)
    return model


def profiler_beside(runs: Sequence[Sequence[NodeTime]], node_ms: float) -> float:
    """Return the ms that the profiler added to each node of these runs, as the chain's links show."""
    links = [Sample(node.ms) for run in runs for node in run if _is_link(node)]
    return max(summarise(links, 0.0, RESOLUTION_MS).median_ms - node_ms, 0.0)


def without_reference(nodes: Sequence[NodeTime]) -> list[NodeTime]:
    """Return a run's nodes without those of the chain."""
    own = [node for node in nodes if not node.name.startswith(CHAIN)]
    for node in reversed(own):
        if node.operation == "ReorderOutput" and node.output_shapes == (CHAIN_SHAPE,):
            own.remove(node)  # the conversion of the chain's result, which the runtime names
            break
    return own


def _is_link(node: NodeTime) -> bool:
    return node.operation == "Conv" and node.name.startswith(f"{CHAIN}_link")


def _measured(threads: int, spinning: bool) -> tuple[Overhead, bool]:
    """Measure the overhead; return it, and whether any round was undisturbed."""
    models = [chain_model(length) for length in _LENGTHS]
    feed = chain_feed()
    options = session_options(threads, spinning)
    sessions = [create_session(model, options) for model in models]
    timers = [stopwatch(functools.partial(session.run, None, feed)) for session in sessions]
    calm_rounds, others = list[list[float]](), list[list[float]]()
    while len(calm_rounds) < _ROUNDS and len(others) < _MOST_DISTURBED:
        turns = [[_sample(timer, threads) for timer in timers] for _ in range(_RUNS)][_RUNS // 4 :]
        each = list(zip(*turns, strict=True))
        undisturbed = min(sum(not sample.disturbed for sample in own) for own in each)
        kept = calm_rounds if undisturbed >= _ENOUGH else others
        kept.append([float(np.median([s.ms for s in calm(own, _ENOUGH)])) for own in each])
    rounds = calm_rounds or others
    node = float(np.median([long - short for short, long in rounds])) / (_LENGTHS[1] - _LENGTHS[0])
    run = min(short for short, _ in rounds) - _LENGTHS[0] * node  # disturbances only make a run longer
    return Overhead(max(run, 0.0), node), bool(calm_rounds)


def _sample(timer: Timer, threads: int) -> Sample:
    return take_sample(timer, pace() if threads == 1 else None)


@functools.cache
def code_warmer(threads: int = 1, spinning: bool = True) -> Callable[[], object]:
    """Return a function that runs a tiny network with every common kind of node.

    After the caches are emptied, it brings back the runtime's code, but hardly any data. In a network, too, a
    block's weights may be cold, but the blocks before it have run the same kernels.
    """
    session = create_session(_sampler(), session_options(threads, spinning))
    feed = {"x": np.ones((1, CHANNELS, 8, 8), np.float32)}
    return functools.partial(session.run, None, feed)


def _sampler() -> bytes:
    c = CHANNELS
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
