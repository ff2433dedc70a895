"""What a row of TensorRT costs: the effort that the builder needs, and how many builders at a time are best."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_hour.networks import images, network
from gpu_hour.session import Session
from smcp_fx.backends import get_backend
from smcp_fx.backends.base import Array
from smcp_fx.backends.tensorrt.backend import TensorRTBackend
from smcp_fx.backends.tensorrt.worker.problems import major_minor
from smcp_fx.blocks.cutting import cut
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.channels import build
from smcp_fx.errors import BackendError
from smcp_fx.tracing.tracer import trace

Row = tuple[FusedBlock, tuple[int, ...]]

LIBRARIES = ("CUBLAS", "CUBLAS_LT", "CUDNN")
#: What makes a build shorter, by name: the most effort first. Levels come with 8.6, compiled kernels with 8.5.
EFFORTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no kernels compiled": {"off": ("JIT_CONVOLUTIONS",)},
    "no kernels compiled, no masked edges": {"off": ("JIT_CONVOLUTIONS", "EDGE_MASK_CONVOLUTIONS")},
    "level 2": {"level": 2},
    "level 1": {"level": 1},
}
#: Rows for the efforts, each built twice; builders beside each other; least effort may be this much slower.
ROWS, BUILDERS, SLOWER = 4, (1, 2, 4, 8), 0.03
#: Less effort must save this share of a row's time, or it is not worth another kind of row.
WORTH = 0.1
#: If a row takes longer (s), widths are multiples of the second number, so that choices share more rows.
LONG, COARSE = 2.0, 32


def rows(session: Session) -> None:
    """One convolution, the cost of a row by effort, then rows of ResNet-18's table by more and more builders."""
    about = session.figure("smoke", lambda: smoke(session))["about"]
    wanted = first_rows(session)
    levels = major_minor(about["tensorrt"]) >= (8, 6)
    for name in [name for name, effort in EFFORTS.items() if levels or "level" not in effort]:
        session.attempt(f"effort {name}", partial(_by_effort, session, wanted, name), 20)
    effort = least_effort({name: session.known(f"effort {name}") or {} for name in EFFORTS})
    rates = _by_builders(session, wanted, effort)
    builders = min(rates, key=lambda count: rates[count])
    multiple = COARSE if rates[builders] > LONG else 8
    session.tell(
        "choice", effort=effort, builders=builders, seconds_a_row=rates[builders], multiple=multiple,
        seconds_of_resnet50=rates[builders] * 200,
    )  # fmt: skip


def smoke(session: Session) -> dict[str, Any]:
    """One convolution: what fails here fails everywhere."""
    began, small = time.monotonic(), session.small
    shape = (2, 8, 6, 6) if small else (32, 64, 56, 56)
    torch.manual_seed(0)
    with closing(make_backend(session, choice={})) as backend:
        engine = backend.compile(nn.Conv2d(shape[1], 2 * shape[1], 3, padding=1), (torch.randn(shape),))
        with engine:
            return {
                "about": backend.about(), "median_ms": engine.latency().median_ms, "types": engine.build["types"],
                "build_seconds": engine.build["seconds"], "seconds": time.monotonic() - began,
            }  # fmt: skip


def chosen(session: Session) -> dict[str, Any]:
    """Return what this stage chose on this device; without it four builders, and all effort."""
    return session.known("choice", stage="tensorrt-rows") or {
        "builders": 4,
        "multiple": 8,
        "effort": "as it is",
    }


def make_backend(
    session: Session, precision: str = "fp16", calibration: Sequence[Array] = (), *,
    choice: Mapping[str, Any] | None = None, folder: Path | str | None = None,
) -> TensorRTBackend:  # fmt: skip
    """Return TensorRT with this session's Python, libraries and timing cache; builders and effort as `chosen`."""
    choice, settings = chosen(session) if choice is None else choice, session.settings
    effort = EFFORTS[choice.get("effort", "as it is")]
    found = get_backend(
        "tensorrt", precision=precision, calibration=calibration, worker_python=settings.worker_python,
        builders=choice.get("builders", 1), folder=folder or settings.state, timeout_s=240.0,
        tactic_sources_off=(*(LIBRARIES if settings.no_libraries else ()), *effort.get("off", ())),
        optimization_level=effort.get("level"),
    )  # fmt: skip
    assert isinstance(found, TensorRTBackend)
    session.add_version("tensorrt", found.about()["tensorrt"])
    return found


