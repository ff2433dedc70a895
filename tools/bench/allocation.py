"""Measure the coupled allocation: budget, certified gap, time, stability; the paper's method beside it.

    python tools/bench/allocation.py --page docs/results/speed.md
    python tools/bench/allocation.py --costs measured --table table.sqlite --side 64

Prints a line a budget; ``--page`` gets a line a network and cost: the worst over its budgets. The paper's method
runs as in training: a solve at every step of an exponential ramp to the budget and more at the budget, each priced
at the last one's counts. Its value is compared with the coupled method's at the true cost of its last iterate. Set
OMP_NUM_THREADS=1 for single-thread times.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from allocation_instances import MODULES, PRICERS, Values, network_cost, synthetic_importances, values_of
from records import fill, table

import smcp_fx
from smcp_fx.allocation import Allocation, allocate
from smcp_fx.backends import get_backend
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import InfeasibleBudgetError
from smcp_fx.latency.cost import LatencyCost
from smcp_fx.latency.table import LatencyTable

RAMP, REFINE = 20, 10


@dataclass(frozen=True)
class PaperRun:
    """The last iterate of the paper's method and whether the last two differ."""

    last: Allocation
    oscillates: bool


def run_paper(values: Values, cost: NetworkCost, budget: float) -> PaperRun:
    """Ramp down to the budget and refine there, each solve at the last one's counts."""
    counts: Mapping[str, int] = cost.full_counts
    full = cost.cost(counts)
    steps = [full * (budget / full) ** (step / RAMP) for step in range(1, RAMP + 1)] + [budget] * REFINE
    found: list[Allocation] = []
    for target in steps:
        found.append(allocate(values, cost, target, "paper", current=counts))
        counts = found[-1].counts
    return PaperRun(found[-1], found[-1].counts != found[-2].counts)


def changed_share(cost: NetworkCost, seed: int, before: Allocation, budget: float) -> float:
    """Return the share of units whose mask changes when the importances are disturbed by 1%."""
    importances = synthetic_importances(cost, seed)
    rng = np.random.default_rng([seed, 1])
    disturbed = {g: i * (1.0 + 0.01 * rng.standard_normal(len(i))) for g, i in importances.items()}
    after = allocate(values_of(cost, disturbed), cost, budget, start=before.counts)
    changed = 0
    for group, scores in importances.items():
        kept = set(np.argsort(-scores)[: before.counts[group]])
        changed += len(kept ^ set(np.argsort(-disturbed[group])[: after.counts[group]]))
    return changed / sum(len(i) for i in importances.values())


def measured_cost(name: str, table: Path, side: int) -> NetworkCost:
    """The latency in ms of one of `MODULES` at 3 x side x side, around its full widths."""
    torch.manual_seed(0)
    with LatencyTable(table) as rows:
        cost = LatencyCost(rows, get_backend("onnxruntime", threads=1))
        return smcp_fx.prepare(MODULES[name]().eval(), torch.randn(1, 3, side, side), cost=cost).pruner.cost


@dataclass(frozen=True)
class Line:
    """One budget's figures: costs as shares of the budget, the paper's value as a share of the coupled method's."""

    seconds: float
    cost: float
    kept: float
    gap: float
    moved: float
    paper_cost: float = float("nan")
    oscillates: bool = False
    paper_value: float = float("nan")

    def __str__(self) -> str:
        own = f"{self.seconds:8.3f}{self.cost:9.5f}{100 * self.kept:9.3f}{100 * self.gap:10.6f}"
        paper = f"{self.paper_cost:9.3f}{'yes' if self.oscillates else 'no':>7}{100 * self.paper_value:10.3f}"
        return f"{own}{100 * self.moved:9.2f}{paper}"


def measure(cost: NetworkCost, share: float, seed: int, paper: bool) -> Line:
    """Allocate to a share of the full cost; raises `InfeasibleBudgetError`."""
    values = values_of(cost, synthetic_importances(cost, seed))
    full, total = cost.cost(cost.full_counts), sum(v[-1] for v in values.values())
    budget = share * full
    found = allocate(values, cost, budget)
    own = (found.seconds, found.cost / budget, found.value / total, found.gap)
    moved = changed_share(cost, seed, found, budget)
    if not paper:
        return Line(*own, moved)
    run = run_paper(values, cost, budget)
    same = allocate(values, cost, run.last.cost, start=run.last.counts)
    return Line(*own, moved, run.last.cost / budget, run.oscillates, run.last.value / same.value)


def worst(name: str, kind: str, lines: Sequence[Line]) -> list[str]:
    """Return a network's row of the page: the worst over its budgets."""
    paper = [line.paper_cost for line in lines]
    return [
        name, kind, f"{max(line.seconds for line in lines):.2f}", f"{min(line.cost for line in lines):.4f}",
        f"{100 * max(line.gap for line in lines):.4f}%", f"{100 * max(line.moved for line in lines):.2f}%",
        f"{min(paper):.2f}–{max(paper):.2f}", f"{100 * min(line.paper_value for line in lines):.1f}%",
    ]  # fmt: skip


def peak_memory() -> float:
    """Return the most memory this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Parse the arguments and print the table."""
    imports = peak_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--costs", nargs="+", default=list(PRICERS), choices=[*PRICERS, "measured"])
    parser.add_argument("--table", type=Path, default=Path("table.sqlite"), help="the measured latency table")
    parser.add_argument("--side", type=int, default=64, help="side of the images of measured networks")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.8, 0.55, 0.3, 0.15])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--no-paper", action="store_true", help="leave the paper's method out")
    parser.add_argument("--page", type=Path, help="document to write the table into")
    args = parser.parse_args()
    print(f"{'network':16}{'cost':9}{'seed':>4}{'budget':>8}{'s':>8}{'T/budget':>9}{'kept %':>9}"
          f"{'gap %':>10}{'moved %':>9}{'paper T':>9}{'osc.':>7}{'its V %':>10}")  # fmt: skip
    rows = []
    for name in args.networks:
        for kind in args.costs:
            measured = kind == "measured"
            cost = measured_cost(name, args.table, args.side) if measured else network_cost(name, kind)
            lines = []
            for seed in args.seeds:
                for share in args.budgets:
                    head = f"{name:16}{kind:9}{seed:4}{100 * share:6.0f}%"
                    try:
                        lines.append(measure(cost, share, seed, not args.no_paper))
                    except InfeasibleBudgetError as error:
                        least = error.smallest / cost.cost(cost.full_counts)
                        print(f"{head}  infeasible: the smallest reachable cost is {least:.1%}")
                    else:
                        print(f"{head}{lines[-1]}", flush=True)
            if lines:
                rows.append(worst(name, kind, lines))
    if args.page:
        heads = ("network", "cost", "seconds", "least T/τ", "gap", "moved", "paper's T/τ", "its value")
        fill(args.page, "allocation", table(heads, rows))
    print(f"peak memory beyond the imports: {peak_memory() - imports:.0f} MiB")


if __name__ == "__main__":
    main()
