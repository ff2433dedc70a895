"""The fields of `report.json`, as dataclasses. None means not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Increased when a field changes its meaning or is removed; new fields may come at any time.
FORMAT = 1


def documented(help: str, default: Any = None) -> Any:
    """Return a field with its meaning for the documentation; each report gets its own default dict."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Side:
    """The dense or the pruned network."""

    accuracy: float | None = documented("share of the test images that the emitted file gets right")
    latency_ms: float | None = documented("median of the measured latency")
    latency_q1_ms: float | None = documented("lower quartile")
    latency_q3_ms: float | None = documented("upper quartile")
    latency_stable: bool | None = documented("whether the timings agreed well enough to be sure of")
    predicted_ms: float | None = documented(
        "prediction of the latency table; null where the target is not a latency"
    )
    params: int | None = documented("parameters")
    flops: float | None = documented("multiply-adds per input")


@dataclass(frozen=True)
class LayerRow:
    """A convolution or linear."""

    path: str = documented("path of its module", "")
    kind: str = documented("`dense` or `depthwise`", "layer")
    in_channels: int | None = documented("input channels")
    in_kept: int | None = documented("those kept")
    out_channels: int = documented("output channels", 0)
    out_kept: int = documented("those kept", 0)
    in_group: str = documented("groups that its input channels belong to", "")
    out_group: str = documented("groups that its output channels belong to", "")


@dataclass(frozen=True)
class GroupRow:
    """A group of the channel graph."""

    name: str = documented("its name", "")
    size: int = documented("its units", 0)
    kept: int = documented("those kept", 0)
    consumers: tuple[str, ...] = documented("paths of the layers that read them", ())
    producers: tuple[str, ...] = documented("paths of the layers that write them", ())
    pinned: tuple[str, ...] = documented("why they must stay; empty when they may go", ())
    limits: tuple[str, ...] = documented("what was asked of its layers' widths", ())


@dataclass(frozen=True)
class SolveRow:
    """One choice of masks."""

    step: int = documented("the optimiser step", 0)
    epoch: float = documented("the same in epochs of pruning", 0.0)
    target: float = documented("the cost asked for at that step, in the unit of `cost`", 0.0)
    cost: float = documented("the cost of what was chosen", 0.0)
    importance_kept: float | None = documented("share of the importance that was kept")
    bound: float | None = documented("the most that any choice within the target keeps")
    changed_share: float | None = documented("share of the units whose mask changed")
    returned: int | None = documented("units that came back")
    seconds: float | None = documented("time it took")


@dataclass(frozen=True)
class EpochRow:
    """An epoch of training."""

    epoch: int = documented("its number, from 1 in each phase", 0)
    phase: str = documented("`dense` or `prune`", "training")
    loss: float | None = documented("mean training loss")
    accuracy: float | None = documented("share of the test images that the model gets right after it")


@dataclass(frozen=True)
class EngineRow:
    """An engine: predicted and measured."""

    name: str = documented("`dense`, `emitted`, or which masks were tried", "")
    predicted_ms: float | None = documented("what the table says")
    measured_ms: float | None = documented("what it takes")


@dataclass(frozen=True)
class BlockRow:
    """A fused block, priced by the latency table."""

    name: str = documented("its name", "")
    dense_ms: float | None = documented("in the dense network")
    pruned_ms: float | None = documented("in the pruned network")


@dataclass(frozen=True)
class Axis:
    """One free width of a block."""

    title: str = documented("what it counts", "")
    values: tuple[int, ...] = documented("the channels, ascending", ())


@dataclass(frozen=True)
class SurfaceRow:
    """The latency of a block over the channels that it may keep."""

    name: str = documented("the block", "")
    axes: tuple[Axis, ...] = documented("one or two of `title` and `values`", ())
    ms: Any = documented("latencies in ms, nested as the axes are")
    measured: tuple[tuple[int, ...], ...] = documented(
        "the widths that were measured; the others are interpolated", ()
    )
    chosen: tuple[int, ...] = documented("the widths that were chosen", ())
    full: tuple[int, ...] = documented("the widths of the dense network", ())


@dataclass(frozen=True)
class TableFacts:
    """The facts behind the predictions."""

    path: str = documented("the latency table", "")
    rows: int | None = documented("its rows of this device and runtime")
    measured: int | None = documented("rows that this run measured")
    seconds: float | None = documented("seconds that measuring them took")
    for_solves: int | None = documented("those of them that solves asked for")
    repeated: int | None = documented(
        "measurements of rows that had been unsteady, slow or unlike the others"
    )
    reused: int | None = documented("rows that were there")
    unstable: int | None = documented("rows in use whose samples did not agree")
    held_out_points: int | None = documented("rows that the others of their block were asked to predict")
    held_out_median: float | None = documented("its relative error there, median")
    held_out_p95: float | None = documented("95th percentile")
    fingerprint: Mapping[str, Any] = documented("device, runtime and settings of the rows", {})
    foreign: bool = documented("whether the rows are of another device or runtime than this one", False)
    residency: Mapping[str, Any] = documented(
        "how rows with weights in cache and from memory are weighed", {}
    )


@dataclass(frozen=True)
class TargetRow:
    """A point of the trade-off curve: the network of one target."""

    target: float = documented("the target as a fraction of the dense cost", 0.0)
    cost: float | None = documented("what the cost model says was reached")
    measured: float | None = documented("measured latency, as a fraction of the dense one")
    latency_ms: float | None = documented("median of the measured latency")
    accuracy: float | None = documented("share of the test images that it gets right")
    params: int | None = documented("parameters")
    flops: float | None = documented("multiply-adds per input")
    file: str = documented("its ONNX file", "")


