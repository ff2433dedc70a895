"""Find the largest submodules of a model that can be traced, as the example inputs call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import InputError, SmcpError, TraceError
from smcp_fx.tracing.call_forms import is_constant, is_default, parameters_of
from smcp_fx.tracing.example_runs import run_eager, same_values
from smcp_fx.tracing.tracer import Traced, trace


@dataclass(frozen=True)
class Form:
    """How a module is called: the structure of its arguments, and the arguments that are not tensors."""

    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]

    def tensors(self, leaves: list[Any]) -> list[Tensor]:
        """The tensors among the flattened arguments."""
        fixed = {place for place, _ in self.constants}
        return [leaf for place, leaf in enumerate(leaves) if place not in fixed]

    def rebuild(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these tensors in place of the original ones."""
        rest, fixed = iter(tensors), dict(self.constants)
        count = self.structure.num_leaves
        leaves = [fixed[place] if place in fixed else next(rest) for place in range(count)]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


@dataclass(frozen=True)
class Region:
    """A submodule that runs as a graph.

    ``output`` is the structure of what it returns; None if that differs between ``train()`` and ``eval()``.
    ``graph`` is its trace, with a placeholder for each tensor; modules and tensors have their paths in the model.
    """

    path: str
    form: Form
    output: pytree.TreeSpec | None
    graph: fx.Graph
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """The regions in the order of their first calls, and why other modules could not be traced: {path: why}."""

    regions: tuple[Region, ...]
    stopped: dict[str, str]


@dataclass
class CallSeen:
    """One call of a module in the example run: its arguments flattened (tensors copied), and its output."""

    leaves: list[Any]
    structure: pytree.TreeSpec
    output: Any = None
    autocast: bool = False


def bound_arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments as ``forward`` sees them, however they are passed: ``(args, kwargs)`` with defaults."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return tuple(args), dict(kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def find_regions(
    model: nn.Module, inputs: tuple[Any, ...], leaves: tuple[str, ...] = (), why: str = ""
) -> Split:
    """Split a model that cannot be traced as a whole; ``why`` is the error.

    Modules named in ``leaves`` stay as they are, and so do modules without a weight of two or more dimensions, which
    hold nothing to prune. The model is run once per level of the module tree, in eval mode.
    """
    stopped = {"": why}
    regions: dict[str, Region] = {}
    frontier = _children(model, "")
    seen: set[int] = set()
    while frontier:
        modules = {path: model.get_submodule(path) for path in frontier}
        calls = _calls(model, inputs, modules)
        frontier = []
        for path, module in modules.items():
            if id(module) in seen or path in leaves or not _has_weights(module):
                continue
            seen.add(id(module))
            if calls[path]:
                try:
                    regions[path] = _trace_region(model, path, calls[path], leaves)
                    continue
                except Exception as error:  # whatever it is, its submodules may be traceable
                    stopped[path] = str(error)
            frontier += _children(module, path)
    return Split(tuple(_unshared(model, regions, stopped)), stopped)


def _children(module: nn.Module, path: str) -> list[str]:
    parts = (
        (name, part) for name, part in module.named_children() if not isinstance(part, torch.jit.ScriptModule)
    )
    return [f"{path}.{name}" if path else name for name, _ in parts]


