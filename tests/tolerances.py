"""One table of tolerances, and the one helper that compares by it.

A tolerance is relative to the scale of what is expected (its largest magnitude): max |found - expected| may
reach ``tolerance * scale``. A failure prints the largest and the mean error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

TOLERANCES: dict[tuple[str, torch.dtype], float] = {
    # Masked against sliced: zeros are dropped from sums, so that only the order of the additions differs. The
    # bound is the project's own promise.
    ("slicing", torch.float32): 1e-5,
    # The same in double precision, where rounding is 2^29 times finer; random deep nets amplify it to 1e-12.
    ("slicing", torch.float64): 1e-9,
    # Prepared with all channels kept against the original: the masks multiply by 1, which is exact, so that
    # only the order of the kernels' additions may differ (1.1e-14 at most on 1,000 random networks in double).
    ("identity", torch.float32): 1e-6,
    ("identity", torch.float64): 1e-13,
    # Autograd against a formula: a few hundred additions in another order, 1e-16 each.
    ("gradient", torch.float64): 1e-11,
    # Importances are kept in float32 whatever the model is: eps is 1.2e-7, sums have a few terms.
    ("importance", torch.float32): 1e-5,
    # Gradients summed in another order (split batches, other memory layouts, fused kernels), then signed sums of
    # them, whose terms cancel: a few hundred times eps.
    ("accumulation", torch.float32): 1e-4,
    # Sums in double over what a network computes in float32: the same network, traced twice.
    ("rises", torch.float64): 1e-5,
    # A regression whose answer is exact: the least ridge, 1e-9 of the inputs' scale, keeps it that far off, times the
    # inputs' condition.
    ("regression", torch.float64): 1e-6,
    # Half precision: eps is 9.8e-4, and rounding adds up over three layers.
    ("identity", torch.float16): 2e-2,
    ("identity", torch.bfloat16): 1e-1,
}


def assert_close(found: Any, expected: Any, what: str, where: str = "") -> None:
    """Compare two pytrees of tensors by the table's line for ``what`` and the expected tensors' type."""
    left, left_spec = pytree.tree_flatten(found)
    right, right_spec = pytree.tree_flatten(expected)
    assert left_spec == right_spec, f"{where}: {left_spec} is not {right_spec}"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if not isinstance(b, Tensor):
            assert a == b, f"{where}: leaf {index} is {a!r}, expected {b!r}"
            continue
        assert isinstance(a, Tensor), f"{where}: leaf {index} is {a!r}, no tensor"
        assert a.shape == b.shape, f"{where}: leaf {index} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"{where}: leaf {index} is {a.dtype}, not {b.dtype}"
        if not b.is_floating_point():
            assert torch.equal(a, b), f"{where}: leaf {index} differs in {int((a != b).sum())} places"
            continue
        tolerance = TOLERANCES[what, b.dtype]
        error = (a.detach().double() - b.detach().double()).abs()
        scale = float(b.detach().double().abs().max()) if b.numel() else 0.0
        largest = float(error.max()) if error.numel() else 0.0
        assert largest <= tolerance * scale, (
            f"{where}: leaf {index} of shape {tuple(b.shape)}: largest error {largest:.3g}, mean "
            f"{float(error.mean()):.3g}, allowed {tolerance:g} of the scale {scale:.3g}"
        )
