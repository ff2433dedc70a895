"""Resize and Upsample as `interpolate`, if torch computes the same."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.elementwise import Rule
from smcp_fx.backends.onnx.importing.sizes import SizeArray

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}
#: torch computes cubic interpolation with this coefficient only.
_CUBIC = -0.75


def _resize(b: Builder, call: Call) -> Any:
    x, rank = call.inputs[0], call.rank or 0
    if rank not in _LINEAR:
        raise call.refused(f"a value of rank {rank}")
    way, old = call.attribute("mode", "nearest"), _is_old(call)
    at = call.attribute("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    scales, sizes = _scales(b, call), call.sizes(3) if call.has(3) else None
    if call.attributes.get("axes"):
        raise call.refused("a resize of some axes")
    options: dict[str, Any] = {}
    if way == "nearest":
        whole = scales is not None and all(scale == int(scale) for scale in scales[2:])
        floor = old or call.attribute("nearest_mode", "round_prefer_floor") == "floor"
        halves = at in ("half_pixel", "pytorch_half_pixel")
        plain = (at == "asymmetric" and (floor or whole)) or (whole and halves)
        options["mode"] = "nearest" if plain else "nearest-exact"
    elif way in ("linear", "cubic"):
        if at not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
            cure = ": export it in opset 11 or later" * old
            raise call.refused(f"{way} interpolation at coordinates {at!r}{cure}")
        if way == "cubic" and (rank != 4 or abs(call.attribute("cubic_coeff_a", _CUBIC) - _CUBIC) > 1e-6):
            raise call.refused(f"cubic interpolation with coefficient {call.attribute('cubic_coeff_a')}")
        options["mode"] = _LINEAR[rank] if way == "linear" else "bicubic"
        options["align_corners"] = at == "align_corners"
        if call.attribute("antialias", 0):
            options["antialias"] = True
    else:
        raise call.refused(f"mode {way!r}")
    if scales is not None:
        if any(scale != 1 for scale in scales[:2]):
            raise call.refused("a resize of images or channels")
        if all(scale == 1 for scale in scales):
            return x
        return b.call(F.interpolate, x, scale_factor=tuple(scales[2:]), **options)
    assert sizes is not None
    return b.call(F.interpolate, x, size=tuple(sizes[2:]), **options)


def _scales(b: Builder, call: Call) -> list[float] | None:
    """Return the factors of a resize; None if it has sizes."""
    if "scales" in call.attributes:
        return [float(scale) for scale in call.attributes["scales"]]
    position = 1 if _is_old(call) else 2
    if not call.has(position):
        return None
    value = call.input(position)
    if isinstance(value, SizeArray):
        raise call.refused("factors that follow from open sizes")
    if isinstance(value, Tensor) and value.numel() == 0:
        return None
    return [float(scale) for scale in call.constant(position)]


def _is_old(call: Call) -> bool:
    """Is the operator of an opset without regions and coordinate modes?"""
    return call.kind == "Upsample" or call.opset < 11


RESIZING: dict[str, Rule] = {"Resize": _resize, "Upsample": _resize}
