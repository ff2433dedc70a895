"""The knapsack, and the allocation with its importances on the GPU, beside the CPU's: seconds, and equal answers."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
from knapsack import INSTANCES, random_instance

import smcp_fx
from gpu_hour.networks import images, network
from gpu_hour.session import Session
from smcp_fx.knapsack import solve_knapsack

#: From 38 groups of 64 options to 10,000 of 32, and a network's own.
KNAPSACKS = {
    "random-38x64": lambda: random_instance(38, 64, 0),
    **{name: INSTANCES[name] for name in ("resnet50", "random-1000x64", "random-10000x32")},
}
ALLOCATIONS = ("resnet50", "mobilenet_v2")


def solvers(session: Session) -> None:
    """Every instance on both devices."""
    for name in list(KNAPSACKS)[: 1 if session.small else None]:
        session.attempt(f"knapsack {name}", partial(_knapsack, session, name), 20)
    for name in ALLOCATIONS:
        session.attempt(f"allocation {name}", partial(_allocation, session, name), 20)


def _knapsack(session: Session, name: str) -> dict[str, Any]:
    instance, answers = KNAPSACKS[name](), {}
    found: dict[str, Any] = {"groups": len(instance.values), "options": sum(map(len, instance.values))}
    for where, device in (("cpu", "cpu"), ("gpu", session.device)):
        put = [[torch.as_tensor(x).to(device) for x in side] for side in (instance.values, instance.costs)]
        for turn in ("first", "seconds"):  # the first solve on a device loads its kernels
            began = time.perf_counter()
            answers[where] = solve_knapsack(*put, instance.capacity, device=device, time_limit=60.0)
            found[f"{where}_{turn}"] = time.perf_counter() - began
    found["same_choices"] = answers["cpu"].choices == answers["gpu"].choices
    found["same_value"] = answers["cpu"].value == answers["gpu"].value
    return {**found, "optimal": answers["cpu"].optimal and answers["gpu"].optimal}


def _allocation(session: Session, name: str) -> dict[str, Any]:
    model, x = network(name, session.small), images(2, session.small)
    prepared = smcp_fx.prepare(model, x, target=0.5, check=False).train()
    prepared(x).square().mean().backward()
    prepared.pruner.step()
    gathered = copy.deepcopy(prepared.state_dict())
    found, counts = dict[str, Any](), {}
    for where, device in (("cpu", "cpu"), ("gpu", session.device)):
        own = smcp_fx.prepare(model, x, target=0.5, check=False)
        own.load_state_dict(gathered)
        own.to(device)
        began = time.perf_counter()
        own.pruner.solve()
        found[f"{where}_seconds"] = time.perf_counter() - began
        counts[where] = own.pruner.counts
    return {**found, "same_counts": counts["cpu"] == counts["gpu"]}
