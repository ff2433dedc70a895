"""The knapsack and the allocator with their values on the GPU, held against the CPU."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import smcp_fx
from smcp_fx.knapsack import solve_knapsack


def solvers_on_gpu(model: nn.Module) -> dict[str, Any]:
    """Return the seconds that both solvers take on each device, and whether the answers are the same."""
    return _knapsack() | _allocator(model)


def _knapsack() -> dict[str, Any]:
    rng, found = np.random.default_rng(0), dict[str, Any]()
    values = [torch.tensor(np.sort(rng.random(64)).cumsum()) for _ in range(60)]
    costs = [torch.tensor(np.sort(rng.integers(1, 10**6, 64)).astype(np.float64)) for _ in range(60)]
    capacity = float(np.floor(0.4 * sum(float(c.max()) for c in costs)))
    answers = {}
    for device in ("cpu", "cuda"):
        began = time.perf_counter()
        put = ([v.to(device) for v in values], [c.to(device) for c in costs])
        answers[device] = solve_knapsack(*put, capacity, device=device)
        found[f"knapsack_{device}_seconds"] = time.perf_counter() - began
    found["knapsack_same_value"] = answers["cpu"].value == answers["cuda"].value
    found["knapsack_optimal"] = bool(answers["cuda"].optimal)
    return found


def _allocator(model: nn.Module) -> dict[str, Any]:
    found = dict[str, Any]()
    on_cpu = smcp_fx.prepare(copy.deepcopy(model).cpu(), torch.randn(2, 3, 64, 64), target=0.5)
    on_cpu(torch.randn(2, 3, 64, 64)).square().mean().backward()
    on_cpu.pruner.step()
    on_gpu = smcp_fx.prepare(copy.deepcopy(model).cpu(), torch.randn(2, 3, 64, 64), target=0.5)
    on_gpu.load_state_dict(on_cpu.state_dict())
    on_gpu.to("cuda")
    for where, prepared in (("cpu", on_cpu), ("cuda", on_gpu)):
        began = time.perf_counter()
        prepared.pruner.solve()
        found[f"allocator_{where}_seconds"] = time.perf_counter() - began
    found["allocator_same_counts"] = on_cpu.pruner.counts == on_gpu.pruner.counts
    return found
