"""From a PyTorch model to one fx graph that computes the same, in `train()` and in `eval()`.

`torch.fx.symbolic_trace` freezes what `forward` reads of `self.training`. The model is therefore traced in
both modes, and the two graphs become one: a flag becomes a node that reads the owning module's own `training` (so
that `model.train()` and a frozen submodule behave as in the original), and operations of one mode (auxiliary heads,
noise) run in that mode only (`smcp_fx.tracing.modes`).
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import InputError, TraceError
from smcp_fx.tracing.attributes import Attributes
from smcp_fx.tracing.autograd_functions import functions_kept
from smcp_fx.tracing.buffers import Buffers, WritesBuffersError
from smcp_fx.tracing.contexts import AutocastError, Contexts, pin_before_detached, without_gradients
from smcp_fx.tracing.counts import Counters, Counts, CountsError, paths_of
from smcp_fx.tracing.example_runs import first_line, images_in, record, run_eager, same_values, unchanged
from smcp_fx.tracing.mode_merging import UnexplainedError, merged
from smcp_fx.tracing.mode_paths import Exploring, Modes, ModeTrace
from smcp_fx.tracing.mode_reads import ReadsOfTraining
from smcp_fx.tracing.mode_steps import alike
from smcp_fx.tracing.modes import require_one_mode, with_branches
from smcp_fx.tracing.own_weights import computed_by_hooks, is_parametrised_layer, own_weight
from smcp_fx.tracing.plain_attention import forward_of, is_plain, slow_path
from smcp_fx.tracing.rewrites import add_computed_biases, drop_expansions, normalise
from smcp_fx.tracing.sentences import is_ours
from smcp_fx.tracing.shape_tracer import ShapeTracer
from smcp_fx.tracing.values import OPAQUE


@dataclass(frozen=True)
class Traced:
    """A graph that computes what the model does, and what its example run showed of every node.

    ``values`` maps node names to recorded outputs, with a `TensorInfo` in place of each tensor.
    ``assumptions`` says what the graph takes for given of its inputs' shapes, and checks when it is called.
    ``work``: the multiply-adds of each node that has some, in the example run, of ``images`` together (0: not told);
    ``outside``: those of Python code around the graph. ``returned`` is what the model itself returned,
    ``given`` what the graph was run on.
    """

    module: fx.GraphModule
    values: dict[str, Any]
    assumptions: tuple[str, ...] = ()
    work: Mapping[str, int] = dataclasses.field(default_factory=dict)
    images: int = 0
    outside: int = 0
    returned: Any = None
    given: tuple[Any, ...] = ()


def trace(model: nn.Module, inputs: tuple[Any, ...], leaves: tuple[str, ...] = ()) -> Traced:
    """Trace the model into a `GraphModule` that shares its parameters; the model's mode is kept.

    ``leaves`` names modules that are called as they are, with what is inside them left alone.
    Raises `InputError` when the model itself refuses the inputs, `TraceError` when fx refuses the model or
    the graph computes something else than the model does on the inputs (naming the first module that
    differs).
    """
    compiler = "torch.jit" if isinstance(model, torch.jit.ScriptModule) else "torch.compile"
    if compiler == "torch.jit" or isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise InputError(
            f"the model is compiled by {compiler}, and has no Python to trace: prepare the model that it was "
            "made from, and compile what convert returns."
        )
    for given in inputs:
        if isinstance(given, Tensor) and not given.numel():
            raise InputError(
                f"an example input is empty, of shape {tuple(given.shape)}: pass at least one image, since what "
                "has no elements does not tell how channels go through the network"
            )
    try:
        with slow_path():
            expected = run_eager(model, inputs)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} does not run on the example inputs {_describe(inputs)}: "
            f"{first_line(error)} Pass inputs of the shape the model was made for."
        ) from error
    training = model.training
    why = {path: f"{path!r} is left as it is" for path in leaves}
    while True:
        try:
            graph, traces = _merged(model, inputs, tuple(why))
            break
        except WritesBuffersError as error:
            if "" in error.paths or error.paths & why.keys():
                raise
            why |= {path: f"{path!r} writes into its own buffers" for path in error.paths}
        except CountsError as error:
            if "" in error.paths or error.paths & why.keys():
                raise
            why |= {path: f"{path!r} counts its calls" for path in error.paths}
        except AutocastError as error:
            if error.paths & why.keys() or not error.by_themselves(model):
                raise
            why |= {path: f"{path!r} enters torch.autocast, and is called as it is" for path in error.paths}
    for node in graph.nodes:
        if node.op == "call_module" and node.target in why:
            node.meta[OPAQUE] = why[str(node.target)]
    normalise(model, graph)
    traced = fx.GraphModule(model, graph, class_name=type(model).__name__)
    traced.graph.lint()
    _keep_constants_out_of_the_state(model, traced)
    # Modules as they are now: `_trace_in_mode` restores them, GraphModule's own flag is set from the model's.
    traced.training = training
    _restore_flags(model, traced)
    try:
        found, values, work = record(traced, inputs)
    except Exception as error:
        raise _does_not_run(model, error) from error
    if not same_values(expected, found):
        with slow_path():
            again = run_eager(model, inputs)
        if not same_values(expected, again):
            raise TraceError(
                f"{type(model).__name__} gives other outputs each time in eval mode, so that nothing can be "
                "checked against it: switch off what is random in it."
            )
        if model._forward_hooks or model._forward_pre_hooks or "forward" in vars(model):
            raise TraceError(
                f"the traced graph of {type(model).__name__} computes something else than the model does, which has "
                "hooks or a forward of its own instance: put it into a module that calls it, and prepare that."
            )
        raise TraceError(
            f"the traced graph of {type(model).__name__} computes something else than the model does: first "
            f"difference at {_first_difference(model, traced, inputs)}. Something in its forward takes "
            "another way when it is traced; a question such as `type(x) is Tensor` is the usual cause."
        )
    without_gradients(traced, values, lambda run: run_eager(traced, inputs, run))
    pin_before_detached(traced)
    drop_expansions(traced, values)
    add_computed_biases(traced, values)
    return Traced(
        traced,
        values,
        tuple(dict.fromkeys(sentence for each in traces for sentence in each.assumptions)),
        work,
        images_in(inputs),
        returned=expected,
        given=inputs,
    )


def _values(model: nn.Module, graph: fx.Graph, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """The values of one mode's graph, with the modules in eval mode; raises `TraceError` when it does not run."""
    module = fx.GraphModule(model, graph, class_name=type(model).__name__)
    try:
        with unchanged(module):
            return record(module, inputs)[1]
    except Exception as error:
        raise _does_not_run(model, error) from error


