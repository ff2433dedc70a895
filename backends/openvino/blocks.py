"""A block timed by OpenVINO as it runs inside a network: its share of a run, by the runtime's performance counts.

The block has the same context as for ONNX Runtime (`smcp_fx.backends.onnx.context`), and the model holds both
twice (`smcp_fx.backends.onnx.twin`). The counts are means over all runs since a network was compiled, in
whole microseconds. They are read after every run, so that runs during which others had the core do not count.
The clock gives the median run, relative to the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from smcp_fx.backends.base import Array, BlockLatency
from smcp_fx.backends.onnx.context import CONTEXT, add_context, random_feed, share_of_channels
from smcp_fx.backends.onnx.twin import TWIN, add_twin
from smcp_fx.backends.openvino.overhead import overhead
from smcp_fx.backends.openvino.session import Node, Session
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
    stopwatch,
    summarise,
    warm_up,
)
from smcp_fx.backends.timing.pace import pace
from smcp_fx.backends.timing.physics import least_ms, multiply_adds

#: The version of the way blocks are timed: rows of different versions are not mixed.
BLOCK_TIMING = "1"


@dataclass(frozen=True)
class Parts:
    """The block's nodes within its context, in the order they run: its own and its twin's.

    A node that the runtime inserted belongs to its reader; the share ``paid`` of such nodes does not count.
    """

    nodes: tuple[Node, ...]
    paid: float

    @classmethod
    def of(cls, nodes: Sequence[Node], paid: float = 0.0) -> Parts:
        """Select the nodes outside the context by name; a node of several layers has the first one's name."""
        return cls(tuple(node for node in nodes if CONTEXT not in _owner(node)), paid)

    def counted(self, state: str) -> list[tuple[Node, ...]]:
        """Return the copies of the block that count in a state: cold, the one that ran last; hot, both."""
        halves = [
            tuple(node for node in self.nodes if (TWIN in _owner(node)) is twin) for twin in (False, True)
        ]
        in_order = sorted(filter(None, halves), key=lambda part: self.nodes.index(part[-1]))
        return in_order[-1:] if state == "cold" else in_order

    def ms(self, spent: Mapping[str, float], node_ms: float, state: str) -> float:
        """Return the block's ms from each node's; ``node_ms`` is added for each node."""
        parts = self.counted(state)
        return sum(
            (1 - self.paid if not node.layers else 1.0) * (spent[node.name] + node_ms)
            for part in parts
            for node in part
            if spent.get(node.name, 0.0) > 0
        ) / max(len(parts), 1)


def _owner(node: Node) -> str:
    """Return the name that tells whose a node is: its own, or its reader's if the runtime inserted it."""
    return node.name if node.layers or not node.readers else node.readers[0]


def measure_block(
    model: onnx.ModelProto,
    threads: int = 1,
    precision: str = "fp32",
    config: TimingConfig | None = None,
    read_before: Collection[int] = (),
    fed_by: Sequence[str] = (),
    written: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
) -> BlockLatency:
    """Measure the nodes of a block's model, all shapes fixed, hot and cold.

    ``read_before``: inputs, by position, whose conversion another block pays for. ``fed_by``: how each was written.
    ``written``: quantises the model if the network is quantised; None if it is in float.
    """
    config = config or QUICK
    count = multiply_adds(model)
    least = least_ms(model, threads) if precision == "fp32" and written is None else 0.0
    paid = share_of_channels(model, read_before)
    add_twin(add_context(model, fed_by))
    model = written(model) if written is not None else model
    data, feed = model.SerializeToString(), list(random_feed(model).values())

    def attempt() -> tuple[Measurement, Measurement] | None:
        hot, cold = (
            _measured(data, feed, threads, precision, paid, config, state) for state in ("hot", "cold")
        )
        return None if hot is None or cold is None else (hot, cold)

    latency = steadiest(attempt, config.attempts, count, least)
    return replace(latency, pace_ms=pace().usual_ms if threads == 1 else 0.0)


def _measured(
    data: bytes,
    feed: Sequence[Array],
    threads: int,
    precision: str,
    paid: float,
    config: TimingConfig,
    state: str,
) -> Measurement | None:
    """Measure a state in a session of its own; None if no run is usable."""
    session = Session(data, threads, precision, counts=True)
    session.feed(feed)
    timer = stopwatch(session.run)
    history: list[dict[str, float]] = []  # each node's ms up to each run

    def once() -> float:
        ms = timer()
        history.append(session.spent())
        return ms

    runs = BlockRuns(once, pace() if threads == 1 else None)
    few, spread = config.min_repeats, config.spread_limit
    if state == "hot":
        warm_up(once, config)
        runs.take_hot(config)
    else:
        once()  # the more runs before, the coarser the counts
        few, spread = FEW_COLD_RUNS, COLD_SPREAD * spread
        runs.take_cold_alone(config)
    history = history[-1 - len(runs.samples) :]
    parts, node_ms = Parts.of(session.nodes(), paid), overhead(threads).node_ms
    still = [sample for sample in runs.samples if not sample.disturbed]
    mostly = len(still) >= max(few, len(runs.samples) / 2)
    if mostly:
        spent = spent_in(
            history, [place for place, sample in enumerate(runs.samples) if not sample.disturbed]
        )
        ms, walls = parts.ms(spent, node_ms, state), float(np.mean([sample.ms for sample in still]))
        samples = [Sample(ms * sample.ms / walls) for sample in still]
    else:
        samples = _disturbed(history, runs.samples, parts, node_ms, state)
    if not samples:
        return None
    summary = summarise(samples, spread)
    return replace(summary, median_ms=max(summary.median_ms, LEAST_MS), stable=summary.stable and mostly)


def _disturbed(
    history: Sequence[Mapping[str, float]],
    samples: Sequence[Sample],
    parts: Parts,
    node_ms: float,
    state: str,
) -> list[Sample]:
    """Return the block's samples although most runs were disturbed; counts of single runs round more."""
    spent = [spent_in(history, [place]) for place in range(len(samples))]
    own = [parts.ms(each, node_ms, state) for each in spent]
    copies = len(parts.counted(state))
    beside = [sum(each.values()) - copies * ms for each, ms in zip(spent, own, strict=True)]
    calm_beside = [ms for ms, sample in zip(beside, samples, strict=True) if not sample.disturbed]
    usual = float(np.median(calm_beside)) if calm_beside else None
    rescaled = (
        sample_of_block(copies * ms, rest, sample, usual)
        for ms, rest, sample in zip(own, beside, samples, strict=True)
    )
    return [replace(sample, ms=sample.ms / copies) for sample in rescaled if sample is not None]


def spent_in(history: Sequence[Mapping[str, float]], places: Collection[int]) -> dict[str, float]:
    """Return each node's mean ms in some of the timed runs; ``places``: their positions among these.

    ``history``: each node's ms up to each run, beginning with the run before the first timed one.
    """
    # Join successive runs into stretches, inside which rounding cancels out.
    stretches: list[tuple[int, int]] = []
    for place in sorted(places):
        if stretches and stretches[-1][1] == place:
            stretches[-1] = stretches[-1][0], place + 1
        else:
            stretches.append((place, place + 1))
    return {
        name: max(
            sum(history[end][name] - history[begin][name] for begin, end in stretches) / len(places), 0.0
        )
        for name in history[-1]
    }
