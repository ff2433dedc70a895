"""What a network takes after it has waited: how fast others push it out of the cache that it shares with them.

    OMP_NUM_THREADS=1 python tools/bench/fading.py --models shufflenet_v2_x1_0 --side 64 --out fading.json

Each network (ONNX Runtime, one thread, batch 1) runs in a loop, then behind pauses in which nothing is read, then
from emptied caches; the tiny network that brings the runtime's code back runs before each but those of the loop. In
turns, as the hour changes all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision

from smcp_fx.backends import get_backend
from smcp_fx.backends.onnxruntime.overhead import code_warmer
from smcp_fx.backends.timing.fading import evict_caches, fading_half_ms, idle
from smcp_fx.backends.timing.measuring import Sample, calm, take_sample
from smcp_fx.backends.timing.pace import pace

PAUSES_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
#: So many turns, and in each so many runs of the loop, of which the last counts.
TURNS, LOOP = 25, 12


def measure(model: str, side: int) -> dict[str, object]:
    """Median ms of a torchvision model by what came before the run."""
    torch.manual_seed(0)
    network = torchvision.models.get_model(model).eval()
    backend = get_backend("onnxruntime", threads=1)
    with backend.compile(network, (torch.randn(1, 3, side, side),)) as engine:
        timer, warm_code = engine.timer(), code_warmer()

        def after_pause(ms: float) -> None:
            timer()
            idle(ms)
            warm_code()

        def after_eviction() -> None:
            evict_caches()
            warm_code()

        def in_a_loop() -> None:
            for _ in range(LOOP):
                timer()

        before: dict[str, Callable[[], None]] = {"loop": in_a_loop, "evicted": after_eviction}
        before |= {f"{ms:g} ms": lambda ms=ms: after_pause(ms) for ms in PAUSES_MS}
        found: dict[str, list[Sample]] = {name: [] for name in before}
        halves = []
        for _ in range(TURNS):
            halves.append(fading_half_ms())
            for name, get_ready in before.items():
                in_a_loop()
                get_ready()
                found[name].append(take_sample(timer, pace()))
    ms = {name: round(float(np.median([s.ms for s in calm(taken, 5)])), 4) for name, taken in found.items()}
    mib = sum(p.numel() for p in network.parameters()) * 4 / 2**20
    return {"model": model, "side": side, "weights_mib": round(mib, 1), "ms": ms,
            "fading_half_ms": np.round(np.percentile(halves, [25, 50, 75]), 1).tolist()}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["shufflenet_v2_x1_0", "efficientnet_b0", "resnet18"])
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    fingerprint = get_backend("onnxruntime", threads=1).fingerprint().as_dict()
    told = {"fingerprint": fingerprint, "system": platform.platform(), "time": time.time(), "networks": []}
    for model in arguments.models:
        told["networks"].append(measure(model, arguments.side))
        print(json.dumps(told["networks"][-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
