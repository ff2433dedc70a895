"""The form in which a runtime needs INT8 files: settings of ONNX Runtime's quantiser (`quantization`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx


def _none(_: onnx.GraphProto) -> list[str]:
    return []


def _as_it_is(_: onnx.GraphProto) -> None:
    pass


@dataclass(frozen=True)
class Scheme:
    """The form in which a runtime needs INT8 files.

    ``told``: its name in fingerprints; changes with the other fields. ``signed``: are activations signed, as
    weights are? ``operations``: those to quantise (None: all that the quantiser can), ``fused``: those that a
    runtime computes together with these; all others stay in float. ``options``: the quantiser's. ``also``:
    names further tensors to quantise; ``finish``: changes a quantised graph in place.
    """

    told: str
    signed: bool
    operations: tuple[str, ...] | None = None
    fused: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    also: Callable[[onnx.GraphProto], list[str]] = _none
    finish: Callable[[onnx.GraphProto], None] = _as_it_is

    @property
    def setting(self) -> tuple[str, str]:
        """Return its entry in a fingerprint's settings."""
        return "quantisation", self.told


#: Unsigned activations, as kernels of x86 and ARM multiply them. ONNX Runtime and OpenVINO run these files.
PROCESSOR = Scheme("static qdq, u8s8, weights per channel", signed=False)
