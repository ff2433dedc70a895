"""A table on demand, and networks pruned to targets by it beside the dense one: the same for every runtime."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn

import smcp_fx
from gpu_hour.networks import images, network
from gpu_hour.session import Session
from smcp_fx.backends import Backend, CompareConfig, Engine, RelativeLatency, compare
from smcp_fx.compiler.seeking import aim_for, seek
from smcp_fx.config import PruningConfig
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.network import SURE, NetworkLatency
from smcp_fx.latency.table import LatencyTable
from smcp_fx.prepared import PreparedModel

#: A comparison on a GPU of its own agrees within seconds.
_COMPARE = CompareConfig(seconds=0.5, longest_seconds=6.0)
#: Importances are gathered over so many batches of at most 32 images; which channels go hardly matters to latency.
_BATCHES = 4


@dataclass
class Job:
    """One network at one batch on one backend. ``build_s``: what an engine takes to build, longest so far."""

    session: Session
    backend: Backend
    name: str
    batch: int
    multiple: int = 8
    build_s: float = 5.0

    def __post_init__(self) -> None:
        self.images = images(self.batch, self.session.small)
        self.dense: Engine | None = None
        self.prepared: PreparedModel
        self.latency: NetworkLatency

    def prune(self, targets: Sequence[float], keep: Sequence[float]) -> None:
        """Measure the dense network, fill the table on demand, reach the targets, and hold sums against engines.

        ``keep``: what groups keep on the average, of each random pruning that sums are held against.
        """
        session = self.session
        session.figure("dense", self._measure_dense, self.build_s)
        with session.table() as table:
            self._bind(table)
            self._gather()
            for asked in targets:
                session.attempt(f"target {asked}", lambda asked=asked: self._reach(asked))
            for share in keep:
                session.attempt(
                    f"pruning {share}", lambda share=share: self._random_pruning(share), self.build_s
                )
            session.tell("check", **self._check(table))

    def engine(self, module: nn.Module) -> Engine:
        """Compile a network at the batch, if there is time for that."""
        self.session.need(self.build_s)
        began = time.monotonic()
        engine = self.backend.compile(module, (self.images,))
        self.build_s = max(self.build_s, time.monotonic() - began)
        return engine

    def dense_engine(self) -> Engine:
        """Return the dense network's engine, built once a run."""
        if self.dense is None:
            self.dense = self.engine(network(self.name, self.session.small))
        return self.dense

    def _measure_dense(self) -> dict[str, Any]:
        began = time.monotonic()
        engine = self.dense_engine()
        seconds, found = time.monotonic() - began, engine.latency()
        build = getattr(engine, "build", {})
        return {
            "network": self.name, "batch": len(self.images), "side": self.images.shape[-1],
            "median_ms": found.median_ms, "spread": found.spread, "compile_seconds": seconds,
            "fingerprint": self.backend.fingerprint().as_dict(),
            **{key: build[key] for key in ("types", "reformats", "notes") if key in build},
        }  # fmt: skip

    # ---- the table ------------------------------------------------------------------------------------------

    def _bind(self, table: LatencyTable) -> None:
        """Measure the first rows that the table lacks; what is measured is told also where time ends it."""
        session, began = self.session, time.monotonic()
        for row in table.rows(self.backend.fingerprint()):
            if row.error:  # a builder that was ended, or a full memory: once more
                table.store.forget_failures(row.signature, row.fingerprint)
        before = self._rows(table)
        cost = LatencyCost(table, self.backend, progress=session.watch)
        model = network(self.name, session.small)
        try:
            self.prepared = smcp_fx.prepare(
                model, self.images, cost=cost, config=PruningConfig(multiple=self.multiple), check=False
            )
        finally:
            measured, seconds = self._rows(table) - before, time.monotonic() - began
            if measured:
                each = {"seconds_a_row": seconds / measured}
                session.tell("first rows", rows_before=before, measured=measured, seconds=seconds, **each)
        latency = latency_of(self.prepared.pruner.cost)
        assert latency is not None
        self.latency = latency

    def _rows(self, table: LatencyTable) -> int:
        return len(table.rows(self.backend.fingerprint()))

    def _gather(self) -> None:
        """Gather importances on random images, on the session's device, the same ones in every run."""
        prepared, device = self.prepared, self.session.device
        generator = torch.Generator().manual_seed(2)
        prepared.to(device).train()
        for _ in range(_BATCHES):
            x = torch.randn(min(len(self.images), 32), *self.images.shape[1:], generator=generator).to(device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", smcp_fx.TrainingWarning)  # there is no optimizer to step
                prepared.zero_grad()
                nn.functional.cross_entropy(
                    prepared(x), torch.randint(10, (len(x),), generator=generator).to(device)
                ).backward()
                prepared.pruner.step()
        prepared.to("cpu").eval()

    # ---- targets --------------------------------------------------------------------------------------------

    def _reach(self, asked: float) -> dict[str, Any]:
        """Solve, measure, correct the aim: every try is a line; a resumed run goes on from the tries it finds."""
        session, began, tries = self.session, time.monotonic(), f"try of {asked}:"
        told = [(t["predicted"], t["measured"]) for t in session.all_known(tries)]
        tried = list[_Candidate]()

        def solve(aim: float) -> _Candidate:
            found = self.prepared.pruner.solve(min(aim, 1.0))
            for earlier in tried:
                earlier.close()
            predicted = found.cost / self.prepared.pruner.full_cost
            tried.append(_Candidate(self, smcp_fx.convert(self.prepared), predicted, tries))
            return tried[-1]

        first = solve(aim_for(asked, told) if told else asked)
        candidate, measured, met = seek(asked, first, solve, told)
        tried[-1].close()
        done = session.all_known(tries)
        return {
            "asked": asked, "met": met, "measured": measured, "predicted": candidate.predicted,
            "first_predicted": done[0]["predicted"], "first_measured": done[0]["measured"], "tries": len(done),
            "rows": self._rows(self.latency.table), "multiple": self.multiple,
            "seconds": time.monotonic() - began,
        }  # fmt: skip

    # ---- sums against engines -------------------------------------------------------------------------------

    def _random_pruning(self, share: float) -> dict[str, Any]:
        """Predict and measure a network whose groups keep ``share`` of their channels on the average."""
        rng, counts = np.random.default_rng(int(100 * share)), dict(self.latency.full_counts)
        for name, allowed in self.prepared.pruner.cost.permitted.items():
            kept = float(np.clip(rng.normal(share, 0.15), 0.1, 1.0)) * allowed[-1]
            counts[name] = min(allowed, key=lambda count: abs(count - kept))
        self.latency.learn(counts, SURE)
        self._keep(counts)
        with self.engine(smcp_fx.convert(self.prepared)) as engine:
            measured = engine.latency()
        return {
            "predicted_ms": self.latency.latency(counts), "measured_ms": measured.median_ms,
            "spread": measured.spread,
        }  # fmt: skip

    def _keep(self, counts: Mapping[str, int]) -> None:
        free = (group for group in self.prepared.channels.groups if group.free)
        self.prepared.set_masks({g.name: torch.arange(g.size) < counts[g.name] for g in free})

    def _check(self, table: LatencyTable) -> dict[str, Any]:
        """The table's held-out error, and its sums against the networks that were measured."""
        fingerprint = self.backend.fingerprint()
        error = table.held_out_error(self.latency.blocks, fingerprint)
        failed = [row for row in table.rows(fingerprint) if row.error]
        dense = self.session.known("dense") or {}
        pairs = [(self.latency.latency(self.latency.full_counts), dense["median_ms"])]
        pairs += [
            (p["predicted_ms"], p["measured_ms"])
            for p in self.session.all_known("pruning ")
            if "measured_ms" in p
        ]
        predicted, measured = np.array(pairs).T
        sums = np.abs(predicted / measured - 1)
        return {
            "rows": self._rows(table), "failed": len(failed), "held_out": error.points,
            "held_out_median": error.median, "held_out_p95": error.p95,
            "run_ms": table.run_overhead(fingerprint), "networks": len(pairs),
            "mean_error": float(sums.mean()), "largest_error": float(sums.max()),
            "dense_predicted_ms": pairs[0][0], "dense_measured_ms": pairs[0][1],
            "spearman": float(spearmanr(predicted, measured)[0]) if len(pairs) > 2 else None,
        }  # fmt: skip


class _Candidate:
    """A network to measure, as `seek` asks for it: each time in a new session of one engine."""

    def __init__(self, job: Job, smaller: nn.Module, predicted: float, tries: str) -> None:
        self.predicted = predicted
        self._job, self._smaller, self._tries = job, smaller, tries
        self._engine: Engine | None = None

    def measure(self) -> RelativeLatency:
        """Measure beside the dense network, and write the try down."""
        job, before = self._job, self._engine
        self._engine = job.engine(self._smaller) if before is None else before.reload()
        if before is not None:
            before.close()
        found = compare(job.dense_engine(), self._engine, _COMPARE)
        number = len(job.session.all_known(self._tries)) + 1
        job.session.tell(
            f"{self._tries} {number}", predicted=self.predicted, measured=found.fraction, standard_error=found.error,
            dense_ms=found.dense.median_ms, pruned_ms=found.pruned.median_ms,
        )  # fmt: skip
        return found

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
