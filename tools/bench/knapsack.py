"""Measure the exact knapsack beside the paper's solvers, HiGHS, and CP-SAT where installed.

    OMP_NUM_THREADS=1 python tools/bench/knapsack.py
    OMP_NUM_THREADS=1 python tools/bench/knapsack.py --instances random-1000x64 --solvers ours highs
    OMP_NUM_THREADS=1 python tools/bench/knapsack.py --instances resnet50 --record docs/records/paper

Prints the paper's timing table ("Multiple-choice knapsack solve effort"): the dynamic program at several
scales, its meet-in-the-middle, and this library's solver, here on synthetic latencies. ``of capacity`` is
the share used: the dynamic program rounds costs down and may exceed 1. Networks are those of
``allocation_instances``, priced at random current counts, counts in multiples of 8; every capacity lies
half-way between the least and the largest cost unless the instance says otherwise. ``--record`` writes what
`tools/reproduce.py knapsack` reads, of the instance resnet50 alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from allocation_instances import network_cost, synthetic_importances
from knapsack_baselines import Floats, solve_by_merging, solve_scaled

from smcp_fx.backends.base import cpu_name
from smcp_fx.knapsack import solve_knapsack
from smcp_fx.recipes.record import Record, write_record


@dataclass(frozen=True)
class Instance:
    """Values and costs, one array a group, and the capacity."""

    values: list[Floats]
    costs: list[Floats]
    capacity: float


@dataclass(frozen=True)
class Row:
    """One measurement; ``choices`` None where the solver gave up, ``note`` says why.

    ``counted``: the choices' cost as the solver counted it, where that is not their sum.
    """

    choices: tuple[int, ...] | None
    seconds: float
    note: str = ""
    counted: float | None = None


Solver = Callable[[Instance], Row]
#: The paper's, in milliseconds.
CAPACITY = 255.4


def random_instance(groups: int, options: int, seed: int) -> Instance:
    """Values and costs uniform in [0, 1), ascending."""
    rng = np.random.default_rng(seed)
    values = [np.sort(rng.random(options)) for _ in range(groups)]
    costs = [np.sort(rng.random(options)) for _ in range(groups)]
    return Instance(values, costs, half_way(costs))


def half_way(costs: list[Floats]) -> float:
    """Return the middle between the least and the largest total cost."""
    return float(sum(c.min() + c.max() for c in costs)) / 2


def network_instance(name: str) -> Instance:
    """A network's linearised problem: each layer priced per input group, at random current counts."""
    cost = network_cost(name, "latency")
    rng = np.random.default_rng(0)
    current = {group: int(rng.choice(counts)) for group, counts in cost.permitted.items()}
    importances = synthetic_importances(cost, 0)
    values, costs = [], []
    for group, counts in cost.permitted.items():
        ranked = np.sort(importances[group])[::-1]
        values.append(np.cumsum(ranked)[np.array(counts) - 1])
        total = np.zeros(len(counts))
        for term in cost.terms:
            readers = [member for member, _ in term.widths[0].groups]
            if group in readers:
                # A concat's cost is split evenly between the groups it reads.
                total += [term.cost({**current, group: count}) / len(readers) for count in counts]
        costs.append(total)
    return Instance(values, costs, half_way(costs))


