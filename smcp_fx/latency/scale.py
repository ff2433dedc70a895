"""How a runtime counts a block's channels: the scale along which its latency is smooth.

Runtimes round widths up to steps, compute several steps at a time, and have kernels of their own for the narrowest
widths and for those that no vector divides. Which of that holds is the runtime's way with a kind of operation, so
that rows of all its blocks tell it together (`smcp_fx.latency.surface.choose_scales`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Kernels that compute four steps at a time: which shares of a tooth's cost the first step brings, two and three. By
#: ResNet-18's convolutions in ONNX Runtime with AVX-512.
TOOTH, _SAW = 4, (0.0, 0.56, 0.74, 0.87, 1.0)


@dataclass(frozen=True)
class Scale:
    """One width's scale.

    ``step``: widths up to a multiple of it cost what that multiple costs. ``saw``: steps come four at a time.
    ``apart``: widths below the first step are not rounded up. ``aligned``: widths that it does not divide take
    another path; 1 where there is none.
    """

    step: int = 1
    saw: bool = False
    apart: bool = False
    aligned: int = 1

    def coordinate(self, widths: Any) -> Floats:
        """Return where widths are on the scale, in channels."""
        given = np.asarray(widths, np.float64)
        found = np.ceil(given / self.step) * self.step
        if self.saw:
            whole, part = np.divmod(found, TOOTH * self.step)
            found = TOOTH * self.step * (whole + np.interp(part / self.step, range(TOOTH + 1), _SAW))
        return np.asarray(np.where(given < self.step, given, found) if self.apart else found)

    def off(self, widths: Any) -> Floats:
        """Return 1 for widths that take the other path, and 0 for the rest."""
        return np.asarray(np.asarray(widths) % self.aligned != 0, np.float64)


#: Vectors of AVX-512 hold 16 numbers, of AVX2 8, of SSE and NEON 4; GPUs work in tiles of 32 and more.
_ROUNDED = tuple(Scale(step, apart=apart) for step in (8, 16, 32, 64) for apart in (False, True))
_SAWS = tuple(Scale(step, saw=True, apart=apart) for step in (8, 16) for apart in (False, True))
_PATHS = tuple(Scale(aligned=aligned) for aligned in (4, 8, 16))
#: What is looked for, the plainest first.
SCALES = (Scale(), *_ROUNDED, *_SAWS, *_PATHS, *(replace(_ROUNDED[2], aligned=aligned) for aligned in (4, 8)))


def kind_of(signature: str) -> str:
    """Return what blocks have in common whose widths a runtime counts alike: their first operation and its kernel."""
    try:
        step = json.loads(signature)["steps"][0]
        module = step.get("module", {})
        return json.dumps([step["operation"], module.get("kernel_size"), module.get("groups") == "depthwise"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return signature  # of another make, as imported rows' may be
