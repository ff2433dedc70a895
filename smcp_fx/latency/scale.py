"""How a runtime counts a block's channels: the scale along which its latency is smooth.

Runtimes round widths up to steps, compute several steps at a time, and have special kernels for the narrowest widths
and for those that are not multiples of a vector. Which of these apply depends on the runtime and the kind of
operation, so it is learned from the rows of all blocks of that kind (`smcp_fx.latency.surface.choose_scales`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Kernels that compute four steps (a tooth) at a time: the share of the tooth's cost for none to four of them.
#: Measured on ResNet-18's convolutions in ONNX Runtime with AVX-512.
TOOTH, _SAW = 4, (0.0, 0.56, 0.74, 0.87, 1.0)


@dataclass(frozen=True)
class Scale:
    """One width's scale.

    ``step``: a width costs as much as the next multiple of it. ``saw``: steps are computed four at a time. ``apart``:
    widths below the first step are not rounded up. ``aligned``: widths that are not multiples of it take another
    path; 1 if there is none.
    """

    step: int = 1
    saw: bool = False
    apart: bool = False
    aligned: int = 1

    def coordinate(self, widths: Any) -> Floats:
        """Return the positions of widths on the scale, in channels."""
        exact = np.asarray(widths, np.float64)
        rounded = np.ceil(exact / self.step) * self.step
        if self.saw:
            whole, part = np.divmod(rounded, TOOTH * self.step)
            rounded = TOOTH * self.step * (whole + np.interp(part / self.step, range(TOOTH + 1), _SAW))
        return np.asarray(np.where(exact < self.step, exact, rounded) if self.apart else rounded)

    def off(self, widths: Any) -> Floats:
        """Return 1 for widths that take the other path, and 0 for others."""
        return np.asarray(np.asarray(widths) % self.aligned != 0, np.float64)


#: Vectors of AVX-512 hold 16 numbers, of AVX2 8, of SSE and NEON 4; GPUs work in tiles of 32 and more.
_ROUNDED = tuple(Scale(step, apart=apart) for step in (8, 16, 32, 64) for apart in (False, True))
_SAWS = tuple(Scale(step, saw=True, apart=apart) for step in (8, 16) for apart in (False, True))
_PATHS = tuple(Scale(aligned=aligned) for aligned in (4, 8, 16))
#: The scales that are tried, the plainest first.
SCALES = (Scale(), *_ROUNDED, *_SAWS, *_PATHS, *(replace(_ROUNDED[2], aligned=aligned) for aligned in (4, 8)))


def kind_of(signature: str) -> str:
    """Return the kind of a block, for which a runtime counts channels alike: its first operation and its kernel."""
    try:
        step = json.loads(signature)["steps"][0]
        module = step.get("module", {})
        return json.dumps([step["operation"], module.get("kernel_size"), module.get("groups") == "depthwise"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return signature  # a foreign one, such as an imported row's
