"""Proof, before anyone trains, that a prepared model is the original, and after, that a sliced one is the masked.

Both are run side by side on a few of the example's images: outputs, what batch norms gather, gradients. What differs
in the model's own precision is judged in double precision, where rounding is told from faults.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import PassError, SmcpError, TraceError
from smcp_fx.masking import STATE, mark_of
from smcp_fx.passes.sliced_labels import Sliced
from smcp_fx.prepared import PreparedGraph, PreparedModel, PreparedRegions
from smcp_fx.trace_sentences import TAKEN
from smcp_fx.tracing import Recorder, plain, unchanged

#: How many images the comparisons take: in `train()` (a batch norm needs two), and as another batch in `eval()`.
_IMAGES, _OTHERS = 2, 3
#: What may differ of the scale: the same kernels in the same order, but for sums over a parameter's uses and zeros
#: that are left out. Judged in double precision where it is more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-2, torch.bfloat16: 2e-1}
#: Where double precision cannot be had, since the model names another type.
_LOOSE = 1e-3


@dataclass
class _Outcome:
    """What a call gave; a parameter's gradient stands under all its names."""

    outputs: list[Any]
    gradients: dict[frozenset[str], Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class _DifferenceError(Exception):
    """What differs, in words."""


def check_prepared(original: nn.Module, prepared: PreparedModel, inputs: tuple[Any, ...]) -> None:
    """Raise `TraceError`, naming what differs first, where the prepared model is not the original.

    Compared are `train()` with gradients and buffers, and `eval()` with another number of images. A mode in which the
    original itself does not take such inputs, or is not the same twice, is left out.
    """
    original = copy.deepcopy(original)
    for training, images in ((True, _IMAGES), (False, _OTHERS)):
        given, expected = _on_some(original, inputs, images, training)
        if expected is None:
            continue
        what = _differs(original, prepared, given, training, expected)
        if what is None or not _repeats(original, given, training, expected):
            continue
        mode = "train" if training else "eval"
        where = _first_module(original, prepared, given, training)
        raise TraceError(
            f"the prepared model computes something else than {type(original).__name__} does in {mode} mode: {what}"
            + (f"; the first module that differs is {where!r}" if where else "")
            + ". Tracing has lost something of its forward: leave the module at fault as it is with "
            "prepare(..., leaves=[...]), or, where the difference is meant, prepare with check=False."
        )


def check_converted(prepared: PreparedModel, converted: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise `PassError` where the sliced network computes something else than the masked one, in `eval()`."""
    inputs = _fitting(prepared, inputs)
    given, expected = _on_some(prepared, inputs, _IMAGES, False)
    if expected is None:
        return
    if isinstance(prepared, PreparedRegions):
        what = _regions_differ(prepared, converted, given)
    else:
        what = _differs(prepared, converted, given, False, expected)
    if what is not None:
        where = _first_sliced(prepared, converted, given)
        raise PassError(
            f"the sliced network computes something else than the masked one: {what}"
            + (f"; the first operation that differs is {where!r}" if where else "")
            + ". This is a fault of smcp_fx: please report it with the model. Until it is mended, exclude the layer "
            "there with PruningConfig(exclude=...)."
        )


# ---- running ------------------------------------------------------------------------------------------------


def _some(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The inputs with so many images: as many as the first tensor has are cut, or repeated."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    images = tensors[0].shape[0] if tensors else 0

    def some(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != images:
            return leaf
        return leaf.detach()[torch.arange(count, device=leaf.device) % images]

    cut: tuple[Any, ...] = pytree.tree_map(some, inputs)
    return cut


def _fitting(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs where the model is now, and in its type."""
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


def _on_some(
    model: nn.Module, inputs: tuple[Any, ...], images: int, training: bool
) -> tuple[tuple[Any, ...], _Outcome | None]:
    """So many images and what the model makes of them; the inputs as they are where it does not take those."""
    given = _some(inputs, images)
    expected = _alone(model, given, training)
    return (given, expected) if expected is not None else (inputs, _alone(model, inputs, training))


def _alone(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> _Outcome | None:
    """What the model computes; None where it does not take these inputs in this mode."""
    try:
        return _outcome(model, inputs, training)
    except Exception:  # whatever a model says to inputs that it was not made for
        return None


def _outcome(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> _Outcome:
    """Run the model; in `train()` with gradients. The model is left as it was."""
    given = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs)
    own = model.python if isinstance(model, PreparedRegions) else model
    with _mode(model, training), unchanged(model), unchanged(own), torch.set_grad_enabled(training):
        torch.manual_seed(0)
        outputs = pytree.tree_leaves(plain(model(*given)))
        buffers = {name: b.detach().clone() for name, b in model.named_buffers() if _is_own(name)}
        return _Outcome(outputs, _gradients(model, outputs) if training else {}, buffers)


def _gradients(model: nn.Module, outputs: list[Any]) -> dict[frozenset[str], Tensor | None]:
    names: dict[Tensor, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and _is_own(name):
            names.setdefault(parameter, set()).add(name)
    named = {frozenset(known): parameter for parameter, known in names.items()}
    parts = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad and o.is_floating_point()]
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
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    parts = [*model.modules(), *([model.python] if isinstance(model, PreparedRegions) else [])]
    modes = [(module, module.training) for module in parts]
    try:
        for module, _ in modes:
            module.training = training
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _is_own(name: str) -> bool:
    return not name.startswith(f"{STATE}.")


# ---- comparing ----------------------------------------------------------------------------------------------


def _differs(
    one: nn.Module, other: nn.Module, inputs: tuple[Any, ...], training: bool, expected: _Outcome
) -> str | None:
    """What differs, in words; None when nothing does, or no more than rounding explains."""
    try:
        found = _outcome(other, inputs, training)
    except (SmcpError, AssertionError) as error:
        if TAKEN in str(error):  # it says so itself, whenever it meets such an input
            return None
        return f"it does not run ({error})"
    except Exception as error:
        return f"it does not run ({error})"
    what = _compare(expected, found, None)
    if what is None:
        return None
    try:
        wide = tuple(copy.deepcopy(model).double() for model in (one, other))
        first, second = (_outcome(model, _wide(inputs), training) for model in wide)
    except Exception:  # a type that its forward names
        return what if _compare(expected, found, _LOOSE) is not None else None
    return _compare(first, second, None)


def _regions_differ(prepared: PreparedRegions, converted: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """What the first call of a region gives, where it is given the same.

    Not what the Python behind makes of it: sorting and suppressing boxes follow the last bit of their scores.
    """
    try:
        what = _calls_differ(prepared.regions, prepared, converted, inputs)
        if what is not None:
            one, other = (copy.deepcopy(model).double() for model in (prepared, converted))
            what = _calls_differ(prepared.regions, one, other, _wide(inputs))
    except Exception as error:
        return f"it does not run ({error})"
    return what


def _calls_differ(
    paths: tuple[str, ...], one: nn.Module, other: nn.Module, inputs: tuple[Any, ...]
) -> str | None:
    left, right = (_first_calls(model, paths, inputs) for model in (one, other))
    for path in paths:
        given, results = (_of_one_shape(left[path][side], right[path][side]) for side in (0, 1))
        if _compare(*given, None) is None and (what := _compare(*results, None)) is not None:
            return f"in region {path!r}, {what}"
    return None


def _of_one_shape(left: list[Tensor], right: list[Tensor]) -> tuple[_Outcome, _Outcome]:
    """The tensors that have lost no channels: the others go straight from one region into the next."""
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a.shape == b.shape]
    return _Outcome([a for a, _ in pairs]), _Outcome([b for _, b in pairs])


def _first_calls(
    model: nn.Module, paths: tuple[str, ...], inputs: tuple[Any, ...]
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The tensors that each region's first call takes and gives."""
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def note(path: str, given: Any, output: Any) -> None:
        taken, gave = (
            [leaf.detach().clone() for leaf in pytree.tree_leaves(plain(side)) if isinstance(leaf, Tensor)]
            for side in (given, output)
        )
        found.setdefault(path, (taken, gave))

    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda _module, given, output, path=path: note(path, given, output)
        )
        for path in paths
    ]
    try:
        _outcome(model, inputs, False)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: found.get(path, ([], [])) for path in paths}


def _wide(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    widened: tuple[Any, ...] = pytree.tree_map(
        lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, inputs
    )
    return widened


def _compare(expected: _Outcome, found: _Outcome, tolerance: float | None) -> str | None:
    try:
        if len(expected.outputs) != len(found.outputs):
            return f"it returns {len(found.outputs)} values, not {len(expected.outputs)}"
        for index, (a, b) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
            _same(a, b, f"output {index}" if len(found.outputs) > 1 else "its output", tolerance)
        for name, buffer in found.buffers.items():
            if name in expected.buffers and buffer.shape == expected.buffers[name].shape:
                _same(expected.buffers[name], buffer, f"buffer {name!r} after a call", tolerance)
        largest = max(
            (float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()),
            default=0,
        )
        for names, a in expected.gradients.items():
            b = next((gradient for known, gradient in found.gradients.items() if known & names), None)
            if a is None and b is None:
                continue
            left = torch.zeros_like(b) if a is None and b is not None else a
            right = torch.zeros_like(a) if b is None and a is not None else b
            _same(left, right, f"the gradient of {min(names)!r}", tolerance, 1e-3 * largest)
    except _DifferenceError as difference:
        return str(difference)
    return None


def _same(a: Any, b: Any, what: str, tolerance: float | None, least: float = 0.0) -> None:
    """Raise `_DifferenceError` unless they are the same, up to their type's tolerance of the scale (or ``least``)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        if isinstance(a, Tensor) or isinstance(b, Tensor) or (type(a) is type(b) and a == a and a != b):
            raise _DifferenceError(f"{what} is {b!r}, not {a!r}"[:200])
        return
    if a.shape != b.shape or a.dtype != b.dtype:
        raise _DifferenceError(f"{what} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}")
    if not a.numel():
        return
    if not a.is_floating_point() and not a.is_complex():
        if not torch.equal(a, b):
            raise _DifferenceError(f"{what} differs")
        return
    allowed = tolerance or _TOLERANCE.get(a.real.dtype if a.is_complex() else a.dtype, _LOOSE)
    if not torch.equal(a.isfinite(), b.isfinite()):
        raise _DifferenceError(f"{what} is finite in other places")
    error = float(torch.nan_to_num(a.detach() - b.detach(), 0.0, 0.0, 0.0).abs().max())
    scale = max(float(torch.nan_to_num(a.detach(), 0.0, 0.0, 0.0).abs().max()), least)
    if error > allowed * scale:
        raise _DifferenceError(f"{what} differs by {error / scale if scale else math.inf:.2g} of its scale")


def _repeats(model: nn.Module, inputs: tuple[Any, ...], training: bool, expected: _Outcome) -> bool:
    again = _alone(model, inputs, training)
    return again is not None and _compare(expected, again, None) is None


# ---- where --------------------------------------------------------------------------------------------------


class _Watching(Recorder):
    """Tells of every node's result."""

    def __init__(self, module: fx.GraphModule, training: bool, seen: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(module, training)
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self._seen(n, result)
        return result


def _run(
    module: fx.GraphModule, inputs: tuple[Any, ...], training: bool, seen: Callable[[fx.Node, Any], None]
) -> None:
    given = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs)
    with _mode(module, training), unchanged(module), torch.no_grad():
        torch.manual_seed(0)
        _Watching(module, training, seen).run(*given)


def _first_module(
    original: nn.Module, prepared: nn.Module, inputs: tuple[Any, ...], training: bool
) -> str | None:
    """The path of the first module whose output differs, of those that the graph calls."""
    if not isinstance(prepared, PreparedGraph):
        return None
    outputs: dict[str, list[Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, out, path=path: outputs.setdefault(path, []).append(copy.deepcopy(_detached(out)))
        )
        for path, module in original.named_modules()
        if path
    ]
    _alone(original, inputs, training)
    for hook in hooks:
        hook.remove()
    wrong: list[str] = []

    def seen(node: fx.Node, result: Any) -> None:
        mark = mark_of(node)
        path = str(node.target) if node.op == "call_module" else mark.path if mark is not None else None
        if path is not None and outputs.get(path):
            before = outputs[path].pop(0)
            if _compare(_Outcome([before]), _Outcome([_detached(result)]), _LOOSE) is not None:
                wrong.append(path)

    try:
        _run(prepared, inputs, training, seen)
    except Exception:  # it may be what does not run
        return wrong[0] if wrong else None
    return wrong[0] if wrong else None


def _first_sliced(prepared: nn.Module, converted: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """The first node whose result in the sliced graph is not the masked one's, less the channels that went."""
    if not isinstance(prepared, PreparedGraph) or not isinstance(converted, fx.GraphModule):
        return None
    masked: dict[str, Any] = {}
    _run(prepared, inputs, False, lambda node, result: masked.update({node.name: result}))
    sliced = Sliced(prepared.channels, prepared.smcp.units_kept().cpu() | ~prepared.channels.free_units)
    wrong: list[str] = []

    def seen(node: fx.Node, result: Any) -> None:
        labels, before = prepared.channels.trail.labels.get(node.name), masked.get(node.name)
        if not (isinstance(labels, Tensor) and isinstance(before, Tensor) and isinstance(result, Tensor)):
            return
        axis = sliced.axis(labels)
        kept = before if axis is None else before.index_select(axis[0], axis[1].to(before.device))
        if _compare(_Outcome([kept]), _Outcome([result]), _LOOSE) is not None:
            wrong.append(str(node.target) if node.op == "call_module" else node.name)

    try:
        _run(converted, inputs, False, seen)
    except Exception:  # it may be what does not run
        return wrong[0] if wrong else None
    return wrong[0] if wrong else None


def _detached(tree: Any) -> Any:
    leaves = pytree.tree_leaves(plain(tree))
    found = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    return None if found is None else found.detach()
