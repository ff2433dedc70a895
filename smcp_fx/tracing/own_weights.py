"""Weights that a layer computes from its own parameters before it runs: parametrisations, and normalising hooks.

before   conv(x)     after   weight = conv.parametrizations.weight();   conv2d(x, weight, conv.bias)     parametrised
                             weight = own_weight(conv, "weight");       conv2d(x, weight, conv.bias)     by a hook

The computation of the weight runs as before, in each mode (spectral norm takes a step in training); the layer itself
becomes a call of its function.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm

from smcp_fx.tracing.constant_values import overwritten

LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip
_LISTS = ".parametrizations."
_OTHER_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def own_weight(module: nn.Module, name: str) -> Tensor:
    """The weight of this name that a hook of the module computes from its parameters."""
    hook: Any = next(hook for hook in module._forward_pre_hooks.values() if _name(hook) == name)
    if isinstance(hook, BasePruningMethod):
        return hook.apply_mask(module)  # type: ignore[no-any-return, no-untyped-call]
    if isinstance(hook, SpectralNorm):
        return hook.compute_weight(module, do_power_iteration=module.training)
    return hook.compute_weight(module)  # type: ignore[no-any-return]


def computed_by_hooks(module: nn.Module) -> list[str]:
    """The names of the weights that hooks of a layer compute; none if hooks do anything else."""
    hooks = [*module._forward_pre_hooks.values()]
    others = module._forward_hooks or module._forward_pre_hooks_with_kwargs
    only_norms = not others and all(map(_name, hooks))
    names = [_name(hook) for hook in hooks]
    held = all(
        name not in module._parameters and isinstance(vars(module).get(name), Tensor) for name in names
    )
    return names if only_norms and held and isinstance(module, LAYERS) else []


def _name(hook: Any) -> str:
    """The name of the weight that a hook computes; empty for another hook."""
    if isinstance(hook, BasePruningMethod):
        return str(hook._tensor_name)
    return str(getattr(hook, "name", "")) if callable(getattr(hook, "compute_weight", None)) else ""


def has_hooks(module: nn.Module) -> bool:
    """Does a call of the module run hooks other than those that compute its weights (which the graph does itself)?"""
    held = module.__dict__
    return any(held[kind] for kind in _OTHER_HOOKS) or not all(
        map(_name, held["_forward_pre_hooks"].values())
    )


def is_parametrised_layer(module: nn.Module) -> bool:
    """Is it a layer whose weight or bias has parametrisations, without hooks?"""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return isinstance(module, LAYERS) and parametrize.is_parametrized(module) and not hooked


def owner_of(node: fx.Node) -> str | None:
    """The name of the weight that the node computes, if a layer computes it from its own parameters."""
    if node.op == "call_module" and _LISTS in str(node.target):
        return str(node.target).replace(_LISTS, ".")
    owner: Any = node.args[0] if node.target in (own_weight, overwritten) else None
    if node.target is overwritten:
        return str(owner.target)
    return f"{owner.target}.{node.args[1]}" if isinstance(owner, fx.Node) else None


def settle_named(model: nn.Module, names: Container[str]) -> None:
    """Turn the computed weights that have one of these names into parameters of their layers."""
    for path, module in [*model.named_modules()]:
        lists = getattr(module, "parametrizations", {}) if parametrize.is_parametrized(module) else {}
        for name in [*lists, *computed_by_hooks(module)]:
            if (f"{path}.{name}" if path else name) in names:
                value = getattr(module, name) if name in lists else own_weight(module, name)
                settle(module, name, nn.Parameter(value.detach().clone()))


def settle(module: nn.Module, name: str, value: nn.Parameter) -> None:
    """Make the value the module's parameter of this name, and remove the hook or parametrisation."""
    lists = module._modules.get("parametrizations")
    if lists is not None and name in lists._modules:
        _end_parametrisation(module, lists, name)
    for hooks in (module._forward_pre_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            inner: Any = getattr(hook, "hook", hook)  # the hook's part in saving and loading state dicts
            if name in (_name(inner), _name(getattr(inner, "fn", None))):
                del hooks[key]
    vars(module).pop(name, None)
    module._buffers.pop(name, None)
    module.register_parameter(name, value)


def _end_parametrisation(module: nn.Module, lists: nn.Module, name: str) -> None:
    """Remove a parametrisation as torch does, but never edit the class, which copies of the module share."""
    injected = parametrize.is_parametrized(module)  # a graph's module only holds tensors that the graph reads
    before = parametrize.type_before_parametrizations(module)
    del lists._modules[name]
    if not lists._modules:
        del module._modules["parametrizations"]
    if injected:
        module.__class__ = before
        if lists._modules:
            parametrize._inject_new_class(module)
            for other in lists._modules:
                parametrize._inject_property(module, other)


def forward_with_weight(module: nn.Module, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` with another tensor in place of its ``weight``."""
    kind = type(module) if not has_hooks(module) else None  # hooks need a call of the module
    args = args or (kwargs.pop("input"),)
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return module._conv_forward(args[0], weight, module.bias)  # type: ignore[operator]
    if kind is nn.Linear:
        return F.linear(args[0], weight, module.bias)  # type: ignore[arg-type]
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and _is_usual(module):
        return _batch_norm(module, weight, args[0])
    return torch.func.functional_call(module, {"weight": weight}, args, kwargs)


def _is_usual(norm: Any) -> bool:
    return norm.track_running_stats and norm.running_mean is not None and norm.momentum is not None


def _batch_norm(norm: Any, weight: Tensor, x: Tensor) -> Tensor:
    """Run a usual batch norm's forward without the cost of `functional_call`."""
    norm._check_input_dim(x)
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    statistics = norm.running_mean, norm.running_var
    return F.batch_norm(x, *statistics, weight, norm.bias, norm.training, norm.momentum, norm.eps)
