"""One trace: the model's forward run by torch.fx, with its modules in given modes."""

from __future__ import annotations

import textwrap
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import SmcpError, TraceError, first_line
from smcp_fx.tracing.attributes import Attribute, Attributes
from smcp_fx.tracing.autograd_functions import functions_kept
from smcp_fx.tracing.block_hooks import note_call
from smcp_fx.tracing.contexts import AutocastError, Contexts
from smcp_fx.tracing.example_runs import unchanged
from smcp_fx.tracing.mode_paths import Modes, ModeTrace
from smcp_fx.tracing.mode_reads import ReadsOfTraining
from smcp_fx.tracing.mode_steps import alike
from smcp_fx.tracing.own_weights import LAYERS, computed_by_hooks, is_parametrised_layer, own_weight
from smcp_fx.tracing.parameter_writes import written_parameter
from smcp_fx.tracing.plain_attention import forward_of, is_plain_attention, slow_path
from smcp_fx.tracing.sentences import is_ours
from smcp_fx.tracing.shape_tracer import KeptOutsideError, ShapeTracer
from smcp_fx.tracing.state_between_calls import State, StateError

#: Files whose hooks are part of the forward, which reads the tensors that they keep.
_OF_FORWARD = {"transformers.utils.output_capturing"}


@dataclass(frozen=True)
class Leaves:
    """Which modules are called as they are: those at ``paths``, and those with hooks unless ``hooks`` are traced."""

    paths: tuple[str, ...]
    hooks: bool = False
    observed: set[str] = field(default_factory=set)  # leaves whose traced hooks changed nothing


class HooksError(TraceError):
    """The forward reads a tensor that a hook keeps."""


