"""From a PyTorch model to one fx graph that computes the same, in `train()` and in `eval()`.

`torch.fx.symbolic_trace` freezes what `forward` reads of `self.training`. The model is therefore traced in
both modes; where the two graphs differ only in such a flag, the flag becomes a node that reads the owning
module's own `training` (so that `model.train()` and a frozen submodule behave as in the original). A model that
runs other operations in `train()` (auxiliary heads) becomes one graph that holds both.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.channels.propagation import TensorInfo
from smcp_fx.errors import InputError, TraceError

#: max |eager - traced| may reach this share of the output's scale: both run the same kernels in the same order.
_SAME = 1e-6


def as_inputs(example_inputs: Tensor | tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    """Return the example inputs as a tuple of positional arguments."""
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)


def default_inputs(model: nn.Module) -> tuple[Any, ...]:
    """Guess inputs the model accepts: its `example_input_array`, timm's `pretrained_cfg`, or an image.

    The image has the first convolution's input channels, batch 2, and the smallest of 32, 64, 224, 299
    pixels a side that the model takes. Raises `InputError` when none fits.
    """
    given = getattr(model, "example_input_array", None)
    if given is not None:
        return as_inputs(given)
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        return (torch.randn(2, *config["input_size"]),)
    first = next((m for m in model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    reasons = ["no convolution was found"]
    if first is not None:
        rank = len(first.kernel_size)
        reasons = []
        for side in (32, 64, 224, 299) if rank < 3 else (16, 32, 112):
            image = torch.randn(2, first.in_channels, *(side,) * rank)
            try:
                run_eager(model, (image.to(first.weight),))
            except Exception as error:
                reasons.append(f"{tuple(image.shape)}: {_first_line(error)}")
            else:
                return (image.to(first.weight),)
    raise InputError(
        f"no example input fits {type(model).__name__} ({'; '.join(reasons)}). "
        "Pass one: prepare(model, example_inputs=torch.randn(...))."
    )


def run_eager(model: nn.Module, inputs: tuple[Any, ...], run: Callable[..., Any] | None = None) -> Any:
    """Run the model (or ``run``) in eval mode without gradients; the model's modes are kept."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return (run or model)(*inputs)
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class Traced:
    """A graph that computes what the model does, and what its example run showed of every node.

    ``values`` maps node names to recorded outputs, with a `TensorInfo` in place of each tensor.
    """

    module: fx.GraphModule
    values: dict[str, Any]


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n.name] = pytree.tree_map(
            lambda v: TensorInfo(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v, result
        )
        return result


def trace(model: nn.Module, inputs: tuple[Any, ...]) -> Traced:
    """Trace the model into a `GraphModule` that shares its parameters; the model's mode is kept.

    Raises `InputError` when the model itself refuses the inputs, `TraceError` when fx refuses the model or
    the graph computes something else than the model does on the inputs (naming the first module that
    differs).
    """
    try:
        expected = run_eager(model, inputs)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} does not run on the example inputs {_describe(inputs)}: "
            f"{_first_line(error)} Pass inputs of the shape the model was made for."
        ) from error
    training = model.training
    graph = _one_graph(model, _trace_in_mode(model, False), _trace_in_mode(model, True))
    _normalise(model, graph)
    traced = fx.GraphModule(model, graph, class_name=type(model).__name__)
    _keep_constants_out_of_the_state(model, traced)
    # Modules as they are now: `_trace_in_mode` restores them, GraphModule's own flag is set from the model's.
    traced.training = training
    _restore_flags(model, traced)
    recorder = _Recorder(traced)
    found = run_eager(traced, inputs, recorder.run)
    if not same_values(expected, found):
        if not same_values(expected, run_eager(model, inputs)):
            raise TraceError(
                f"{type(model).__name__} gives other outputs each time in eval mode, so that nothing can be "
                "checked against it: switch off what is random in it."
            )
        raise TraceError(
            f"the traced graph of {type(model).__name__} computes something else than the model does: first "
            f"difference at {_first_difference(model, traced, inputs)}. An in-place operation on a view "
            "(`u += v` on a chunk) is the usual cause; write it out of place."
        )
    return Traced(traced, recorder.values)


