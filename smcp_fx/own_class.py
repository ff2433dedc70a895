"""A smaller network in the class that it came from: widths and weights given to the class's own modules."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from smcp_fx.errors import InputError
from smcp_fx.kept_channels import WIDTHS, Widths, cut_of, note_cut, renumbered
from smcp_fx.outcomes import LOOSE, Outcome, difference, differs, fitting, in_mode
from smcp_fx.passes.slice_channels import resize_fields
from smcp_fx.prepared import PreparedModel
from smcp_fx.proof import IMAGES, OTHERS, more_images, on_some
from smcp_fx.tracing.copying import deep_copy
from smcp_fx.tracing.example_inputs import as_inputs, default_inputs
from smcp_fx.tracing.example_runs import first_line, unchanged
from smcp_fx.tracing.own_weights import settle_named

Model = TypeVar("Model", bound=nn.Module)

_LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase)
#: What modules say of their sizes, besides what their weights' shapes say.
_FIELDS = (int, tuple, torch.Size)


def resize(
    model: Model,
    like: nn.Module | Mapping[str, Tensor],
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    *,
    check: bool = True,
) -> Model:
    """Give a model the widths and weights of a smaller one of its kind, in place, and return it.

    The model keeps its class, methods and other attributes; numbers that these hold of widths stay what they were.

    Args:
        model: the original, or a fresh instance of its class.
        like: what `convert`, `compress` or `load` returned, or the state dict of such a model.
        example_inputs: as for `prepare`.
        check: run the model on them first, with two numbers of images, in train and eval mode, and hold it against
            ``like``. A state dict has nothing to be held against: the model is run if ``example_inputs`` are given.

    Raises `InputError`, and leaves the model as it was, where the class does not run at these widths or computes
    something else: where its forward holds numbers of channels, or moves channels by position.
    """
    if not isinstance(model, nn.Module) or isinstance(model, PreparedModel):
        raise InputError(f"resize needs a model of your own class, not {type(model).__name__}")
    if not isinstance(like, (nn.Module, Mapping)) or isinstance(like, PreparedModel):
        raise InputError(
            f"resize needs a smaller model, or its state dict, to follow, not {type(like).__name__}"
        )
    trial = _resized(deep_copy(model), like)  # what fails leaves the model as it was
    if check and (example_inputs is not None or isinstance(like, nn.Module)):
        inputs = default_inputs(model) if example_inputs is None else as_inputs(example_inputs, model)
        _check(trial, like, inputs)
    resized = _resized(model, like)
    if isinstance(like, nn.Module):
        note_cut(resized, cut_of(like))
    return resized


def _resized(model: Model, like: nn.Module | Mapping[str, Tensor]) -> Model:
    """Set the tensors, then what modules say of their sizes. Nothing is changed where a tensor is missing."""
    twins = dict(like.named_modules(remove_duplicate=False)) if isinstance(like, nn.Module) else {}
    values = dict(_tensors(like)) if isinstance(like, nn.Module) else like
    settle_named(model, values)
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
    found: dict[int, Tensor | None] = {
        key: next((values[name] for name in same if name in values), None) for key, same in names.items()
    }
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if t.dim()}  # no counters
    missing = [name for name, tensor in state.items() if found.get(id(tensor)) is None]
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
            value = found.get(id(old))
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
    """The channels that a layer says it reads and writes; None for another module."""
    for names in (("in_channels", "out_channels"), ("in_features", "out_features"), ("num_features",) * 2):
        if isinstance(module, _LAYERS) and all(hasattr(module, name) for name in names):
            return getattr(module, names[0]), getattr(module, names[1])
    return None


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _set_fields(module: nn.Module, twin: nn.Module | None, path: str) -> None:
    """Make a module say the sizes that it has now; ``twin`` is the smaller model's of the same name."""
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
    """Has a grouped convolution lost whole groups, or the same outputs of each?"""
    first, second = conv.weight.shape[:2]
    sides = (
        (conv.in_channels, conv.out_channels) if conv.transposed else (conv.out_channels, conv.in_channels)
    )
    alike = second * conv.groups == sides[1] and first < sides[0]
    return 1 < conv.groups < conv.in_channels and alike and first % (sides[0] // conv.groups) == 0


def _check(model: nn.Module, like: nn.Module | Mapping[str, Tensor], inputs: tuple[Any, ...]) -> None:
    """Raise `InputError` where a model does not run, or does not compute what ``like`` does."""
    inputs = fitting(model, inputs)
    for training, images in ((True, IMAGES), (False, OTHERS)):
        if not isinstance(like, nn.Module):
            _run(model, inputs, training)
            continue
        given, expected = on_some(like, inputs, images, training)
        if expected is None:
            continue
        _run(model, given, training)
        what = differs(like, model, given, training, expected, more=more_images(inputs))
        if what is not None:
            where = _first_difference(model, like, given)
            raise InputError(
                f"{type(model).__name__} computes something else at these widths than the smaller model: {what}"
                + (f"; the first module that differs is {where!r}" if where else "")
                + f".{_ADVICE}"
            )


_ADVICE = (
    " Its forward takes channels by number: use the graph that convert returns, or keep the layer there with "
    "PruningConfig(exclude=...)."
)


def _run(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> None:
    """Raise `InputError`, naming the innermost module, where a model does not run."""
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
        why = first_line(error).rstrip(".")
        raise InputError(
            f"{type(model).__name__} does not run at these widths: in {where}, {why}.{_ADVICE}"
        ) from error


def _first_difference(model: nn.Module, like: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """The path of the first module that both call and whose output differs."""
    there, wrong = _outputs(like, inputs), None
    for path, output in _outputs(model, inputs).items():
        if path in there and difference(Outcome([there[path]]), Outcome([output]), LOOSE) is not None:
            wrong = wrong or path
    return wrong


def _outputs(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def note(path: str, output: Any) -> None:
        if isinstance(output, Tensor):
            found.setdefault(path, output.detach().clone())

    hooks = [
        module.register_forward_hook(lambda _m, _i, output, path=path: note(path, output))
        for path, module in model.named_modules()
        if path and not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        with torch.no_grad(), in_mode(model, False), unchanged(model):
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found
