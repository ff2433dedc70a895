"""Engines of the dense and the pruned network, and corrections of predicted latencies by measured ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smcp_fx.backends import Backend, CompareConfig, Engine, Measurement, RelativeLatency, compare
from smcp_fx.compiler.seeking import CLOSE, aim_for, seek
from smcp_fx.errors import CheckpointError, TableError
from smcp_fx.prepare import PreparedModel, sliced
from smcp_fx.pruning.solve import Solve
from smcp_fx.storage.files import brief, read_json, write_texts
from smcp_fx.zoo.data import ImageData, as_tuple
from smcp_fx.zoo.models import FittedModel

#: A table is refused if it differs from the dense network's engine by more than this factor in each of so
#: many measurements.
FAR, _ASKED = 1.5, 3


@dataclass(frozen=True)
class Comparison:
    """One network measured beside the dense one: predicted and measured ms, after optimiser ``step``."""

    name: str
    predicted_ms: float | None
    measured: RelativeLatency
    step: int = 0


class Corrector:
    """Measures the network that a solve chose, and corrects the pruner's target, before masks are fixed.

    The table's sum and the engine's latency may differ by a factor (fusion across blocks, caches); the
    pruner's ``correction`` is that factor for the fraction pruned / dense. ``comparisons`` are stored in
    ``state`` for a resumed run.
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
        self._tries = 0
        self._engine: Engine | None = None  # of the candidate that is measured

    def to(self, fraction: float) -> Corrector:
        """Return a corrector for another fraction of the dense latency."""
        state = self.file.parent
        return Corrector(self.prepared, self.backend, self.dense, self.inputs, fraction, state, self.say)

    def after(self, solve: Solve) -> None:
        """Measure before the final target arrives; after the last solve, solve again until it fits.

        If no solve fits, the nearest masks stay, and their measurement is printed.
        """
        schedule = self.prepared.pruner.schedule
        assert schedule is not None
        if solve.step == schedule.last_step:
            self.fit(solve.step)
        elif solve.step + schedule.every >= schedule.ramp_end and not self.comparisons:
            # Correct one solve before the target arrives, so that masks need not change afterwards.
            _Candidate(self, "first masks near the target", solve.step).measure()
            self._drop_engine()
            self._aim(aim_for(self.fraction, self._told()))

    def resume(self, step: int) -> None:
        """Load the comparisons made up to the optimiser step that training continues from."""
        if not self.file.exists():
            return
        records = read_json(self.file, CheckpointError, "start without --resume")
        try:
            earlier = [_comparison(record) for record in records]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{self.file} is damaged or of another version ({type(error).__name__}: {error}); "
                "start without --resume"
            ) from error
        self.comparisons = [comparison for comparison in earlier if comparison.step <= step]

    def fit(self, step: int = 0) -> None:
        """Measure the network of the last solve, and solve again until it meets the target."""
        pruner = self.prepared.pruner

        def candidate() -> _Candidate:
            self._tries += 1
            name = "last masks" if self._tries == 1 else f"last masks, try {self._tries}"
            tried.append(_Candidate(self, name, step))
            return tried[-1]

        def solve(aim: float) -> _Candidate:
            self._aim(aim)
            pruner.solve()
            return candidate()

        tried = list[_Candidate]()
        first = candidate()
        try:
            best, measured, met = seek(self.fraction, first, solve, self._told())
        finally:
            self._drop_engine()
        if not met:
            self.prepared.set_masks(best.masks)
            gap = (
                f". The choices offered leave a gap there: channels go in multiples of {pruner.config.multiple} "
                "(--multiple), and counts that save hardly any time are left out"
            )
            self.say(
                f"no solve came within {CLOSE:.0%} of the target: the nearest is kept, at {measured:.1%}"
                + (gap if any(candidate.below for candidate in tried) else "")
            )
        pruner.correction = best.correction  # belongs to these masks

    def _told(self) -> list[tuple[float, float]]:
        """Return all pairs of predicted (ms) and measured latency (a fraction of the dense one) so far."""
        return [(c.predicted_ms, c.measured.fraction) for c in self.comparisons if c.predicted_ms]

    def _aim(self, ms: float) -> None:
        """Correct the pruner's target, so that the next solve is for a predicted latency."""
        pruner = self.prepared.pruner
        smallest = pruner.smallest_cost() * (1 + 1e-6)
        pruner.correction = self.fraction * pruner.full_cost / max(ms, smallest)
        if ms < smallest:
            self.say(
                "no permitted choice is predicted to be as fast as that asks for: the fastest is sought instead"
            )

    def measure(self, name: str, predicted_ms: float, step: int, again: bool) -> RelativeLatency:
        """Measure the file of the present masks beside the dense network; ``again``: the same file once more."""
        if not again:
            self._drop_engine()
            self._engine = self.backend.compile(sliced(self.prepared).cpu(), self.inputs, self.scratch)
        assert self._engine is not None
        measured = compared(self.dense, self._engine)
        self.comparisons.append(Comparison(name, predicted_ms, measured, step))
        write_texts({self.file: json.dumps([asdict(c) for c in self.comparisons], indent=1)}, "measurements")
        sure = measured.error <= CompareConfig.error
        unsure = "" if sure else f" (± {100 * measured.error:.1f} points: the machine is busy)"
        self.say(
            f"{name}: measured {measured.fraction:.1%} of the dense latency{unsure}, the table says "
            f"{predicted_ms / self.prepared.pruner.full_cost:.1%}, asked {self.fraction:.1%}"
        )
        return measured

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        for file in self.backend.files(self.scratch):
            file.unlink(missing_ok=True)


