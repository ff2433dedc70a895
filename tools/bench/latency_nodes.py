"""What a network's blocks take by operation, measured one by one, against the nodes of the whole network.

    OMP_NUM_THREADS=1 python tools/bench/latency_nodes.py --models efficientnet_b0 --settings 64x32 --prunings 0 1 2

ONNX Runtime, one thread, in cache or (``--state cold``) behind emptied caches; pruning 0 is the dense network, the
others are those of `latency.py`. No table and no interpolation: every block is measured at the widths that it has. So
this shows what a row counts that the network does not have (a conversion between layouts, say), or lacks. Nodes of a
whole network whose weights do not stay in cache take longer than their blocks do in the state in cache.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latency_networks import MODELS, SETTINGS, Network

from smcp_fx.backends.base import Array
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.chain import chain_feed
from smcp_fx.backends.onnxruntime.overhead import (
    add_reference,
    code_warmer,
    overhead,
    profiler_beside,
    without_reference,
)
from smcp_fx.backends.onnxruntime.own_time import CONVERSION, BlockInContext, own_nodes
from smcp_fx.backends.onnxruntime.profile import RESOLUTION_MS, NodeTime, Profiler
from smcp_fx.backends.timing.fading import displace_inner_caches, evict_caches
from smcp_fx.backends.timing.measuring import Sample, stopwatch, summarise, take_sample
from smcp_fx.backends.timing.pace import pace
from smcp_fx.blocks.cutting import cut
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs.flops import FlopsCost
from smcp_fx.tracing.tracer import Traced

#: Runs that warm up, and that count.
WARM, RUNS = 3, 15
#: Operations below this share of the network are not printed.
PRINTED = 0.005


def empty_caches() -> None:
    """Empty the caches, but for the runtime's code."""
    evict_caches()
    _warm_code()()


_warm_code = functools.cache(code_warmer)


#: What comes before every run: a whole network in its loop is hot by itself.
BEFORE_BLOCKS = {"hot": displace_inner_caches, "cold": empty_caches}
BEFORE_NETWORKS = {"hot": lambda: None, "cold": empty_caches}


class KeepsBlocks(FlopsCost):
    """Prices in FLOPs, so that nothing is measured, and keeps the blocks."""

    blocks: Sequence[FusedBlock] = ()

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        self.blocks = cut(traced, channels)
        return super().network_cost(traced, channels)


@dataclass
class Taken:
    """Ms and number of nodes by operation."""

    ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    nodes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: Taken) -> None:
        """Add what another took."""
        for operation in other.ms:
            self.ms[operation] += other.ms[operation]
            self.nodes[operation] += other.nodes[operation]

    @property
    def total(self) -> float:
        """Ms of all."""
        return sum(self.ms.values())


def profiled(
    data: bytes, feed: Mapping[str, Array], before: Callable[[], object]
) -> tuple[list[list[NodeTime]], float]:
    """Return the nodes of undisturbed runs, without the chain beside them, and what the profiler added to each."""
    with Profiler(data) as profiler:
        timer = stopwatch(lambda: profiler.session.run(None, dict(feed)))
        for _ in range(WARM):
            timer()
        samples = []
        for _ in range(RUNS):
            before()
            samples.append(take_sample(timer, pace()))
        runs = profiler.runs()[WARM:]
    still = [run for run, sample in zip(runs, samples, strict=True) if not sample.disturbed] or runs
    return [without_reference(run) for run in still], profiler_beside(still, overhead().node_ms)


def by_operation(runs: Sequence[Sequence[NodeTime]], profiler_ms: float, share: float = 1.0) -> Taken:
    """What runs of the same nodes took; a node counts as ``share`` of one.

    None takes less than a link of the chain beside it, as in a table's rows.
    """
    taken, least_ms = Taken(), overhead().node_ms
    for times in zip(*runs, strict=True):
        ms = summarise([Sample(node.ms) for node in times], 0.0, RESOLUTION_MS).median_ms - profiler_ms
        taken.ms[times[0].operation] += share * max(ms, least_ms)
        taken.nodes[times[0].operation] += share
    return taken


