"""The fields of `report.json`, as dataclasses. None stands for what was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Increased when a field changes its meaning or goes; new fields may come at any time.
FORMAT = 1


def told(help: str, default: Any = None) -> Any:
    """A field that carries its meaning for the documentation; defaults are made anew for each report."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Side:
    """The dense or the pruned network."""

    accuracy: float | None = told("share of the test images that the emitted file gets right")
    latency_ms: float | None = told("median of the measured latency")
    latency_q1_ms: float | None = told("lower quartile")
    latency_q3_ms: float | None = told("upper quartile")
    latency_stable: bool | None = told("whether the timings agreed well enough to be sure of")
    predicted_ms: float | None = told(
        "prediction of the latency table; null where the target is not a latency"
    )
    params: int | None = told("parameters")
    flops: float | None = told("multiply-adds per input")


@dataclass(frozen=True)
class LayerRow:
    """A convolution or linear."""

    path: str = told("path of its module", "")
    kind: str = told("`dense` or `depthwise`", "layer")
    in_channels: int | None = told("input channels")
    in_kept: int | None = told("those kept")
    out_channels: int = told("output channels", 0)
    out_kept: int = told("those kept", 0)
    in_group: str = told("groups that its input channels belong to", "")
    out_group: str = told("groups that its output channels belong to", "")


@dataclass(frozen=True)
class GroupRow:
    """A group of the channel graph."""

    name: str = told("its name", "")
    size: int = told("its units", 0)
    kept: int = told("those kept", 0)
    consumers: tuple[str, ...] = told("paths of the layers that read them", ())
    producers: tuple[str, ...] = told("paths of the layers that write them", ())
    pinned: tuple[str, ...] = told("why they must stay; empty when they may go", ())


@dataclass(frozen=True)
class SolveRow:
    """One choice of masks."""

    step: int = told("the optimiser step", 0)
    epoch: float = told("the same in epochs of pruning", 0.0)
    target: float = told("the cost asked for at that step, in the unit of `cost`", 0.0)
    cost: float = told("the cost of what was chosen", 0.0)
    importance_kept: float | None = told("share of the importance that was kept")
    bound: float | None = told("the most that any choice within the target keeps")
    changed_share: float | None = told("share of the units whose mask changed")
    returned: int | None = told("units that came back")
    seconds: float | None = told("time it took")


@dataclass(frozen=True)
class EpochRow:
    """An epoch of training."""

    epoch: int = told("its number, from 1 in each phase", 0)
    phase: str = told("`dense` or `prune`", "training")
    loss: float | None = told("mean training loss")
    accuracy: float | None = told("share of the test images that the model gets right after it")


@dataclass(frozen=True)
class EngineRow:
    """An engine: predicted and measured."""

    name: str = told("`dense`, `emitted`, or which masks were tried", "")
    predicted_ms: float | None = told("what the table says")
    measured_ms: float | None = told("what it takes")


@dataclass(frozen=True)
class BlockRow:
    """A fused block, priced by the latency table."""

    name: str = told("its name", "")
    dense_ms: float | None = told("in the dense network")
    pruned_ms: float | None = told("in the pruned network")


@dataclass(frozen=True)
class Axis:
    """One free width of a block."""

    title: str = told("what it counts", "")
    values: tuple[int, ...] = told("the channels, ascending", ())


@dataclass(frozen=True)
class SurfaceRow:
    """The latency of a block over the channels that it may keep."""

    name: str = told("the block", "")
    axes: tuple[Axis, ...] = told("one or two of `title` and `values`", ())
    ms: Any = told("latencies in ms, nested as the axes are")
    measured: tuple[tuple[int, ...], ...] = told(
        "the widths that were measured; the others are interpolated", ()
    )
    chosen: tuple[int, ...] = told("the widths that were chosen", ())
    full: tuple[int, ...] = told("the widths of the dense network", ())


@dataclass(frozen=True)
class TableFacts:
    """What the predictions rest on."""

    path: str = told("the latency table", "")
    rows: int | None = told("its rows of this device and runtime")
    measured: int | None = told("rows that this run measured")
    seconds: float | None = told("seconds that measuring them took")
    for_solves: int | None = told("those of them that solves asked for")
    repeated: int | None = told("measurements of rows that had been unsteady, slow or unlike the others")
    reused: int | None = told("rows that were there")
    unstable: int | None = told("rows in use whose samples did not agree")
    held_out_points: int | None = told("rows that the others of their block were asked to predict")
    held_out_median: float | None = told("its relative error there, median")
    held_out_p95: float | None = told("95th percentile")
    fingerprint: Mapping[str, Any] = told("device, runtime and settings of the rows", {})
    foreign: bool = told("whether the rows are of another device or runtime than this one", False)
    residency: Mapping[str, Any] = told("how rows with weights in cache and from memory are weighed", {})


@dataclass(frozen=True)
class TargetRow:
    """A point of the trade-off curve: the network of one target."""

    target: float = told("the target as a fraction of the dense cost", 0.0)
    cost: float | None = told("what the cost model says was reached")
    measured: float | None = told("measured latency, as a fraction of the dense one")
    latency_ms: float | None = told("median of the measured latency")
    accuracy: float | None = told("share of the test images that it gets right")
    params: int | None = told("parameters")
    flops: float | None = told("multiply-adds per input")
    file: str = told("its ONNX file", "")