def _does_not_run(model: nn.Module, error: Exception) -> TraceError:
    return TraceError(
        f"the traced graph of {type(model).__name__} does not run: {first_line(error)} Something in its forward "
        "takes another way when it is traced; a question such as `isinstance(x, Tensor)` is the usual cause."
    )


def _keep_constants_out_of_the_state(model: nn.Module, traced: fx.GraphModule) -> None:
    """Tensors that are plain attributes of the original are not part of its state dict; nor of the graph's."""
    persistent = set(model.state_dict())
    for name, buffer in list(traced.named_buffers()):
        if name not in persistent:
            path, _, attribute = name.rpartition(".")
            owner = traced.get_submodule(path)
            delattr(owner, attribute)
            owner.register_buffer(attribute, buffer, persistent=False)


class _Tracer(ShapeTracer):
    """Questions about shapes are answered; modules with hooks or parametrisations stay leaves, so that these run.

    So do those named in ``leaves``. ``stopped`` is the innermost module in which tracing failed.
    """

    def __init__(self, inputs: tuple[Any, ...], leaves: tuple[str, ...], proxy_buffers: bool) -> None:
        super().__init__(inputs)
        self.leaves = leaves
        self.stopped: nn.Module | None = None
        self.contexts = Contexts()
        self._paths: dict[nn.Module, str] = {}
        self._looked_into: set[nn.Module] = set()  # modules of torch that are being looked into
        self.proxy_buffer_attributes = proxy_buffers

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """With the paths of the model's modules known."""
        self._paths = {module: path for path, module in root.named_modules()}
        return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        changed = m._forward_hooks or m._forward_pre_hooks or nn.utils.parametrize.is_parametrized(m)
        named = module_qualified_name in self.leaves
        scripted = isinstance(m, torch.jit.ScriptModule)  # it has no Python to trace
        if (changed and m not in self._looked_into) or named or scripted:
            return True
        return m not in self._looked_into and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Remember where it stops; modules that another thread calls meanwhile just run."""
        if self.contexts.elsewhere:
            return forward(*args, **kwargs)
        outer = self.contexts.path
        if not self._evaluating and m in self._paths:
            self.contexts.path = self._paths[m]
        try:
            if not self._evaluating and is_plain(m, args, kwargs):
                return self._call_plainly(m, forward, args, kwargs)
            if not self._evaluating and (is_parametrised_layer(m) or computed_by_hooks(m)):
                return self._call_computing(m, forward, args, kwargs)
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.stopped = self.stopped or m
            raise
        finally:
            self.contexts.path = outer

    def _call_plainly(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        rank = self.value(first.node).dim() if isinstance(first, fx.Proxy) else first.dim()
        self._looked_into.add(m)
        try:
            with slow_path():
                return super().call_module(m, forward_of(m, forward, rank), args, kwargs)
        finally:
            self._looked_into.discard(m)

    def _call_computing(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer that computes its weight: the function that it is, on what computes it."""
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
        """So do they read their parameters."""
        if self.contexts.elsewhere:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Nodes know in which contexts they were made."""
        node = super().create_node(*args, **kwargs)
        if node.name == "self":  # a module's name, which the generated code means itself by
            node._rename("self_module")
        self.contexts.note(node)
        return node


#: A trace, and the numbers that its forward counts up.
_Once = tuple[ModeTrace, Counters]

#: torch.fx changes `nn.Module` itself while it traces: one trace at a time.
_ONE_AT_A_TIME = threading.RLock()


def _merged(
    model: nn.Module, inputs: tuple[Any, ...], leaves: tuple[str, ...]
) -> tuple[fx.Graph, list[ModeTrace]]:
    """One graph for all modes of the model's modules, and the traces that it was made of."""

    def values(trace: ModeTrace) -> dict[str, Any]:
        normalise(model, trace.graph)
        return _values(model, trace.graph, inputs)

    with _ONE_AT_A_TIME:
        explored = Exploring(
            lambda mode, others: _trace_in_mode(model, inputs, (mode, others), leaves),
            lambda mode, others: _fails(model, inputs, (mode, others)),
        )
    while True:
        for trace in explored.traces:
            with_branches(trace.graph)
        try:
            graph = merged(model, explored.traces, explored.paths, values)
        except UnexplainedError as error:
            with _ONE_AT_A_TIME:
                if explored.go_on(error.paths):
                    continue
            raise TraceError(
                f"what {type(model).__name__} computes differs between train and eval mode, and no `training` that "
                "its forward reads says where: read self.training in the forward of the module that differs."
            ) from None
        for group in explored.coupled():
            require_one_mode(graph, group)
        return graph, explored.traces


