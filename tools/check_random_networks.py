"""Compare masked with sliced random networks (`tests/random_networks.py`) over a range of seeds; resumable.

    python tools/check_random_networks.py --first 0 --last 10000 --record random_networks.jsonl

One line of JSON for every hundred seeds; a failure has a line with seed, program and message, and the run goes on.
Seeds that the record has of the same kind are not run again. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"


def main() -> int:
    """Run the seeds that the record lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=10_000, help="one past the last seed")
    parser.add_argument("--record", type=Path, default=Path("random_networks.jsonl"))
    parser.add_argument("--step", type=int, default=100, help="seeds a line")
    parser.add_argument(
        "--layer-pruning",
        action="store_true",
        help="more branches, which may go as a whole; masks twice a network",
    )
    parser.add_argument(
        "--gates", action="store_true", help="more gates, parameters and tied weights in unusual places"
    )
    parser.add_argument("--statistics", action="store_true", help="more that mixes channels")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="closed-form repair as well, of the whole network and of a sliced one",
    )
    options = parser.parse_args()
    import smcp_fx  # noqa: F401  (before tests/ is on the path, which has a folder of that name)

    sys.path.append(str(TESTS))
    kinds = ("layer_pruning", "gates", "statistics", "repair")
    kind = " ".join(name for name in kinds if getattr(options, name)) or "plain"
    done, failed = set(), 0
    if options.record.exists():
        for line in map(json.loads, options.record.read_text().splitlines()):
            if line["kind"] == kind:
                done.update(range(line["first"], line["last"]))
            failed += len(line["failures"])
    for first in range(options.first, options.last, options.step):
        seeds = [seed for seed in range(first, min(first + options.step, options.last)) if seed not in done]
        if not seeds:
            continue
        line = {"kind": kind} | run(
            seeds, options.layer_pruning, options.gates, options.repair, options.statistics
        )
        failed += len(line["failures"])
        with options.record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line["first"], line["last"], f"{line['free']:.3f}", f"{line['seconds']:.0f} s", flush=True)
        for failure in line["failures"]:
            print(json.dumps(failure), flush=True)
    return int(failed > 0)


def run(
    seeds: list[int],
    layer_pruning: bool = False,
    gates: bool = False,
    repair: bool = False,
    statistics: bool = False,
) -> dict[str, Any]:
    """Check each seed; failures are collected."""
    import torch
    from models import check_slicing
    from random_networks import random_network
    from random_repair import check_repair

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    failures, free = [], []
    started = time.monotonic()
    for seed in seeds:
        network = random_network(seed, branches=layer_pruning, gates=gates, statistics=statistics)
        try:
            prepared = check_slicing(
                network,
                (torch.randn(2, 3, 8, 8),),
                seeds=(seed, seed + 1) if layer_pruning else (seed,),
                layer_pruning=layer_pruning,
            )
            if repair:
                check_repair(network, torch.randn(2, 3, 8, 8), seed)
            free.append(prepared.channels.free_share)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            failures.append({"seed": seed, "program": network.program, "why": text[:1000]})
    return {
        "first": seeds[0],
        "last": seeds[-1] + 1,
        "free": sum(free) / max(len(free), 1),
        "seconds": time.monotonic() - started,
        "failures": failures,
    }


if __name__ == "__main__":
    sys.exit(main())
