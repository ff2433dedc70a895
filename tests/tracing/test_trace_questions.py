"""What Python asks of a traced tensor: types, lengths, look-ups, numbers; each as the eager model is answered."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import einops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange, Reduce
from models import conv
from tolerances import assert_close
from torch import Tensor, nn
from tracing_oracle import check_traced

import smcp_fx
from smcp_fx.errors import AssumptionError, SmcpError, TraceError

Wiring = Callable[[Any, Tensor], Tensor]


class Asking(nn.Module):
    """``wiring`` between two convolutions; in this file, whose calls of `int` and `len` are therefore seen."""

    def __init__(self, wiring: Wiring, **parts: Any) -> None:
        super().__init__()
        self.wiring = wiring
        self.stem, self.out = conv(3, 8), conv(parts.pop("after", None) or 8, 4)
        self.ones = torch.ones(1, 1, 1, dtype=torch.float16)
        self.register_buffer("ones_buffer", torch.ones(8, 1, 1), persistent=False)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.wiring(self, self.stem(x)))


@functools.lru_cache
def ramp(height: int, width: int) -> Tensor:
    return torch.arange(height * width, dtype=torch.float64).view(1, 1, height, width)


def in_windows(s: Any, h: Tensor) -> Tensor:
    """Windows of 4, and back by a division, as in shifted-window attention."""
    b, c, height, width = h.shape
    h = F.pad(h, (0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
    _, _, tall, wide = h.shape
    windows = h.view(b, c, tall // 4, 4, wide // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
    windows = windows - windows.mean(1, keepdim=True)
    count = int(windows.shape[0] / (tall * wide / 4 / 4))
    parts = windows.view(count, tall // 4, wide // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4)
    return parts.reshape(count, c, tall, wide)[:, :, :height, :width]


#: Every size is free: nothing is assumed of the input's.
ANSWERED: dict[str, Wiring] = {
    "isinstance": lambda s, h: h * 2 if isinstance(h, Tensor) else h,
    "isinstance of a parameter": lambda s, h: h * 2 if isinstance(s.stem.weight, nn.Parameter) else h,
    "isinstance of TorchScript": lambda s, h: h * 2 if torch.jit.isinstance(h, Tensor) else h,
    "isinstance of TorchScript, of tensors": lambda s, h: (
        h * 2 if torch.jit.isinstance([h], list[Tensor]) else h
    ),
    "isinstance of a number": lambda s, h: h * 2 if isinstance(h.shape[1], int) else h,
    "isinstance of a shape": lambda s, h: h * 2 if isinstance(h.shape, torch.Size) else h,
    "isinstance of no list": lambda s, h: h[0] if isinstance(h, (list, tuple, Sequence)) else h * 2,
    "is_tensor": lambda s, h: h * 2 if torch.is_tensor(h) else h,
    "hasattr": lambda s, h: h.tensors if hasattr(h, "tensors") else h * 2,
    "type by its name": lambda s, h: h * 2 if "Half" in h.type() else h * 3,
    "type of a tensor": lambda s, h: h * 2 if type(h) is Tensor else h[0],
    "type compared": lambda s, h: (
        F.interpolate(h, size=int(h.shape[2] / 2))
        if type(h.shape[2]) is int and type(h.shape[2] / 2) is float
        else h
    ),
    "type of a class": lambda s, h: h.type(torch.FloatTensor).double(),
    "type of another": lambda s, h: (h > 0).type(h.type()) * h,
    "a constant, of its type": lambda s, h: h * torch.ones(1).type(h.type()) + torch.ones(1).type(h.dtype),
    "an attribute, of its type": lambda s, h: h * s.ones.type(dtype=h.type()),
    "a buffer, of its type": lambda s, h: h * s.ones_buffer.type(h.type()),
    "the method, of its type": lambda s, h: h * Tensor.type(torch.relu(h) > 0, h.type()),
    "a constant, expanded": lambda s, h: (
        h * torch.full((1, 1, 1, 1), 2.0).expand(h.shape[0], -1, 1, h.size(3))
    ),
    "a constant's like": lambda s, h: h + torch.ones(1).new_zeros(h.shape[0], 1, 1, 1).type(h.type()),
    "a constant's numbers": lambda s, h: h * torch.ones(1).new_tensor([h.shape[2]]).type(h.type()),
    "a device as a text": lambda s, h: h * 2 if str(h.device) == "cpu" and f"{h.dtype}" else h,
    "limits of a type": lambda s, h: h.clamp(min=torch.finfo(h.dtype).eps),
    "ndim in a set": lambda s, h: h * 2 if h.ndim in {3, 4} else h,
    "ndim in a dict": lambda s, h: h * {4: 2.0}[h.dim()],
    "a size by get": lambda s, h: h * {8: 2.0}.get(h.shape[1], 3.0),
    "a size in a shape": lambda s, h: h * 2 if 8 in h.shape[:2] else h,
    "int of a quotient": lambda s, h: F.interpolate(h, size=(int(h.shape[2] / 2), int(h.shape[3] * 1.5))),
    "float of a size": lambda s, h: h / float(h.shape[2]),
    "len": lambda s, h: h.view(len(h), -1).view(h.shape),
    "divmod": lambda s, h: h * divmod(h.shape[2], 3)[0] + divmod(h.shape[3], 3)[1],
    "numpy's root": lambda s, h: h / np.sqrt(h.shape[2]),
    "numpy's product": lambda s, h: h.view(h.shape[0], int(np.prod(h.shape[1:]))).view(h.shape),
    "numpy's ceiling": lambda s, h: F.interpolate(
        h, size=(int(np.ceil(h.shape[2] / 2)), math.ceil(h.shape[3] / 2))
    ),
    "all and any along a dimension": lambda s, h: sum(  # type: ignore[dict-item]
        masked * (2.0 if len(masked.shape) == 4 else 3.0)
        for which in (torch.all, torch.any)
        for masked in [h * which(torch.arange(h.shape[3]).view(-1, 1) > 1, -1)]
    ),
    "numpy's numbers": lambda s, h: h * np.float32(2.0) + np.int64(1),
    "a cached function": lambda s, h: h + ramp(h.shape[2], h.shape[3]),
    "windows": in_windows,
    "einops": lambda s, h: einops.rearrange(h, "b (g c) h w -> b (c g) h w", g=2),
    "einops, reduced": lambda s, h: h * einops.reduce(h, "b c h w -> b c 1 1", "mean"),
    "einops, repeated": lambda s, h: einops.repeat(h, "b c h w -> b c (h 2) w"),
    "a list of parts": lambda s, h: torch.cat([part * k for k, part in enumerate(h.split([3, 5], 1))], 1),
    "channels in parts": lambda s, h: torch.cat(
        [part * (k + 1) for k, part in enumerate(h.relu().split(4, 1))], 1
    ),
    "parts of a reshape": lambda s, h: sum(h.view(h.shape[0], 2, 4, *h.shape[2:]).unbind(1)),  # type: ignore[dict-item]
    "tensor_split": lambda s, h: torch.cat([part.flip(3) for part in h.tensor_split(3, 3)], 3),
}


@pytest.mark.parametrize("how", ANSWERED)
def test_answered_at_any_size(how: str) -> None:
    wiring = ANSWERED[how]
    prepared = check_traced(Asking(wiring, after=4 if how == "parts of a reshape" else None))
    assert prepared.channels.free_share > 0.4


@pytest.mark.parametrize(
    "layer", [Rearrange("b (g c) h w -> b (c g) h w", g=2), Reduce("b c h w -> b c h 1", "max")]
)
def test_layers_of_einops(layer: nn.Module) -> None:
    assert check_traced(Asking(lambda s, h: s.part(h), part=layer)).channels.free_share == 1.0


#: With the places, among the oracle's shapes, of those for which the example's answer does not hold.
FROZEN: dict[str, tuple[Wiring, tuple[int, ...]]] = {
    "split": (lambda s, h: torch.cat([part.flip(3) for part in h.split(4, dim=3)], 3), (2, 3)),
    "split of the batch": (lambda s, h: torch.cat([part / part.norm() for part in h.split(1)]), (1, 3)),
    "chunk": (lambda s, h: torch.cat([part / part.norm() for part in h.chunk(2)]), (3,)),
    "unbind": (lambda s, h: torch.stack([row * k for k, row in enumerate(h.unbind(3))], 3), (2, 3)),
    "rows": (lambda s, h: torch.stack([row / row.norm() for row in h]), (1, 3)),
    "zip": (lambda s, h: torch.stack([a + b for a, b in zip(h, 2 * h, strict=True)]), (1, 3)),
    "star": (lambda s, h: torch.cat((*h.split(4, 3),), 3), (2, 3)),
    "unpacked": (lambda s, h: first_of_two(*h.split(4, 3)) + h.mean(), (2, 3)),
    "a set of shapes": (lambda s, h: h * 2 if h.shape[2:] in {torch.Size([8, 8])} else h, (2, 3)),
    "numpy's logarithm": (lambda s, h: h / np.log2(h.shape[2]), (2, 3)),
}


def first_of_two(a: Tensor, b: Tensor) -> Tensor:
    return a.mean(3, keepdim=True)


@pytest.mark.parametrize("how", FROZEN)
def test_frozen_and_told(how: str) -> None:
    wiring, refused = FROZEN[how]
    check_traced(Asking(wiring), refused=refused)


def test_an_assumption_is_an_error_of_ours_and_still_an_assertion() -> None:
    prepared = smcp_fx.prepare(Asking(FROZEN["split"][0]).eval(), torch.randn(2, 3, 8, 8))
    with pytest.raises(
        AssumptionError, match=r"len\(stem\.split\(4, dim=3\)\) == 2 .*prepare the model again"
    ) as told:
        prepared(torch.randn(2, 3, 8, 16))
    assert isinstance(told.value, SmcpError) and isinstance(told.value, AssertionError)
    with pytest.raises(AssertionError, match="prepare the model again"):
        smcp_fx.convert(prepared)(torch.randn(2, 3, 8, 16))


def test_answers_hold_in_another_precision() -> None:
    model = Asking(lambda s, h: h.masked_fill(h < 0, torch.finfo(h.dtype).tiny)).eval()
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 8, 8))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(prepared.double()(x), model.double()(x))


def test_a_number_in_a_text_does_not_freeze_it_and_is_no_key() -> None:
    def wiring(s: Any, h: Tensor) -> Tensor:
        assert f"{h.shape}"
        return h

    check_traced(Asking(wiring))
    keyed = Asking(lambda s, h: h * {"8": 2.0}[f"{h.shape[1]}"]).eval()
    with pytest.raises(TraceError, match=r"stem\.shape\[1\] of the traced graph"):
        smcp_fx.prepare(keyed, torch.randn(2, 3, 8, 8))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`:FutureWarning", "ignore:`torch.jit.script`:DeprecationWarning"
)
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.trace`:FutureWarning", "ignore:`torch.jit.trace`:DeprecationWarning"
)
def test_code_in_c_is_not_told_that_a_proxy_is_a_tensor() -> None:
    """It would read memory that is none."""
    doubled = torch.jit.script(twice)
    doubled._torchdynamo_inline = None  # the Python that it was made of is traced in its place
    with pytest.raises(TraceError, match=r"Expected a value of type 'Tensor.*test_trace_questions\.py"):
        smcp_fx.prepare(Asking(lambda s, h: doubled(h)).eval(), torch.randn(2, 3, 8, 8))


def twice(x: Tensor) -> Tensor:
    return x * 2


def test_what_stands_in_is_gone_afterwards() -> None:
    names = ("int", "float", "len", "isinstance")
    before = torch.finfo, torch.is_tensor, nn.Module.__setattr__, ramp
    smcp_fx.prepare(Asking(ANSWERED["windows"]).eval(), torch.randn(2, 3, 8, 8))
    assert (torch.finfo, torch.is_tensor, nn.Module.__setattr__, ramp) == before
    assert not set(names) & set(globals())


class Views(nn.Module):
    """A dict of images by the camera's name, without a mask; a keyword of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.ModuleDict({"left": conv(3, 8), "right": conv(3, 8)})
        self.out = conv(16, 4)

    def forward(self, views: Any, options: Any, mask: Any = None, *, scale: float = 2.0) -> Any:
        seen = [self.eyes[name](image) for name, image in views.items()]
        h = torch.cat(seen, 1) * scale * len([*views.keys(), *views.values()])
        if options["shift"] is not None:
            h = h + options["shift"]
        return self.out(h if mask is None else h * mask)


