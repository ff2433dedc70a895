"""The compile run: train, measure, prune, repair, fine-tune, emit, measure, report."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from smcp_fx.backends import Backend, Engine, get_backend
from smcp_fx.backends.layers import blocks_beside_layers
from smcp_fx.calibration import gather_importance, solve_best
from smcp_fx.compiler.calibrating import (
    Repaired,
    calibration_batches,
    calibration_facts,
    load_choice,
    repaired,
    save_choice,
)
from smcp_fx.compiler.folder import RunFolder, placed
from smcp_fx.compiler.judging import (
    dense_accuracy,
    held_against_dense,
    held_out_divergence,
    note_guesses,
)
from smcp_fx.compiler.measuring import Corrector, accuracy_of, compared
from smcp_fx.compiler.onnx_files import network_and_samples
from smcp_fx.compiler.phases import Phases
from smcp_fx.compiler.precision import Precision
from smcp_fx.compiler.pricing import asked_fraction, chosen_cost, dense_latency
from smcp_fx.compiler.reporting import FinalFigures, build_report, target_row
from smcp_fx.compiler.saving import WEIGHTS, Saver
from smcp_fx.compiler.settings import CompileSettings, as_record
from smcp_fx.compiler.telling import Teller
from smcp_fx.compiler.training import usable_device
from smcp_fx.config import PruningConfig
from smcp_fx.errors import InputError, TraceError
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.latency.filling import MeasureReport
from smcp_fx.latency.progress import duration
from smcp_fx.output_kinds import Kinds
from smcp_fx.prepare import PreparedModel, convert, converted_full, prepare
from smcp_fx.pruning.solve import Solve
from smcp_fx.report import Report, summary_table, target_table, write_report
from smcp_fx.report.schema import TargetRow
from smcp_fx.texts import amount
from smcp_fx.training import Epoch
from smcp_fx.zoo.data import ImageData, as_tuple, load_data
from smcp_fx.zoo.models import FittedModel, load_model
from smcp_fx.zoo.pretrained import preprocessing_of, pretrained_weights
from smcp_fx.zoo.weights import read_weights

#: Options that apply only to masks learnt while training.
_LEARNT = ("mask", "momentum", "memory", "tolerance")


def compile_model(
    settings: CompileSettings, config: PruningConfig | None = None, console: Console | None = None
) -> Report:
    """Run all stages and return the report that was written to ``settings.out``.

    Raises the library's errors for anything that does not fit. Finished stages stay in ``--out``; a run with
    ``resume`` continues from there.
    """
    config, usual = config or PruningConfig(), PruningConfig()
    for name in _LEARNT:
        if getattr(config, name) != getattr(usual, name) and not settings.masks:
            option = f"{name}={getattr(config, name)!r}"
            raise InputError(f"{option} is of masks that are learnt: set prune='during', too")
    run = _Compilation(placed(settings), config, console or Console())
    return run.go()


class _Compilation:
    def __init__(self, settings: CompileSettings, config: PruningConfig, console: Console) -> None:
        self.settings = settings
        self.config = config
        self.tell = Teller(console)
        self.saver = Saver(settings, self.tell)
        self.folder = RunFolder(settings, as_record(settings, config))
        self.base = Path.cwd()  # where relative paths begin, whatever a factory of data or models changes
        self.device = torch.device("cpu")  # the training device
        self._told: MeasureReport | None = None  # rows measured up to the last solve
        self._begun: MeasureReport | None = None  # rows measured for the first prices

    def go(self) -> Report:
        settings = self.settings
        backend = get_backend(settings.backend, **settings.backend_options)
        for remark in backend.remarks():
            self.tell.note(remark)
        self.precision = Precision(backend, settings, self.tell)
        self.folder.look()
        torch.manual_seed(settings.seed)
        self.device = usable_device(settings.device)
        if settings.model.startswith("onnx:"):
            return self._begin(*network_and_samples(settings, self.base, backend, self.tell), backend)
        images = preprocessing_of(settings.model)
        images = settings.prepared(replace(images, size=settings.side or images.size))
        data = load_data(
            settings.data,
            self.base,
            images=images,
            augment=settings.augment if settings.trains else "none",
            workers=settings.workers,
        )
        if settings.trains:
            settings.schedule(data.steps_per_epoch(settings.train_batch))  # fail now if it does not fit
        weights = None
        if settings.has_weights:
            file = settings.weights
            weights = read_weights(self.base / file) if file else pretrained_weights(settings.model)
        fitted = load_model(settings.model, data, weights, self.base, size=settings.side)
        return self._begin(fitted, data, backend)

    def _begin(self, fitted: FittedModel, data: ImageData, backend: Backend) -> Report:
        """Check that the run can be done, and do it."""
        settings = self.settings
        for note in fitted.notes:
            self.tell.note(note)
        inputs = fitted.examples(settings.batch)
        self._check_early(fitted, backend, inputs)
        with self.folder.held():
            # A damaged or foreign table is refused before anything is trained.
            cost = chosen_cost(settings, self.base, backend, self.tell)
            fitted.model.to(self.device)
            if not data.labelled:
                named = settings.model.startswith(("torchvision:", "timm:"))
                kinds = settings.kinds or ("classes" if named else None)
                data = held_against_dense(data, fitted, kinds, self.tell)
            tested = fitted.trained and data.labelled
            accuracy = dense_accuracy(fitted, data, self.tell) if tested else 1.0
            phases = Phases(settings, fitted, data, self.tell, accuracy)
            self.precision.calibrate(fitted, data)
            self._check_table(phases, backend, inputs, cost)
            self.folder.begin()  # from here on, an earlier run's files are replaced
            return self._train_and_emit(phases, backend, inputs, cost)

    def _train_and_emit(
        self,
        phases: Phases,
        backend: Backend,
        inputs: tuple[torch.Tensor, ...],
        cost: str | LatencyCost,
    ) -> Report:
        settings, fitted, data = self.settings, phases.fitted, phases.data
        dense_results = phases.dense()
        prepared = self._prepare(fitted, data, inputs, cost)
        folder = settings.folder
        dense_path, pruned_path = folder / "dense.onnx", folder / "pruned.onnx"
        with self.tell.stage("exporting the dense network"):
            full = converted_full(prepared).cpu()
            kept = self.precision.choose_kept(full, inputs)
            dense = backend.compile(full, inputs, dense_path)
            for remark in dense.remarks:
                self.tell.note(remark)
        fraction = asked_fraction(prepared, settings.wanted, dense_latency(prepared, dense, cost))
        corrector = Corrector(prepared, backend, dense, inputs, fraction, folder / "state", self.tell.say)
        smaller, corrector, results, without = self._pruned(prepared, phases, corrector, cost)
        with self.tell.stage("emitting"):
            smaller = smaller.cpu()
            self.saver.save(smaller, prepared, folder / WEIGHTS)
            pruned = backend.compile(smaller, inputs, pruned_path)
        with self.tell.stage("measuring dense and pruned in turns"):
            measured = compared(dense, pruned)
        with self.tell.stage("reading accuracies from the emitted files"):
            accuracies = [accuracy_of(engine, data, fitted, settings.batch) for engine in (dense, pruned)]
        precision = self.precision.facts(
            (full, smaller), inputs, pruned, (accuracies[0], accuracies[1]), kept, data, fitted
        )
        note_guesses(data, accuracies[0], accuracies[1], settings.rate, self.tell)
        report = build_report(
            settings, self.config, prepared, fitted, data, backend, corrector,
            FinalFigures(measured, tuple(accuracies), corrector.fraction),
            begun=self._begun,
            training=[("dense", dense_results), ("prune", results)],
            seconds=self.tell.seconds,
            notes=self.tell.notes,
        )  # fmt: skip
        if settings.targets:
            file = report.files.get("pruned") or report.files.get("weights", "")
            last = target_row(prepared, measured, accuracies[1], file)
            without["targets"] = (*without["targets"], last)
        return self._write(replace(report, precision=precision, **without), prepared, pruned)

    def _pruned(
        self, prepared: PreparedModel, phases: Phases, corrector: Corrector, cost: str | LatencyCost
    ) -> tuple[nn.Module, Corrector, list[Epoch], dict[str, Any]]:
        """Return the pruned and trained network, its corrector, its epochs, the report's extra fields."""
        corrects = isinstance(cost, LatencyCost) and not cost.foreign
        results: list[Epoch] = []
        without: dict[str, Any] = {}
        if self.settings.masks:

            def solved(solve: Solve) -> None:
                if corrects:
                    corrector.after(solve)
                self._tell_rows(prepared, f"solve at step {solve.step}")

            results = phases.masks(prepared, solved, resumed=corrector.resume)
            smaller: nn.Module = convert(prepared)
        else:
            smaller, corrector, without = self._chosen(prepared, phases, corrector, corrects)
            if self.settings.trains:
                results = phases.tune(smaller)
        if self.settings.trains:
            phases.recalibrate(smaller)
        return smaller, corrector, results, without

    def _write(self, report: Report, prepared: PreparedModel, pruned: Engine) -> Report:
        """Write the report, with the engine's layers if it reports them, and print its tables."""
        folder, network_latency = self.settings.folder, latency_of(prepared.pruner.cost)
        layers = pruned.layers() if network_latency is not None else []
        if network_latency is not None and layers:
            predicted = {block.name: block.pruned_ms or 0.0 for block in report.blocks}
            beside = blocks_beside_layers(network_latency.blocks, predicted, layers)
            report = replace(report, engine_layers=beside)
        write_report(replace(report, notes=tuple(self.tell.notes)), folder)
        for table in (summary_table(report), target_table(report)):
            if table is not None:
                self.tell.console.print(table, markup=False)
        self.tell.console.print(f"Files in {folder}: {', '.join(report.files.values())}", markup=False)
        return report

    # ---- stages -----------------------------------------------------------------------------------------

    def _check_early(self, fitted: FittedModel, backend: Backend, inputs: tuple[torch.Tensor, ...]) -> None:
        """Check first that the model can be prepared and exported, and that an exact target is in reach."""
        image = fitted.examples(self.settings.batch if fitted.output_names else 2)
        exact = self.settings.cost != "latency"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run's own `prepare` repeats them
            trial = prepare(
                fitted.model,
                image,
                target=self.settings.wanted if exact else 1.0,
                cost=self.settings.cost if exact else "flops",
                config=self.config,
            )
        if trial.regions:
            raise TraceError(
                f"{trial.untraced['']} Its parts can be traced and pruned in your own training loop "
                "(smcp_fx.prepare), but what this command emits is one graph."
            )
        trial.pruner.check_target()
        full = converted_full(trial)
        with self.tell.stage("trying the export"):
            backend.try_export(full, inputs)
        if backend.writer is not None and backend.writer.closed:
            closed = ", ".join(backend.writer.closed)
            self.tell.note(f"open in the file, and fixed in those written, at what is measured: {closed}")
        self.saver.try_on(full)

    def _check_table(
        self, phases: Phases, backend: Backend, inputs: tuple[torch.Tensor, ...], cost: str | LatencyCost
    ) -> None:
        """Fill the table; check it against the network, and the target against it, before any training."""
        if not isinstance(cost, LatencyCost) or cost.foreign or not phases.trains_dense:
            return
        trial = self._prepare(phases.fitted, phases.data, inputs, cost)
        with backend.compile(converted_full(trial).cpu(), inputs) as dense:
            asked_fraction(trial, self.settings.wanted, dense_latency(trial, dense, cost))
        trial.pruner.check_target()

    def _prepare(
        self, fitted: FittedModel, data: ImageData, inputs: tuple[Any, ...], cost: str | LatencyCost
    ) -> PreparedModel:
        masks = self.settings.masks
        schedule = self.settings.schedule(data.steps_per_epoch(self.settings.train_batch)) if masks else None
        wanted = self.settings.wanted
        latency = isinstance(cost, LatencyCost)
        name = "measuring the latency table" if latency and not self._begun else "analysing the network"
        with self.tell.stage(name), self.tell.bar(name):
            prepared = prepare(
                fitted.model,
                tuple(value.to(self.device) for value in inputs),
                target=wanted if isinstance(wanted, float) or not latency else 1.0,
                cost=cost,
                schedule=schedule,
                config=self.config,
            )
        network_latency = latency_of(prepared.pruner.cost)
        if network_latency is not None and network_latency.report is not None:
            if self._begun is not None:
                self._begun = network_latency.report = network_latency.report.after(self._begun)
                return prepared  # the rest has been reported already
            self._begun = report = network_latency.report
            self.tell.say(
                f"{report.measured} rows measured, {report.reused} were there, in {duration(report.seconds)}"
            )
            if other := report.elsewhere:
                self.tell.note(
                    f"rows that the table had at {other} do not count: this run times batch {self.settings.batch} at "
                    f"{fitted.size} pixels"
                )
        channels = prepared.channels
        self.tell.say(
            f"{len(channels.groups)} groups, {channels.free_share:.0%} of the input channels free; unpruned cost "
            f"{amount(prepared.pruner.full_cost, prepared.pruner.cost.unit)}"
        )
        return prepared

    def _chosen(
        self, prepared: PreparedModel, phases: Phases, corrector: Corrector, corrects: bool
    ) -> tuple[nn.Module, Corrector, dict[str, Any]]:
        """Run `_calibrate`, or load its result from before the run was interrupted."""
        choice = self.settings.folder / "state" / "chosen.safetensors"
        if self.settings.resume and choice.exists() and phases.tuning:
            facts = load_choice(choice, prepared)
            corrector.resume(0)
            return convert(prepared), corrector, {"calibration": facts}
        smaller, corrector, fields = self._calibrate(prepared, phases, corrector, corrects)
        if self.settings.trains:
            save_choice(choice, prepared, fields["calibration"])
        return smaller, corrector, fields

    def _tell_rows(self, prepared: PreparedModel, name: str) -> None:
        """Report the number of rows that solves have measured, if there are new ones."""
        latency = latency_of(prepared.pruner.cost)
        if latency is None or latency.report is None:
            return
        before, self._told = self._told or self._begun or latency.report, latency.report
        if rows := latency.report.measured - before.measured:
            self.tell.say(
                f"{name}: {rows} rows measured in {duration(latency.report.seconds - before.seconds)}"
            )

    def _calibrate(
        self, prepared: PreparedModel, phases: Phases, corrector: Corrector, corrects: bool
    ) -> tuple[nn.Module, Corrector, dict[str, Any]]:
        """Prune and repair without training; return the last target's network, its corrector, report fields.

        ``corrects``: latencies are measured, and masks solved for again. The networks of other targets are
        written to files of their own.
        """
        fitted, data, dense = phases.fitted, phases.data, phases.dense_accuracy
        settings, pruner = self.settings, prepared.pruner
        batches = calibration_batches(data, fitted, settings.calibration, settings.seed, self.device)
        images = sum(len(as_tuple(x)[0]) for x, _ in batches)
        kinds: Kinds = "classes" if data.answers is None else data.answers.kinds
        name = f"gathering importances from {images} images"
        with self.tell.stage(name), self.tell.bar(name) as tick:
            gather_importance(prepared, batches, outputs=kinds, progress=tick)
        points, state, whole = [], prepared.smcp, pruner.rises
        targets = sorted(settings.targets, reverse=True) or [corrector.fraction]
        for target in targets:
            if len(targets) > 1:
                self.tell.say(f"target {target:.0%}")
            corrector = corrector.to(target)
            pruner.target = target * pruner.full_cost
            state.rises = whole
            with self.tell.stage("solving"), self.tell.bar("solving") as tick:
                correct = corrector.fit if corrects else None
                trust = solve_best(prepared, batches, outputs=kinds, correct=correct, progress=tick)
                self._tell_rows(prepared, "solving")
            self.tell.say(
                f"weight of the estimated worths of groups: {trust:.0%} (0%: nearly uniform widths)"
            )
            name = "slicing and repairing"
            with self.tell.stage(name), self.tell.bar(name) as tick:
                fixed = repaired(prepared, batches, fitted, data, tick)
            self.tell.say(
                f"{'accuracy' if data.labelled else 'agreement'} {dense:.2%} -> "
                f"{fixed.sliced:.2%} sliced -> {fixed.repaired:.2%} repaired; {str(fixed.report).splitlines()[0]}"
            )
            if data.answers is not None:
                apart = held_out_divergence(fixed.network, data, fitted)
                self.tell.note(
                    f"at {target:.0%}, held-out samples diverge by {apart:.3g} "
                    "(nats; of values, or of several outputs, relative to a constant answer)"
                )
            if target != targets[-1]:
                points.append(self._emitted(prepared, fixed, corrector, target))
        facts = calibration_facts(fixed, prepared, images, data.labelled, dense)
        fields = {"calibration": facts, "agreement": not data.labelled, "targets": tuple(points)}
        last = {"target": f"{targets[-1]:g}"} if settings.targets else {}
        return fixed.network, corrector, fields | last

    def _emitted(
        self, prepared: PreparedModel, fixed: Repaired, corrector: Corrector, target: float
    ) -> TargetRow:
        """Write one target's network, measure it, and return its point of the curve."""
        path = self.settings.folder / f"pruned-{target:g}.onnx"
        network = fixed.network.cpu()
        self.saver.save(network, prepared, weights := path.with_suffix(".safetensors"))
        with (
            self.tell.stage("emitting"),
            corrector.backend.compile(network, corrector.inputs, path) as engine,
        ):
            measured = compared(corrector.dense, engine)
        file = (*corrector.backend.files(path), weights)[0]
        return target_row(prepared, measured, fixed.repaired, file.name)
