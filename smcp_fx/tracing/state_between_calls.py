"""Does a call of a model change what the next one computes? A graph would repeat the first call.

    self.steps += 1; if self.steps > 1000: ...           a number that decides what is computed
    self.state = 0.9 * self.state + x                     a tensor in a plain attribute that the next call reads
    if not self.ready: self.scale.data.copy_(1 / x.std()) what the first call alone does (ActNorm, quantisers)
    if self.mean.sum() == 0: self.mean += x.mean()        a buffer that tracing writes into: Python asks for values

Modules that do so are called as they are. A cache for inputs of one size is no such state: it is `forgotten`
while the model is traced, so that the graph computes it in every call, for every size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.tracing.aliases import memory_of_model
from smcp_fx.tracing.attributes import Attribute, flags_of, numbers_of
from smcp_fx.tracing.example_runs import run_eager, same_values, unchanged
from smcp_fx.tracing.operations import writes_in_place
from smcp_fx.tracing.same_draws import same_draws
from smcp_fx.tracing.sentences import listed_paths
from smcp_fx.tracing.trees import leaves_of

WRITES = "writes into its own buffers"
COUNTS = "counts its calls"
RECALLS = "keeps tensors from one call for the next"
INITIALISES = "initialises itself in its first call: let the model see a batch in train mode, then prepare it"

#: Added to a number, to see whether it changes a later call. Chosen, not measured.
_LATER = 10**6
#: Attributes that every module has.
_OWN = frozenset(vars(nn.Module()))


class StateError(TraceError):
    """A call of the modules of these ``paths`` changes what the next one computes; ``why`` is one of those above."""

    def __init__(self, paths: set[str], why: str) -> None:
        self.paths, self.why = paths, why
        names = listed_paths(sorted(paths - {""})) if paths - {""} else "the model itself"
        super().__init__(
            f"{names} {why}. A graph would repeat the first call. Register what it keeps as buffers, or move what "
            "changes it into a module of its own: it is then called as it is."
        )


class State:
    """A model's state before it is traced; ``set_modes`` sets the modes of the trace.

    Call `note` after the trace, `restore` in any case, then `check`.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], set_modes: Callable[[], None]) -> None:
        self._model, self._inputs, self._set_modes = model, inputs, set_modes
        self._buffers = [
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
        self._numbers, self._flags = numbers_of(model), flags_of(model)
        self._written: set[str] = set()
        self._kept, self._counted, self._raised = set[Attribute](), set[Attribute](), set[Attribute]()

    def note(self, graph: fx.Graph) -> None:
        """Record the trace's changes to attributes."""
        model = self._model
        self._kept = {
            (module, name)
            for module in model.modules()
            for name, value in vars(module).items()
            if name not in _OWN
            and name not in module._buffers
            and any(isinstance(leaf, Proxy) for leaf in leaves_of(value))
        }
        self._counted = {key for key, value in numbers_of(model).items() if self._numbers.get(key) != value}
        raised = {key for key, value in flags_of(model).items() if self._flags.get(key, value) != value}
        if raised:  # of modules into whose parameters or buffers the graph writes
            memory = memory_of_model(model, graph)
            written = {
                model.get_submodule(memory[node.args[0]].rpartition(".")[0])
                for node in graph.nodes
                if node.args and node.args[0] in memory and writes_in_place(node, model)
            }
            self._raised = {key for key in raised if key[0] in written}

    def restore(self) -> None:
        """Restore the values of buffers and plain tensors; record changed ones that are no integers."""
        for path, module, name, buffer, value in self._buffers:
            same = bool(((buffer == value) | (value != value)).all())
            if dict(module._buffers.items()).get(name) is not buffer or not same:
                buffer.data.copy_(value)
                self._written |= {path} if buffer.is_floating_point() else set()
        for path, tensor, version, value in self._plain:
            if tensor._version != version:
                tensor.data.copy_(value)
                self._written |= {path} if tensor.is_floating_point() else set()

    def check(self) -> set[Attribute]:
        """Raise `StateError` if a later call differs; return the numbers that count calls, which may change one."""
        if self._written:
            raise StateError(self._written, WRITES)
        first, second, third = self._in_two_calls() if self._counted or self._raised else ({}, {}, {})
        once = {k for k in self._raised if first.get(k) != second.get(k) and second.get(k) == third.get(k)}
        if once:
            raise StateError(self._paths(once), INITIALISES)
        if self._kept and (recalled := self._recalled()):
            raise StateError(self._paths(recalled), RECALLS)
        return {k for k in self._counted if first.get(k) != second.get(k) and second.get(k) != third.get(k)}

    def count_on(self, counters: Collection[Attribute]) -> None:
        """Set these numbers to their values after many calls."""
        for module, name in counters:
            vars(module)[name] = self._numbers.get((module, name), 0) + _LATER

    def depends_on(self, counters: Collection[Attribute]) -> StateError:
        """Return the error for numbers that change the computation."""
        return StateError(self._paths(counters), COUNTS)

    def _paths(self, attributes: Collection[Attribute]) -> set[str]:
        owners = {module for module, _ in attributes}
        return {path for path, module in self._model.named_modules() if module in owners}

    def _in_two_calls(self) -> list[dict[Attribute, Any]]:
        """Numbers and flags before a call, after it and after a second; no change if the model refuses the mode."""
        states = [numbers_of(self._model) | flags_of(self._model)]
        with unchanged(self._model), torch.no_grad():
            self._set_modes()
            try:
                for _ in range(2):
                    self._model(*_cloned(self._inputs))
                    states.append(numbers_of(self._model) | flags_of(self._model))
            except Exception:  # the trace itself reports a model that refuses its example in this mode
                return states[:1] * 3
        return states

    def _recalled(self) -> set[Attribute]:
        """The attributes that hold traced values and change the outputs of the next call."""
        try:
            first, held = self._call({})
            if same_values(first, self._call(held)[0]):
                return set()
            guilty = {
                key for key, value in held.items() if not same_values(first, self._call({key: value})[0])
            }
            return guilty or set(held)
        except Exception:  # it refuses the example in this mode
            return set()

    def _call(self, state: Mapping[Attribute, Any]) -> tuple[Any, dict[Attribute, Any]]:
        """The outputs with these attributes, and the attributes after the call."""
        with unchanged(self._model), same_draws(), torch.no_grad():
            self._set_modes()
            for (module, name), value in state.items():
                vars(module)[name] = value
            # In new containers: a dict that the model keeps is emptied again.
            outputs = pytree.tree_map(lambda v: v, self._model(*_cloned(self._inputs)))
            return outputs, _cloned({k: vars(k[0])[k[1]] for k in self._kept if k[1] in vars(k[0])})


def _cloned(tree: Any) -> Any:
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, tree)