class _Tracer(ShapeTracer):
    """Answers questions about shapes. Modules with hooks or parametrisations stay leaves, so that these still run.

    So do the modules in ``leaves``. With ``leaves.hooks``, hooks are traced: forward reads tensors they keep.
    ``stopped`` is the innermost module in which tracing failed.
    """

    def __init__(
        self, inputs: tuple[Any, ...], leaves: Leaves, proxy_buffers: bool, fixed: tuple[int, ...]
    ) -> None:
        super().__init__(inputs, fixed)
        self.leaves = leaves
        self.stopped: nn.Module | None = None
        self.contexts = Contexts()
        self._paths: dict[nn.Module, str] = {}
        self._looked_into: set[nn.Module] = set()  # modules of torch that are being traced through
        self.proxy_buffer_attributes = proxy_buffers
        self._tensors: dict[int, tuple[str, Tensor]] = {}  # parameters and buffers by their ids
        self._overwritten: set[int] = set()  # ids of the tensors that forward has written into

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Collect the paths of the model's modules and tensors, then trace."""
        self._paths = {module: path for path, module in root.named_modules()}
        named = [*(root.named_buffers() if self.proxy_buffer_attributes else ()), *root.named_parameters()]
        self._tensors = {id(tensor): (name, tensor) for name, tensor in named}
        return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        hooked = (m._forward_hooks or m._forward_pre_hooks) and not self._traces_hooks(m)
        changed = hooked or nn.utils.parametrize.is_parametrized(m)
        named = module_qualified_name in self.leaves.paths
        scripted = isinstance(m, torch.jit.ScriptModule)  # it has no Python to trace
        if (changed and m not in self._looked_into) or named or scripted:
            return True
        return m not in self._looked_into and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Remember where tracing stops. Modules that another thread calls meanwhile just run."""
        if self.contexts.elsewhere:
            return forward(*args, **kwargs)
        outer, path = self.contexts.path, self._paths.get(m, "")
        before = self.num_calls.get(path, 0)
        if not self._evaluating and m in self._paths:
            self.contexts.path = path
        try:
            output = self._called(m, forward, args, kwargs)
            if not self._evaluating:
                note_call(f"{path}@{before}" if before else path, (args, kwargs), output)
            return output
        except Exception:  # raised again: the innermost module is named
            self.stopped = self.stopped or m
            raise
        finally:
            self.contexts.path = outer

    def _called(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._evaluating:
            return super().call_module(m, forward, args, kwargs)
        if is_plain_attention(m, args, kwargs):
            return self._call_plainly(m, forward_of(m, forward, self._seen), args, kwargs)
        if is_parametrised_layer(m) or computed_by_hooks(m) or self._is_overwritten(m):
            return self._call_computing(m, forward, args, kwargs)
        output = super().call_module(m, forward, args, kwargs)
        if m._forward_hooks and self._traces_hooks(m) and self.is_leaf_module(m, self._paths.get(m, "")):
            self._run_hooks(m, args, kwargs, output)
        return output

    def _call_plainly(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._looked_into.add(m)
        try:
            with slow_path():
                return super().call_module(m, forward, args, kwargs)
        finally:
            self._looked_into.discard(m)

    def _traces_hooks(self, m: nn.Module) -> bool:
        hooks = (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        return self.leaves.hooks or all(getattr(hook, "__module__", "") in _OF_FORWARD for hook in hooks)

    def _run_hooks(self, m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Let a leaf's hooks see and keep its arguments and result; their changes are part of the call itself."""
        changed = bool(m._forward_pre_hooks)
        for number, hook in m._forward_hooks.items():
            named = (kwargs,) if number in m._forward_hooks_with_kwargs else ()
            changed |= hook(m, args, *named, output) is not None
        if not changed:
            self.leaves.observed.add(self._paths[m])

    def run_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module's result for fake tensors, which traced hooks must not keep."""
        if not module._forward_hooks or not self._traces_hooks(module):
            return super().run_module(module, args, kwargs)
        hooks, module._forward_hooks = module._forward_hooks, OrderedDict()
        try:
            return super().run_module(module, args, kwargs)
        finally:
            module._forward_hooks = hooks

    def _seen(self, value: Any) -> Any:
        return self.value(value.node) if isinstance(value, fx.Proxy) else value

    def _is_overwritten(self, m: nn.Module) -> bool:
        """Has the forward written into a parameter of this layer?"""
        own = m._parameters.values() if self._overwritten and type(m) in LAYERS else ()
        return any(id(parameter) in self._overwritten for parameter in own)

    def _call_computing(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace into a layer that computes its weight, so that the graph holds this computation."""
        names, hooks, held = computed_by_hooks(m), dict(m._forward_pre_hooks), dict(vars(m))
        self._looked_into.add(m)
        try:
            if names and not self.is_leaf_module(m, self._paths.get(m, "")):
                owner = self.create_proxy("get_attr", self._paths[m], (), {})
                for name in names:
                    vars(m)[name] = self.create_proxy("call_function", own_weight, (owner, name), {})
                m._forward_pre_hooks.clear()
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._looked_into.discard(m)
            m._forward_pre_hooks.update(hooks)
            vars(m).update({name: held[name] for name in names})

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute; another thread gets the plain one."""
        if self.contexts.elsewhere:
            return attr_val
        # torch.fx searches all tensors at every read; use a table, unless forward has replaced this tensor.
        name, tensor = self._tensors.get(id(attr_val), (None, None))
        if (
            name is None
            or tensor is not attr_val
            or _registered(self.root, name) is not attr_val
            or self.evaluating()
        ):
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Note in which contexts each node was made."""
        node = super().create_node(*args, **kwargs)
        if node.name == "self":  # a module's name, but also the module itself in generated code
            node._rename("self_module")
        self.contexts.note(node)
        written = written_parameter(node, self.root) if node.op in ("call_function", "call_method") else None
        if written is not None:
            self._overwritten.add(id(_registered(self.root, str(written.target))))
        return node


def _registered(root: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of this name, from the modules' tables: reads of attributes are traced."""
    *path, last = name.split(".")
    module: nn.Module | None = root
    for part in path:
        module = None if module is None else module._modules.get(part)
    return None if module is None else module._parameters.get(last, module._buffers.get(last))


#: A trace, the model's state before it, and the numbers that its forward counts up.
_Once = tuple[ModeTrace, State, set[Attribute]]


def _set(model: nn.Module, modes: tuple[bool, Modes]) -> None:
    model.train(modes[0])
    for path, module in model.named_modules():
        if path in modes[1]:
            module.training = modes[1][path]


def fails(model: nn.Module, inputs: tuple[Any, ...], modes: tuple[bool, Modes]) -> bool:
    """Whether the model itself fails when its modules are in these modes."""
    before = Attributes(model)
    try:
        with unchanged(model), torch.no_grad():
            _set(model, modes)
            model(*pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs))
    except Exception:  # a model may raise anything in modes it was not made for
        return True
    finally:
        before.restore(constants=False)
    return False


