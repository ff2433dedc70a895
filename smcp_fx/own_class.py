"""Puts a smaller network into its original class: the class's own modules get its widths and weights."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smcp_fx.errors import InputError, first_line
from smcp_fx.interface.example_inputs import default_inputs
from smcp_fx.interface.positional import positional
from smcp_fx.interface.wrapping import require_whole, unwrapped
from smcp_fx.kept_channels import WIDTHS, Widths, cut_of, note_cut, renumbered
from smcp_fx.outcomes import LOOSE, Outcome, difference, differs, fitting, in_mode, outcome_or_none
from smcp_fx.passes.slice_channels import resize_fields
from smcp_fx.prepared import PreparedModel
from smcp_fx.proof import IMAGES, OTHERS, more_images, on_some, run_watched
from smcp_fx.tracing.copying import deep_copy
from smcp_fx.tracing.example_runs import outputs_of_modules, unchanged
from smcp_fx.tracing.modes import conditions, is_flag
from smcp_fx.tracing.own_weights import LAYERS, settle_named
from smcp_fx.tracing.sentences import is_ours

Model = TypeVar("Model", bound=nn.Module)

_LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase)
#: Types of the attributes in which modules state their sizes.
_FIELDS = (int, tuple, torch.Size)


def resize(
    model: Model,
    like: nn.Module | Mapping[str, Tensor],
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    check: bool = True,
) -> Model:
    """Give a model the widths and weights of a smaller one of its kind, in place, and return it.

    The model keeps its class, methods and other attributes; few widths in these (``num_features``) change.

    Args:
        model: the original, or a fresh instance of its class.
        like: the smaller model, from `convert`, `compress` or `load`, or its state dict.
        example_inputs: as for `prepare`.
        check: run the model on the inputs first, in eval and train mode with two batch sizes, and compare it
            with ``like``; other random draws are no difference. A state dict gives nothing to compare: the
            model only runs, and only if ``example_inputs`` are given.

    Raises `InputError`, and leaves the model as it was, if the class does not run at these widths or computes
    something else. The usual cause is a forward that holds channel counts or moves channels by position.
    """
    if not isinstance(model, nn.Module) or isinstance(model, PreparedModel):
        raise InputError(f"resize needs a model of your own class, not {type(model).__name__}")
    like = unwrapped(like) if isinstance(like, nn.Module) else like
    if not isinstance(like, (nn.Module, Mapping)) or isinstance(like, PreparedModel):
        raise InputError(
            f"resize needs a smaller model, or its state dict, to follow, not {type(like).__name__}"
        )
    for given in (model, like):
        if isinstance(given, nn.Module):
            require_whole(given, "resize")
    trial = _resized(deep_copy(model), like)  # a failure leaves the model as it was
    if check and (example_inputs is not None or isinstance(like, nn.Module)):
        called, inputs = positional(
            trial, default_inputs(model) if example_inputs is None else example_inputs
        )
        _check(called, like, inputs)
    resized = _resized(model, like)
    if isinstance(like, nn.Module):
        note_cut(resized, cut_of(like))
    return resized


def _resized(model: Model, like: nn.Module | Mapping[str, Tensor]) -> Model:
    """Set the tensors, then the modules' stated sizes. A tensor that the smaller model lacks stays."""
    twins = dict(like.named_modules(remove_duplicate=False)) if isinstance(like, nn.Module) else {}
    values = dict(_tensors(like)) if isinstance(like, nn.Module) else like
    settle_named(model, values)
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
    kept: dict[int, Tensor | None] = {
        key: next((values[name] for name in same if name in values), None) for key, same in names.items()
    }
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if t.dim()}  # no counters
    missing = [name for name, tensor in state.items() if kept.get(id(tensor)) is None]
    if len(missing) == len(state) or (missing and not isinstance(like, nn.Module)):
        raise InputError(
            f"{type(model).__name__} is not what the smaller model was made from: {missing[0]!r} is not in it"
        )
    new: dict[int, Tensor] = {}
    for same in names.values():
        for name in same:
            path, _, attribute = name.rpartition(".")
            owner = model.get_submodule(path)
            old = getattr(owner, attribute)
            value = kept.get(id(old))
            if value is None:
                continue
            if id(old) not in new:
                fresh = value.detach().to(old.device, copy=True)
                new[id(old)] = (
                    nn.Parameter(fresh, old.requires_grad) if isinstance(old, nn.Parameter) else fresh
                )
            setattr(owner, attribute, new[id(old)])
    before = {path: _widths(module) for path, module in model.named_modules()}
    for path, module in model.named_modules():
        _set_fields(module, twins.get(path), path)
    now = {path: _widths(module) for path, module in model.named_modules()}
    widths: Widths = {}
    for path, was in before.items():
        is_now = now[path]
        if was is not None and is_now is not None:
            widths[path] = ((was[0], is_now[0]), (was[1], is_now[1]))
    for path, module in model.named_modules():
        if before[path] is None:
            for name in WIDTHS:
                if name in vars(module):
                    setattr(module, name, renumbered(name, vars(module)[name], widths, path))
    return model


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """The input and output channels that a layer states; None for another module."""
    for names in (("in_channels", "out_channels"), ("in_features", "out_features"), ("num_features",) * 2):
        if isinstance(module, _LAYERS) and all(hasattr(module, name) for name in names):
            return getattr(module, names[0]), getattr(module, names[1])
    return None


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _set_fields(module: nn.Module, twin: nn.Module | None, path: str) -> None:
    """Update a module's stated sizes; ``twin`` is the smaller model's module of the same name."""
    if type(twin) is type(module) and twin is not None:
        for name, value in vars(twin).items():
            if type(value) in _FIELDS and name != "training" and name in vars(module):
                setattr(module, name, value)
        return
    channels = getattr(module, "num_channels", None)
    if isinstance(module, nn.modules.conv._ConvNd) and twin is None and _is_ambiguous(module):
        raise InputError(
            f"how many groups {path!r} has is not in a state dict: give the smaller model itself"
        )
    resize_fields(module)
    if isinstance(module, nn.GroupNorm) and module.num_channels != channels:
        if not isinstance(twin, nn.GroupNorm):  # whole groups may have gone, or some channels of each
            raise InputError(
                f"how many groups {path!r} has is not in a state dict: give the smaller model itself"
            )
        module.num_groups = twin.num_groups