# ---- what is kept for inputs of one size ------------------------------------------------------------------------


@contextmanager
def forgotten(model: nn.Module, inputs: tuple[Any, ...], expected: Any) -> Iterator[None]:
    """Remove attributes that the forward fills in again with the same outputs; they are restored at the end."""
    kept = [(module, name, vars(module)[name]) for module in model.modules() for name in _caches(module)]
    try:
        for module, name, _ in kept:
            _forget_if_refilled(model, module, name, inputs, expected)
        yield
    finally:
        for module, name, value in kept:
            vars(module)[name] = value


def _caches(module: nn.Module) -> list[str]:
    """The attributes that may hold, or identify, cached values: only if any tensor or size is cached."""
    if module._forward_pre_hooks:  # values of hooks (weight norm, pruning) are no cache of the forward
        return []
    plain = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (Tensor, torch.Size)) or _is_sizes(value)
    }
    worth = any(not _is_sizes(value) or isinstance(value, torch.Size) for value in plain.values())
    return sorted(plain, key=lambda name: isinstance(plain[name], Tensor)) if worth else []


def _is_sizes(value: Any) -> bool:
    """Is it a size, or sizes of several maps?"""
    return (
        isinstance(value, (tuple, list))
        and bool(value)
        and all(type(size) is int or _is_sizes(size) for size in value)
    )


def _forget_if_refilled(
    model: nn.Module, module: nn.Module, name: str, inputs: tuple[Any, ...], expected: Any
) -> None:
    """Remove one attribute, unless the forward needs it or does not set it again."""
    held = vars(module)[name]
    seen: list[Any] = []

    def run(*args: Any) -> Any:
        output = model(*args)
        seen.append(vars(module).get(name))
        return output

    if hasattr(type(module), name):  # the class's value, before any forward
        del vars(module)[name]
    else:
        vars(module)[name] = None
    try:
        same = same_values(expected, run_eager(model, inputs, run)) and same_values(held, seen[0])
    except Exception:  # without it, the forward may fail in any way
        same = False
    if not same:
        vars(module)[name] = held


def fill_caches(model: nn.Module, inputs: tuple[Any, ...], paths: Collection[str]) -> bool:
    """Let modules fill the non-persistent buffers that their first call replaces; return whether any did.

    If a second call replaces one again, they are no caches, and all stay as they were.
    """
    caches = [
        (module, name)
        for module in map(model.get_submodule, paths)
        for name in module._non_persistent_buffers_set & module._buffers.keys()
    ]

    def run(*args: Any) -> list[Tensor | None]:
        model(*args)
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