def trace_in_mode(
    model: nn.Module,
    inputs: tuple[Any, ...],
    modes: tuple[bool, Modes],
    leaves: Leaves,
    fixed: tuple[int, ...] = (),
) -> ModeTrace:
    """Trace the model in these modes. ``fixed``: the places of inputs that keep their example values.

    Raises `StateError` if a call changes what the next one computes.
    """
    before = Attributes(model)
    traced, state, counters = _trace_so(model, inputs, modes, leaves, fixed)
    if counters:  # would a later call give another trace?
        state.count_on(counters)
        try:
            later = _trace_so(model, inputs, modes, leaves, fixed)[0]
            same = alike(model, traced.graph, later.graph)
        except TraceError:
            same = False
        finally:
            before.restore()
        if not same:
            raise state.depends_on(counters)
    return traced


def _trace_so(
    model: nn.Module,
    inputs: tuple[Any, ...],
    modes: tuple[bool, Modes],
    leaves: Leaves,
    fixed: tuple[int, ...],
) -> _Once:
    try:
        return _trace_once(model, inputs, modes, leaves, fixed, proxy_buffers=True)
    except (StateError, AutocastError, HooksError):
        raise
    except TraceError:
        if not any(True for _ in model.buffers()):
            raise
    # Retry with fixed buffers: Python may have asked for the values of one.
    return _trace_once(model, inputs, modes, leaves, fixed, proxy_buffers=False)


def _trace_once(
    model: nn.Module,
    inputs: tuple[Any, ...],
    modes: tuple[bool, Modes],
    leaves: Leaves,
    fixed: tuple[int, ...],
    *,
    proxy_buffers: bool,
) -> _Once:
    before, state = Attributes(model), State(model, inputs, lambda: _set(model, modes))
    _set(model, modes)
    seen = {path: module.training for path, module in model.named_modules()}
    tracer = _Tracer(inputs, leaves, proxy_buffers, fixed)
    reads = ReadsOfTraining(model, tracer.log.read, tracer.evaluating)
    try:
        with reads, tracer.contexts.watched(), functions_kept(tracer):
            graph = tracer.trace(model)
        state.note(graph)
    except Exception as error:
        where = next(
            (
                f"{frame.filename}:{frame.lineno} ({textwrap.shorten(frame.line or '', 100)})"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if Path(torch.__file__).parent not in Path(frame.filename).parents
                and not is_ours(frame.filename)
            ),
            "its forward",
        )
        names = {id(module): name for name, module in model.named_modules()}
        stopped = names.get(id(tracer.stopped), "")
        inside = f"in module {stopped!r} ({type(tracer.stopped).__name__}), " if stopped else ""
        advice = (
            ""  # our own errors say what to do
            if isinstance(error, SmcpError)
            else " Control flow must not depend on tensors' values; move it out of forward, wrap it with "
            "torch.fx.wrap, or name the module in prepare(..., leaves=[...])."
        )
        kind = HooksError if isinstance(error, KeptOutsideError) else TraceError
        raise kind(
            f"torch.fx cannot trace {type(model).__name__}: {first_line(error)} It stopped {inside}at {where}."
            + advice
        ) from error
    finally:
        state.restore()
        before.restore()
    if tracer.contexts.autocast:
        raise AutocastError(tracer.contexts.autocast)
    return ModeTrace(graph, seen, tracer.log, tracer.assumptions), state, state.check()