@dataclass(frozen=True)
class RepairRow:
    """A layer, repaired or left as it was, and why."""

    path: str = told("path of its module", "")
    before: float = told(
        "error of its outputs on images held out, as a share of their spread, as sliced", 0.0
    )
    after: float = told("the same as repaired", 0.0)
    repaired: bool = told("whether the repair was better and the weights were changed", False)
    positions: int = told("output positions it was fitted to", 0)
    inputs: int = told("weights of each output", 0)
    left: str = told("why it was not looked at", "")


@dataclass(frozen=True)
class WorthRow:
    """What a group's units are worth: how far the loss rises where only the best of them are kept."""

    name: str = told("the group", "")
    size: int = told("its units", 0)
    kept: int = told("those kept", 0)
    counts: tuple[int, ...] = told("how many are kept, ascending", ())
    rises: tuple[float, ...] = told(
        "estimate of the loss's rise at each count, its readers fitted anew; to compare, not to add to a loss",
        (),
    )


@dataclass(frozen=True)
class CalibrationFacts:
    """What was done without training."""

    images: int = told("training images it looked at", 0)
    labels: bool = told("whether they had labels", True)
    dense: float | None = told("accuracy of the dense network")
    sliced: float | None = told("accuracy as it was sliced")
    repaired: float | None = told("accuracy as it was repaired")
    norms: int = told("batch norms whose statistics were set", 0)
    layers: tuple[RepairRow, ...] = told("the layers in the order they run", ())
    worth: tuple[WorthRow, ...] = told("the free groups; empty where the loss was not known", ())


@dataclass(frozen=True)
class PrecisionFacts:
    """What less precision did: the same networks in float32 beside the emitted ones."""

    name: str = told("the precision of the emitted files", "")
    dense_accuracy: float | None = told("accuracy of the dense network in float32")
    pruned_accuracy: float | None = told("accuracy of the pruned network in float32")
    dense_ms: float | None = told("median latency of the dense network in float32")
    fraction: float | None = told("measured latency of the emitted file, over the dense network's in float32")
    pruned_fraction: float | None = told("measured latency, pruned over dense, both in float32")
    kept: tuple[str, ...] = told("layers that were left in float32 as asked", ())
    errors: Mapping[str, float] = told(
        "where less precision costs more than a point: error of the pruned network's outputs (root mean square, as a "
        "share of theirs) if a layer alone is quantised",
        {},
    )


@dataclass(frozen=True)
class Report:
    """The result of a compile run."""

    format: int = told("version of these fields", FORMAT)
    model: str = told("the model as it was named", "")
    data: str = told("the data set", "")
    seed: int | None = told("seed of everything random")
    created: str = told("when, in UTC", "")
    target: str = told("the target as it was given", "")
    target_fraction: float | None = told("the target as a fraction of the dense cost")
    predicted_fraction: float | None = told("what the cost model says was reached")
    measured_fraction: float | None = told("measured latency, pruned over dense: median of the rounds")
    measured_fraction_q1: float | None = told("lower quartile of the rounds")
    measured_fraction_q3: float | None = told("upper quartile of the rounds")
    measured_fraction_error: float | None = told("standard error of the median")
    measured_rounds: int | None = told("rounds in which both were measured in turns")
    correction: float | None = told("measured over predicted latency, by which the last target was corrected")
    cost: str = told("unit of the target: `ms`, `FLOPs` (multiply-adds) or `parameters`", "ms")
    batch: int | None = told("images that a latency is of")
    epochs: float | None = told("epochs of pruning")
    settings: Mapping[str, Any] = told("every setting of the run", {})
    backend: Mapping[str, Any] = told("runtime, version, device, threads, precision, settings", {})
    versions: Mapping[str, str] = told("versions of the packages in use", {})
    seconds: Mapping[str, float] = told("time by stage", {})
    dense: Side = told("the dense network", Side())
    pruned: Side = told("the pruned network", Side())
    layers: tuple[LayerRow, ...] = told("the layers in the order they run", ())
    groups: tuple[GroupRow, ...] = told("the groups of the channel graph", ())
    solves: tuple[SolveRow, ...] = told("each choice of masks", ())
    training: tuple[EpochRow, ...] = told("epochs, of the dense training first", ())
    agreement: bool = told(
        "whether accuracies are agreement with the dense network, for lack of labels", False
    )
    calibration: CalibrationFacts | None = told("what was repaired; null where masks were learnt in training")
    precision: PrecisionFacts | None = told("what less precision than float32 did; null where it is that")
    targets: tuple[TargetRow, ...] = told("the trade-off curve, where one was asked for", ())
    validation: tuple[EngineRow, ...] = told("predicted beside measured latency", ())
    blocks: tuple[BlockRow, ...] = told("latency by block; empty where the target is not a latency", ())
    surfaces: tuple[SurfaceRow, ...] = told("latency over channels, of the slowest blocks", ())
    table: TableFacts | None = told("the latency table; null where the target is not a latency")
    engine_layers: Mapping[str, Any] | None = told(
        "the engine's own times by block and layer, where its runtime tells them"
    )
    files: Mapping[str, str] = told("names of the files in the folder, by what they are", {})
    notes: tuple[str, ...] = told("what was noticed", ())
