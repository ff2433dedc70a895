"""A block timed by OpenVINO as it runs inside a network: its share of a run, by the runtime's performance counts.

Around the block stands the same context as for ONNX Runtime (`smcp_fx.backends.onnx.context`), and all of it is there
twice (`smcp_fx.backends.onnx.twin`). The counts are means over all runs since a network was compiled, in whole
microseconds. So they tell which share of a run is the block's; how long a run takes, undisturbed, the clock tells.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from smcp_fx.backends.base import Array, BlockLatency
from smcp_fx.backends.onnx.context import CONTEXT, add_context, random_feed, share_of_channels
from smcp_fx.backends.onnx.twin import TWIN, add_twin
from smcp_fx.backends.openvino.overhead import overhead
from smcp_fx.backends.openvino.session import Node, Session
from smcp_fx.backends.timing.block_runs import COLD_SPREAD, FEW_COLD_RUNS, BlockRuns
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
from smcp_fx.backends.timing.physics import least_ms
from smcp_fx.errors import BackendError

#: Changes with the way blocks are timed: rows of another way are not mixed with these.
BLOCK_TIMING = "1"
#: Cold runs are few, so that the counts before them, which round the more the more runs there were, must be few, too.
_WARM_BEFORE_COLD = 1
#: No block is faster than this.
_LEAST_MS = 1e-4


@dataclass(frozen=True)
class Parts:
    """The nodes of a block in its context that are the block's, in the order they run: its own and its twin's.

    What the runtime inserted belongs to its reader. ``paid``: of such conversions this share does not count.
    """

    nodes: tuple[Node, ...]
    paid: float

    @classmethod
    def of(cls, nodes: Sequence[Node], paid: float = 0.0) -> Parts:
        """Tell nodes from the context's by name; a node that computes several layers has the first one's."""
        return cls(tuple(node for node in nodes if CONTEXT not in _owner(node)), paid)

    def counted(self, state: str) -> list[tuple[Node, ...]]:
        """Return the parts that count in a state: cold, what ran second; hot, both."""
        halves = [
            tuple(node for node in self.nodes if (TWIN in _owner(node)) is twin) for twin in (False, True)
        ]
        in_order = sorted(filter(None, halves), key=lambda part: self.nodes.index(part[-1]))
        return in_order[-1:] if state == "cold" else in_order

    def ms(self, spent: Mapping[str, float], node_ms: float, state: str) -> float:
        """Return the block's ms in what was spent; ``node_ms`` is added for each node."""
        parts = self.counted(state)
        return sum(
            (1 - self.paid if not node.layers else 1.0) * (spent[node.name] + node_ms)
            for part in parts
            for node in part
            if spent.get(node.name, 0.0) > 0
        ) / max(len(parts), 1)


def _owner(node: Node) -> str:
    """Return the name that tells whose a node is: its own, or that of what reads it where the runtime inserted it."""
    return node.name if node.layers or not node.readers else node.readers[0]


def measure_block(
    model: onnx.ModelProto,
    threads: int = 1,
    precision: str = "fp32",
    config: TimingConfig | None = None,
    read_before: Collection[int] = (),
    fed_by: Sequence[str] = (),
) -> BlockLatency:
    """Measure the nodes of a block's model, all shapes fixed, hot and cold.

    ``read_before``: inputs, by position, whose conversion another block pays for. ``fed_by``: how each was written.
    """
    config = config or QUICK
    least = least_ms(model, threads) if precision == "fp32" else 0.0
    paid = share_of_channels(model, read_before)
    add_twin(add_context(model, fed_by))
    data, feed = model.SerializeToString(), list(random_feed(model).values())
    found: BlockLatency | None = None
    for _ in range(config.attempts):
        states = [_measured(data, feed, threads, precision, paid, config, state) for state in ("hot", "cold")]
        taken = BlockLatency(*states)
        if min(state.median_ms for state in states) < least:
            continue
        found = taken if found is None else found.steadier(taken)
        if found.stable:
            break
    if found is None:
        raise BackendError(
            f"the block seemed to take less than the {least:.4g} ms that its multiply-adds need on this processor: "
            "the machine was too busy for its clocks to tell. Measure again when it is idle."
        )
    return replace(found, pace_ms=pace().usual_ms if threads == 1 else 0.0)


def _measured(
    data: bytes,
    feed: Sequence[Array],
    threads: int,
    precision: str,
    paid: float,
    config: TimingConfig,
    state: str,
) -> Measurement:
    """Measure a state in a session of its own."""
    session = Session(data, threads, precision, counts=True)
    session.feed(feed)
    runs = BlockRuns(stopwatch(session.run), pace() if threads == 1 else None)
    if state == "hot":
        warm_up(runs.timer, config)
        before = session.spent()
        runs.take_hot(config)
    else:
        for _ in range(_WARM_BEFORE_COLD):
            session.run()
        before = session.spent()
        runs.take_cold_alone(config)
    after = session.spent()
    count = len(runs.samples)
    spent = {name: (ms - before[name]) / count for name, ms in after.items()}
    parts = Parts.of(session.nodes(), paid)
    ms = parts.ms(spent, overhead(threads).node_ms, state)
    # Disturbed runs are in the counts' means: what they took too long, the block is taken to have its share of.
    walls = float(np.mean([sample.ms for sample in runs.samples]))
    few, spread = (
        (config.min_repeats, config.spread_limit)
        if state == "hot"
        else (FEW_COLD_RUNS, COLD_SPREAD * config.spread_limit)
    )
    still = [Sample(ms * sample.ms / walls, sample.disturbed) for sample in runs.samples]
    found = summarise(calm(still, few), spread)
    mostly = 2 * sum(not sample.disturbed for sample in still) >= len(still)
    return replace(found, median_ms=max(found.median_ms, _LEAST_MS), stable=found.stable and mostly)
