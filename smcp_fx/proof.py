"""Checks that a prepared model computes what the original does, and a sliced model what the masked one does.

The two run side by side on a few of the example's images; outputs, buffers and gradients are compared. A
difference in the model's own precision is judged again in double precision, which tells rounding from faults.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import AssumptionError, PassError, TraceError, is_out_of_memory
from smcp_fx.masking.masks import mark_of
from smcp_fx.outcomes import (
    LOOSE,
    ROUNDING,
    Outcome,
    difference,
    differs,
    fitting,
    in_mode,
    outcome_of,
    outcome_or_none,
    repeats,
)
from smcp_fx.passes.fold_batch_norm_scalers import FoldBatchNormScalers
from smcp_fx.passes.sliced_labels import Sliced
from smcp_fx.passes.weight_products import held_tensor
from smcp_fx.prepared import PreparedGraph, PreparedModel, PreparedRegions
from smcp_fx.tracing.copying import InDouble, deep_copy, widened
from smcp_fx.tracing.example_runs import Recorder, plain, unchanged
from smcp_fx.tracing.same_draws import same_draws

#: Images per comparison: in `train()` (a batch norm needs two), and in `eval()`, as another batch size.
IMAGES, OTHERS = 2, 3
#: Images in double precision: from two images, a batch norm of one-pixel maps makes signs, which the last bit
#: decides. The second number is for examples of the first size: a trace may be right for that size only.
_JUDGED = 5, 4


def check_prepared(original: nn.Module, prepared: PreparedModel, inputs: tuple[Any, ...]) -> None:
    """Raise `TraceError`, naming the first difference, if the prepared model computes something else.

    Compares `train()` with gradients and buffers, and `eval()` with another batch size. Skips a mode in which
    the original refuses the inputs. Warns if the original gives other results each time, or no finite number.
    """
    original, kind = deep_copy(original), type(original).__name__
    for training, images in ((True, IMAGES), (False, OTHERS)):
        example, expected = on_some(original, inputs, images, training)
        if expected is None:
            continue
        if expected.says_nothing and not training:
            warnings.warn(
                f"{kind} gives NaN or infinity alone for the example inputs, so that nothing shows whether it is the "
                "same once prepared: check its weights and the inputs.",
                stacklevel=3,
            )
        try:
            mismatch = differs(original, prepared, example, training, expected, more=more_images(inputs))
        except AssumptionError:  # it takes no other batch size, and says so in every call
            example, expected = inputs, outcome_or_none(original, inputs, training)
            if expected is None:
                continue
            mismatch = differs(original, prepared, example, training, expected)
        if mismatch is None:
            continue
        mode = "train" if training else "eval"
        if not repeats(original, example, training, expected):
            warnings.warn(
                f"{kind} gives something else in each call in {mode} mode, so that nothing shows whether it is the "
                "same once prepared.",
                stacklevel=3,
            )
            continue
        where = _first_module(original, prepared, example, training)
        raise TraceError(
            f"{kind} computes something else once prepared, in {mode} mode: {mismatch}"
            + (f"; the first module that differs is {where!r}" if where else "")
            + f". Keep the module at fault as it is, with prepare(..., leaves=[{repr(where) if where else '...'}]); "
            "if the difference is meant, pass check=False."
        )


def check_converted(prepared: PreparedModel, converted: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise `PassError` if the sliced network computes something else than the masked one, in `eval()`."""
    inputs = fitting(prepared, inputs)
    example, expected = on_some(prepared, inputs, IMAGES, False)
    if expected is None:
        return
    if isinstance(prepared, PreparedRegions):
        mismatch = _regions_differ(prepared, converted, example)
    else:
        mismatch = differs(prepared, converted, example, False, expected, _widened_as_folded)
    if mismatch is not None:
        where = _first_sliced(prepared, converted, example)
        raise PassError(
            f"the sliced network computes something else than the masked one: {mismatch}"
            + (f"; the first operation that differs is {where!r}" if where else "")
            + ". Keep the layer there with PruningConfig(exclude=...), and please report it: smcp_fx is at fault."
        )