def clustered_instance(groups: int, options: int, seed: int) -> Instance:
    """Costs near multiples of 1000 and values nearly in proportion; the capacity lies between clusters."""
    rng = np.random.default_rng(seed)
    level = 1000.0 * np.arange(options)
    values = [level + rng.integers(-10, 11, options) for _ in range(groups)]
    costs = [level + rng.integers(-10, 11, options) for _ in range(groups)]
    return Instance(values, costs, 1000.0 * (groups * (options - 1) // 2) + 500)


def subset_sum_instance(groups: int, options: int, seed: int) -> Instance:
    """Values equal to real-valued costs: every choice lies on the relaxation's optimal face."""
    rng = np.random.default_rng(seed)
    costs = [rng.random(options) for _ in range(groups)]
    return Instance(costs, costs, half_way(costs))


def correlated_instance(groups: int, options: int, seed: int) -> Instance:
    """Integer costs, summed up, and each option worth 10 more than its cost and its predecessor's surplus."""
    rng = np.random.default_rng(seed)
    costs = [np.cumsum(np.sort(rng.integers(1, 10_000, options))).astype(float) for _ in range(groups)]
    values = [c + 10.0 * np.arange(1, options + 1) for c in costs]
    return Instance(values, costs, float(np.floor(half_way(costs))))


INSTANCES: dict[str, Callable[[], Instance]] = {
    "resnet50": lambda: network_instance("resnet50"),
    "resnet101": lambda: network_instance("resnet101"),
    "efficientnet_b0": lambda: network_instance("efficientnet_b0"),
    "densenet121": lambda: network_instance("densenet121"),
    "random-1000x64": lambda: random_instance(1000, 64, 0),
    "random-10000x32": lambda: random_instance(10_000, 32, 0),
    "clusters-38x16": lambda: clustered_instance(38, 16, 0),
    "subset-sum-38x64": lambda: subset_sum_instance(38, 64, 0),
    "correlated-50x10": lambda: correlated_instance(50, 10, 0),
    "correlated-200x20": lambda: correlated_instance(200, 20, 0),
}


def run_ours(instance: Instance) -> Row:
    """Run this library; the median of seven runs where one is short."""
    solutions = [solve_knapsack(instance.values, instance.costs, instance.capacity)]
    if solutions[0].seconds < 0.5:
        solutions += [solve_knapsack(instance.values, instance.costs, instance.capacity) for _ in range(6)]
    seconds = float(np.median([solution.seconds for solution in solutions]))
    gap = (solutions[0].bound - solutions[0].value) / max(1.0, abs(solutions[0].value))
    return Row(solutions[0].choices, seconds, "optimal" if solutions[0].optimal else f"gap {gap:.1e}")


def run_scaled(scale: float, instance: Instance) -> Row:
    """Run the dynamic program unless its table of options would exceed 4 GB."""
    # Scales are for costs of hundreds, as the paper's capacity.
    scale *= CAPACITY / instance.capacity
    if len(instance.values) * scale * instance.capacity * 2 > 4e9:
        return Row(None, 0.0, "table above 4 GB")
    start = time.perf_counter()
    answer = solve_scaled(instance.values, instance.costs, instance.capacity, scale)
    seconds = time.perf_counter() - start
    whole = sum(int(np.floor(c[i] * scale)) for c, i in zip(instance.costs, answer.choices, strict=True))
    return Row(answer.choices, seconds, counted=whole / scale)


def run_merging(instance: Instance) -> Row:
    """Run the paper's meet-in-the-middle."""
    start = time.perf_counter()
    answer = solve_by_merging(instance.values, instance.costs, instance.capacity)
    seconds = time.perf_counter() - start
    if answer is None:
        return Row(None, seconds, "a merge above 2^27 pairs")
    return Row(answer.choices, seconds, f"{answer.pairs / 1e6:.1f} M pairs")


def run_highs(instance: Instance) -> Row:
    """Run HiGHS through SciPy, to a relative gap of 0, for a minute at most."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    sizes = [len(v) for v in instance.values]
    total = sum(sizes)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    one_each = sparse.csr_matrix((np.ones(total), (rows, np.arange(total))))
    within = LinearConstraint(
        sparse.csr_matrix(np.concatenate(instance.costs)[None]), -np.inf, instance.capacity
    )
    start = time.perf_counter()
    result = milp(
        -np.concatenate(instance.values),
        constraints=[LinearConstraint(one_each, 1, 1), within],
        integrality=np.ones(total),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": 60.0},
    )
    seconds = time.perf_counter() - start
    if result.x is None:
        return Row(None, seconds, "no choice found")
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    choices = np.flatnonzero(result.x > 0.5) - starts
    return Row(tuple(choices.tolist()), seconds, "" if result.status == 0 else "time limit")


def run_cp_sat(instance: Instance) -> Row:
    """Run OR-Tools' CP-SAT on one thread, values and costs scaled to integers of 10^-9 of the capacity."""
    from ortools.sat.python import cp_model

    scale = 1e9 / instance.capacity
    model = cp_model.CpModel()
    taken = [[model.new_bool_var("") for _ in v] for v in instance.values]
    for group in taken:
        model.add_exactly_one(group)
    flat = [x for group in taken for x in group]
    costs = np.ceil(np.concatenate(instance.costs) * scale).astype(np.int64).tolist()
    values = np.rint(np.concatenate(instance.values) * scale).astype(np.int64).tolist()
    model.add(cp_model.LinearExpr.weighted_sum(flat, costs) <= int(np.floor(instance.capacity * scale)))
    model.maximize(cp_model.LinearExpr.weighted_sum(flat, values))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 60.0
    start = time.perf_counter()
    status = solver.solve(model)
    seconds = time.perf_counter() - start
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Row(None, seconds, "no choice found")
    choices = tuple(next(i for i, x in enumerate(group) if solver.value(x)) for group in taken)
    return Row(choices, seconds, "" if status == cp_model.OPTIMAL else "time limit")


SOLVERS: dict[str, Solver] = {
    "ours": run_ours,
    "highs": run_highs,
    "cp-sat": run_cp_sat,
    "merging": run_merging,
    "dp-10": lambda instance: run_scaled(10, instance),
    "dp-100": lambda instance: run_scaled(100, instance),
    "dp-500": lambda instance: run_scaled(500, instance),
    "dp-1000": lambda instance: run_scaled(1000, instance),
}


#: The rows of the paper's table.
PAPER_ROWS = {
    "dp-10": "DP (s=10)",
    "dp-100": "DP (s=100)",
    "dp-500": "DP (s=500)",
    "dp-1000": "DP (s=1000)",
    "merging": "Algorithm 2",
    "ours": "smcp_fx",
}


def record(instance: Instance, solver: str, row: Row, folder: Path) -> None:
    """Write the figures of the paper's table: seconds, and by how much the solver miscounts the cost."""
    if solver not in PAPER_ROWS or row.choices is None:
        return
    cost = sum(float(c[i]) for c, i in zip(instance.costs, row.choices, strict=True))
    wrong = 0.0 if row.counted is None else abs(cost - row.counted)
    values = {"seconds": row.seconds, "exactness": wrong * CAPACITY / instance.capacity}
    folder.mkdir(parents=True, exist_ok=True)
    found = Record.of_run(
        row=f"knapsack/{PAPER_ROWS[solver]}", complete=True, values=values, device=cpu_name()
    )
    write_record(found, folder / f"knapsack-{solver}.json")


def main() -> None:
    """Print one table an instance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", nargs="+", choices=INSTANCES, default=list(INSTANCES))
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="write records of the instance resnet50"
    )
    arguments = parser.parse_args()
    solvers = [name for name in arguments.solvers if name != "cp-sat" or importlib.util.find_spec("ortools")]
    for name in arguments.instances:
        instance = INSTANCES[name]()
        options = sum(map(len, instance.values))
        print(f"\n{name}: {len(instance.values)} groups, {options} options, capacity {instance.capacity:.6g}")
        print(f"{'solver':10s} {'seconds':>10s} {'value':>18s} {'of capacity':>12s}")
        for solver in solvers:
            row = SOLVERS[solver](instance)
            if name == "resnet50" and arguments.record is not None:
                record(instance, solver, row, arguments.record)
            if row.choices is None:
                print(f"{solver:10s} {row.seconds:10.4f} {'-':>18s} {'-':>12s}  {row.note}", flush=True)
                continue
            value = sum(float(v[i]) for v, i in zip(instance.values, row.choices, strict=True))
            cost = sum(float(c[i]) for c, i in zip(instance.costs, row.choices, strict=True))
            share = cost / instance.capacity
            print(f"{solver:10s} {row.seconds:10.4f} {value:18.9f} {share:12.8f}  {row.note}", flush=True)


if __name__ == "__main__":
    main()
