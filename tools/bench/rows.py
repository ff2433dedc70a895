"""How many rows of a latency table decisions need, and what they are worth: recorded tables, played back.

    python tools/bench/rows.py record --table table.sqlite --networks resnet18:64x32 --replays replays
    python tools/bench/rows.py run --replays replays --record rows.jsonl                # with this checkout
    ../older/.venv/bin/python tools/bench/rows.py run ... --way "whole range"           # and with another
    python tools/bench/rows.py tables --record rows.jsonl --out docs/results/latency.md

A replay answers with the latencies of a table that was measured whole, times noise: 1% on a quiet machine, 5% and
outliers on a busy one. Each network is pruned to 60, 40 and 25% of its latency, from an empty table each, by one
solve; *ramp* is a schedule of 39 solves to 40%. A choice is judged by the whole table without noise: what it costs
there, and what it is worth against the best choice by that table at the same target. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from records import Record, fill, table

import smcp_fx
from smcp_fx.allocation.rounding import without_dominated
from smcp_fx.backends.base import Backend, BlockLatency, Engine, Fingerprint, Measurement
from smcp_fx.blocks.sharing import unique_blocks
from smcp_fx.cost_model import NetworkCost
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.residency import Residency
from smcp_fx.latency.table import LatencyTable
from smcp_fx.prepare import PreparedModel

TARGETS = (0.6, 0.4, 0.25)
NETWORKS = (
    "resnet18:32x32",
    "resnet18:64x32",
    "mobilenet_v2:64x1",
    "resnet50:64x1",
    "shufflenet_v2_x1_0:64x1",
)
#: Name: (spread of a row, share of outliers, spread of the spread that a row tells).
MACHINES = {"quiet": (0.01, 0.0), "busy": (0.05, 0.03)}
#: All networks are priced as if their weights were in a cache of this size.
RESIDENCY = Residency(32.0 * (1 << 20))


def shape_of(setting: str) -> tuple[int, int, int, int]:
    """Return (batch, 3, side, side) of "64x1": side and batch."""
    side, _, batch = setting.partition("x")
    return int(batch), 3, int(side), int(side)


def network(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return "resnet18:64x1" with random weights, and its images."""
    model, _, setting = name.partition(":")
    torch.manual_seed(0)
    return torchvision.models.get_model(model), torch.randn(shape_of(setting))


@dataclass
class Replay(Backend):
    """Answers with recorded latencies ([hot, cold] over a block's grids, by signature and grids) and noise."""

    blocks: Mapping[str, Any]
    spread: float = 0.0
    outliers: float = 0.0
    seed: int = 0
    asked: int = 0
    name = "replay"
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint("replay", "recorded", "none", "1", 1, "float32", (("mode", "replay"),))

    def compile(self, *given: Any) -> Engine:
        raise AssertionError("a replay compiles nothing")

    def run_overhead_ms(self) -> float | None:
        return float(self.blocks["run"])

    def block_latency(self, block: Any, widths: tuple[int, ...], config: Any = None) -> BlockLatency:
        self.asked += 1
        states = []
        for state in self.truth(block, widths):
            ms = state * math.exp(self.spread * self._rng.standard_normal())
            if self._rng.random() < self.outliers:
                ms *= self._rng.uniform(1.2, 2.0)
            half = 0.67 * self.spread * ms
            states.append(Measurement(ms, ms - half, ms + half, 11, stable=True))
        return BlockLatency(*states)

    def truth(self, block: Any, widths: tuple[int, ...]) -> tuple[float, float]:
        """Return the recorded latencies of a row."""
        for grids, hot, cold in self.blocks["signatures"][block.signature]:
            if all(width in grid for width, grid in zip(widths, grids, strict=True)):
                at = tuple(grid.index(width) for width, grid in zip(widths, grids, strict=True))
                return float(hot[at]), float(cold[at])
        raise KeyError(f"{block.name} at {widths} was not recorded")


