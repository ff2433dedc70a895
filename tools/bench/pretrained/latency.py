"""Networks reduced until they measure a share of the dense network's latency, in a runtime, as emitted.

A way to reduce a network goes by some cost (FLOPs, or a latency that a table predicts). `Stopwatch.narrowed` asks it
for less or more until the network it returns measures what is wanted, by the search of `smcp-compile`, and then for
less until it is within that. Latencies depend on widths, not on weights: they are measured once for the same widths
and processor, in turns with the dense network, and kept in a record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from records import Record
from torch import Tensor, nn

from smcp_fx import LatencyCost, LatencyTable
from smcp_fx.backends import CompareConfig, Engine, compare, get_backend
from smcp_fx.compiler.seeking import CLOSE, seek

#: Images at a time.
BATCH = 16
#: Of records that name no backend.
_USUAL = "onnxruntime"
#: Steps in what is asked for, until a network is within its target: where whole multiples of channels go at once, the
#: nearest network may be slower.
_LESS = 0.97
_COMPARE = CompareConfig(rounds=3, error=0.005, longest_seconds=3.0)

#: From a share of the dense network's cost to a network, and the share it came to.
Reduce = Callable[[float], tuple[nn.Module, float]]


@dataclass(frozen=True)
class Share:
    """Of the dense latency: what was measured in all, and its standard error."""

    fraction: float
    error: float


class Stopwatch:
    """Measures networks beside one dense network; what is known of it stands in ``record``, its rows beside it.

    ``name`` in the record tells the ``backend``, too, unless that is ONNX Runtime.
    """

    def __init__(
        self, name: str, dense: nn.Module, images: Tensor, record: Record, backend: str = _USUAL
    ) -> None:
        self.name, self.inputs = name if backend == _USUAL else f"{name}, {backend}", (images[:BATCH],)
        self._record, self._dense = record, dense
        self._backend = get_backend(backend, threads=1)

    @cached_property
    def cost(self) -> LatencyCost:
        """What our own allocation is priced by: a table that fills with the rows that are asked for."""
        return LatencyCost(
            LatencyTable(self._record.path.with_suffix(".sqlite")), self._backend, progress=False
        )

    @property
    def device(self) -> str:
        """The processor that latencies are measured on."""
        return self._backend.fingerprint().device

    @property
    def pricing(self) -> dict[str, Any]:
        """What a `Setting` takes where measured latencies count."""
        return {"cost": self.cost, "example": self.inputs[0], "narrow": self.narrowed}

    def share(self, model: nn.Module, again: bool = False) -> Share:
        """Measure a network's share of the dense latency; known widths only ``again``, and then the mean of both."""
        key = {"network": self.name, "device": self.device, "widths": widths_of(model)}
        known = self._record.find("latency", **key)
        if not known or again:
            file = self._record.path.with_name(f"{self.name}-reduced.onnx")
            with (
                self._engine.reload() as dense,
                self._backend.compile(model.eval(), self.inputs, file) as reduced,
            ):
                found = compare(dense, reduced, _COMPARE)
            self._record.add(
                "latency", **key, fraction=found.fraction, error=found.error,
                dense_ms=found.dense.median_ms, ms=found.pruned.median_ms,
            )  # fmt: skip
            known = self._record.find("latency", **key)
        mean = sum(line["fraction"] for line in known) / len(known)
        error = sum(line["error"] ** 2 for line in known) ** 0.5 / len(known)
        return Share(mean, error)

    def narrowed(self, target: float, reduce: Reduce, first: float) -> float:
        """Return the share to ask ``reduce`` for, so that its network measures ``target`` of the dense latency.

        ``first``: the share to begin with. The network may measure less, where whole multiples of channels go at
        once; `share` of it tells.
        """

        def solve(aim: float) -> _Candidate:
            return _Candidate(self, aim, *reduce(min(aim, 1.0)))

        found, measured, _ = seek(target, solve(first), solve)
        aim = found.aim
        while measured > target + CLOSE and aim > _LESS * target / 4:
            aim *= _LESS
            measured = self.share(reduce(min(aim, 1.0))[0]).fraction
        return aim

    @cached_property
    def _engine(self) -> Engine:
        file = self._record.path.with_name(f"{self.name}-dense.onnx")
        return self._backend.compile(self._dense, self.inputs, file)


class _Candidate:
    """A network that ``reduce`` returned for an aim; see `seeking.Candidate`."""

    def __init__(self, watch: Stopwatch, aim: float, model: nn.Module, predicted: float) -> None:
        self.aim, self.predicted = aim, predicted
        self._watch, self._model, self._tried = watch, model, False

    def measure(self) -> Share:
        """Measure it; the second time in sessions of its own."""
        again, self._tried = self._tried, True
        return self._watch.share(self._model, again)


def widths_of(model: nn.Module) -> str:
    """Return what stands for a network's widths: 16 hex digits of the shapes of its parameters, in order."""
    shapes = [list(parameter.shape) for parameter in model.parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
