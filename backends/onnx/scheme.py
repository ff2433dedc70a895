"""How a runtime wants INT8 files: what ONNX Runtime's quantiser (`quantization`) is told."""

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
    """How a runtime wants its INT8 files.

    ``told``: for fingerprints; changes with the rest. ``signed``: whether activations are signed bytes, as weights
    are. ``operations``: what is quantised (None: all that the quantiser has rules for), ``fused``: what a runtime
    computes together with that; all else stays in float. ``options``: the quantiser's. ``also``: names further
    tensors to quantise; ``finish``: changes a quantised graph in place.
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


#: Unsigned activations: what the kernels of x86 and ARM multiply. ONNX Runtime and OpenVINO run these files.
PROCESSOR = Scheme("static qdq, u8s8, weights per channel", signed=False)