class Exact:
    """A table without noise or gaps, for judging: surfaces that look recorded latencies up."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def oracle(self, prepared: PreparedModel) -> NetworkCost:
        """Return the network's cost by the recorded latencies themselves."""
        latency = latency_of(prepared.pruner.cost)
        permitted = {g.name: g.permitted for g in prepared.channels.groups if g.free}
        truth = copy.copy(latency)
        names = {block.name: block for block in latency.blocks}
        sums = []
        for state, cost in enumerate((latency.hot, latency.cold)):
            free = {term.name for term in cost.terms}
            terms = [replace(t, price=_Lookup(self.replay, names[t.name], state)) for t in cost.terms]
            fixed = sum(self.replay.truth(b, ())[state] for n, b in names.items() if n not in free)
            sums.append(NetworkCost("ms", permitted, tuple(terms), fixed))
        both = replace(sums[0], terms=(*sums[0].terms, *sums[1].terms))
        offered = dict(without_dominated(both, 0.02).permitted)
        for name, cost in zip(("hot", "cold"), sums, strict=True):
            object.__setattr__(truth, name, replace(cost, permitted=offered))
        object.__setattr__(truth, "measurer", None)
        return truth.around(truth.full_counts)


class _Lookup:
    """A price that is looked up."""

    def __init__(self, replay: Replay, block: Any, state: int) -> None:
        entries = replay.blocks["signatures"][block.signature]
        full = tuple(grid[-1] for grid in block.grids)
        grids, *states = min(
            (e for e in entries if all(f in g for f, g in zip(full, e[0], strict=True))),
            key=lambda e: math.prod(len(g) for g in e[0]),
        )
        self.grids, self.values = [np.array(g) for g in grids], states[state]

    def __call__(self, *widths: Any) -> Any:
        return self.values[tuple(np.searchsorted(g, w) for g, w in zip(self.grids, widths, strict=True))]


def worth_of(
    prepared: PreparedModel, scores: Mapping[str, torch.Tensor], keep: Mapping[str, torch.Tensor]
) -> float:
    """Return what masks are worth: `smcp_fx.pruning.worth`, written out."""
    power, total = 1 - prepared.pruner.config.width_exponent, 0.0
    for name, values in scores.items():
        whole = float(values.double().sum())
        total += whole * (float(values[keep[name]].double().sum()) / whole) ** power / power if whole else 0.0
    return total


def record(arguments: argparse.Namespace) -> None:
    """Write down what a table that was measured whole says of networks, at every width."""
    with LatencyTable(arguments.table, read_only=True) as rows:
        (fingerprint,) = rows.fingerprints()
        for name in arguments.networks:
            module, images = network(name)
            cost = LatencyCost(rows, Replay({}), fingerprint=fingerprint, residency=RESIDENCY)
            latency = latency_of(smcp_fx.prepare(module, (images,), cost=cost).pruner.cost)
            assert latency is not None
            arrays: dict[str, Any] = {"run": rows.run_overhead(fingerprint)}
            index = []
            for block in unique_blocks(latency.blocks):
                widths = np.ix_(*(np.array(grid) for grid in block.grids))
                for share, state in enumerate(("hot", "cold")):
                    arrays[f"{state}{len(index)}"] = rows.surface(block, fingerprint, share)(*widths)
                index.append((block.signature, block.grids))
            np.savez_compressed(file_of(arguments.replays, name), index=json.dumps(index), **arrays)


def file_of(folder: Path, name: str) -> Path:
    """Return where a network's replay lies."""
    return folder / f"{name.replace(':', '_')}.npz"


def read_replay(file: Path) -> dict[str, Any]:
    """Return what `record` wrote: (grids, hot, cold) by signature."""
    found: dict[str, Any] = {}
    with np.load(file) as arrays:
        for number, (signature, grids) in enumerate(json.loads(str(arrays["index"]))):
            states = (arrays[f"hot{number}"], arrays[f"cold{number}"])
            found.setdefault(signature, []).append((tuple(map(tuple, grids)), *states))
        return {"run": float(arrays["run"]), "signatures": found}


def run(arguments: argparse.Namespace) -> None:
    """Run what the record lacks."""
    done = Record(arguments.record)
    for name in arguments.networks:
        blocks = read_replay(file_of(arguments.replays, name))
        for machine in arguments.machines:
            for target in (*TARGETS, "ramp"):
                key = {"way": arguments.way, "network": name, "machine": machine, "target": target}
                if not done.find("solve", **key):
                    found = solved(name, blocks, machine, target, arguments.tables)
                    print(done.add("solve", **key, **found), flush=True)


