"""Compare the latency table with whole networks: sums and rounding.

    python tools/bench/latency.py run --record latency.jsonl             every model and setting, two hours at most
    python tools/bench/latency.py run --record latency.jsonl --models resnet18 --settings 64x32 --prunings 6
    python tools/bench/latency.py tables --record docs/records/latency.jsonl --out docs/results/latency.md

For each model and setting (side x batch; ONNX Runtime, one thread): the table is measured; random prunings are
timed with the dense network, in turns, and held against the table's sum; and of five groups of a network pruned to
half of the latency no larger count should be as fast as the chosen one. (Targets: latency_targets.py.)

Every result is a line of JSON the moment it is there: run again to go on. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from latency_networks import MODELS, SETTINGS, Network
from latency_tables import of_record
from records import Record, begin, fill

from smcp_fx.allocation import allocate
from smcp_fx.allocation.rounding import grow_for_free
from smcp_fx.backends import (
    Backend,
    Measurement,
    TimingConfig,
    get_backend,
    measure_interleaved,
)
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.table import MEASURABLE_MS, HeldOutError, LatencyTable

#: A solve's answer, priced around itself, is as near to what was asked as is looked for: relative.
LANDED = 0.005
#: The network whose counts are held against larger ones is pruned to this part of the latency.
HALF = 0.5
#: Sessions and rounds per session in which networks are timed, for the median: sessions differ, and other users of
#: cache and memory change within seconds. Fewer if they take longer than this many seconds, but at least two sessions
#: of one round.
SITTINGS, ROUNDS, FEWEST_ROUNDS, FEWEST_SITTINGS = 3, 4, 1, 2
ROUNDS_SECONDS, SITTINGS_SECONDS = 12.0, 90.0
#: Timings that spread further (interquartile range over median) are told apart.
STEADY = 0.1
#: Times that blocks of a chosen and a larger count are measured again, in turns; four times if that takes long (s).
TURNS, ROUNDING = 10, 5.0
#: Held-out rows of a table that are measured again, in new sessions.
AGAIN = 75
#: Most bytes of weights timed in turns: more would not fit into memory.
TOGETHER = 8 << 30
#: Many short rounds rather than few long ones, so that a round is one moment for all. Each network's runs begin with
#: untimed ones for warming up.
_TIMING = TimingConfig(
    min_repeats=3, max_repeats=30, budget_ms=24.0, spread_limit=STEADY, attempts=1, settle_ms=120.0, burst=3,
    warmup_window=1,
)  # fmt: skip


class Bench:
    """One model at one setting: its table, its prunings, its rounding."""

    def __init__(
        self, record: Record, table: LatencyTable, backend: Backend, model: str, setting: str
    ) -> None:
        self.record = record
        self.table = table
        self.backend = backend
        self.key = {"model": model, "setting": setting}
        began = time.monotonic()
        self.network = Network.make(model, setting, LatencyCost(table, backend))
        found = latency_of(self.network.prepared.pruner.cost)
        assert found is not None
        self.cost, report = found, table.measure(found.blocks, backend)  # random prunings: the whole range
        found.read()
        if not record.find("table", **self.key):
            in_cache, from_memory = self.held_out()
            record.add("table", **self.key, blocks=len(self.cost.blocks), measured=report.measured,
                       reused=report.reused, seconds=time.monotonic() - began, failed=len(report.failed),
                       unstable=len(report.unstable), repeated=report.repeated,
                       errors=np.round(in_cache.errors, 4).tolist(),
                       held_out_ms=np.round(in_cache.measured_ms, 5).tolist(),
                       steady=in_cache.steady.tolist(), cold_steady=from_memory.steady.tolist(),
                       cold_errors=np.round(from_memory.errors, 4).tolist(),
                       cold_held_out_ms=np.round(from_memory.measured_ms, 5).tolist())  # fmt: skip
        self.dense = self.network.engine(self.cost.full_counts)

    def held_out(self) -> list[HeldOutError]:
        """The errors of interpolation, in cache and from memory, of the same rows."""
        fingerprint = self.backend.fingerprint()
        return [self.table.held_out_error(self.cost.blocks, fingerprint, share) for share in (0.0, 1.0)]

    def repeated(self) -> None:
        """Measure held-out rows anew: no interpolation can be held to more than a row's own repetition."""
        if self.record.find("again", **self.key):
            return
        held_out = self.held_out()
        measurable = np.flatnonzero(held_out[0].measured_ms >= MEASURABLE_MS)
        some = np.random.default_rng(0).permutation(measurable)[:AGAIN]
        rows = [self.backend.block_latency(*held_out[0].rows[i]) for i in some]
        told: dict[str, list[Any]] = {}
        for state, error, found in (
            ("", held_out[0], [row.hot for row in rows]),
            ("cold_", held_out[1], [row.cold or row.hot for row in rows]),
        ):
            told[f"{state}errors"] = np.round(error.errors[some], 4).tolist()
            told[f"{state}ms"] = np.round(error.measured_ms[some], 5).tolist()
            told[f"{state}again_ms"] = [round(row.median_ms, 5) for row in found]
            told[f"{state}stable"] = [row.stable for row in found]
        self.record.add("again", **self.key, **told)

    def prunings(self, count: int, deadline: float) -> None:
        """Time the dense network and random prunings, all in turns, so that a slow moment is for all alike."""
        missing = [i for i in range(1, count + 1) if not self.record.find("whole", **self.key, index=i)]
        while missing and time.monotonic() < deadline:
            chosen: list[int] = []
            size = 0.0
            while missing and size < TOGETHER:
                chosen.append(missing.pop(0))
                size += self.cost.whole(self.network.random_counts(chosen[-1])).weight_bytes
            sittings: list[list[tuple[float, list[Measurement]]]] = []
            began = time.monotonic()
            while len(sittings) < SITTINGS and (
                len(sittings) < FEWEST_SITTINGS or time.monotonic() - began < SITTINGS_SECONDS
            ):
                sittings.append(self.sitting(chosen))
            second = len(sittings[0])  # the first round of the second sitting
            halves, rounds = zip(*itertools.chain.from_iterable(sittings), strict=True)
            dense, *found = zip(*rounds, strict=True)  # of each network, its rounds
            half_ms = float(np.median(halves))
            beside = {"dense_ms": _median_ms(dense), "dense_first_ms": dense[0].median_ms,
                      "dense_again_ms": dense[second].median_ms, "dense_spread": _spread(dense),
                      **({"half_ms": half_ms} if math.isfinite(half_ms) else {})}  # fmt: skip
            for index, pruned in zip(chosen, found, strict=True):
                whole = {**vars(self.cost.whole(self.network.random_counts(index))),
                         "measured_ms": _median_ms(pruned)}  # fmt: skip
                # No prediction can be held to more than a network's own repetition.
                told = {"spread": _spread(pruned), "first_ms": pruned[0].median_ms,
                        "again_ms": pruned[second].median_ms, "rounds_ms": [m.median_ms for m in pruned]}  # fmt: skip
                self.record.add("whole", **self.key, index=index, whole=whole, **told, **beside)

    def sitting(self, chosen: Sequence[int]) -> list[tuple[float, list[Measurement]]]:
        """Time the dense network and prunings in turns, these in new sessions.

        Of each round: how fast the cache forgot before it, and the networks' times, the dense one's first.
        """
        rounds: list[tuple[float, list[Measurement]]] = []
        with ExitStack() as opened:
            engines = [
                opened.enter_context(self.network.engine(self.network.random_counts(index)))
                for index in chosen
            ]
            began = time.monotonic()
            while len(rounds) < ROUNDS and (
                len(rounds) < FEWEST_ROUNDS or time.monotonic() - began < ROUNDS_SECONDS
            ):
                half_ms = self.backend.fading_half_ms()
                rounds.append((half_ms, measure_interleaved([self.dense, *engines], config=_TIMING)))
        return rounds

    def allocated(self, budget: float) -> dict[str, int]:
        """Counts of the greatest value for random importances, the cost taken again around each answer.

        The smallest that are permitted where none is as fast.
        """
        counts: Mapping[str, int] = self.cost.full_counts
        for _ in range(4):
            cost = self.cost.around(counts)
            try:
                found = allocate(self.network.random_values(0, cost.permitted), cost, budget)
                counts = found.counts
            except InfeasibleBudgetError:  # as priced around these counts, not around the smallest
                counts = cost.smallest_counts
            if abs(self.cost.latency(counts) / budget - 1) <= LANDED:
                break
        return grow_for_free(self.cost.around(counts), counts)

    def rounding(self) -> None:
        """Of five groups, measure the blocks anew at the chosen count and at the larger ones the table likes best."""
        if self.record.find("rounding", **self.key):
            return
        counts = self.allocated(HALF * self.cost.latency(self.cost.full_counts))
        cost = self.cost.around(counts)
        blocks = {block.name: block for block in self.cost.blocks}
        rng = np.random.default_rng(5)
        open_groups = [name for name, allowed in self.network.permitted.items() if counts[name] < allowed[-1]]
        share = self.cost.share(counts)
        for name in rng.choice(open_groups, min(5, len(open_groups)), replace=False):
            terms = [term for term in cost.terms if name in term.groups and term.name in blocks]
            larger = [c for c in self.network.permitted[name] if c > counts[name]][:6]
            tabled = {
                c: sum(term.cost({**counts, name: c}) for term in terms) for c in (counts[name], *larger)
            }
            likely = min(larger, key=lambda c: tabled[c])
            ratios: list[float] = []
            began = time.monotonic()
            while len(ratios) < TURNS and (len(ratios) < 4 or time.monotonic() - began < ROUNDING):
                ms = dict.fromkeys((counts[name], likely), 0.0)
                # The second of two equal large blocks runs 4 to 8% faster: each takes its turn at being first.
                for count in list(ms)[:: -1 if len(ratios) % 2 else 1]:
                    for term in terms:
                        widths = tuple(w.channels({**counts, name: count}) for w in term.widths)
                        found = self.backend.block_latency(blocks[term.name], widths)
                        cold = found.cold or found.hot
                        ms[count] += (1 - share) * found.hot.median_ms + share * cold.median_ms
                ratios.append(ms[likely] / ms[counts[name]])
            q1, median, q3 = (float(q) for q in np.percentile(ratios, [25, 50, 75]))
            self.record.add("rounding", **self.key, group=str(name), chosen=counts[name], larger=likely,
                            tabled=tabled[likely] / tabled[counts[name]], measured=median,
                            quartiles=[q1, q3])  # fmt: skip