@dataclass(frozen=True)
class RepairRow:
    """A layer, repaired or left as it was, and why."""

    path: str = documented("path of its module", "")
    before: float = documented(
        "error of its outputs on images held out, as a share of their spread, as sliced", 0.0
    )
    after: float = documented("the same as repaired", 0.0)
    repaired: bool = documented("whether the repair was better and the weights were changed", False)
    positions: int = documented("output positions it was fitted to", 0)
    inputs: int = documented("weights of each output", 0)
    left: str = documented("why it was not looked at", "")


@dataclass(frozen=True)
class WorthRow:
    """The worth of a group's units: how far the loss rises if only the best of them are kept."""

    name: str = documented("the group", "")
    size: int = documented("its units", 0)
    kept: int = documented("those kept", 0)
    counts: tuple[int, ...] = documented("how many are kept, ascending", ())
    rises: tuple[float, ...] = documented(
        "estimate of the loss's rise at each count, its readers fitted anew; to compare, not to add to a loss",
        (),
    )


@dataclass(frozen=True)
class CalibrationFacts:
    """The result of pruning without training."""

    images: int = documented("training images it looked at", 0)
    labels: bool = documented("whether they had labels", True)
    dense: float | None = documented("accuracy of the dense network")
    sliced: float | None = documented("accuracy as it was sliced")
    repaired: float | None = documented("accuracy as it was repaired")
    norms: int = documented("batch norms whose statistics were set", 0)
    layers: tuple[RepairRow, ...] = documented("the layers in the order they run", ())
    worth: tuple[WorthRow, ...] = documented("the free groups; empty where the loss was not known", ())


@dataclass(frozen=True)
class PrecisionFacts:
    """The effect of less precision: the emitted networks beside their float32 copies."""

    name: str = documented("the precision of the emitted files", "")
    dense_accuracy: float | None = documented("accuracy of the dense network in float32")
    pruned_accuracy: float | None = documented("accuracy of the pruned network in float32")
    dense_ms: float | None = documented("median latency of the dense network in float32")
    fraction: float | None = documented(
        "measured latency of the emitted file, over the dense network's in float32"
    )
    pruned_fraction: float | None = documented("measured latency, pruned over dense, both in float32")
    kept: tuple[str, ...] = documented("layers that were left in float32 as asked", ())
    errors: Mapping[str, float] = documented(
        "where less precision costs more than a point: error of the pruned network's outputs (root mean square, as a "
        "share of theirs) if a layer alone is quantised",
        {},
    )


@dataclass(frozen=True)
class Report:
    """The result of a compile run."""

    format: int = documented("version of these fields", FORMAT)
    model: str = documented("the model as it was named", "")
    data: str = documented("the data set", "")
    seed: int | None = documented("seed of everything random")
    created: str = documented("when, in UTC", "")
    target: str = documented("the target as it was given", "")
    target_fraction: float | None = documented("the target as a fraction of the dense cost")
    predicted_fraction: float | None = documented("what the cost model says was reached")
    measured_fraction: float | None = documented("measured latency, pruned over dense: median of the rounds")
    measured_fraction_q1: float | None = documented("lower quartile of the rounds")
    measured_fraction_q3: float | None = documented("upper quartile of the rounds")
    measured_fraction_error: float | None = documented("standard error of the median")
    measured_rounds: int | None = documented("rounds in which both were measured in turns")
    correction: float | None = documented(
        "measured over predicted latency, by which the last target was corrected"
    )
    cost: str = documented("unit of the target: `ms`, `FLOPs` (multiply-adds) or `parameters`", "ms")
    batch: int | None = documented("images that a latency is of")
    epochs: float | None = documented("epochs of pruning")
    settings: Mapping[str, Any] = documented("every setting of the run", {})
    backend: Mapping[str, Any] = documented("runtime, version, device, threads, precision, settings", {})
    versions: Mapping[str, str] = documented("versions of the packages in use", {})
    seconds: Mapping[str, float] = documented("time by stage", {})
    dense: Side = documented("the dense network", Side())
    pruned: Side = documented("the pruned network", Side())
    layers: tuple[LayerRow, ...] = documented("the layers in the order they run", ())
    groups: tuple[GroupRow, ...] = documented("the groups of the channel graph", ())
    solves: tuple[SolveRow, ...] = documented("each choice of masks", ())
    training: tuple[EpochRow, ...] = documented("epochs, of the dense training first", ())
    agreement: bool = documented(
        "whether accuracies are agreement with the dense network, for lack of labels", False
    )
    calibration: CalibrationFacts | None = documented(
        "what was repaired; null where masks were learnt in training"
    )
    precision: PrecisionFacts | None = documented(
        "what less precision than float32 did; null where it is that"
    )
    targets: tuple[TargetRow, ...] = documented("the trade-off curve, where one was asked for", ())
    validation: tuple[EngineRow, ...] = documented("predicted beside measured latency", ())
    blocks: tuple[BlockRow, ...] = documented("latency by block; empty where the target is not a latency", ())
    surfaces: tuple[SurfaceRow, ...] = documented("latency over channels, of the slowest blocks", ())
    table: TableFacts | None = documented("the latency table; null where the target is not a latency")
    engine_layers: Mapping[str, Any] | None = documented(
        "the engine's own times by block and layer, where its runtime tells them"
    )
    files: Mapping[str, str] = documented("names of the files in the folder, by what they are", {})
    notes: tuple[str, ...] = documented("what was noticed", ())
