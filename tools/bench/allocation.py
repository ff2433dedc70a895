"""Measure the coupled allocation: budget, certified gap, time, stability; the paper's method beside it.

    python tools/bench/allocation.py --networks resnet50 unet --costs flops latency --seeds 0 1
    python tools/bench/allocation.py --costs measured --table table.sqlite --side 64

The paper's method runs as in training: a solve at every step of an exponential ramp to the budget and more at
the budget, each priced at the last one's counts. Its value is compared with the coupled method's at the true
cost of its last iterate. Set OMP_NUM_THREADS=1 for single-thread times.
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
    """Return the share of units whose mask changes when the importances are disturbed by 1 %."""
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


def measure(name: str, kind: str, cost: NetworkCost, shares: Sequence[float], seed: int, paper: bool) -> None:
    """Print one line a budget."""
    values = values_of(cost, synthetic_importances(cost, seed))
    full, total = cost.cost(cost.full_counts), sum(v[-1] for v in values.values())
    for share in shares:
        budget = share * full
        line = f"{name:16}{kind:9}{seed:4}{100 * share:6.0f} %"
        try:
            found = allocate(values, cost, budget)
        except InfeasibleBudgetError as error:
            print(f"{line}  infeasible: the smallest reachable cost is {100 * error.smallest / full:.1f} %")
            continue
        line += f"{found.seconds:8.3f}{found.cost / budget:9.5f}{100 * found.value / total:9.3f}"
        line += f"{100 * found.gap:10.6f}{100 * changed_share(cost, seed, found, budget):9.2f}"
        if paper:
            run = run_paper(values, cost, budget)
            same = allocate(values, cost, run.last.cost, start=run.last.counts)
            line += f"{run.last.cost / budget:9.3f}{'yes' if run.oscillates else 'no':>7}"
            line += f"{100 * run.last.value / same.value:10.3f}"
        print(line, flush=True)


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
    args = parser.parse_args()
    head = f"{'network':16}{'cost':9}{'seed':>4}{'budget':>8}{'s':>8}{'T/budget':>9}{'kept %':>9}"
    head += f"{'gap %':>10}{'moved %':>9}"
    print(head if args.no_paper else f"{head}{'paper T':>9}{'osc.':>7}{'its V %':>10}")
    for name in args.networks:
        for kind in args.costs:
            measured = kind == "measured"
            cost = measured_cost(name, args.table, args.side) if measured else network_cost(name, kind)
            for seed in args.seeds:
                measure(name, kind, cost, args.budgets, seed, not args.no_paper)
    print(f"peak memory beyond the imports: {peak_memory() - imports:.0f} MiB")


if __name__ == "__main__":
    main()