def _set(model: nn.Module, modes: tuple[bool, Modes]) -> None:
    model.train(modes[0])
    for path, module in model.named_modules():
        if path in modes[1]:
            module.training = modes[1][path]


def _fails(model: nn.Module, inputs: tuple[Any, ...], modes: tuple[bool, Modes]) -> bool:
    """Does the model itself fail when its modules are in these modes?"""
    before = Attributes(model)
    try:
        with unchanged(model), torch.no_grad():
            _set(model, modes)
            model(*pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs))
    except Exception:  # whatever a model says in modes that it was not made for
        return True
    finally:
        before.restore(constants=False)
    return False


def _trace_in_mode(
    model: nn.Module, inputs: tuple[Any, ...], modes: tuple[bool, Modes], leaves: tuple[str, ...]
) -> ModeTrace:
    counts, before = Counts(model), Attributes(model)
    traced = _trace_so(model, inputs, modes, leaves)
    if counters := traced[1]:  # would it be another one, later?
        counts.put(counters)
        try:
            later = _trace_so(model, inputs, modes, leaves)
            same = alike(model, traced[0].graph, later[0].graph)
        except TraceError:
            same = False
        finally:
            before.restore()
        if not same:
            raise CountsError(paths_of(model, counters))
    return traced[0]


def _trace_so(
    model: nn.Module, inputs: tuple[Any, ...], modes: tuple[bool, Modes], leaves: tuple[str, ...]
) -> _Once:
    try:
        return _trace_once(model, inputs, modes, leaves, proxy_buffers=True)
    except (WritesBuffersError, AutocastError):
        raise
    except TraceError:
        if not any(True for _ in model.buffers()):
            raise
    # Python asks for a buffer's values, which are then fixed.
    return _trace_once(model, inputs, modes, leaves, proxy_buffers=False)


