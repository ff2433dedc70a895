"""Modules that write into their own buffers while they are traced are found, and called as they are.

A graph holds the writes of a forward. But where Python asks for a buffer's values, which are then fixed, tracing
itself runs them; so it does with tensors in plain attributes. Buffers of integers (counters) are not worth this: only
their values are restored.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from smcp_fx.errors import TraceError
from smcp_fx.tracing.example_runs import run_eager


class WritesBuffersError(TraceError):
    """The modules of these ``paths`` write into buffers."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        names = ", ".join(repr(path) if path else "the model itself" for path in sorted(paths))
        super().__init__(
            f"Buffers or plain tensors of {names} change in forward, which a graph would not do in the right mode. "
            "Move what changes them into a module of its own: it is then called as it is."
        )


class Buffers:
    """Buffers and plain tensors of a model before it is traced: forward may assign to them, or write into them."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (path, module, name, buffer, buffer.detach().clone())
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._plain = [
            (path, tensor, tensor._version, tensor.detach().clone())
            for path, module in model.named_modules()
            for tensor in vars(module).values()
            if isinstance(tensor, Tensor) and not tensor.is_inference()
        ]

    def restore(self) -> set[str]:
        """Put the values back, under whatever name; return the paths of the modules whose numbers had changed."""
        written = set()
        for path, module, name, buffer, value in self._held:
            same = bool(((buffer == value) | (value != value)).all())
            if dict(module._buffers.items()).get(name) is not buffer or not same:
                buffer.data.copy_(value)
                written |= {path} if buffer.is_floating_point() else set()
        for path, tensor, version, value in self._plain:
            if tensor._version != version:
                tensor.data.copy_(value)
                written |= {path} if tensor.is_floating_point() else set()
        return written


def fill_caches(model: nn.Module, inputs: tuple[Any, ...], paths: Collection[str]) -> bool:
    """Let modules fill what they fill in their first call for a size, and keep outside the state dict; did any?

    What another call fills again is no cache, and stays as it was.
    """
    caches = [
        (module, name)
        for module in map(model.get_submodule, paths)
        for name in module._non_persistent_buffers_set & module._buffers.keys()
    ]

    def run(*given: Any) -> list[Tensor | None]:
        model(*given)
        return [module._buffers[name] for module, name in caches]

    def put(values: list[Tensor | None]) -> None:
        for (module, name), value in zip(caches, values, strict=True):
            module._buffers[name] = value

    before = [module._buffers[name] for module, name in caches]
    first: list[Tensor | None] = run_eager(model, inputs, run)
    put(first)
    again = run_eager(model, inputs, run)
    steady = all(one is other for one, other in zip(first, again, strict=True))
    if not steady:
        put(before)
    return steady and any(one is not other for one, other in zip(first, before, strict=True))


def keep_in_state(model: nn.Module, traced: nn.Module) -> None:
    """Add to the graph's module the parameters and buffers that the graph does not read, as of branches not taken.

    The state dict keeps its keys, so that checkpoints of the original load, and those of the graph load there; and
    parameters keep their order, by which optimisers' state dicts and averages of weights know them. A module that
    stands in several places does so here, and follows the `eval()` of each.
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
        known = dict(traced.named_modules(remove_duplicate=False)) if len(paths) > 1 else {}
        there = [path for path in paths if path in known]
        for path in paths if there else ():
            if path not in known:
                _owner(traced, path).add_module(path.rpartition(".")[2], known[there[0]])


def _keep_order(model: nn.Module, traced: nn.Module) -> None:
    """Register in the model's order what both hold; the rest comes after it."""
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
    """Return the module that holds what has this name; it is made where there is none."""
    owner = traced
    for part in name.split(".")[:-1]:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    return owner
