"""The keys of a graph's state dict are the model's, in the model's order."""

from __future__ import annotations

from torch import nn


def keep_in_state(model: nn.Module, traced: nn.Module) -> None:
    """Add the parameters and buffers that the graph does not read (of branches not taken) to its module.

    The state dict keeps its keys, so that checkpoints load both ways between original and graph. Parameters
    keep their order, by which optimisers' state dicts and weight averages identify them. A module that the
    model holds in several places is in the same places here, and follows the `eval()` of each.
    """
    _keep_places(model, traced)
    have = set(traced.state_dict())
    for name in model.state_dict(keep_vars=True):
        if name in have:
            continue
        path, _, attribute = name.rpartition(".")
        source = model.get_submodule(path)
        owner = _owner(traced, name)
        if attribute in source._parameters:
            owner.register_parameter(attribute, source._parameters[attribute])
        elif attribute in source._buffers:
            owner.register_buffer(attribute, source._buffers[attribute])
    _keep_order(model, traced)


def _keep_places(model: nn.Module, traced: nn.Module) -> None:
    places: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(path)
    for paths in places.values():
        modules = dict(traced.named_modules(remove_duplicate=False)) if len(paths) > 1 else {}
        there = [path for path in paths if path in modules]
        for path in paths if there else ():
            if path not in modules:
                _owner(traced, path).add_module(path.rpartition(".")[2], modules[there[0]])


def _keep_order(model: nn.Module, traced: nn.Module) -> None:
    """Register the parts that both hold in the model's order, and the others after them."""
    originals = dict(model.named_modules(remove_duplicate=False))
    for path, module in list(traced.named_modules(remove_duplicate=False)):
        original = originals.get(path, module)
        if original is module:
            continue
        for table in ("_modules", "_parameters", "_buffers"):
            parts, held = dict(getattr(module, table)), getattr(module, table)
            held.clear()
            held.update({name: parts[name] for name in (*getattr(original, table), *parts) if name in parts})


def _owner(traced: nn.Module, name: str) -> nn.Module:
    """Return the module that holds the part of this name; make it if there is none."""
    owner = traced
    for part in name.split(".")[:-1]:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    return owner
