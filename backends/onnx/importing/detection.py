"""Operators of detectors' last steps."""

from __future__ import annotations

import operator
from typing import Any

import torch

from smcp_fx.backends.onnx.importing.building import Builder
from smcp_fx.backends.onnx.importing.call import Call
from smcp_fx.backends.onnx.importing.elementwise import Rule


def _nms(b: Builder, call: Call) -> Any:
    """Boxes [1, n, 4] and scores [1, 1, n] -> [kept, 3]; of one image and one class, as exporters write it."""
    from torchvision.ops import nms

    boxes, scores = call.inputs[:2]
    if call.attribute("center_point_box", 0) or {s[:2] for s in b.shapes(scores)} != {(1, 1)}:
        raise call.refused("suppression of several images or classes at once")
    most, overlap, least = (
        float(call.constant(p).reshape(-1)[0]) if call.has(p) else None for p in (2, 3, 4)
    )
    boxes = b.call(torch.select, boxes, 0, 0)
    scores = b.call(torch.select, b.call(torch.select, scores, 0, 0), 0, 0)
    if least is not None and least > 0:
        raise call.refused("a least score: filter before it")
    at = tuple(torch.empty(some, dtype=torch.int64, device="meta") for some in (5, 7))
    kept = b.given_examples(nms, (boxes, scores, overlap or 0.0), (at[0], at[1]))
    if most is not None:
        kept = b.call(operator.getitem, kept, slice(None, int(most)))
    column = b.call(torch.unsqueeze, kept, 1)
    nothing = b.call(torch.zeros_like, column)
    return b.call(torch.cat, [nothing, nothing, column], 1)


def _roi_align(b: Builder, call: Call) -> Any:
    from torchvision.ops import roi_align

    x, boxes, images = call.inputs
    if call.attribute("mode", "avg") != "avg":
        raise call.refused("mode other than avg")
    halves = call.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    kind = b.dtype(boxes)
    column = b.call(torch.unsqueeze, b.method("to", images, kind), 1)
    size = (call.attribute("output_height", 1), call.attribute("output_width", 1))
    rois = b.call(torch.cat, [column, boxes], 1)
    return b.call(
        roi_align, x, rois, size, float(call.attribute("spatial_scale", 1.0)),
        int(call.attribute("sampling_ratio", 0)) or -1, halves and call.opset >= 16,
    )  # fmt: skip


DETECTION: dict[str, Rule] = {"NonMaxSuppression": _nms, "RoiAlign": _roi_align}