def _is_ambiguous(conv: nn.modules.conv._ConvNd) -> bool:
    """May a grouped convolution have lost either whole groups or the same outputs of each?"""
    first, second = conv.weight.shape[:2]
    sides = (
        (conv.in_channels, conv.out_channels) if conv.transposed else (conv.out_channels, conv.in_channels)
    )
    alike = second * conv.groups == sides[1] and first < sides[0]
    return 1 < conv.groups < conv.in_channels and alike and first % (sides[0] // conv.groups) == 0


def _check(model: nn.Module, like: nn.Module | Mapping[str, Tensor], inputs: tuple[Any, ...]) -> None:
    """Raise `InputError` if a model does not run, or computes something else than ``like``, in either mode.

    If they differ in train mode, compare them again with the modules that draw random numbers in eval mode.
    """
    inputs, compared = fitting(model, inputs), not isinstance(like, nn.Module)
    for training, images in ((False, OTHERS), (True, IMAGES)):
        if not isinstance(like, nn.Module):
            _run(model, like, inputs, training)
            continue
        example, expected = on_some(like, inputs, images, training)
        if expected is None:
            continue
        compared = True
        _run(model, like, example, training)
        mismatch = differs(like, model, example, training, expected, more=more_images(inputs))
        if mismatch is not None and training:
            drawing = _drawing(like, example) | _drawing(model, example)
            example, expected = on_some(like, inputs, images, training, drawing)
            if drawing and expected is not None:
                more = more_images(inputs)
                mismatch = differs(like, model, example, training, expected, more=more, but=drawing)
        if mismatch is not None:
            where = _first_difference(model, like, example)
            raise InputError(
                f"{type(model).__name__} computes something else at these widths than the smaller model, in "
                f"{'train' if training else 'eval'} mode: {mismatch}"
                + (f"; the first module that differs is {where!r}" if where else "")
                + f". {_reason(model, like, example, where)}"
            )
    if not compared:
        shapes = pytree.tree_map(lambda v: list(v.shape) if isinstance(v, Tensor) else v, inputs)
        warnings.warn(
            f"the smaller {type(like).__name__} does not run on the example inputs {shapes}, so that nothing shows "
            "whether the result is the same: give inputs that it takes, on its device.",
            stacklevel=3,
        )


_ADVICE = (
    " Use the graph that convert returns, or keep the layers there whole with PruningConfig(exclude=...)."
)


def _reason(model: nn.Module, like: nn.Module, inputs: tuple[Any, ...], where: str | None) -> str:
    """The likely cause and its cure: a module's option, weights that forward reads itself, or indexing."""
    ours, theirs = (dict(m.named_modules()) for m in (model, like))
    drawing = set[str]() if where else _drawing(model, inputs) | _drawing(like, inputs)
    for path in [where] if where else [path for path in ours if path in theirs and path not in drawing]:
        other = vars(theirs[path])
        for name, value in vars(ours[path]).items():
            if type(value) is float and type(other.get(name)) is float and value != other[name]:
                return (
                    f"{f'{path}.{name}'!r} is {value:g} here, and {other[name]:g} in the smaller model: make the "
                    "instance with the options of the model that was pruned."
                )
    called = outputs_of_modules(model, inputs).keys()
    for path, module in model.named_modules():
        if path and path not in called and isinstance(module, LAYERS):
            return (
                f"Forward computes with the weight of {path!r} itself: the smaller model may hold the result, which "
                f"forward would compute with once more.{_ADVICE}"
            )
    return (
        "Its forward takes channels by position or by their number, or this instance was made with other options "
        f"than the model that was pruned.{_ADVICE}"
    )


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls that draw random numbers."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _drawing(model: nn.Module, inputs: tuple[Any, ...]) -> set[str]:
    """The modules whose own forwards draw random numbers in train mode, or whose flags enable a draw."""
    paths, draws = set[str](), _Draws()  # type: ignore[no-untyped-call]
    calls = [[0, 0]]  # per open call: the draws before it; these plus the draws of calls inside

    def left(path: str) -> None:
        before, before_count = calls.pop()
        if draws.count > before_count:
            paths.add(path)
        calls[-1][1] += draws.count - before

    def seen(node: fx.Node, _: Any) -> None:
        if draws.count > calls[-1][1]:
            flags = {name for case in when[node] for name, _ in case} | {n.name for n in node.all_input_nodes}
            paths.update(path for name, path in modes.items() if name in flags)
        calls[-1][1] = draws.count

    hooks = []
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            hooks.append(module.register_forward_pre_hook(lambda _m, _i: calls.append([draws.count] * 2)))
            hooks.append(module.register_forward_hook(lambda _m, _i, _o, path=path: left(path)))
    try:
        with draws:
            if isinstance(model, fx.GraphModule):
                nodes = model.graph.nodes
                when = conditions(nodes)
                modes = {
                    n.name: str(n.target).rpartition(".")[0]
                    for n in nodes
                    if n.op == "get_attr" and is_flag(n)
                }
                run_watched(model, inputs, True, seen)
            else:
                outcome_or_none(model, inputs, True)
    finally:
        for hook in hooks:
            hook.remove()
    return paths


def _run(
    model: nn.Module, like: nn.Module | Mapping[str, Tensor], inputs: tuple[Any, ...], training: bool
) -> None:
    """Raise `InputError`, naming the innermost module and the line, if a model does not run."""
    try:
        with torch.no_grad(), in_mode(model, training), unchanged(model):
            model(*inputs)
    except Exception as error:
        paths = {id(module): path for path, module in model.named_modules()}
        inside = [
            paths[id(frame.f_locals["self"])]
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if id(frame.f_locals.get("self")) in paths
        ]
        where = (
            f"{inside[-1]!r} ({type(model.get_submodule(inside[-1])).__name__})"
            if any(inside[-1:])
            else "forward"
        )
        lines = [f for f in traceback.extract_tb(error.__traceback__)[1:] if not is_ours(f.filename)]
        line = (
            f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno}: {lines[-1].line})" if lines else ""
        )
        there = like.state_dict() if isinstance(like, nn.Module) else like
        gone = [name for name, tensor in model.state_dict().items() if name not in there and tensor.dim()]
        reason = (
            f"The smaller model has no {gone[0]!r}: it holds what forward computes from it, or was made from another "
            "model than this one"
            if gone
            else "Forward takes channels by number or position there"
        )
        raise InputError(
            f"{type(model).__name__} does not run at these widths: in {where}, "
            f"{first_line(error).rstrip('.')}{line}. {reason}.{_ADVICE}"
        ) from error


def _first_difference(model: nn.Module, like: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """The path of the first module that both call and whose output differs."""
    there, wrong = outputs_of_modules(like, inputs), None
    for path, output in outputs_of_modules(model, inputs).items():
        both = path in there and isinstance(output, Tensor) and isinstance(there[path], Tensor)
        if both and difference(Outcome([there[path]]), Outcome([output]), LOOSE) is not None:
            wrong = wrong or path
    return wrong
