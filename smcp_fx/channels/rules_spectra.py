"""Channel rules of Fourier transforms and complex numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smcp_fx.channels.labels import compact
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.rules_elementwise import like
from smcp_fx.channels.rules_statistics import tie_mixed
from smcp_fx.channels.trail import Call


def transform(run: Propagation, call: Call) -> Any:
    """Mixes along the transformed dimensions. Channels along other dimensions pass."""
    labels = run.of(call.argument(0, "input"))
    dims = _transformed(call, labels.dim())
    uniform = tie_mixed(run, call, labels, dims)
    if uniform is None:
        return run.unknown(call, f"channels are mixed by {call.shown!r}")
    for dim in dims:
        uniform = uniform.narrow(dim, 0, 1)
    return like(call, uniform)


def _transformed(call: Call, rank: int) -> set[int]:
    several = (call.name or "")[-1] in "2n"
    dims = call.argument(2, "dim", (-2, -1) if (call.name or "").endswith("2") else None if several else -1)
    if dims is None:
        sizes = call.argument(1, "s")
        dims = range(rank) if sizes is None else range(rank - len(sizes), rank)
    return {int(dim) % rank for dim in (dims if several else (dims,))}


def pairs(run: Propagation, call: Call) -> Any:
    """`view_as_real`: the real and the imaginary part of each channel along a new last dimension."""
    return compact(run.of(call.argument(0, "input")).unsqueeze(-1).expand(call.shape))


def from_pairs(run: Propagation, call: Call) -> Any:
    """`view_as_complex`: the two parts belong to one channel."""
    labels: Tensor = run.of(call.argument(0, "input"))
    return run.tie_along(labels, labels.dim() - 1).select(-1, 0)


_TRANSFORMS = [
    f"fft{inverse}{kind}{rank}"
    for inverse in ("", "i")
    for kind in ("fft", "rfft", "hfft")
    for rank in ("", "2", "n")
]
RULES: dict[str, Rule] = {
    **dict.fromkeys(_TRANSFORMS, transform),
    "viewasreal": pairs,
    "viewascomplex": from_pairs,
}