def _trace_once(
    model: nn.Module,
    inputs: tuple[Any, ...],
    modes: tuple[bool, Modes],
    leaves: tuple[str, ...],
    *,
    proxy_buffers: bool,
) -> _Once:
    before, counts = Attributes(model), Counts(model)
    _set(model, modes)
    seen = {path: module.training for path, module in model.named_modules()}
    tracer = _Tracer(inputs, leaves, proxy_buffers)
    buffers, written = Buffers(model), set[str]()
    reads = ReadsOfTraining(model, tracer.log.read, tracer.evaluating)
    try:
        with reads, tracer.contexts.watched(), functions_kept(tracer):
            graph = tracer.trace(model)
        written |= buffers.written_by(model, graph)
        changed = counts.changed(model)
    except Exception as error:
        where = next(
            (
                f"{frame.filename}:{frame.lineno} ({frame.line})"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if Path(torch.__file__).parent not in Path(frame.filename).parents
                and not is_ours(frame.filename)
            ),
            "its forward",
        )
        names = {id(module): name for name, module in model.named_modules()}
        stopped = names.get(id(tracer.stopped), "")
        inside = f"in module {stopped!r} ({type(tracer.stopped).__name__}), " if stopped else ""
        raise TraceError(
            f"torch.fx cannot trace {type(model).__name__}: {first_line(error)} It stopped {inside}at {where}. "
            "Control flow must not depend on tensors' values; move it out of forward, wrap it with "
            "torch.fx.wrap, or name the module in prepare(..., leaves=[...])."
        ) from error
    finally:
        written |= buffers.restore()
        before.restore()
    if written:
        raise WritesBuffersError(written)
    if tracer.contexts.autocast:
        raise AutocastError(tracer.contexts.autocast)
    counters = counts.among(changed, model, inputs, lambda: _set(model, modes)) if changed else set()
    return ModeTrace(graph, seen, tracer.log, tracer.assumptions), counters


def _restore_flags(model: nn.Module, traced: fx.GraphModule) -> None:
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in traced.named_modules():
        if name:
            module.training = modes.get(name, traced.training)


def _first_difference(model: nn.Module, traced: fx.GraphModule, inputs: tuple[Any, ...]) -> str:
    """Name the first leaf module whose output differs between the model and its graph."""
    outputs: dict[str, Any] = {}
    original = copy.deepcopy(model)
    for name, module in original.named_modules():
        # A hook that returned the copy would put it in the output's place, where later in-place work hits it.
        module.register_forward_hook(
            lambda _m, _i, out, name=name: outputs.update({name: copy.deepcopy(out)})
        )
    run_eager(original, inputs)
    for name, module in (duplicate := copy.deepcopy(traced)).named_modules():
        if name in outputs and not list(module.children()):
            module.register_forward_hook(
                lambda _m, _i, out, name=name: (
                    found.append(name) if not same_values(outputs[name], out) else None
                )
            )
    found: list[str] = []
    run_eager(duplicate, inputs)
    return f"module {found[0]!r}" if found else "an operation between modules"


def _describe(inputs: tuple[Any, ...]) -> str:
    shapes = [tuple(i.shape) if isinstance(i, Tensor) else type(i).__name__ for i in inputs]
    return ", ".join(map(str, shapes)) or "(none)"
