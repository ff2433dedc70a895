"""Engines of the dense and the pruned network, and the correction a measured one teaches the table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcp_fx.backends import Backend, CompareConfig, Engine, Measurement, RelativeLatency, compare
from smcp_fx.errors import CheckpointError, TableError
from smcp_fx.prepare import PreparedModel, sliced
from smcp_fx.pruning.solve import Solve
from smcp_fx.storage.files import brief, read_json, write_texts
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel

#: A measured fraction this far from the target is good enough to leave the masks as they are.
CLOSE = 0.01
#: How often, at most, the last masks are solved for again with a better correction before they are fixed. The first
#: or the second solve met 178 of 252 targets (docs: Experiments); the last ones are for small networks at busy hours,
#: which measured again differ from themselves by more than a point.
TRIES = 5
#: Where table and engine differ by more than this factor about the dense network, the table decides nothing. So often
#: is the engine asked.
FAR, _ASKED = 1.5, 3
#: Predictions that differ by less than this (in logarithms) say nothing about the slope of the measured latency; and
#: the slopes believed beyond what was measured.
_APART, _SLOPES = 0.1, (0.4, 1.25)


@dataclass(frozen=True)
class Comparison:
    """One network measured beside the dense one: predicted and measured ms, after optimiser ``step``."""

    name: str
    predicted_ms: float | None
    measured: RelativeLatency
    step: int = 0


class Corrector:
    """Measures the network that a solve chose, and corrects the pruner's target before masks are fixed.

    The table's sum and the engine's latency may differ by a factor (fusion across blocks, caches); the
    pruner's ``correction`` is that factor for the fraction pruned / dense. ``comparisons`` are kept in ``state``,
    so that a resumed run knows them.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        dense: Engine,
        inputs: tuple[Tensor, ...],
        fraction: float,
        state: Path,
        say: Callable[[str], None],
    ) -> None:
        self.prepared = prepared
        self.backend = backend
        self.dense = dense
        self.inputs = inputs
        self.fraction = fraction
        self.file = state / "comparisons.json"
        self.scratch = state / "candidate.onnx"
        self.say = say
        self.comparisons: list[Comparison] = []

    def after(self, solve: Solve) -> None:
        """Measure before the final target arrives; after the last solve, solve again until it fits.

        When no solve fits, the masks that came nearest stay, and what they measured is said.
        """
        schedule = self.prepared.pruner.schedule
        assert schedule is not None
        if solve.step == schedule.last_step:
            self._fit(solve.step)
        elif solve.step + schedule.every >= schedule.ramp_end and not self.comparisons:
            # One solve before the target arrives: it then arrives corrected, and masks can stay from there on.
            self._measure("first masks near the target", solve.step)

    def resume(self, step: int) -> None:
        """Take up the comparisons that were made up to the optimiser step that training goes on from."""
        if not self.file.exists():
            return
        records = read_json(self.file, CheckpointError, "start without --resume")
        try:
            found = [_comparison(record) for record in records]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{self.file} is damaged or of another version ({type(error).__name__}: {error}); "
                "start without --resume"
            ) from error
        self.comparisons = [comparison for comparison in found if comparison.step <= step]

    def _fit(self, step: int) -> None:
        pruner = self.prepared.pruner
        tried: list[tuple[float, dict[str, Tensor], float]] = []
        for attempt in range(TRIES + 1):
            if attempt:
                pruner.solve()
            solved_with = pruner.correction
            missed = self._measure("last masks" if not attempt else f"last masks, try {attempt + 1}", step)
            missed -= self.fraction
            if is_met(missed, self.comparisons[-1].measured.error):
                pruner.correction = solved_with  # stays with the masks: they fit the target by that one
                return
            tried.append((missed, self.prepared.masks, solved_with))
        missed, masks, pruner.correction = min(tried, key=lambda entry: abs(entry[0]))
        self.prepared.set_masks(masks)
        self.say(
            f"no solve came within {CLOSE:.0%} of the target: the nearest is kept, at {self.fraction + missed:.1%}"
        )

    def _measure(self, name: str, step: int) -> float:
        pruner = self.prepared.pruner
        module = sliced(self.prepared).cpu()
        predicted = pruner.present_cost
        with self.backend.compile(module, self.inputs, self.scratch) as engine:
            measured = compare(self.dense, engine)
        for file in self.backend.files(self.scratch):
            file.unlink(missing_ok=True)
        self.comparisons.append(Comparison(name, predicted, measured, step))
        write_texts({self.file: json.dumps([asdict(c) for c in self.comparisons], indent=1)}, "measurements")
        smallest = pruner.smallest_cost() * (1 + 1e-6)
        told = [(c.predicted_ms, c.measured.fraction) for c in self.comparisons if c.predicted_ms]
        aim = aim_for(self.fraction, told)
        pruner.correction = self.fraction * pruner.full_cost / max(aim, smallest)
        sure = measured.error <= CompareConfig.error
        unsure = "" if sure else f" (± {100 * measured.error:.1f} points: the machine is busy)"
        self.say(
            f"{name}: measured {measured.fraction:.1%} of the dense latency{unsure}, the table says "
            f"{predicted / pruner.full_cost:.1%}, asked {self.fraction:.1%}"
        )
        if aim < smallest:
            self.say(
                "no permitted choice is predicted to be as fast as that asks for: the fastest is sought instead"
            )
        return measured.fraction


