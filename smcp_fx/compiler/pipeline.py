"""The compile run: train, measure, prune while training, convert, emit, measure, report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from smcp_fx.backends import get_backend
from smcp_fx.backends.base import Backend, measure_interleaved
from smcp_fx.compiler.data import ImageData, load_data
from smcp_fx.compiler.measuring import Corrector, accuracy_of, converted_full, layer_counts
from smcp_fx.compiler.models import FittedModel, load_model
from smcp_fx.compiler.settings import CompileSettings, as_record
from smcp_fx.compiler.training import EpochResult, Trainer
from smcp_fx.config import PruningConfig
from smcp_fx.costs import CostModel, bind
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.latency_cost import LatencyCost
from smcp_fx.latency_table import LatencyTable
from smcp_fx.latency_table import Progress as TableProgress
from smcp_fx.prepare import PreparedModel, convert, prepare
from smcp_fx.pruner import Solve
from smcp_fx.report import summary_table, write_report
from smcp_fx.tracing import Traced


def compile_model(
    settings: CompileSettings, config: PruningConfig | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Run the whole way and return the report that was written to ``settings.out``.

    Raises the library's errors for whatever does not fit; what was finished stays in ``--out`` and a run with
    ``resume`` goes on from there.
    """
    run = _Run(settings, config or PruningConfig(), console or Console())
    return run.go()