def tables(arguments: argparse.Namespace) -> None:
    """Write the page's table."""
    lines = Record(arguments.record).find("solve")
    rows = [
        [
            line["network"].replace(":", ", "), line["machine"],
            line["target"] if line["target"] == "ramp" else f"{line['target']:.0%}", line["way"],
            str(line["rows"]), str(line["asked"]), f"{line['predicted']:.1%}", f"{line['true']:.1%}",
            f"{line['worth']:.2%}" if "worth" in line else "",
        ]
        for line in sorted(lines, key=lambda x: (x["network"], x["machine"], str(x["target"]), x["way"]))
    ]  # fmt: skip
    head = ["network", "machine", "target", "rows by", "rows", "with repeats", "predicted", "true", "worth"]
    fill(arguments.out, "rows", table(head, rows))


def solved(
    name: str, blocks: Mapping[str, Any], machine: str, target: float | str, tables: Path | None
) -> dict[str, Any]:
    """Prune one network, from an empty table or from the one in ``tables``."""
    spread, outliers = MACHINES[machine]
    replay = Replay(blocks, spread, outliers)
    module, images = network(name)
    schedule = smcp_fx.Schedule.scaled(100, 1, 1) if target == "ramp" else None
    fraction = 0.4 if target == "ramp" else float(target)
    with (
        tempfile.TemporaryDirectory() as folder,
        LatencyTable((tables or Path(folder)) / f"{name}-{machine}.sqlite") as rows,
    ):
        cost = LatencyCost(rows, replay, progress=False, residency=RESIDENCY)
        began = time.perf_counter()
        prepared = smcp_fx.prepare(module, (images,), target=fraction, cost=cost, schedule=schedule)
        began_rows, bound = replay.asked, time.perf_counter() - began
        few = images[:2]
        pruner, began = prepared.pruner, time.perf_counter()
        if schedule is None:
            prepared(few).square().mean().backward()
            pruner.step()
            gathered = {key: value.clone() for key, value in prepared.state_dict().items()}
            scores = {name: values.clone() for name, values in pruner.importance.items()}
            pruner.solve()
        else:
            for _ in range(schedule.last_step):
                prepared.zero_grad()
                prepared(torch.randn_like(few)).square().mean().backward()
                pruner.step()
            gathered = {}
        seconds, counts, keep = time.perf_counter() - began, pruner.counts, prepared.masks
        found = {
            "rows": len(rows.rows()) - 1, "asked": replay.asked, "begun": began_rows,
            "prepare_s": bound, "solve_s": seconds,
            "predicted": pruner.present_cost / pruner.full_cost,
        }  # fmt: skip
        exact = Exact(replay)
        truth = exact.oracle(prepared)
        full = truth.cost(truth.full_counts)
        found["full_off"] = pruner.full_cost / full - 1
        found["true"] = truth.at(counts).cost(counts) / full
        if gathered:
            prepared.load_state_dict(gathered)
            pruner.cost, pruner.target = truth, fraction * full
            pruner.solve()
            found["worth"] = worth_of(prepared, scores, keep) / worth_of(prepared, scores, prepared.masks)
            found["best_true"] = truth.at(pruner.counts).cost(pruner.counts) / full
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording, running, writing = (commands.add_parser(name) for name in ("record", "run", "tables"))
    recording.add_argument("--table", type=Path, required=True)
    recording.set_defaults(run=record)
    writing.add_argument("--out", type=Path, required=True)
    writing.set_defaults(run=tables)
    for command in (recording, running):
        command.add_argument("--replays", type=Path, required=True)
        command.add_argument("--networks", nargs="+", default=NETWORKS)
    for command in (running, writing):
        command.add_argument("--record", type=Path, required=True)
    running.add_argument("--way", default="on demand")
    running.add_argument("--machines", nargs="+", default=list(MACHINES))
    running.add_argument("--tables", type=Path, help="keep tables here, so that targets share their rows")
    running.set_defaults(run=run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