def first_rows(session: Session) -> list[Row]:
    """Return the first rows of ResNet-18's table at batch 64, in an order that mixes the blocks."""
    traced = trace(network("resnet18", session.small), (images(64, session.small),))
    blocks = cut(traced, build(traced.module, traced.values, multiple=8))
    with session.table() as table, closing(make_backend(session, choice={})) as backend:
        wanted = table.wanted(blocks, backend.fingerprint(), whole=False)
    found = [(block, point) for block, points in wanted for point in points]
    random.Random(0).shuffle(found)
    return found  # type: ignore[return-value]


def _by_effort(session: Session, wanted: list[Row], effort: str) -> dict[str, Any]:
    """Build some rows twice, each time with a timing cache of its own, and measure them."""
    seconds, latencies = list[float](), list[list[float]]()
    for _ in range(2):
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(make_backend(session, choice={"effort": effort}, folder=folder)) as backend,
        ):
            backend.expect_blocks([block for block, _ in wanted[:ROWS]])
            backend.block_latency(*wanted[-1])  # the first build of a process loads the kernels, too
            latencies.append([])
            for block, point in wanted[:ROWS]:
                session.need(5)
                began = time.monotonic()
                latencies[-1].append(backend.block_latency(block, point).hot.median_ms)
                seconds.append(time.monotonic() - began)
    first, second = np.array(latencies)
    return {
        "seconds_a_row": float(np.mean(seconds)), "ms": np.minimum(first, second).tolist(),
        "apart": float(np.abs(np.log(first / second)).max()),
    }  # fmt: skip


def least_effort(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the quickest way to build whose rows are nearly as fast as with all effort, and no less certain."""
    whole = found.get("as it is", {})
    if "ms" not in whole:
        return "as it is"
    certain = max(whole["apart"], SLOWER)
    limit = (1 - WORTH) * whole["seconds_a_row"]
    good = [
        name
        for name, figure in found.items()
        if "ms" in figure
        and figure["apart"] <= certain
        and figure["seconds_a_row"] <= limit
        and float(np.mean(np.array(figure["ms"]) / np.array(whole["ms"]))) <= 1 + SLOWER
    ]
    return min(good or ["as it is"], key=lambda name: found[name]["seconds_a_row"])


def _by_builders(session: Session, wanted: list[Row], effort: str) -> dict[int, float]:
    """Measure rows into the table by more and more builders, until that is no faster; seconds a row, by builders."""
    left, blocks = list(wanted), [block for block, _ in wanted]
    rates: dict[int, float] = {}
    for builders in BUILDERS:

        def measured(builders: int = builders) -> dict[str, Any]:
            choice = {"effort": effort, "builders": builders}
            with closing(make_backend(session, choice=choice)) as backend:
                backend.expect_blocks(blocks)
                table.learn(
                    [left.pop() for _ in range(min(builders, len(left)))], blocks, backend, session.watch
                )
                some = [left.pop() for _ in range(min(3 * builders, len(left)))]
                began = time.monotonic()
                report = table.learn(some, blocks, backend, session.watch)
                seconds = time.monotonic() - began
            return {
                "seconds_a_row": seconds / max(report.measured + report.repeated, 1), "rows": report.measured,
                "repeated": report.repeated, "failed": [error for *_, error in report.failed][:3],
            }  # fmt: skip

        with session.table() as table:
            found = session.attempt(f"{builders} builders", measured, 30) or {}
        if not found.get("rows"):
            break
        rates[builders] = found["seconds_a_row"]
        if rates[builders] > 1.1 * min(rates.values()):
            break
    if not rates:
        raise BackendError("no row could be built: see the figures of the builders")
    return rates
