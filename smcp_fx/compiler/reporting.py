"""The report of a compile run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import Tensor

from smcp_fx.backends import Backend, RelativeLatency, backend_packages
from smcp_fx.compiler.measuring import Corrector
from smcp_fx.compiler.precision import file_of
from smcp_fx.compiler.saving import WEIGHTS
from smcp_fx.compiler.settings import CompileSettings, as_record
from smcp_fx.compiler.surfaces import surfaces
from smcp_fx.config import PruningConfig
from smcp_fx.latency.cost import latency_of
from smcp_fx.latency.filling import MeasureReport
from smcp_fx.latency.network import NetworkLatency
from smcp_fx.model_summary import kept_widths
from smcp_fx.prepare import PreparedModel
from smcp_fx.pruning.pruner import Pruner
from smcp_fx.report.schema import (
    BlockRow,
    EngineRow,
    EpochRow,
    GroupRow,
    LayerRow,
    Report,
    Side,
    SolveRow,
    TableFacts,
    TargetRow,
)
from smcp_fx.training import Epoch
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel


@dataclass(frozen=True)
class FinalFigures:
    """Latency and accuracy of the dense and the pruned network; ``asked``: the fraction of the dense cost."""

    latency: RelativeLatency
    accuracies: tuple[float, ...]
    asked: float


def build_report(
    settings: CompileSettings,
    config: PruningConfig,
    prepared: PreparedModel,
    fitted: FittedModel,
    data: ImageData,
    backend: Backend,
    corrector: Corrector,
    measured: FinalFigures,
    *,
    begun: MeasureReport | None,
    training: Sequence[tuple[str, list[Epoch]]],
    seconds: Mapping[str, float],
    notes: Sequence[str],
) -> Report:
    """Return the report.

    ``begun``: the rows measured for the first prices; ``training``: the epochs of each phase.
    """
    pruner, latency = prepared.pruner, measured.latency
    network_latency = latency_of(pruner.cost)
    dense, pruned = _sides(prepared, measured)
    return Report(
        model=fitted.name,
        data=data.name,
        seed=settings.seed,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=settings.target,
        target_fraction=measured.asked,
        predicted_fraction=pruner.present_cost / pruner.full_cost,
        measured_fraction=latency.fraction,
        measured_fraction_q1=latency.q1,
        measured_fraction_q3=latency.q3,
        measured_fraction_error=latency.error,
        measured_rounds=latency.rounds,
        correction=pruner.correction,
        cost=pruner.cost.unit,
        batch=settings.batch,
        epochs=settings.epochs,
        settings=as_record(settings, config),
        backend=backend.fingerprint().as_dict(),
        versions=_versions(),
        seconds=dict(seconds),
        dense=dense,
        pruned=pruned,
        layers=_layers(prepared),
        groups=_groups(prepared),
        solves=_solves(pruner),
        training=_epochs(training),
        validation=_validation(corrector, dense, pruned),
        blocks=_blocks(network_latency, pruner.counts) if network_latency is not None else (),
        surfaces=surfaces(network_latency, pruner.counts) if network_latency is not None else (),
        table=_table_facts(network_latency, begun, backend) if network_latency is not None else None,
        files=_files(backend, settings),
        notes=tuple(notes),
    )


def _files(backend: Backend, settings: CompileSettings) -> dict[str, str]:
    """Return the names of the run's files, by role."""
    networks = {
        side if number == 0 else f"{side}{''.join(file.suffixes)}": file.name
        for side in ("dense", "pruned")
        for number, file in enumerate(backend.files(settings.folder / f"{side}.onnx"))
    }
    report = {"report": "report.html", "data": "report.json"}
    return {**networks, **_weight_files(settings), **report, **_float_files(backend, settings)}


def target_row(prepared: PreparedModel, measured: RelativeLatency, accuracy: float, file: str) -> TargetRow:
    """Return the present network's point on the curve of several targets."""
    pruner = prepared.pruner
    return TargetRow(
        target=pruner.target / pruner.full_cost,
        cost=pruner.present_cost / pruner.full_cost,
        measured=measured.fraction,
        latency_ms=measured.pruned.median_ms,
        accuracy=accuracy,
        params=int(prepared.plan.parameters.cost(pruner.counts)),
        flops=prepared.plan.flops.cost(pruner.counts),
        file=file,
    )


def _sides(prepared: PreparedModel, measured: FinalFigures) -> tuple[Side, Side]:
    """Return the figures of the dense and the pruned network."""
    pruner, plan = prepared.pruner, prepared.plan
    latency, in_ms = measured.latency, pruner.cost.unit == "ms"
    dense, pruned = (
        Side(
            accuracy=accuracy,
            latency_ms=result.median_ms,
            latency_q1_ms=result.q1_ms,
            latency_q3_ms=result.q3_ms,
            latency_stable=result.stable,
            predicted_ms=predicted if in_ms else None,
            params=int(plan.parameters.cost(counts)),
            flops=plan.flops.cost(counts),
        )
        for counts, result, accuracy, predicted in zip(
            (pruner.cost.full_counts, pruner.counts),
            (latency.dense, latency.pruned),
            measured.accuracies,
            (pruner.full_cost, pruner.present_cost),
            strict=True,
        )
    )
    return dense, pruned