def _normalise(model: nn.Module, graph: fx.Graph) -> None:
    """First arguments by position, so that rules and passes find them; `nn.Unflatten` as the function it is."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        kwargs = dict(node.kwargs)
        for name in ("input", "tensors"):
            if not node.args and name in kwargs:
                node.args = (kwargs.pop(name),)
        for name in ("shape", "size"):
            sizes = kwargs.get(name)
            by_keyword = len(node.args) == 1 and isinstance(sizes, (tuple, list))
            if by_keyword and node.target in (torch.reshape, torch.broadcast_to):
                node.args = (*node.args, kwargs.pop(name))
        if len(node.args) == 1 and node.target is torch.unflatten and {"dim", "sizes"} <= kwargs.keys():
            node.args = (*node.args, kwargs.pop("dim"), kwargs.pop("sizes"))
        node.kwargs = kwargs
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(module) is nn.Unflatten and isinstance(module.dim, int):
            node.op, node.target = "call_function", torch.unflatten
            node.args = (node.args[0], module.dim, tuple(module.unflattened_size))
    for node in graph.nodes:
        if node.op == "call_method" and len(node.args) == 1:
            names = {
                "view": ["size"],
                "reshape": ["shape"],
                "expand": ["size"],
                "unflatten": ["dim", "sizes"],
            }
            wanted = names.get(str(node.target), [])
            if wanted and all(name in node.kwargs for name in wanted):
                node.args = (*node.args, *(node.kwargs[name] for name in wanted))
                node.kwargs = {k: v for k, v in node.kwargs.items() if k not in wanted}


def _keep_constants_out_of_the_state(model: nn.Module, traced: fx.GraphModule) -> None:
    """Tensors that are plain attributes of the original are not part of its state dict; nor of the graph's."""
    persistent = set(model.state_dict())
    for name, buffer in list(traced.named_buffers()):
        if name not in persistent:
            path, _, attribute = name.rpartition(".")
            owner = traced.get_submodule(path)
            delattr(owner, attribute)
            owner.register_buffer(attribute, buffer, persistent=False)


class _Tracer(fx.Tracer):
    """The standard tracer; modules with hooks or parametrisations stay leaves, so that these run."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        changed = m._forward_hooks or m._forward_pre_hooks or nn.utils.parametrize.is_parametrized(m)
        return bool(changed) or super().is_leaf_module(m, module_qualified_name)


def _trace_in_mode(model: nn.Module, training: bool) -> fx.Graph:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        return _Tracer().trace(model)
    except Exception as error:
        where = next(
            (
                f"{frame.filename}:{frame.lineno} ({frame.line})"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if "torch/fx" not in frame.filename and Path(frame.filename) != Path(__file__)
            ),
            "its forward",
        )
        raise TraceError(
            f"torch.fx cannot trace {type(model).__name__}: {_first_line(error)} It stopped at {where}. "
            "Control flow must not depend on tensors; move it out of forward, or wrap it with torch.fx.wrap."
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode


def _one_graph(model: nn.Module, evaluated: fx.Graph, trained: fx.Graph) -> fx.Graph:
    """Merge the two modes' graphs: a constant that is False in one and True in the other becomes a node."""
    pairs = list(zip(evaluated.nodes, trained.nodes, strict=False))
    counterpart = {id(t): e for e, t in pairs}
    same = len(evaluated.nodes) == len(trained.nodes)
    rewritten = []
    for e, t in pairs:
        if not same:
            break
        left, left_spec = pytree.tree_flatten((e.args, e.kwargs))
        right, right_spec = pytree.tree_flatten((t.args, t.kwargs))
        targets = e.target == t.target or _same_constants(model, e, t)
        same = e.op == t.op and targets and left_spec == right_spec
        for index, (a, b) in enumerate(zip(left, right, strict=True) if same else ()):
            if isinstance(b, fx.Node):
                same = same and counterpart.get(id(b)) is a
            elif a is False and b is True:
                left[index] = _training_node(evaluated, e)
            else:
                same = same and type(a) is type(b) and (a == b or (a != a and b != b))  # NaN is itself here
        rewritten.append((e, left, left_spec))
    if same:
        for e, left, left_spec in rewritten:
            e.args, e.kwargs = pytree.tree_unflatten(left, left_spec)
    return evaluated if same else _both_modes(model, evaluated, trained)


def _both_modes(model: nn.Module, evaluated: fx.Graph, trained: fx.Graph) -> fx.Graph:
    """One graph for a model that runs other operations in `train()` (auxiliary heads): it holds both modes'.

    What both do is there once; what only training does is added, and the output is picked by the mode:
    ``output = (evaluated, trained)[training]``.
    """
    free: dict[Any, list[fx.Node]] = {}
    for node in evaluated.nodes:
        free.setdefault(_key(model, node, lambda n: n), []).append(node)
    placed: dict[fx.Node, fx.Node] = {}
    order = {node: index for index, node in enumerate(evaluated.nodes)}
    last = next(iter(evaluated.nodes))
    for node in trained.nodes:
        if node.op == "output":
            continue
        twins = free.get(_key(model, node, lambda n: placed[n]), [])
        if twins:
            placed[node] = twins.pop(0)
            _mark_flags(evaluated, placed[node], node)
        else:
            with evaluated.inserting_after(last):
                placed[node] = evaluated.node_copy(node, lambda n: placed[n])
            order[placed[node]] = order[last]
        if order[placed[node]] >= order[last]:
            last = placed[node]
    ends = [next(n for n in graph.nodes if n.op == "output") for graph in (evaluated, trained)]
    result = (ends[0].args[0], fx.node.map_arg(ends[1].args[0], lambda n: placed[n]))
    flag = _training_node(evaluated, None)
    with evaluated.inserting_before(ends[0]):
        ends[0].args = (evaluated.call_function(operator.getitem, (result, flag)),)
    for node in list(evaluated.nodes):
        if node.op == "get_attr" and not node.users and str(node.target).endswith("training"):
            evaluated.erase_node(node)
    evaluated.lint()
    return evaluated


def _key(model: nn.Module, node: fx.Node, place: Callable[[fx.Node], fx.Node]) -> Any:
    """What tells one call from another, training flags aside."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    plain = [
        id(place(leaf)) if isinstance(leaf, fx.Node) else "flag" if isinstance(leaf, bool) else repr(leaf)
        for leaf in leaves
    ]
    constant = getattr(model, str(node.target), None) if node.op == "get_attr" else None
    target = repr(constant) if isinstance(constant, Tensor) else node.target
    return node.op, target, tuple(plain), repr(spec)


def _mark_flags(graph: fx.Graph, node: fx.Node, trained: fx.Node) -> None:
    """Where the trained twin has True for a False, the module's own mode decides."""
    left, spec = pytree.tree_flatten((node.args, node.kwargs))
    right = pytree.tree_leaves((trained.args, trained.kwargs))
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is False and b is True:
            left[index] = _training_node(graph, node)
    node.args, node.kwargs = pytree.tree_unflatten(left, spec)


def _same_constants(model: nn.Module, left: fx.Node, right: fx.Node) -> bool:
    """Tensors made in `forward` are kept by the tracer as attributes, under a new name in each mode."""
    if left.op != "get_attr" or right.op != "get_attr":
        return False
    a, b = (getattr(model, str(node.target), None) for node in (left, right))
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)


def _training_node(graph: fx.Graph, node: fx.Node | None) -> fx.Node:
    """A node that reads `training` of the innermost module whose forward made `node`, or of the model."""
    stack = node.meta.get("nn_module_stack") if node is not None else None
    owner = list(stack.values())[-1][0] if stack else ""
    target = f"{owner}.training" if owner else "training"
    for other in graph.nodes:
        if other.op == "get_attr" and other.target == target:
            found: fx.Node = other
            return found
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        return graph.create_node("get_attr", target)


def _restore_flags(model: nn.Module, traced: fx.GraphModule) -> None:
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in traced.named_modules():
        if name:
            module.training = modes.get(name, traced.training)


def same_values(expected: Any, found: Any) -> bool:
    """Tell whether two outputs (any pytree) hold the same tensors, up to rounding."""
    left, left_spec = pytree.tree_flatten(_plain(expected))
    right, right_spec = pytree.tree_flatten(_plain(found))
    if left_spec != right_spec:
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return False
        if isinstance(a, Tensor):
            if a.shape != b.shape:
                return False
            if not torch.allclose(a, b, rtol=0, atol=_SAME * _scale(a), equal_nan=True):
                return False
    return True


def _plain(tree: Any) -> Any:
    """Containers as dict and tuple: fx returns its own kinds of them."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f.name: _plain(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
    if isinstance(tree, (list, tuple)):
        return tuple(_plain(value) for value in tree)
    return tree


def _scale(value: Tensor) -> float:
    if not value.numel() or not value.is_floating_point():
        return 0.0
    return float(torch.nan_to_num(value, 0.0, 0.0, 0.0).abs().max())


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


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return line if line.endswith((".", "!", "?")) else line + "."
