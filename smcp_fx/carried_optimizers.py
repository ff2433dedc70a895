"""Carries an optimiser over to a smaller model: its options, and its state for the kept channels."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smcp_fx.errors import InputError
from smcp_fx.interface.wrapping import unwrapped
from smcp_fx.kept_channels import cut_of
from smcp_fx.pruning.loop_watch import tell
from smcp_fx.tracing.sentences import listed_paths

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def carry_optimizer(optimizer: AnyOptimizer, model: nn.Module, smaller: nn.Module) -> AnyOptimizer:
    """Return an optimiser over the smaller model's parameters that continues where this one is.

    Its class, groups and options are the same; momentum, moments and other tensors of a parameter's shape are cut as
    the parameter was, and numbers (``step``) are copied. Nothing is shared with ``optimizer``, which stays as it was.

    Args:
        optimizer: over the parameters of ``model``, all or some; others (of a loss, say) stay in their groups.
        model: the model that it trained: the prepared one, or the original.
        smaller: the result of `convert` (with or without ``into``), `compress` or `resize`.

    A weight that was computed from parameters (weight norm) is a parameter now: it joins their group, without
    state. A scaled batch norm keeps the state of the unscaled weight. Make learning-rate schedulers anew. If
    the optimiser keeps another kind of state at a parameter's new shape (Adafactor's rows and columns below
    some size), the parameter starts without state, and a `TrainingWarning` names it.

    Raises `InputError` for optimisers of other models, for models that were loaded from a file, and for state that is
    of no parameter's shape.
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"carry_optimizer needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    for side in (model, smaller):
        if not isinstance(side, nn.Module):
            raise InputError(f"carry_optimizer needs two models, not {type(side).__name__}")
    model, smaller = unwrapped(model), unwrapped(smaller)
    cut = cut_of(smaller)
    if cut is None:
        raise InputError(
            f"nothing says which channels {type(smaller).__name__} kept: give what convert, compress or resize "
            "returned, before it is saved; a loaded model knows no more"
        )
    names: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(path)
    there = dict(smaller.named_parameters(remove_duplicate=False))
    groups: list[dict[str, Any]] = []
    state: dict[Tensor, dict[str, Any]] = {}
    gone: list[tuple[str, int]] = []  # with the number of its group
    for group in optimizer.param_groups:
        kept: list[tuple[str, Tensor]] = []
        for index, old in enumerate(group["params"]):
            mine = names.get(id(old))
            name = next((one for one in mine or () if one in there), None)
            if mine is not None and name is None:
                gone.append((mine[0], len(groups)))
                continue
            new = old if name is None else there[name]
            dims: Mapping[int, Tensor] = next((cut[one] for one in mine or () if one in cut), {})
            if name is not None and tuple(new.shape) != _shape(old, dims):
                raise InputError(
                    f"{name!r} has shape {tuple(new.shape)}, which is not what was kept of {tuple(old.shape)}: give "
                    "the model that the smaller one was made of"
                )
            kept.append((group["param_names"][index] if "param_names" in group else "", new))
            if old in optimizer.state:
                moments = optimizer.state[old]
                state[new] = {
                    key: _carried(value, old, new, dims, f"{key!r} of {name!r}")
                    for key, value in moments.items()
                }
        groups.append({**{k: copy.deepcopy(v) for k, v in group.items() if k != "params"}, "params": kept})
    if not any(id(old) in names for group in optimizer.param_groups for old in group["params"]):
        raise InputError(
            f"the optimiser holds no parameter of {type(model).__name__}: give the model that it was made for"
        )
    named = {name for mine in names.values() for name in mine}
    for path, parameter in smaller.named_parameters():
        if path not in named and gone:
            nearest = max(gone, key=lambda one: _together(one[0], path))
            groups[nearest[1]]["params"].append((path, parameter))
    made = _made(optimizer, groups)
    begun = _begun(made) if state else {}
    anew = [new for new in state if not _fits(state[new], begun.get(new, {}))]
    if anew:
        paths: dict[Tensor, str] = {parameter: path for path, parameter in smaller.named_parameters()}
        tell(
            f"{type(made).__name__} begins anew for {len(anew)} of {len(state)} parameters, as at their new shapes "
            f"it keeps another kind of state: {listed_paths([paths.get(new, 'another') for new in anew])}"
        )
    dropped = set(anew)
    made.state.update({new: moments for new, moments in state.items() if new not in dropped})
    return made


def _shape(old: Tensor, dims: Mapping[int, Tensor]) -> tuple[int, ...]:
    return tuple(dims[dim].numel() if dim in dims else size for dim, size in enumerate(old.shape))


def _carried(value: Any, old: Tensor, new: Tensor, dims: Mapping[int, Tensor], name: str) -> Any:
    """One entry of a parameter's state, cut to the parameter's new shape."""
    if not isinstance(value, Tensor):
        if any(isinstance(part, Tensor) and part.dim() for part in torch.utils._pytree.tree_leaves(value)):
            raise InputError(f"the optimiser's {name} holds tensors of other shapes: start a new one")
        return copy.deepcopy(value)
    if value.dim() == 0 or (value.numel() == 1 and old.numel() != 1):
        return value.detach().clone()
    if value.dim() != old.dim() or any(a not in (1, b) for a, b in zip(value.shape, old.shape, strict=True)):
        raise InputError(
            f"the optimiser's {name}, of shape {tuple(value.shape)}, is not of the parameter's, {tuple(old.shape)}, "
            "and cannot be cut: start a new one"
        )
    for dim, positions in dims.items():
        if value.shape[dim] == old.shape[dim]:
            value = value.index_select(dim, positions.to(value.device))
    if value.shape != new.shape:  # a statistic of rows or columns
        return value.detach().clone()
    return torch.empty_like(new, dtype=value.dtype, device=value.device).copy_(value)


def _together(one: str, other: str) -> int:
    """How many modules hold both parameters."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), 0)


def _begun(made: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state after a first step with zero gradients, by parameter; {} if the step needs more."""
    try:
        trial = copy.deepcopy(made)
        places = [
            pair
            for own, tried in zip(made.param_groups, trial.param_groups, strict=True)
            for pair in zip(own["params"], tried["params"], strict=True)
        ]
        for _, tried in places:
            tried.grad = torch.zeros_like(tried)
        with torch.random.fork_rng(devices=[]):
            trial.step()
    except Exception:  # the step may need a closure, or sparse gradients
        return {}
    return {own: trial.state[tried] for own, tried in places}


def _fits(found: Mapping[str, Any], begun: Mapping[str, Any]) -> bool:
    """Does a parameter's state hold every entry that the optimiser begins with, in its shape?"""
    return all(
        key in found
        and (
            not isinstance(value, Tensor)
            or value.dim() == 0
            or getattr(found[key], "shape", ()) == value.shape
        )
        for key, value in begun.items()
    )


def _made(optimizer: AnyOptimizer, groups: list[dict[str, Any]]) -> AnyOptimizer:
    """An optimiser of the same class, without state."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    for group in groups:
        if group.pop("param_names", None) is None:
            group["params"] = [parameter for _, parameter in group["params"]]
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    try:
        made = kind(groups, **options)
    except Exception as error:
        raise InputError(
            f"{kind.__name__} cannot be made anew from its groups and defaults ({error}): make one for the smaller "
            "model yourself"
        ) from error
    made.defaults = copy.deepcopy(optimizer.defaults)
    made.state.clear()
    return made
