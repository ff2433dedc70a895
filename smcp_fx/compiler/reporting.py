"""What a compile run came to, as the JSON values that the report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from smcp_fx.backends import Backend, RelativeLatency
from smcp_fx.compiler.measuring import Corrector, layer_counts
from smcp_fx.compiler.saving import WEIGHTS
from smcp_fx.compiler.settings import CompileSettings, as_record
from smcp_fx.compiler.surfaces import surfaces
from smcp_fx.config import PruningConfig
from smcp_fx.latency.cost import latency_of
from smcp_fx.latency.filling import MeasureReport
from smcp_fx.latency.network import NetworkLatency
from smcp_fx.prepare import PreparedModel
from smcp_fx.training import Epoch
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel


@dataclass(frozen=True)
class Measured:
    """Dense and pruned, measured in turns, and read for accuracy; ``asked``: the fraction of the dense cost."""

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
    measured: Measured,
    *,
    filled: MeasureReport | None,
    training: Sequence[tuple[str, list[Epoch]]],
    seconds: Mapping[str, float],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the report; ``filled``: what measuring the latency table took; ``training`` is by phase."""
    pruner = prepared.pruner
    counts, unit = pruner.counts, pruner.cost.unit
    full_counts = pruner.cost.full_counts
    others = {"flops": prepared.plan.flops, "params": prepared.plan.parameters}
    predicted = {"dense": pruner.full_cost, "pruned": pruner.present_cost}
    latency, sides = measured.latency, {}
    for side, chosen, result, accuracy in zip(
        ("dense", "pruned"),
        (full_counts, counts),
        (latency.dense, latency.pruned),
        measured.accuracies,
        strict=True,
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
    per_epoch = pruner.schedule.steps_per_epoch if pruner.schedule is not None else 1
    network_latency = latency_of(pruner.cost)
    blocks = _blocks(network_latency, counts) if network_latency is not None else []
    validation = [
        {"name": c.name, "predicted_ms": c.predicted_ms, "measured_ms": c.measured.pruned.median_ms}
        for c in corrector.comparisons
    ]
    if unit == "ms":
        validation.insert(
            0,
            {
                "name": "dense",
                "predicted_ms": predicted["dense"],
                "measured_ms": latency.dense.median_ms,
            },
        )
        validation.append(
            {
                "name": "emitted",
                "predicted_ms": predicted["pruned"],
                "measured_ms": latency.pruned.median_ms,
            }
        )
    return {
        "model": fitted.name,
        "data": data.name,
        "seed": settings.seed,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "target": settings.target,
        "target_fraction": measured.asked,
        "predicted_fraction": predicted["pruned"] / predicted["dense"],
        "measured_fraction": latency.fraction,
        "measured_fraction_q1": latency.q1,
        "measured_fraction_q3": latency.q3,
        "measured_fraction_error": latency.error,
        "measured_rounds": latency.rounds,
        "correction": pruner.correction,
        "cost": unit,
        "batch": settings.batch,
        "epochs": settings.epochs,
        "settings": as_record(settings, config),
        "backend": backend.fingerprint().as_dict(),
        "versions": _versions(),
        "seconds": seconds,
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
            {"epoch": r.epoch, "phase": phase, "loss": r.loss, "accuracy": r.values["accuracy"]}
            for phase, results in training
            for r in results
        ],
        "validation": validation,
        "blocks": blocks,
        "surfaces": surfaces(network_latency, counts) if network_latency is not None else [],
        "table": _table_facts(network_latency, filled, backend) if network_latency is not None else None,
        "files": {
            "dense": "dense.onnx",
            "pruned": "pruned.onnx",
            **_weight_files(settings),
            "report": "report.html",
            "data": "report.json",
            **_engine_files(backend, settings),
        },
        "notes": notes,
    }


def _engine_files(backend: Backend, settings: CompileSettings) -> dict[str, str]:
    """The files that the runtime keeps beside the ONNX files: engines and their descriptions."""
    return {
        f"{side}{''.join(file.suffixes)}": file.name
        for side in ("dense", "pruned")
        for file in backend.files(settings.folder / f"{side}.onnx")[1:]
    }


def _weight_files(settings: CompileSettings) -> dict[str, str]:
    """The weights and their manifest; none of a network that cannot be saved."""
    if not (settings.folder / WEIGHTS).exists():
        return {}
    return {"weights": WEIGHTS, "manifest": Path(WEIGHTS).with_suffix(".json").name}


def _blocks(latency: NetworkLatency, counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """What each block is predicted to take in the dense and in the pruned network, weighed for each of them."""
    dense, pruned = latency.by_block(latency.full_counts), latency.by_block(counts)
    return [{"name": name, "dense_ms": ms, "pruned_ms": pruned[name]} for name, ms in dense.items()]


def _table_facts(latency: NetworkLatency, filled: MeasureReport | None, backend: Backend) -> dict[str, Any]:
    """What the latencies rest on: rows, how sure they are, and how they were weighed."""
    table, fingerprint = latency.table, latency.fingerprint
    error = table.held_out_error(latency.blocks, fingerprint)
    return {
        "path": str(table.path),
        "rows": len(table.rows(fingerprint)),
        "measured": filled.measured if filled else 0,
        "reused": filled.reused if filled else None,
        "unstable": len(table.unsteady(latency.blocks, fingerprint)),
        "held_out_points": error.points,
        "held_out_median": error.median,
        "held_out_p95": error.p95,
        "fingerprint": fingerprint.as_dict(),
        "foreign": fingerprint != backend.fingerprint(),
        "residency": asdict(latency.residency),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in ("smcp_fx", "torch", "torchvision", "onnx", "onnxruntime", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