# ---- running ------------------------------------------------------------------------------------------------


def _images(inputs: tuple[Any, ...]) -> int:
    """The batch size: the length of the first tensor."""
    return next((v.shape[0] for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and v.dim()), 0)


def _some(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The inputs with ``count`` images: each tensor as long as the first one is cut or repeated."""
    images = _images(inputs)

    def some(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != images:
            return leaf
        index = torch.arange(count, device=leaf.device)
        cut = leaf.detach()[index % images]
        if not leaf.is_floating_point() or count <= images:
            return cut
        # Each repeat is weaker: equal images would not show whether the model mixes them.
        return cut * (1 - (index // images) / count).to(cut).reshape(-1, *[1] * (cut.dim() - 1))

    cut: tuple[Any, ...] = pytree.tree_map(some, inputs)
    return cut


def more_images(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs with as many images as double precision is judged on."""
    return _some(inputs, _JUDGED[_images(inputs) == _JUDGED[0]])


def on_some(
    model: nn.Module, inputs: tuple[Any, ...], images: int, training: bool, but: Collection[str] = ()
) -> tuple[tuple[Any, ...], Outcome | None]:
    """The inputs with so many images, and the outcome; the inputs as given if the model refuses those."""
    some = _some(inputs, images)
    expected = outcome_or_none(model, some, training, but)
    if expected is not None:
        return some, expected
    return inputs, outcome_or_none(model, inputs, training, but)


def _widened_as_folded(prepared: nn.Module) -> nn.Module:
    """A copy in double precision, whose scaled weights equal those that folding rounded to the model's type.

    Otherwise a deep network would amplify the rounding of one multiplication a channel until it looks wrong.
    """
    wide = widened(prepared)
    assert isinstance(prepared, PreparedModel) and isinstance(wide, PreparedModel)
    products = [node for node in prepared.graph.nodes if node.target in FoldBatchNormScalers.functions]
    with torch.no_grad():
        for product in products:
            weight, scale = (held_tensor(prepared, node) for node in product.args)
            folded = weight * scale.to(weight.dtype)
            wide_weight, wide_scale = (held_tensor(wide, node) for node in product.args)
            wide_weight.copy_(torch.where(wide_scale == 0, wide_weight, folded.double() / wide_scale))
    return wide


# ---- regions ------------------------------------------------------------------------------------------------


def _regions_differ(prepared: PreparedRegions, converted: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """The first difference between the regions' first calls, where their operands are the same.

    The Python code behind them is not compared: sorting and suppressing boxes depend on a score's last bit.
    """
    try:
        mismatch = _calls_differ(prepared.regions, prepared, converted, inputs)
        if mismatch is not None:
            one, other = _widened_as_folded(prepared), widened(converted)
            with InDouble():
                mismatch = _calls_differ(prepared.regions, one, other, widened(inputs), ROUNDING)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"it does not run ({error})"
    return mismatch


def _calls_differ(
    paths: tuple[str, ...],
    one: nn.Module,
    other: nn.Module,
    inputs: tuple[Any, ...],
    tolerance: float | None = None,
) -> str | None:
    left, right = (_first_calls(model, paths, inputs) for model in (one, other))
    for path in paths:
        operands, results = (_of_one_shape(left[path][side], right[path][side]) for side in (0, 1))
        if difference(*operands, None) is None and (mismatch := difference(*results, tolerance)) is not None:
            return f"in region {path!r}, {mismatch}"
    return None


def _of_one_shape(left: list[Tensor], right: list[Tensor]) -> tuple[Outcome, Outcome]:
    """The tensors that have lost no channels: the others go straight from one region into the next."""
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a.shape == b.shape]
    return Outcome([a for a, _ in pairs]), Outcome([b for _, b in pairs])


def _first_calls(
    model: nn.Module, paths: tuple[str, ...], inputs: tuple[Any, ...]
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The tensors that each region's first call takes and returns."""
    calls: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def note(path: str, given: Any, output: Any) -> None:
        taken, gave = (
            [leaf.detach().clone() for leaf in pytree.tree_leaves(plain(side)) if isinstance(leaf, Tensor)]
            for side in (given, output)
        )
        calls.setdefault(path, (taken, gave))

    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda _module, given, output, path=path: note(path, given, output)
        )
        for path in paths
    ]
    try:
        outcome_of(model, inputs, False)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: calls.get(path, ([], [])) for path in paths}


