"""The outcome of one call of a model (outputs, gradients, buffers), and whether two models have the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import AssumptionError, SmcpError, is_out_of_memory
from smcp_fx.masking.masks import STATE
from smcp_fx.prepared import PreparedRegions
from smcp_fx.tracing.copying import InDouble, widened
from smcp_fx.tracing.example_runs import plain, unchanged
from smcp_fx.tracing.same_draws import same_draws
from smcp_fx.tracing.sentences import TAKEN

#: The allowed difference, as a share of the scale. The same kernels run in the same order, except for sums
#: over a parameter's uses and for zeros that are left out. A larger difference in the model's own precision
#: is amplified rounding if double precision shows no more than float32 may.
ROUNDING = 1e-5
_TOLERANCE = {torch.float64: 1e-9, torch.float32: ROUNDING, torch.float16: 5e-2, torch.bfloat16: 2e-1}
#: The same for a model that does not run in double precision.
LOOSE = 1e-3


@dataclass
class Outcome:
    """The results of a call; a parameter's gradient is keyed by all its names."""

    outputs: list[Any]
    gradients: dict[frozenset[str], Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def says_nothing(self) -> bool:
        """Are there only NaN and infinity? Then any other model that gives these would pass for the same."""
        real = [o for o in self.outputs if isinstance(o, Tensor) and o.is_floating_point() and o.numel()]
        return bool(real) and not any(bool(o.isfinite().any()) for o in real)


class _DifferenceError(Exception):
    """What differs, in words."""


def fitting(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs on the model's device, with floating-point tensors in its type."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is None:
        return inputs
    moved: tuple[Any, ...] = pytree.tree_map(
        lambda v: (
            v.to(weight.device, weight.dtype if v.is_floating_point() else v.dtype)
            if isinstance(v, Tensor)
            else v
        ),
        inputs,
    )
    return moved


def outcome_or_none(
    model: nn.Module, inputs: tuple[Any, ...], training: bool, but: Collection[str] = ()
) -> Outcome | None:
    """The outcome of a call; None if the model does not take these inputs in this mode."""
    try:
        return outcome_of(model, inputs, training, but)
    except Exception as error:  # a model may raise anything on inputs that it was not made for
        if is_out_of_memory(error):
            raise
        return None


def outcome_of(
    model: nn.Module, inputs: tuple[Any, ...], training: bool, but: Collection[str] = ()
) -> Outcome:
    """Run the model; in `train()` with gradients. The model is left as it was. ``but``: as for `in_mode`."""
    copies = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs)
    own = model.python if isinstance(model, PreparedRegions) else model
    with (
        in_mode(model, training, but),
        unchanged(model),
        unchanged(own),
        same_draws(),
        torch.set_grad_enabled(training),
    ):
        outputs = pytree.tree_leaves(plain(getattr(model, "by_place", model)(*copies)))
        buffers = {name: b.detach().clone() for name, b in model.named_buffers() if _is_own(name)}
        return Outcome(outputs, _gradients(model, outputs) if training else {}, buffers)


def _gradients(model: nn.Module, outputs: list[Any]) -> dict[frozenset[str], Tensor | None]:
    names: dict[Tensor, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and _is_own(name):
            names.setdefault(parameter, set()).add(name)
    named = {frozenset(own_names): parameter for parameter, own_names in names.items()}
    parts = [
        o
        for o in outputs
        if isinstance(o, Tensor) and o.requires_grad and o.numel() and o.is_floating_point()
    ]
    if not named or not parts:
        return dict.fromkeys(named)
    weights = [
        torch.arange(o.numel(), device=o.device).remainder(7).sub(2.5).to(o).reshape(o.shape) for o in parts
    ]
    loss = sum(
        ((o * w).sum() / math.sqrt(o.numel()) for o, w in zip(parts, weights, strict=True)), torch.zeros(())
    )
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))


@contextmanager
def in_mode(model: nn.Module, training: bool, but: Collection[str] = ()) -> Iterator[None]:
    """Put all modules into one mode for the block, but those at the paths ``but`` into eval mode."""
    evaluated = {id(module) for path, module in model.named_modules() if path in but} if but else set()
    parts = [*model.modules(), *([model.python] if isinstance(model, PreparedRegions) else [])]
    modes = [(module, module.training) for module in parts]
    try:
        for module, _ in modes:
            module.training = training and id(module) not in evaluated
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _is_own(name: str) -> bool:
    return not name.startswith(f"{STATE}.")


# ---- comparing ----------------------------------------------------------------------------------------------


