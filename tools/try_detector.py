"""The sweep's checks on a torchvision detection model, traced in regions, as a row of plain values."""

from __future__ import annotations

import copy
import time
from typing import Any

from comparison import difference
from model_lists import DETECTOR_SIDE, Entry
from random_weights import random_masks, randomise
from trying import FLOAT32, FLOAT64, converted, describe, peak, timed_stages


def attempt_detector(entry: Entry, row: dict[str, Any]) -> None:
    """Prepare, mask, train a step, convert, compare what the regions give, train a step; ``row`` is filled.

    Boxes are sorted and suppressed by the last bit of their scores, so the comparison is of what goes into that.
    """
    import torch
    from torch.utils import _pytree as pytree

    import smcp_fx
    from smcp_fx.config import MethodConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = entry.build()
    randomise(model)
    model.eval()
    images = [torch.rand(3, DETECTOR_SIDE, DETECTOR_SIDE) for _ in range(2)]
    row.update(input=[2, *images[0].shape], parameters=sum(p.numel() for p in model.parameters()))
    before = peak()
    row["stage"] = "prepare"
    times = timed_stages()
    started = time.perf_counter()
    prepared = smcp_fx.prepare(model, (images,), config=MethodConfig(multiple=1, batch_norm_scaling=True))
    row.update(prepare_s=time.perf_counter() - started, trace_s=times["trace"], graph_s=times["build"])
    row.update(peak_gib=(peak() - before) / 2**20, regions=list(prepared.regions))
    row.update(describe(prepared))
    row["stage"] = "identity"
    with torch.no_grad():
        row["identity"] = difference(prepared(images), model(images))
    if not row["identity"] <= FLOAT32:
        raise ArithmeticError(f"all channels kept, and the output differs by {row['identity']:.3g}")
    row["stage"] = "masked train"
    prepared.set_masks(random_masks(prepared))
    one_step(prepared, images)
    sliced = converted(prepared, row)
    row["stage"] = "sliced eval"
    row["error"], row["compared"] = regions_difference(prepared, sliced, row["regions"], images)
    if not row["error"] <= FLOAT32:
        row["stage"] = "float64"
        wide = copy.deepcopy(prepared).double()
        doubles = [image.double() for image in images]
        row["error64"], _ = regions_difference(wide, smcp_fx.convert(wide), row["regions"], doubles)
        if not row["error64"] <= FLOAT64:
            raise ArithmeticError(
                f"masked and sliced differ by {row['error']:.3g}, float64 {row['error64']:.3g}"
            )
    row["stage"] = "train"
    one_step(sliced, images)
    reached = [p.grad for p in sliced.parameters() if p.grad is not None]
    if not reached or not all(bool(torch.isfinite(grad).all()) for grad in reached):
        raise ArithmeticError("gradients that are missing or not finite")
    row["boxes"] = sum(t.shape[0] for t in pytree.tree_leaves(sliced.eval()(images)) if t.dim() == 2)
    row["status"] = "exact"
    del row["stage"]


def one_step(model: Any, images: list[Any]) -> None:
    """Forward and backward in training mode, a box an image; the model is left in eval mode."""
    import torch

    side = images[0].shape[-1]
    targets = [
        {
            "boxes": torch.tensor([[5.0, 5.0, 60.0, 70.0]]),
            "labels": torch.tensor([1]),
            "masks": torch.ones(1, side, side, dtype=torch.uint8),
            "keypoints": torch.tensor([[[30.0, 30.0, 1.0]] * 17]),
        }
        for _ in images
    ]
    model.train()
    loss = sum(model(images, targets).values())
    loss.backward()
    model.eval()
    if not bool(torch.isfinite(loss)):
        raise ArithmeticError(f"the loss is {float(loss)}")


def regions_difference(
    masked: Any, sliced: Any, regions: list[str], images: list[Any]
) -> tuple[float, list[str]]:
    """Return the largest difference of the regions' outputs, over their scale, and the regions compared in full.

    An output that only another region reads may be narrower once sliced, and is left out. A region behind the choice
    of boxes may see other boxes, or another order, if scores differ in their last bit: its outputs are compared
    sorted, or left out.
    """
    found, expected = (given(model, regions, images) for model in (sliced, masked))
    worst, whole = 0.0, []
    for path in regions:
        pairs = list(zip(found[path], expected[path], strict=True))
        alike = [(a, b) for a, b in pairs if a.shape == b.shape and a.numel()]
        if path.startswith("roi_heads"):
            alike = [(a.flatten().sort().values, b.flatten().sort().values) for a, b in alike]
        if alike:
            worst = max(worst, difference([a for a, _ in alike], [b for _, b in alike]))
        if len(alike) == len(pairs) > 0:
            whole.append(path)
    if not any("head" in path for path in whole):
        raise ArithmeticError("no head's outputs could be compared")
    return worst, whole


def given(model: Any, regions: list[str], images: list[Any]) -> dict[str, list[Any]]:
    """Return every tensor that the regions return in one run in eval mode, in order."""
    import torch
    from torch.utils import _pytree as pytree

    outputs: dict[str, list[Any]] = {path: [] for path in regions}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda _m, _a, out, path=path: outputs[path].extend(t.clone() for t in pytree.tree_leaves(out))
        )
        for path in regions
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return outputs