def of_block(models: BlockModels, block: FusedBlock, widths: tuple[int, ...], state: str) -> Taken:
    """What a block takes where a table's rows are measured: in its context, beside its twin."""
    within = BlockInContext.of(models.model(block, widths), block.read_before, block.fed_by)
    runs, profiler_ms = profiled(within.data, within.feed, BEFORE_BLOCKS[state])
    told = [within.counted(run, state) for run in runs]
    _, copies = told[0]
    taken = Taken()
    for parts in zip(*(parts for parts, _ in told), strict=True):  # of each part, its runs
        own = [own_nodes(part, within.results, copies) for part in parts]
        taken.add(by_operation(own, profiler_ms, 1 / (copies * len(told[0][0]))))
    if CONVERSION in taken.ms:
        taken.ms[CONVERSION] *= 1 - within.paid
    return taken


def compare(model: str, setting: str, prunings: Sequence[int], state: str) -> list[dict[str, Any]]:
    """One line for each pruning: by operation what blocks and network take (ms), and of how many nodes."""
    cost, models = KeepsBlocks(), BlockModels()
    network = Network.make(model, setting, cost)
    groups = [group for group in network.prepared.channels.groups if group.free]
    known: dict[tuple[str, tuple[int, ...]], Taken] = {}
    lines = []
    for index in prunings:
        counts = network.random_counts(index) if index else {group.name: group.size for group in groups}
        blocks = Taken()
        for block in cost.blocks:
            widths = tuple(width.channels(counts) for width in block.widths)
            key = block.signature, widths
            if key not in known:
                known[key] = of_block(models, block, widths, state)
            blocks.add(known[key])
        whole = network.model(counts)
        names = [value.name for value in whole.graph.input]
        feed = {**dict(zip(names, (x.numpy() for x in network.inputs), strict=True)), **chain_feed()}
        add_reference(whole)
        found = by_operation(*profiled(whole.SerializeToString(), feed, BEFORE_NETWORKS[state]))
        operations = sorted(blocks.ms.keys() | found.ms.keys(), key=lambda name: -found.ms[name])
        lines.append({
            "model": model, "setting": setting, "pruning": index, "state": state,
            "blocks_ms": blocks.total, "network_ms": found.total,
            "operations": {
                name: {"blocks_ms": blocks.ms[name], "blocks": blocks.nodes[name],
                       "network_ms": found.ms[name], "network": found.nodes[name]}
                for name in operations
            },
        })  # fmt: skip
    return lines


def show(line: Mapping[str, Any]) -> None:
    """Print one comparison."""
    whole = line["network_ms"]
    apart = line["blocks_ms"] / whole - 1
    print(f"{line['model']} {line['setting']}, pruning {line['pruning']}, {line['state']}: "
          f"blocks {line['blocks_ms']:.3f} ms, network {whole:.3f} ms, {apart:+.1%}")  # fmt: skip
    for name, of in line["operations"].items():
        if max(of["blocks_ms"], of["network_ms"]) > PRINTED * whole:
            apart = (of["blocks_ms"] - of["network_ms"]) / whole
            print(f"    {name:20s} blocks {of['blocks_ms']:8.3f} ({of['blocks']:5.1f})   network "
                  f"{of['network_ms']:8.3f} ({of['network']:3.0f})   {apart:+.1%} of the whole")  # fmt: skip


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--settings", nargs="+", default=tuple(SETTINGS), choices=tuple(SETTINGS))
    parser.add_argument("--prunings", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--state", default="hot", choices=BEFORE_BLOCKS, help="in cache, or from memory")
    parser.add_argument("--out", type=Path, help="file of JSON lines to add to")
    arguments = parser.parse_args()
    for setting in arguments.settings:
        for model in arguments.models:
            for line in compare(model, setting, arguments.prunings, arguments.state):
                show(line)
                if arguments.out is not None:
                    with arguments.out.open("a", encoding="utf-8") as file:
                        told = json.loads(json.dumps(line), parse_float=lambda x: round(float(x), 5))
                        file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