# ---- where --------------------------------------------------------------------------------------------------


class _Watching(Recorder):
    """Calls ``seen`` with every node and its result."""

    def __init__(self, module: fx.GraphModule, training: bool, seen: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(module, training)
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self._seen(n, result)
        return result


def run_watched(
    module: fx.GraphModule, inputs: tuple[Any, ...], training: bool, seen: Callable[[fx.Node, Any], None]
) -> None:
    """Run a graph, and call ``seen`` with every node and its result."""
    copies = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs)
    with in_mode(module, training), unchanged(module), same_draws(), torch.no_grad():
        _Watching(module, training, seen).run(*copies)


def _first_module(
    original: nn.Module, prepared: nn.Module, inputs: tuple[Any, ...], training: bool
) -> str | None:
    """The path of the first module that the graph calls and whose output differs."""
    if not isinstance(prepared, PreparedGraph):
        return None
    outputs: dict[str, list[Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, out, path=path: outputs.setdefault(path, []).append(copy.deepcopy(_detached(out)))
        )
        for path, module in original.named_modules()
        if path and not isinstance(module, torch.jit.ScriptModule)
    ]
    outcome_or_none(original, inputs, training)
    for hook in hooks:
        hook.remove()
    wrong: list[str] = []

    def seen(node: fx.Node, result: Any) -> None:
        mark = mark_of(node)
        path = str(node.target) if node.op == "call_module" else mark.path if mark is not None else None
        if path is not None and outputs.get(path):
            before = outputs[path].pop(0)
            if difference(Outcome([before]), Outcome([_detached(result)]), LOOSE) is not None:
                wrong.append(path)

    try:
        run_watched(prepared, inputs, training, seen)
    except Exception:  # the graph at fault may not run at all
        return wrong[0] if wrong else None
    return wrong[0] if wrong else None


def _first_sliced(prepared: nn.Module, converted: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """The first node whose sliced result differs from the kept channels of its masked result."""
    if not isinstance(prepared, PreparedGraph) or not isinstance(converted, fx.GraphModule):
        return None
    masked: dict[str, Any] = {}

    def note(node: fx.Node, result: Any) -> None:
        # A copy: a later operation may write into it, as in-place activations do.
        masked[node.name] = result.clone() if isinstance(result, Tensor) else result

    run_watched(prepared, inputs, False, note)
    sliced = Sliced(prepared.channels, prepared.smcp.units_kept().cpu() | ~prepared.channels.free_units)
    wrong: list[str] = []

    def seen(node: fx.Node, result: Any) -> None:
        labels, before = prepared.channels.trail.labels.get(node.name), masked.get(node.name)
        if not (isinstance(labels, Tensor) and isinstance(before, Tensor) and isinstance(result, Tensor)):
            return
        axis = sliced.axis(labels)
        kept = before if axis is None else before.index_select(axis[0], axis[1].to(before.device))
        if difference(Outcome([kept]), Outcome([result]), LOOSE) is not None:
            wrong.append(str(node.target) if node.op == "call_module" else node.name)

    try:
        run_watched(converted, inputs, False, seen)
    except Exception:  # the graph at fault may not run at all
        return wrong[0] if wrong else None
    return wrong[0] if wrong else None


def _detached(tree: Any) -> Any:
    leaves = pytree.tree_leaves(plain(tree))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    return None if first is None else first.detach()