def differs(
    one: nn.Module,
    other: nn.Module,
    inputs: tuple[Any, ...],
    training: bool,
    expected: Outcome,
    widen_one: Callable[[nn.Module], nn.Module] = widened,
    more: tuple[Any, ...] | None = None,
    but: Collection[str] = (),
) -> str | None:
    """What differs, in words; None if nothing does, or no more than rounding explains.

    ``widen_one``: copies ``one`` in double precision. ``more``: inputs for double precision, if both models
    take them. ``but``: as for `in_mode`. Raises `AssumptionError` if ``other`` reports that it was not traced
    for such inputs.
    """
    try:
        actual = outcome_of(other, inputs, training, but)
    except (SmcpError, AssertionError) as error:
        if TAKEN in str(error):
            raise AssumptionError(str(error)) from error
        return f"it does not run ({error})"
    except Exception as error:
        if is_out_of_memory(error):  # no fault of the other
            raise
        return f"it does not run ({error})"
    mismatch = difference(expected, actual, None)
    if mismatch is None:
        return None
    wide = widen_one(one), widened(other)
    for images in (inputs,) if more is None else (more, inputs):
        try:
            with InDouble():
                first, second = (outcome_or_none(model, widened(images), training, but) for model in wide)
        except Exception as error:
            if images is inputs or not is_out_of_memory(error):
                raise
            continue  # the images are large: try ``inputs`` alone
        if first is not None and second is not None:
            return difference(first, second, ROUNDING)
    return mismatch if difference(expected, actual, LOOSE) is not None else None


def difference(expected: Outcome, actual: Outcome, tolerance: float | None) -> str | None:
    """The first difference, in words; ``tolerance``: a share of the scale; None: by each tensor's type."""
    try:
        if len(expected.outputs) != len(actual.outputs):
            return f"it returns {len(actual.outputs)} values, not {len(expected.outputs)}"
        for index, (a, b) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
            _same(a, b, f"output {index}" if len(actual.outputs) > 1 else "its output", tolerance)
        # Behind a norm means are zero: a batch norm there gathers rounding, which float64 tells from faults.
        floor = 1e-5 * _largest(expected.buffers.values())
        for name, buffer in actual.buffers.items():
            if name in expected.buffers and buffer.shape == expected.buffers[name].shape:
                least = floor if buffer.dtype == torch.float64 else 0.0
                _same(expected.buffers[name], buffer, f"buffer {name!r} after a call", tolerance, least)
        largest = _largest(expected.gradients.values())
        by_name = {name: gradient for names, gradient in actual.gradients.items() for name in names}
        for names, a in expected.gradients.items():
            b = next((by_name[name] for name in sorted(names) if name in by_name), None)
            if a is None and b is None:
                continue
            left = torch.zeros_like(b) if a is None and b is not None else a
            right = torch.zeros_like(a) if b is None and a is not None else b
            _same(left, right, f"the gradient of {min(names)!r}", tolerance, 1e-3 * largest)
    except _DifferenceError as difference:
        return str(difference)
    return None


def _largest(tensors: Iterable[Tensor | None]) -> float:
    """The largest finite value of all tensors of real numbers; 0 without any."""
    real = [t.detach() for t in tensors if t is not None and t.is_floating_point() and t.numel()]
    return max((float(torch.nan_to_num(t, 0.0, 0.0, 0.0).abs().max()) for t in real), default=0.0)


def _same(a: Any, b: Any, name: str, tolerance: float | None, least: float = 0.0) -> None:
    """Raise `_DifferenceError` unless they are the same, up to their type's tolerance of the scale (or ``least``)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        if isinstance(a, Tensor) or isinstance(b, Tensor) or (type(a) is type(b) and a == a and a != b):
            raise _DifferenceError(f"{name} is {b!r}, not {a!r}"[:200])
        return
    if a.shape != b.shape or a.dtype != b.dtype:
        raise _DifferenceError(f"{name} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}")
    if not a.numel():
        return
    if not a.is_floating_point() and not a.is_complex():
        if not torch.equal(a, b):
            raise _DifferenceError(f"{name} differs")
        return
    allowed = tolerance or _TOLERANCE.get(a.real.dtype if a.is_complex() else a.dtype, LOOSE)
    if not torch.equal(a.isfinite(), b.isfinite()):
        raise _DifferenceError(f"{name} is finite in other places")
    error = float(torch.nan_to_num(a.detach() - b.detach(), 0.0, 0.0, 0.0).abs().max())
    scale = max(float(torch.nan_to_num(a.detach(), 0.0, 0.0, 0.0).abs().max()), least)
    if error > allowed * scale:
        raise _DifferenceError(f"{name} differs by {error / scale if scale else math.inf:.2g} of its scale")


def repeats(model: nn.Module, inputs: tuple[Any, ...], training: bool, expected: Outcome) -> bool:
    """Does the model give the same again?"""
    again = outcome_or_none(model, inputs, training)
    return again is not None and difference(expected, again, None) is None
