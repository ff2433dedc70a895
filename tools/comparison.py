"""Run models and compare what they give."""

from __future__ import annotations

from typing import Any


def run(model: Any, inputs: tuple[Any, ...]) -> Any:
    """The model's output, without gradients."""
    import torch

    with torch.no_grad():
        return model(*(i.clone() for i in inputs))


def scale(outputs: Any) -> float:
    """Largest magnitude of the outputs."""
    import torch
    from torch.utils import _pytree as pytree

    return max(float(t.abs().max()) for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor))


def difference(found: Any, expected: Any) -> float:
    """Largest |found - expected| of any output, over that output's scale; infinite for another structure."""
    import torch
    from torch.utils import _pytree as pytree

    left = [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    right = [t for t in pytree.tree_leaves(expected) if isinstance(t, torch.Tensor)]
    if [t.shape for t in left] != [t.shape for t in right]:
        return float("inf")
    errors = [
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)
        for a, b in zip(left, right, strict=True)
        if a.numel()
    ]
    return float("nan") if any(e != e for e in errors) else max(errors, default=0.0)