def measured_as_predicted(dense: Engine, predicted_ms: float, table: Path) -> float:
    """Measure the dense network, in ms, and raise `TableError` where a table says something else altogether.

    Pruning by such a table would reach its target in the table alone.
    """
    for _ in range(_ASKED):
        measured_ms = dense.latency().median_ms
        if measured_ms > 0 and 1 / FAR <= predicted_ms / measured_ms <= FAR:
            return measured_ms
    raise TableError(
        f"the dense network takes {measured_ms:.4g} ms, and the rows of {table} say {predicted_ms:.4g}: they differ "
        f"by more than {FAR:g} times, so that nothing is pruned by them. The rows or this moment are of a busy "
        "machine. Stop what else computes on it and run the same command with --resume. If the two differ still, the "
        "rows are wrong: have the unsteady ones measured again by smcp-table measure --retry-unstable, or move the "
        "file away, so that all are."
    )


def is_met(missed: float, error: float) -> bool:
    """Whether a measured fraction is as near to the asked one as is looked for: `CLOSE`, or what it can tell.

    What it can tell are two standard errors (of ``error``), up to twice `CLOSE`: another solve would follow noise.
    """
    return abs(missed) <= max(CLOSE, min(2 * error, 2 * CLOSE))


def aim_for(asked: float, tried: Sequence[tuple[float, float]]) -> float:
    """Return the prediction to ask for, so that ``asked`` is measured.

    ``tried``: pairs (predicted, measured) in their order. What was predicted about as the last was tells together by
    which factor measurements differ: their median, as one in a session of bad luck says little. From there the line
    to another pair is followed, in logarithms. Where one measured on the other side of ``asked`` it is the nearest
    such: the answer lies between the two, however steeply latencies fall there (weights that stay in cache from some
    size on). Otherwise it is the last pair that lies far enough away for its slope to mean something, as latencies
    need not fall as predicted (overheads that stay). Without one, and where noise hides its slope (less was measured
    of what is predicted to take longer), they are taken to fall as predicted.
    """
    logs, wanted = np.log(np.asarray(tried, np.float64)), math.log(asked)
    near = np.abs(logs[:, 0] - logs[-1, 0]) <= _APART
    here = np.median(logs[near], axis=0)
    missing = wanted - here[1]
    over, risen = (logs[~near] - here).T
    slopes = risen / over
    # The line there rises, and passes what is asked on its way.
    across = (slopes > 0) & (risen * missing > missing**2)
    if across.any():
        slope = slopes[across][np.abs(over[across]).argmin()]
    elif len(slopes) and slopes[-1] > 0:
        slope = np.clip(slopes[-1], *_SLOPES)
    else:
        slope = 1.0
    return float(np.exp(here[0] + missing / slope))


def _comparison(record: dict[str, Any]) -> Comparison:
    """Return a comparison that a file tells of; `ValueError`, `TypeError` or `KeyError` where it is none."""
    measured = record["measured"]
    sides = {side: Measurement(**measured[side]) for side in ("dense", "pruned")}
    found = Comparison(**{**record, "measured": RelativeLatency(**{**measured, **sides})})
    latency = found.measured
    told = [latency.fraction, latency.q1, latency.q3, latency.error]
    told += [
        ms for side in (latency.dense, latency.pruned) for ms in (side.median_ms, side.q1_ms, side.q3_ms)
    ]
    for number in (*told, 0.0 if found.predicted_ms is None else found.predicted_ms):
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise ValueError(f"{brief(number)} is no measured number")
    if type(found.step) is not int or type(found.name) is not str:
        raise ValueError(f"{brief((found.name, found.step))} are no name and step")
    return found


def accuracy_of(engine: Engine, data: ImageData, fitted: FittedModel, batch: int) -> float:
    """Share of the test images that an emitted network gets right."""
    right = total = 0
    for images, labels in data.tests(batch, fitted.channels, fitted.size):
        filled = images
        if len(images) < batch:  # engines with a fixed batch take full batches only
            filled = torch.cat([images, images[:1].expand(batch - len(images), *images.shape[1:])])
        logits = engine.run([filled.numpy()])[0][: len(images)]
        right += int((np.argmax(logits, axis=1) == labels.numpy()).sum())
        total += len(labels)
    return right / total


def layer_counts(prepared: PreparedModel) -> list[dict[str, Any]]:
    """Channels before and after, layer by layer."""
    channels = prepared.channels
    kept = prepared.smcp.units_kept()

    def count(labels: Tensor) -> int:
        units = channels.units.of(labels)
        return int(((units < 0) | kept[units.clamp(min=0)]).sum())

    def group(labels: Tensor) -> str:
        indices = {int(channels.group_of_unit[u]) for u in channels.units.of(labels).tolist() if u >= 0}
        return ", ".join(channels.groups[i].name for i in sorted(indices) if i >= 0)

    return [
        {
            "path": layer.path,
            "kind": layer.kind,
            "in_channels": layer.input_channels.numel(),
            "in_kept": count(layer.input_channels),
            "out_channels": layer.output_channels.numel(),
            "out_kept": count(layer.output_channels),
            "in_group": group(layer.input_channels),
            "out_group": group(layer.output_channels),
        }
        for layer in channels.layers
    ]
