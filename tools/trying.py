"""Shared by the sweep's checks: limits, times, memory, and a summary of the channel graph."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

#: |masked - sliced| of the output's scale that passes in float32, and in float64 where that is exceeded.
FLOAT32, FLOAT64 = 1e-5, 1e-9


def converted(prepared: Any, row: dict[str, Any]) -> Any:
    """Return the sliced model; ``row`` gets the time and the share of parameters left."""
    import smcp_fx

    row["stage"] = "convert"
    started = time.perf_counter()
    sliced = smcp_fx.convert(prepared)
    row["convert_s"] = time.perf_counter() - started
    row["kept"] = sum(p.numel() for p in sliced.parameters()) / row["parameters"]
    return sliced


def timed_stages() -> dict[str, float]:
    """Let `prepare` note how long its tracing and its channel graph take."""
    module = sys.modules["smcp_fx.prepare"]
    parts = {"trace": "trace", "find_regions": "trace", "join_regions": "trace", "build": "build"}
    times: dict[str, float] = {"trace": 0.0, "build": 0.0}
    for name, part in parts.items():
        function = getattr(module, name)

        def noted(*args: Any, _function: Any = function, _part: str = part, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = _function(*args, **kwargs)
            times[_part] += time.perf_counter() - started
            return result

        setattr(module, name, noted)
    return times


def describe(prepared: Any) -> dict[str, Any]:
    """Note the free share of the dense layers' input channels, and what pins the rest."""
    from smcp_fx.channels.trail import INPUT

    graph = prepared.channels
    why: Counter[str] = Counter()
    slots = {"convolution": [0, 0], "linear": [0, 0]}
    for layer in graph.layers:
        if layer.kind != "dense":
            continue
        kind = slots["convolution" if len(layer.weight_shape) > 2 else "linear"]
        for unit in graph.units.of(layer.in_labels).tolist():
            reasons = graph.units.why.get(unit)
            if any(reason.kind == INPUT for reason in reasons):
                continue
            kind[0] += not reasons
            kind[1] += 1
            if reasons:
                why[reasons[0].text] += 1
    return {
        "free": graph.free_share,
        "free_convolution": slots["convolution"],
        "free_linear": slots["linear"],
        "groups": len(graph.groups),
        "free_groups": sum(group.free for group in graph.groups),
        "pinned": dict(why.most_common(6)),
        "assumed": list(prepared.plan.traced.assumptions),
    }


def peak() -> float:
    """Peak resident memory of this process, in KiB."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def run_apart(key: str, seconds: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run in a process of its own; its row, or one that says how it ended."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work()))
    process.start()
    sender.close()
    row = {"key": key, "status": "crashed", "why": f"not done after {seconds} s"}
    if receiver.poll(seconds):
        try:
            row = receiver.recv()
        except EOFError:
            process.join()
            row["why"] = f"ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    return row