def _layers(prepared: PreparedModel) -> tuple[LayerRow, ...]:
    """Return each layer's channels before and after."""
    channels = prepared.channels

    def group(labels: Tensor) -> str:
        indices = {int(channels.group_of_unit[u]) for u in channels.units.of(labels).tolist() if u >= 0}
        return ", ".join(channels.groups[i].name for i in sorted(indices) if i >= 0)

    return tuple(
        LayerRow(
            path=layer.path,
            kind=layer.kind,
            in_channels=layer.input_channels.numel(),
            in_kept=inputs,
            out_channels=layer.output_channels.numel(),
            out_kept=outputs,
            in_group=group(layer.input_channels),
            out_group=group(layer.output_channels),
        )
        for layer, inputs, outputs in kept_widths(channels, prepared.smcp.units_kept())
    )


def _groups(prepared: PreparedModel) -> tuple[GroupRow, ...]:
    counts = prepared.pruner.counts
    return tuple(
        GroupRow(g.name, g.size, counts.get(g.name, g.size), g.consumers, g.producers, g.pinned, g.limits)
        for g in prepared.channels.groups
    )


def _solves(pruner: Pruner) -> tuple[SolveRow, ...]:
    per_epoch = pruner.schedule.steps_per_epoch if pruner.schedule is not None else 1
    return tuple(
        SolveRow(
            step=s.step,
            epoch=s.step / per_epoch,
            target=s.target,
            cost=s.cost,
            importance_kept=s.importance_kept,
            bound=s.bound,
            changed_share=s.changed_share,
            returned=s.returned,
            seconds=s.seconds,
        )
        for s in pruner.history
    )


def _epochs(training: Sequence[tuple[str, list[Epoch]]]) -> tuple[EpochRow, ...]:
    return tuple(
        EpochRow(r.epoch, phase, r.loss, r.values["accuracy"]) for phase, results in training for r in results
    )


def _validation(corrector: Corrector, dense: Side, pruned: Side) -> tuple[EngineRow, ...]:
    """Return predictions and measurements of all tried networks; for a latency, also of dense and emitted."""
    tried = [EngineRow(c.name, c.predicted_ms, c.measured.pruned.median_ms) for c in corrector.comparisons]
    if dense.predicted_ms is None:
        return tuple(tried)
    first = EngineRow("dense", dense.predicted_ms, dense.latency_ms)
    return (first, *tried, EngineRow("emitted", pruned.predicted_ms, pruned.latency_ms))


def _float_files(backend: Backend, settings: CompileSettings) -> dict[str, str]:
    """Return the networks' float32 files, for a run in less precision."""
    if backend.full_precision() is None:
        return {}
    return {f"{side}_float": file_of(settings.folder, side).name for side in ("dense", "pruned")}


def _weight_files(settings: CompileSettings) -> dict[str, str]:
    """Return the weights' file and manifest, if the network can be saved."""
    if not (settings.folder / WEIGHTS).exists():
        return {}
    return {"weights": WEIGHTS, "manifest": Path(WEIGHTS).with_suffix(".json").name}


def _blocks(latency: NetworkLatency, counts: Mapping[str, int]) -> tuple[BlockRow, ...]:
    """Return each block's predicted latency in the dense and in the pruned network."""
    dense, pruned = latency.by_block(latency.full_counts), latency.by_block(counts)
    return tuple(BlockRow(name, ms, pruned[name]) for name, ms in dense.items())


def _table_facts(latency: NetworkLatency, begun: MeasureReport | None, backend: Backend) -> TableFacts:
    """Return the facts behind the latencies: rows, their certainty, and their weights."""
    table, fingerprint, filled = latency.table, latency.fingerprint, latency.report
    error = table.held_out_error(latency.blocks, fingerprint)
    return TableFacts(
        path=str(table.path),
        rows=len(table.rows(fingerprint)),
        measured=filled.measured if filled else 0,
        seconds=filled.seconds if filled else None,
        for_solves=filled.measured - begun.measured if filled and begun else None,
        repeated=filled.repeated if filled else None,
        reused=filled.reused if filled else None,
        unstable=len(table.unsteady(latency.blocks, fingerprint)),
        held_out_points=error.points,
        held_out_median=error.median,
        held_out_p95=error.p95,
        fingerprint=fingerprint.as_dict(),
        foreign=fingerprint != backend.fingerprint(),
        residency=asdict(latency.residency),
    )


def _versions() -> dict[str, str]:
    versions = {}
    for name in dict.fromkeys(("smcp_fx", "torch", "torchvision", "numpy", *backend_packages())):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