class _Run:
    def __init__(self, settings: CompileSettings, config: PruningConfig, console: Console) -> None:
        self.settings = settings
        self.config = config
        self.console = console
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    def go(self) -> dict[str, Any]:
        settings = self.settings
        backend = get_backend(settings.backend, threads=settings.threads)
        self._open_folder()
        torch.manual_seed(settings.seed)
        data = load_data(settings.data)
        fitted = load_model(settings.model, data, settings.weights)
        self.notes += fitted.notes
        for note in fitted.notes:
            self.console.print(f"  {note}")
        inputs = (torch.randn(settings.batch, fitted.channels, fitted.size, fitted.size),)
        self._check_early(fitted)
        dense_results = self._train_dense(fitted, data)
        cost, table = self._cost(backend)
        prepared = self._prepare(fitted, data, inputs, cost)
        folder = settings.folder
        dense_path, pruned_path = folder / "dense.onnx", folder / "pruned.onnx"
        with self._stage("exporting the dense network"):
            full = converted_full(prepared)
            dense = backend.compile(full, inputs, dense_path)
        fraction = self._fraction(prepared, dense.latency().median_ms)
        corrector = Corrector(
            prepared, backend, dense, inputs, fraction, folder / "state" / "candidate.onnx", self._say
        )
        trainer = self._prune(prepared, fitted, data, corrector)
        with self._stage("emitting"):
            smaller = convert(prepared)
            self._save(smaller, prepared, folder / "pruned.safetensors")
            pruned = backend.compile(smaller, inputs, pruned_path)
        with self._stage("measuring dense and pruned in turns"):
            measured = measure_interleaved([dense, pruned])
        with self._stage("reading accuracies from the emitted files"):
            accuracies = [accuracy_of(engine, data, fitted, settings.batch) for engine in (dense, pruned)]
        report = self._report(
            prepared, fitted, data, backend, cost, table, corrector, measured, accuracies, fraction,
            [("dense", dense_results), ("prune", trainer.results)],
        )  # fmt: skip
        write_report(report, folder)
        self.console.print(summary_table(report))
        self.console.print(f"Files in {folder}: {', '.join(report['files'].values())}")
        return report

    # ---- stages -----------------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        folder = self.settings.folder
        state = folder / "state"
        record_file = state / "settings.json"
        record = as_record(self.settings, self.config)
        try:
            state.mkdir(parents=True, exist_ok=True)
            if self.settings.resume:
                if not record_file.exists():
                    raise CheckpointError(f"there is no run to resume in {folder}; start it without --resume")
                try:
                    before = json.loads(record_file.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise CheckpointError(f"{record_file} is damaged; start without --resume") from error
                if before != record:
                    changed = [
                        f"{key}: {before.get(part, {}).get(key)!r} -> {value!r}"
                        for part in record
                        for key, value in record[part].items()
                        if before.get(part, {}).get(key) != value
                    ]
                    raise CheckpointError(
                        f"the run in {folder} was started with other settings ({'; '.join(changed)}); resume it "
                        "with the same, or start afresh without --resume"
                    )
                return
            for old in state.glob("*.pt"):
                old.unlink()
            record_file.write_text(json.dumps(record, indent=1), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error}") from error

    def _check_early(self, fitted: FittedModel) -> None:
        """Find out before any training whether the model can be prepared, and an exact target reached."""
        image = torch.randn(2, fitted.channels, fitted.size, fitted.size)
        exact = self.settings.cost != "latency"
        trial = prepare(
            fitted.model,
            image,
            target=self.settings.wanted if exact else 1.0,
            cost=self.settings.cost if exact else "flops",
            config=self.config,
        )
        trial.pruner.check_target()

    def _train_dense(self, fitted: FittedModel, data: ImageData) -> list[EpochResult]:
        settings = self.settings
        if settings.weights is not None or settings.dense_epochs == 0:
            return []
        trainer = Trainer(
            fitted.model,
            fitted,
            data,
            epochs=settings.dense_epochs,
            batch=settings.train_batch,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            seed=settings.seed,
            checkpoint=settings.folder / "state" / "dense.pt",
        )
        if settings.resume:
            trainer.load()
        with self._stage("training the dense model"), self._bar("training the dense model") as tick:
            trainer.run(tick)
        self.console.print(f"  dense test accuracy {trainer.results[-1].accuracy:.2%}")
        return trainer.results

    def _cost(self, backend: Backend) -> tuple[str | CostModel, LatencyTable | None]:
        if self.settings.cost != "latency":
            return self.settings.cost, None
        path = (
            Path(self.settings.table) if self.settings.table else self.settings.folder.parent / "table.sqlite"
        )
        table = LatencyTable(path)
        return LatencyCost(table, backend), table

    def _prepare(
        self, fitted: FittedModel, data: ImageData, inputs: tuple[Any, ...], cost: str | CostModel
    ) -> PreparedModel:
        schedule = self.settings.schedule(data.steps_per_epoch(self.settings.train_batch))
        wanted = self.settings.wanted
        latency = isinstance(cost, LatencyCost)
        name = "measuring the latency table" if latency else "analysing the network"
        with self._stage(name), self._progress() as progress:
            if isinstance(cost, LatencyCost):
                task = progress.add_task("measuring the latency table", total=1.0)

                def show(state: TableProgress) -> None:
                    progress.update(
                        task, completed=state.fraction, description=f"latency table: {state.block}"
                    )

                cost.progress = show
            prepared = prepare(
                fitted.model,
                inputs,
                target=wanted if isinstance(wanted, float) or not latency else 1.0,
                cost=cost,
                schedule=schedule,
                config=self.config,
            )
        channels = prepared.channels
        self.console.print(
            f"  {len(channels.groups)} groups, {channels.free_share:.0%} of the input channels free; unpruned cost "
            f"{prepared.pruner.full_cost:.5g} {prepared.pruner.cost.unit}"
        )
        return prepared

    def _fraction(self, prepared: PreparedModel, dense_ms: float) -> float:
        """The fraction of the dense cost that is asked for; sets the pruner's target for absolute latencies."""
        pruner, wanted = prepared.pruner, self.settings.wanted
        if isinstance(wanted, str) and pruner.cost.unit == "ms":
            from smcp_fx.costs import absolute_target

            fraction = absolute_target(wanted, dense_ms, "ms") / dense_ms
            pruner.target = fraction * pruner.full_cost
        return pruner.target / pruner.full_cost

    def _prune(
        self, prepared: PreparedModel, fitted: FittedModel, data: ImageData, corrector: Corrector
    ) -> Trainer:
        settings = self.settings
        pruner = prepared.pruner
        pruner.check_target()
        trainer = Trainer(
            prepared,
            fitted,
            data,
            epochs=settings.epochs,
            batch=settings.train_batch,
            lr=settings.lr * 2 / 3,
            weight_decay=settings.weight_decay,
            seed=settings.seed + 1,
            checkpoint=settings.folder / "state" / "pruning.pt",
        )
        if settings.resume and trainer.load():
            pruner.correction = float(trainer.extra.get("correction", 1.0))
            pruner.history = [Solve(**entry) for entry in json.loads(trainer.extra.get("history", "[]"))]

        def before_step(step: int) -> None:
            solve = pruner.step()
            if solve is not None:
                if pruner.cost.unit == "ms":
                    corrector.after(solve)
                trainer.extra["correction"] = pruner.correction
                trainer.extra["history"] = json.dumps([asdict(entry) for entry in pruner.history])

        with self._stage("pruning while training"), self._bar("pruning while training") as tick:
            trainer.run(tick, before_step)
        return trainer

    def _save(self, smaller: torch.fx.GraphModule, prepared: PreparedModel, path: Path) -> None:
        from smcp_fx.serialization import save

        save(smaller, path, metadata={"model": self.settings.model, "target": self.settings.target,
                                      "kept": prepared.pruner.counts})  # fmt: skip

    # ---- the report -------------------------------------------------------------------------------------

    def _report(
        self, prepared: PreparedModel, fitted: FittedModel, data: ImageData, backend: Backend,
        cost: str | CostModel, table: LatencyTable | None, corrector: Corrector, measured: Any,
        accuracies: list[float], fraction: float, training: list[tuple[str, list[EpochResult]]],
    ) -> dict[str, Any]:  # fmt: skip
        settings, pruner = self.settings, prepared.pruner
        counts, unit = pruner.counts, pruner.cost.unit
        full_counts = pruner.cost.full_counts
        traced = Traced(prepared, prepared.plan.traced.values)
        others = {name: bind(name, traced, prepared.channels) for name in ("flops", "params")}
        predicted = {"dense": pruner.full_cost, "pruned": pruner.cost.cost(counts)}
        sides = {}
        for side, chosen, result, accuracy in zip(
            ("dense", "pruned"), (full_counts, counts), measured, accuracies, strict=True
        ):
            sides[side] = {
                "accuracy": accuracy,
                "latency_ms": result.median_ms,
                "latency_q1_ms": result.q1_ms,
                "latency_q3_ms": result.q3_ms,
                "latency_stable": result.stable,
                "predicted_ms": predicted[side] if unit == "ms" else None,
                "params": others["params"].cost(chosen),
                "flops": others["flops"].cost(chosen),
            }
        measured_fraction = measured[1].median_ms / measured[0].median_ms
        per_epoch = pruner.schedule.steps_per_epoch if pruner.schedule is not None else 1
        blocks = []
        if unit == "ms":
            blocks = [
                {"name": term.name, "dense_ms": term.cost(full_counts), "pruned_ms": term.cost(counts)}
                for term in pruner.cost.terms
            ]
        validation = [
            {"name": c.name, "predicted_ms": c.predicted_ms, "measured_ms": c.pruned.median_ms}
            for c in corrector.comparisons
        ]
        if unit == "ms":
            validation.insert(
                0, {"name": "dense", "predicted_ms": predicted["dense"], "measured_ms": measured[0].median_ms}
            )
            validation.append(
                {"name": "emitted", "predicted_ms": predicted["pruned"], "measured_ms": measured[1].median_ms}
            )
        return {
            "model": fitted.name,
            "data": data.name,
            "seed": settings.seed,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "target": settings.target,
            "target_fraction": fraction,
            "predicted_fraction": predicted["pruned"] / predicted["dense"],
            "measured_fraction": measured_fraction,
            "correction": pruner.correction,
            "cost": unit,
            "batch": settings.batch,
            "epochs": settings.epochs,
            "settings": as_record(settings, self.config),
            "backend": backend.fingerprint().as_dict(),
            "versions": _versions(),
            "seconds": self.seconds,
            **sides,
            "layers": layer_counts(prepared),
            "groups": [
                {
                    "name": group.name,
                    "size": group.size,
                    "kept": counts.get(group.name, group.size),
                    "consumers": list(group.consumers),
                    "producers": list(group.producers),
                    "pinned": list(group.pinned),
                }
                for group in prepared.channels.groups
            ],
            "solves": [
                {
                    "step": s.step,
                    "epoch": s.step / per_epoch,
                    "target": s.target,
                    "cost": s.cost,
                    "importance_kept": s.importance_kept,
                    "bound": s.bound,
                    "changed_share": s.changed_share,
                    "returned": s.returned,
                    "seconds": s.seconds,
                }
                for s in pruner.history
            ],
            "training": [
                {"epoch": r.epoch, "phase": phase, "loss": r.loss, "accuracy": r.accuracy}
                for phase, results in training
                for r in results
            ],
            "validation": validation,
            "blocks": blocks,
            "table": self._table_facts(table, cost, backend),
            "files": {
                "dense": "dense.onnx",
                "pruned": "pruned.onnx",
                "weights": "pruned.safetensors",
                "manifest": "pruned.json",
                "report": "report.html",
                "data": "report.json",
            },
            "notes": self.notes,
        }

    def _table_facts(
        self, table: LatencyTable | None, cost: str | CostModel, backend: Backend
    ) -> dict[str, Any] | None:
        if table is None or not isinstance(cost, LatencyCost) or cost.report is None:
            return None
        fingerprint = backend.fingerprint()
        error = table.held_out_error(cost.blocks, fingerprint)
        return {
            "path": str(table.path),
            "rows": len(table.rows(fingerprint)),
            "measured": cost.report.measured,
            "reused": cost.report.reused,
            "held_out_points": error.points,
            "held_out_median": error.median,
            "held_out_p95": error.p95,
        }

    # ---- what the user sees -----------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self.console.print(f"  {text}")

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.console.print(f"[bold]{name}[/bold]")
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )

    @contextmanager
    def _bar(self, name: str) -> Iterator[Any]:
        with self._progress() as progress:
            task = progress.add_task(name)

            def tick(done: int, total: int, loss: float) -> None:
                progress.update(task, completed=done, total=total, description=f"{name}, loss {loss:.3f}")

            yield tick


def _versions() -> dict[str, str]:
    found = {}
    for name in ("smcp_fx", "torch", "torchvision", "onnx", "onnxruntime", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