def test_dicts_and_what_the_example_leaves_out() -> None:
    image, one = torch.randn(2, 3, 8, 8), torch.ones(2, 1, 8, 8)
    views, model = {"left": image, "right": image + 1}, Views().eval()
    example = {"views": views, "options": {"shift": None}, "mask": None}
    prepared = smcp_fx.prepare(model, example).eval()
    assert prepared.channels.free_share == 1.0
    assert_close(prepared(views, {"shift": None}, None), model(views, {"shift": None}), "identity")
    for options, mask, told in (({"shift": one}, None, "shift"), ({"shift": None}, one, "mask")):
        with pytest.raises(AssumptionError, match=f"{told}.* is None"):
            prepared(views, options, mask)


def test_values_that_are_asked_to_be_finite_are_taken_for_finite() -> None:
    def guarded(s: Any, h: Tensor) -> Tensor:
        if not torch.isfinite(h).all() or h.isnan().any():
            h = h.clamp(-1, 1)
        return h

    prepared = smcp_fx.prepare(Asking(guarded), torch.randn(2, 3, 8, 8))
    assert prepared.channels.free_share == 1 and "is finite" in prepared.plan.traced.assumptions[0]
    with pytest.raises(AssumptionError, match="is finite"):
        prepared(torch.full((1, 3, 8, 8), torch.nan))


def test_checks_of_torch_stay() -> None:
    def checked(s: Any, h: Tensor) -> Tensor:
        size = h.shape[2] % 2 == 0
        torch._check(size() if callable(size) else size, lambda: "odd")
        torch._check_tensor_all((h < 1e6).flatten(1))
        return h

    prepared = smcp_fx.prepare(Asking(checked), torch.randn(2, 3, 8, 8))
    prepared(torch.randn(3, 3, 6, 8))
    for bad in (torch.randn(2, 3, 7, 8), torch.full((1, 3, 8, 8), 1e9)):
        with pytest.raises(AssertionError):
            prepared(bad)