def _has_weights(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _unshared(model: nn.Module, regions: dict[str, Region], stopped: dict[str, str]) -> Iterator[Region]:
    """The regions that share no weights with modules outside: shared weights could not be sliced."""
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = next((path for path in regions if name.startswith(path + ".")), "")
        owners.setdefault(id(parameter), set()).add(home)
    shared = {home for homes in owners.values() if "" in homes for home in homes}
    for path, region in regions.items():
        if path in shared:
            stopped[path] = "it shares weights with a module that is not traced"
        else:
            yield region


def _calls(
    model: nn.Module, inputs: tuple[Any, ...], modules: dict[str, nn.Module]
) -> dict[str, list[CallSeen]]:
    """Run the model and return the calls of each of the modules."""
    calls: dict[str, list[CallSeen]] = {path: [] for path in modules}
    outside = _autocast()

    def enter(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, structure = pytree.tree_flatten(bound_arguments(module.forward, args, kwargs))
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        calls[path].append(CallSeen(copies, structure, autocast=_autocast() != outside))

    def leave(path: str, module: nn.Module, output: Any) -> None:
        # The output may be changed in place later.
        calls[path][-1].output = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, output)

    with watched(modules, enter, leave):
        run_eager(model, inputs)
    return calls


def _autocast() -> list[bool]:
    return [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]


@contextmanager
def watched(
    modules: dict[str, nn.Module],
    enter: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[[str, nn.Module, Any], None],
) -> Iterator[None]:
    """Call ``enter`` before and ``leave`` after each call of the modules."""
    with ExitStack() as stack:
        for path, module in modules.items():

            def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                enter(path, module, args, kwargs)

            def after(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                leave(path, module, output)

            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


def _trace_region(model: nn.Module, path: str, calls: list[CallSeen], leaves: tuple[str, ...]) -> Region:
    form = _form(path, model.get_submodule(path), calls)
    inputs = form.tensors(calls[0].leaves)
    if not inputs:
        raise TraceError(f"{path!r} is called without tensors")
    if any(call.autocast for call in calls):
        raise TraceError(
            f"{path!r} is called under torch.autocast, which the forward enters: enter it around the model instead"
        )
    harness = _harness(model, path, form)
    traced = trace(harness, tuple(inputs), leaves)
    for call in calls[1:]:
        tensors = tuple(tensor.clone() for tensor in form.tensors(call.leaves))
        try:
            same = same_values(call.output, run_eager(traced.module, tensors))
        except (SmcpError, AssertionError, RuntimeError) as error:
            raise TraceError(
                f"{path!r} is called in several ways that one graph does not hold: {error}"
            ) from error
        if not same:
            raise TraceError(f"{path!r} computes something else when it is called again")
    graph = traced.module.graph
    _rename(model, traced, path)
    returned, structure = pytree.tree_flatten(calls[0].output)
    end = next(node for node in graph.nodes if node.op == "output")
    fixed = all(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(end.args[0]))
    fixed = fixed and len(pytree.tree_leaves(end.args[0])) == len(returned)
    if not all(leaf is None or isinstance(leaf, Tensor) for leaf in returned):
        raise TraceError(f"{path!r} returns more than tensors")
    return Region(path, form, structure if fixed else None, graph, traced.assumptions)


def _form(path: str, module: nn.Module, calls: list[CallSeen]) -> Form:
    """The form that all calls share; numbers and objects other than defaults are refused, as they may change."""
    forms = []
    defaults = pytree.tree_leaves([parameter.default for parameter in parameters_of(module)])
    for call in calls:
        rest = tuple((place, leaf) for place, leaf in enumerate(call.leaves) if not isinstance(leaf, Tensor))
        for _, leaf in rest:
            if not (is_constant(leaf) or any(is_default(leaf, default) for default in defaults)):
                raise TraceError(
                    f"{path!r} is called with a {type(leaf).__name__}, which may change from call to call"
                )
        forms.append(Form(call.structure, rest))
    if any(form != forms[0] for form in forms):
        raise TraceError(f"{path!r} is called with arguments of several structures")
    return forms[0]


class _Harness(nn.Module):
    """Holds one module at its path in the model, and calls it with tensors as the form says."""

    def __init__(self, path: str, module: nn.Module, form: Form) -> None:
        super().__init__()
        *parents, last = path.split(".")
        owner: nn.Module = self
        for name in parents:
            owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, module)
        self._path, self._form = path, form

    def _called(self, tensors: tuple[Any, ...]) -> Any:
        args, kwargs = self._form.rebuild(tensors)
        return self.get_submodule(self._path)(*args, **kwargs)


def _harness(model: nn.Module, path: str, form: Form) -> nn.Module:
    """A module whose forward takes the tensors one by one, as fx reads its signature."""
    count = form.structure.num_leaves - len(form.constants)
    names = ", ".join(f"tensor_{place}" for place in range(count))
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {names}): return self._called(({names},))", scope)  # noqa: S102 - names of our own
    kind = type(
        f"Region{type(model.get_submodule(path)).__name__}", (_Harness,), {"forward": scope["forward"]}
    )
    harness: nn.Module = kind(path, model.get_submodule(path), form)
    harness.training = model.get_submodule(path).training
    return harness


def _rename(model: nn.Module, traced: Traced, path: str) -> None:
    """Move what the tracer stored beside the module (constants, its training flag) into the module."""
    module = model.get_submodule(path)
    for node in traced.module.graph.nodes:
        target = str(node.target)
        if node.op != "get_attr":
            continue
        if target.startswith(path + "."):
            node.target = _held(model, target)
            continue
        if target == "training":
            node.target = f"{path}.training"
            continue
        value = getattr(traced.module, target)
        if not isinstance(value, Tensor):
            raise InputError(f"{path!r} reads {target!r}, which is not a tensor of its own")
        node.target = f"{path}.{_buffer(module, f'traced{target}', value)}"


def _held(model: nn.Module, target: str) -> str:
    """The graph's name of a module's tensor. A plain attribute becomes a buffer, to be sliced and moved with it."""
    home, _, name = target.rpartition(".")
    owner = model.get_submodule(home)
    value = vars(owner).get(name)
    return f"{home}.{_buffer(owner, f'traced_{name}', value)}" if isinstance(value, Tensor) else target


def _buffer(module: nn.Module, wanted: str, value: Tensor) -> str:
    """Register the tensor as a buffer that is not in the module's state dict; returns its name."""
    name, number, held = wanted, 0, value if value.is_leaf else value.detach()
    while hasattr(module, name) and not _same_view(getattr(module, name), held):
        name = f"{wanted}_{(number := number + 1)}"
    if not hasattr(module, name):
        module.register_buffer(name, held, persistent=False)
    return name


def _same_view(one: Any, other: Tensor) -> bool:
    return (
        isinstance(one, Tensor)
        and one.data_ptr() == other.data_ptr()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )
