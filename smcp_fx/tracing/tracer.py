"""From a PyTorch model to one fx graph that computes the same, in `train()` and in `eval()`.

`torch.fx.symbolic_trace` freezes every `self.training` that `forward` reads. The model is therefore traced in
both modes, and the two graphs become one. A flag becomes a node that reads its module's own `training`, so
that `model.train()` and a frozen submodule behave as in the original. Operations of one mode (auxiliary
heads, noise) run in that mode only (`smcp_fx.tracing.modes`).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.errors import InputError, TraceError, first_line
from smcp_fx.tracing.call_forms import Form, forms_of, parameters_of
from smcp_fx.tracing.contexts import (
    AutocastError,
    detach_frozen,
    pin_before_detached,
    pin_layers,
    without_gradients,
)
from smcp_fx.tracing.copying import copy_modes
from smcp_fx.tracing.example_runs import (
    images_in,
    outputs_of_modules,
    record,
    run_eager,
    same_values,
    unchanged,
)
from smcp_fx.tracing.mode_merging import UnexplainedError, merged
from smcp_fx.tracing.mode_paths import Exploring, Modes, ModeTrace
from smcp_fx.tracing.modes import require_one_mode, with_branches
from smcp_fx.tracing.plain_attention import slow_path
from smcp_fx.tracing.recurrent import open_recurrent_layers
from smcp_fx.tracing.rewrites import add_computed_biases, drop_expansions, normalise
from smcp_fx.tracing.single_trace import HooksError, Leaves, fails, trace_in_mode
from smcp_fx.tracing.state_between_calls import WRITES, StateError, fill_caches, forgotten
from smcp_fx.tracing.values import OPAQUE


@dataclass(frozen=True)
class Traced:
    """A graph that computes the same as the model, and the values of every node in an example run.

    ``values`` maps node names to recorded outputs, with a `TensorInfo` in place of each tensor. ``assumptions`` lists
    what the graph assumes about its inputs' shapes, and checks in every call. ``work``: multiply-adds of nodes in the
    example run, for all ``images`` together (0: unknown); ``outside``: those of Python code around the graph.
    ``returned``: the model's own output; ``inputs``: the graph's; ``forms``: the calls that leave out some.
    """

    module: fx.GraphModule
    values: dict[str, Any]
    assumptions: tuple[str, ...] = ()
    work: Mapping[str, int] = dataclasses.field(default_factory=dict)
    images: int = 0
    outside: int = 0
    returned: Any = None
    inputs: tuple[Any, ...] = ()
    forms: tuple[Form, ...] = ()


def trace(
    model: nn.Module, inputs: tuple[Any, ...], leaves: tuple[str, ...] = (), *, options: bool = False
) -> Traced:
    """Trace the model into a `GraphModule` that shares its parameters; the model's mode is kept.

    ``leaves`` names modules that are called as they are, without looking inside. ``options``: also trace calls that
    leave out optional arguments, as far as the model takes them and one graph can hold them.
    Raises `InputError` when the model itself refuses the inputs, `TraceError` when fx refuses the model or
    the graph computes something else than the model does on the inputs (naming the first module that
    differs).
    """
    _require_traceable(model, inputs)
    try:
        with slow_path():
            expected = run_eager(model, inputs)
    except Exception as error:
        needed = sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in parameters_of(model))
        hint = ""
        if any(isinstance(value, Mapping) for value in inputs):
            hint = f", by the names in forward{inspect.signature(model.forward)}"
        elif len(inputs) < needed:
            hint = f", {needed} in a tuple; in batches ((first, second), labels)"
        raise InputError(
            f"{type(model).__name__} does not run on the example inputs {_describe(inputs)}: "
            f"{first_line(error)} Pass inputs of the shape and type the model was made for{hint}."
        ) from error
    _require_named(model, inputs)
    training = model.training
    forms = forms_of(model, inputs) if options else ()
    with forgotten(model, inputs, expected):
        try:
            graph, traces, called = _with_leaves(model, inputs, leaves, forms)
        except TraceError:
            if not forms:
                raise
            return trace(model, inputs, leaves)
    normalise(model, graph)
    traced = fx.GraphModule(model, graph, class_name=type(model).__name__)
    traced.graph.lint()
    _keep_constants_out_of_the_state(model, traced)
    for path in called.observed:
        _drop_hooks(traced, path)
    # The graph's modules take the model's modes, which `trace_in_mode` has restored.
    copy_modes(model, traced)
    traced.training = training
    try:
        result, values, work = record(traced, inputs)
    except Exception as error:
        raise _does_not_run(model, error) from error
    if not same_values(expected, result):
        raise _differs(model, traced, inputs, expected)
    if not all(_takes(model, traced, form.of(inputs)) for form in forms):
        return trace(model, inputs, leaves)
    pin_layers(traced, without_gradients(graph))
    pin_before_detached(traced)
    drop_expansions(traced, values)
    add_computed_biases(traced, values)
    open_recurrent_layers(traced, values)
    return Traced(
        traced,
        values,
        tuple(dict.fromkeys(sentence for each in traces for sentence in each.assumptions)),
        work,
        images_in(inputs),
        returned=expected,
        inputs=inputs,
        forms=forms,
    )


def _takes(model: nn.Module, traced: fx.GraphModule, inputs: tuple[Any, ...]) -> bool:
    """Does the graph compute the same as the model if these arguments are left out?"""
    with slow_path():
        expected = run_eager(model, inputs)
    try:
        return same_values(expected, run_eager(traced, inputs))
    except Exception:  # the graph may not run in this form
        return False


def _require_traceable(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise `InputError` for scripted and exported models, which have no layers to trace, and for empty inputs."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "the model is compiled by torch.jit: prepare the model that it was made from, and compile what convert "
            "returns."
        )
    nodes = model.graph.nodes if isinstance(model, fx.GraphModule) else ()
    if any(getattr(node.target, "_name", "").startswith(("aten::conv", "aten::linear")) for node in nodes):
        raise InputError(
            "the model was made by torch.export, and its layers are taken apart: prepare the model that it was made "
            "from, or write it to an ONNX file and read that with smcp_fx.from_onnx."
        )
    for value in inputs:
        if isinstance(value, Tensor) and not value.numel():
            raise InputError(
                f"an example input is empty, of shape {tuple(value.shape)}: pass at least one image; a tensor "
                "without elements does not show how channels go through the network"
            )


def _require_named(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise `TraceError` if an input goes into the forward's ``*args``: a graph's arguments have names."""
    arguments = inspect.signature(model.forward).parameters.values()
    named = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    rest = [a.name for a in arguments if a.kind == a.VAR_POSITIONAL]
    if rest and len(inputs) > len(named):
        raise TraceError(
            f"forward of {type(model).__name__} takes its inputs as *{rest[0]}, and a graph's have names: write them "
            "as arguments of their own, as in forward(self, x)."
        )


def _with_leaves(
    model: nn.Module, inputs: tuple[Any, ...], leaves: tuple[str, ...], forms: tuple[Form, ...]
) -> tuple[fx.Graph, list[ModeTrace], Leaves]:
    """Trace the model. ``leaves``, and modules that cannot be traced, stay calls.

    Their nodes are marked as opaque, with the reason. Hooks run with their modules; they are traced only if
    the forward reads tensors that they keep.
    """
    why = {path: f"{path!r} is left as it is" for path in leaves}
    hooks = False
    while True:
        called = Leaves(tuple(why), hooks)
        try:
            graph, traces = _merged(model, inputs, called, forms)
            break
        except HooksError:
            if hooks:
                raise
            hooks = True
        except StateError as error:
            if error.why == WRITES and fill_caches(model, inputs, error.paths):
                continue
            if "" in error.paths or error.paths & why.keys():
                raise
            why |= {path: f"{path!r} {error.why}" for path in error.paths}
        except AutocastError as error:
            if error.paths & why.keys() or not error.by_themselves(model):
                raise
            why |= {path: f"{path!r} enters torch.autocast, and is called as it is" for path in error.paths}
    for node in graph.nodes:
        if node.op == "call_module" and node.target in why:
            node.meta[OPAQUE] = why[str(node.target)]
    return graph, traces, called


def _drop_hooks(traced: fx.GraphModule, path: str) -> None:
    """Replace a module whose hooks were traced by a copy without hooks that shares its parameters."""
    home, _, name = path.rpartition(".")
    module = copy.copy(traced.get_submodule(path))
    module._forward_hooks = OrderedDict()
    setattr(traced.get_submodule(home), name, module)


def _differs(model: nn.Module, traced: fx.GraphModule, inputs: tuple[Any, ...], expected: Any) -> TraceError:
    """Return the error for a graph that computes something else, with its likely cause."""
    name = type(model).__name__
    with slow_path():
        again = run_eager(model, inputs)
    if not same_values(expected, again):
        return TraceError(
            f"{name} gives other outputs each time in eval mode, so that nothing can be checked against it: switch "
            "off what is random in it."
        )
    if model._forward_hooks or model._forward_pre_hooks or "forward" in vars(model):
        return TraceError(
            f"the traced graph of {name} computes something else than the model does, which has hooks or a forward "
            "of its own instance: put it into a module that calls it, and prepare that."
        )
    return TraceError(
        f"the traced graph of {name} computes something else than the model does: first difference at "
        f"{_first_difference(model, traced, inputs)}. Something in its forward takes another way when it is "
        "traced; a question about a type, such as `type(x) in KINDS`, is the usual cause."
    )


def _values(model: nn.Module, graph: fx.Graph, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Return the values of one mode's graph, with modules in eval mode; `TraceError` if it does not run."""
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
    """Keep out of the graph's state dict all tensors that are not in the original's."""
    persistent = set(model.state_dict())
    for name, buffer in list(traced.named_buffers()):
        if name not in persistent:
            path, _, attribute = name.rpartition(".")
            owner = traced.get_submodule(path)
            delattr(owner, attribute)
            owner.register_buffer(attribute, buffer, persistent=False)


#: torch.fx changes `nn.Module` itself while it traces: one trace at a time.
_ONE_AT_A_TIME = threading.RLock()


def _merged(
    model: nn.Module, inputs: tuple[Any, ...], leaves: Leaves, forms: tuple[Form, ...]
) -> tuple[fx.Graph, list[ModeTrace]]:
    """One graph for all modes of the model's modules and all forms of calls, and the traces that it was made of."""

    def formed(others: Modes) -> tuple[Form | None, tuple[Any, ...]]:
        form = next((form for form in forms if others.get(form.key)), None)
        return form, inputs if form is None else form.of(inputs)

    def values(trace: ModeTrace) -> dict[str, Any]:
        normalise(model, trace.graph)
        return _values(model, trace.graph, inputs)

    def traced(mode: bool, others: Modes) -> ModeTrace:
        form, arguments = formed(others)
        trace = trace_in_mode(model, arguments, (mode, others), leaves, () if form is None else form.places)
        asked = forms if form is None else forms[: forms.index(form) + 1]
        # Record the forms as the first questions.
        trace.log.frames[0].reads[:0] = [(0, one.key, one is form) for one in asked]
        trace.modes = {**trace.modes, **{one.key: one is form for one in forms}}
        if without_gradients(trace.graph):
            normalise(model, trace.graph)
            module = fx.GraphModule(model, with_branches(trace.graph), class_name=type(model).__name__)
            values = _values(model, trace.graph, inputs)
            detach_frozen(module, values, lambda run: run_eager(module, inputs, run))
        return trace

    with _ONE_AT_A_TIME:
        explored = Exploring(
            traced,
            lambda mode, others: fails(model, formed(others)[1], (mode, others)),
        )
    while True:
        for trace in explored.traces:
            with_branches(trace.graph)
        try:
            graph = merged(model, explored.traces, explored.paths, values, forms)
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


def _first_difference(model: nn.Module, traced: fx.GraphModule, inputs: tuple[Any, ...]) -> str:
    """Name the first leaf module whose output differs between the model and its graph."""
    expected, actual = (outputs_of_modules(one, inputs) for one in (model, traced))
    leaves = {name for name, module in traced.named_modules() if not list(module.children())}
    for name, output in actual.items():
        if name in leaves and name in expected and not same_values(expected[name], output):
            return f"module {name!r}"
    return "an operation between modules"


def _describe(inputs: tuple[Any, ...]) -> str:
    shapes = [tuple(i.shape) if isinstance(i, Tensor) else type(i).__name__ for i in inputs]
    return ", ".join(map(str, shapes)) or "(none)"