def _median_ms(rounds: Sequence[Measurement]) -> float:
    return float(np.median([m.median_ms for m in rounds]))


def _spread(rounds: Sequence[Measurement]) -> float:
    return float(np.median([m.spread for m in rounds]))


def run(arguments: argparse.Namespace) -> None:
    """Measure what the record lacks."""
    deadline = time.monotonic() + 60 * arguments.minutes
    record, backend = Record(arguments.record), get_backend("onnxruntime", threads=1)
    begin(record, backend)
    path = arguments.table or arguments.record.with_suffix(".sqlite")
    with LatencyTable(path) as table:
        for setting in arguments.settings:
            for model in arguments.models:
                if time.monotonic() > deadline:
                    print(f"{arguments.minutes} minutes are over; run again to go on")
                    return
                print(f"{model} {setting}", flush=True)
                bench = Bench(record, table, backend, model, setting)
                bench.repeated()
                bench.prunings(arguments.prunings, deadline)
                bench.rounding()
                bench.dense.close()


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure what the record lacks")
    measure.add_argument("--record", type=Path, required=True, help="file of JSON lines to fill")
    measure.add_argument("--table", type=Path, help="latency table to use (default: beside the record)")
    measure.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    measure.add_argument("--settings", nargs="+", default=tuple(SETTINGS), choices=tuple(SETTINGS))
    measure.add_argument("--prunings", type=int, default=20)
    measure.add_argument(
        "--minutes", type=float, default=120.0, help="start nothing after so long (default: 120)"
    )
    tables = commands.add_parser("tables", help="write the tables of a record into a document")
    tables.add_argument("--record", type=Path, required=True)
    tables.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        fill(arguments.out, "measured", of_record(Record(arguments.record).lines, STEADY))


if __name__ == "__main__":
    main()
