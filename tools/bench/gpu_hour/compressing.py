"""`compress` of ResNet-50 on the GPU: seconds by part, how busy the CPU is meanwhile, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import smcp_fx
from gpu_hour.networks import images, network
from gpu_hour.session import Session


def resnet50(session: Session) -> None:
    """64 images first, so that there is a figure; then 512."""
    for count in (64, 512):
        session.attempt(f"{count} images", partial(_compress, session, count), 30)


def _compress(session: Session, count: int) -> dict[str, Any]:
    """The calls that `smcp_fx.compress` consists of, each timed."""
    device = session.device
    model = network("resnet50", session.small).to(device)
    one = images(32, session.small).to(device)
    batches = [one * (1 + 0.1 * number) for number in range(2 if session.small else count // len(one))]
    parts = _Parts(session, count)
    prepared = parts.run("prepare", lambda: smcp_fx.prepare(model, batches[0], target=0.5))
    parts.run(
        "gather importances",
        lambda: smcp_fx.gather_importance(prepared, batches, outputs="classes", progress=parts.share),
    )
    parts.run(
        "solve",
        lambda: smcp_fx.calibration.solve_best(prepared, batches, outputs="classes", progress=parts.share),
    )
    smaller = parts.run("convert", lambda: smcp_fx.convert(prepared))
    parts.run("repair", lambda: smcp_fx.repair(smaller, prepared, batches, progress=parts.share))
    return {"images": sum(map(len, batches)), "parts": parts.found, "seconds": parts.total()}


class _Parts:
    """Times parts, and writes each down: ``cpu`` is the share of one core, ``at`` when a share of it was done."""

    def __init__(self, session: Session, count: int) -> None:
        self._session, self._count = session, count
        self._began = 0.0
        self._at: dict[str, float] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a part."""
        cuda = self._session.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._began, cpu, self._at = time.perf_counter(), time.process_time(), {}
        result = work()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        self.found[name] = {
            "seconds": seconds, "cpu": (time.process_time() - cpu) / max(seconds, 1e-9), "at": self._at,
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
        }  # fmt: skip
        self._session.tell(f"part of {self._count}: {name}", **self.found[name])
        return result

    def share(self, done: float) -> None:
        """Note when each tenth of a part was done."""
        self._at.setdefault(f"{int(10 * done) / 10:.1f}", time.perf_counter() - self._began)

    def total(self) -> float:
        """Return the seconds of all parts."""
        return sum(part["seconds"] for part in self.found.values())