class _Candidate:
    """The network of the present masks; see `seeking.Candidate`. ``below``: its solve found no nearer one."""

    def __init__(self, corrector: Corrector, name: str, step: int) -> None:
        pruner = corrector.prepared.pruner
        self.masks, self.correction = corrector.prepared.masks, pruner.correction
        self.predicted = pruner.present_cost
        self.below = self.predicted < (1 - CLOSE) * min(pruner.target / self.correction, pruner.full_cost)
        self._corrector, self._name, self._step, self._measured = corrector, name, step, False

    def measure(self) -> RelativeLatency:
        """Measure the network; a second call measures it in a new session."""
        again, self._measured = self._measured, True
        name = f"{self._name}, again" if again else self._name
        return self._corrector.measure(name, self.predicted, self._step, again)


def compared(dense: Engine, pruned: Engine) -> RelativeLatency:
    """Compare two files in new sessions: a session begun right after an export runs up to a tenth slower."""
    with dense.reload() as one, pruned.reload() as other:
        return compare(one, other)


def measured_as_predicted(dense: Engine, predicted_ms: float, table: Path) -> float:
    """Measure the dense network, in ms, and raise `TableError` if the table is far off.

    Pruning by such a table would meet its target only on paper.
    """
    for _ in range(_ASKED):
        measured_ms = dense.latency().median_ms
        if measured_ms > 0 and 1 / FAR <= predicted_ms / measured_ms <= FAR:
            return measured_ms
    raise TableError(
        f"the dense network takes {measured_ms:.4g} ms, and the rows of {table} say {predicted_ms:.4g}: they differ "
        f"by more than {FAR:g} times, so that nothing is pruned by them. The rows or this moment are of a busy "
        "machine. Stop what else computes on it and try again. If the two differ still, the "
        "rows are wrong: have the unsteady ones measured again by smcp-table measure --retry-unstable, or move the "
        "file away, so that all are."
    )


def _comparison(record: dict[str, Any]) -> Comparison:
    """Return a comparison from a file; `ValueError`, `TypeError` or `KeyError` if it is invalid."""
    measured = record["measured"]
    sides = {side: Measurement(**measured[side]) for side in ("dense", "pruned")}
    comparison = Comparison(**{**record, "measured": RelativeLatency(**{**measured, **sides})})
    latency = comparison.measured
    numbers = [latency.fraction, latency.q1, latency.q3, latency.error]
    numbers += [
        ms for side in (latency.dense, latency.pruned) for ms in (side.median_ms, side.q1_ms, side.q3_ms)
    ]
    for number in (*numbers, 0.0 if comparison.predicted_ms is None else comparison.predicted_ms):
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise ValueError(f"{brief(number)} is not a measured number")
    if type(comparison.step) is not int or type(comparison.name) is not str:
        raise ValueError(f"{brief((comparison.name, comparison.step))} are not a name and a step")
    return comparison


def accuracy_of(engine: Engine, data: ImageData, fitted: FittedModel, batch: int) -> float:
    """Return the share of test images that an emitted network gets right."""
    right, total = 0.0, 0
    for images, labels in data.tests(batch, fitted.channels, fitted.size):
        inputs, count = as_tuple(images), len(as_tuple(images)[0])
        filled = [
            torch.cat([value, value[:1].expand(batch - count, *value.shape[1:])]) if count < batch else value
            for value in inputs  # engines of a fixed batch take only full batches
        ]
        outputs = [
            torch.from_numpy(output[:count] if count < batch else output)
            for output in engine.run([v.numpy() for v in filled])
        ]
        right += data.right(outputs[0] if len(outputs) == 1 else outputs, labels)
        total += count
    return right / total
