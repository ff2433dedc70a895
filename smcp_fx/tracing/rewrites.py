"""Rewrites a fresh trace into fewer forms, so that rules and passes meet fewer cases."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from torch import fx, nn

from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.operations import operation_name, operation_of, writes_in_place
from smcp_fx.tracing.values import TensorInfo

_EXPANSIONS = {"expand", "expandas", "broadcastto", "cat", "repeat", "repeatinterleave", "tile"}
#: Element-wise operations, which may run before or after a value is spread over the channels.
_ALONE = set(
    """
clamp exp gelu hardsigmoid hardswish hardtanh leakyrelu neg pow relu relu6 sigmoid silu softplus square sqrt tanh
""".split()
)
#: Methods that change their tensor's shape in place, and have an out-of-place form.
RESHAPED = {"unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "swapdims_", "t_"}

_OUTER = {torch.outer, torch.ger, "outer", "ger"}


def normalise(model: nn.Module, graph: fx.Graph) -> None:
    """Give first arguments by position, so that rules and passes find them; `nn.Unflatten` becomes a function.

    An outer product becomes an `einsum`, and `h.unsqueeze_(1)` becomes `h = h.unsqueeze(1)`.
    """
    _resolve_annotations(model, graph)
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_method" and node.target in RESHAPED and isinstance(node.args[0], fx.Node):
            node.target = str(node.target).rstrip("_")
            for user in [user for user in node.args[0].users if place[user] > place[node]]:
                user.replace_input_with(node.args[0], node)
    by_position(model, graph)
    for node in list(graph.nodes):
        _two_at_a_time(graph, node)
        _of_one(graph, node)
        _without_addend(graph, node)
        _in_steps(model, graph, node)
        if _asks_for_idle_gradients(graph, node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.target in _OUTER and len(node.all_input_nodes) == len(node.args) == 2:
            node.op, node.target, node.args = "call_function", torch.einsum, ("i,j->ij", *node.args)
        if node.target is getattr and node.args[1] == "data" and _gives_a_tensor(node.args[0]):
            # torch.export knows no `.data`.
            node.op, node.target, node.args = "call_method", "detach", node.args[:1]
        if type(module) is nn.Unflatten and isinstance(module.dim, int):
            node.op, node.target = "call_function", torch.unflatten
            node.args = (node.args[0], module.dim, tuple(module.unflattened_size))


def _asks_for_idle_gradients(graph: fx.Graph, node: fx.Node) -> bool:
    """Does `x.requires_grad_()` ask for the gradient of a tensor inside the network, which no code reads?

    Checkpointing and frozen layers (wav2vec2) ask for it. The gradient of an input is not idle, since the
    caller may read it; no gradient is idle in a graph that calls `autograd.grad`.
    """
    if node.op != "call_method" or node.target != "requires_grad_":
        return False
    source, wanted = (
        node.args[0],
        node.kwargs.get("requires_grad", True if len(node.args) < 2 else node.args[1]),
    )
    taken = any(other.target in (torch.autograd.grad, "backward", "retain_grad") for other in graph.nodes)
    return isinstance(source, fx.Node) and source.op.startswith("call") and wanted is True and not taken


def _gives_a_tensor(node: fx.Node) -> bool:
    """Is it no parameter (whose `.data` a forward may write into), and no input of a user's class?"""
    return node.op in ("call_module", "call_method") or (
        node.op == "call_function" and node.target is not getattr
    )


def _two_at_a_time(graph: fx.Graph, node: fx.Node) -> None:
    """Split an einsum of several operands into products of two, from left to right, as PyTorch computes it.

    before   einsum("nld,nmd,nl->nlm", q, k, z)      after   einsum("nlm,nl->nlm", einsum("nld,nmd->nlm", q, k), z)
    """
    if node.target not in (torch.einsum, torch.functional.einsum) or not isinstance(node.args[0], str):
        return
    factors = node.args[1] if len(node.args) == 2 else node.args[1:]
    equation, arrow, out = node.args[0].replace(" ", "").partition("->")
    terms = equation.split(",")
    if len(terms) < 3 or not arrow or "." in equation or not isinstance(factors, (tuple, list)):
        return
    operands = list(factors)
    with graph.inserting_before(node):
        while len(terms) > 2:
            left = "".join([*terms[2:], out])
            made = "".join(dict.fromkeys(letter for letter in terms[0] + terms[1] if letter in left))
            first = graph.call_function(node.target, (f"{terms[0]},{terms[1]}->{made}", *operands[:2]))
            first.meta = dict(node.meta)
            terms, operands = [made, *terms[2:]], [first, *operands[2:]]
    node.args = (f"{','.join(terms)}->{out}", *operands)


def _of_one(graph: fx.Graph, node: fx.Node) -> None:
    """Write an einsum of one operand, such as `einsum("nchw->nhc", x)`, as a permutation and a sum."""
    if node.target not in (torch.einsum, torch.functional.einsum) or len(node.args) != 2:
        return
    operand = node.args[1][0] if isinstance(node.args[1], (tuple, list)) else node.args[1]
    term, arrow, out = str(node.args[0]).replace(" ", "").partition("->")
    if (
        "," in term
        or "." in term
        or not arrow
        or len(set(term)) < len(term)
        or not isinstance(operand, fx.Node)
    ):
        return
    order = out + "".join(letter for letter in term if letter not in out)
    summed = tuple(range(len(out), len(order)))
    with graph.inserting_before(node):
        moved = graph.call_method("permute", (operand, *(term.index(letter) for letter in order)))
        result = graph.call_method("sum", (moved, summed)) if summed else moved
    for made in {moved, result}:
        made.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _without_addend(graph: fx.Graph, node: fx.Node) -> None:
    """`baddbmm(empty, a, b, beta=0, alpha=scale)` as `bmm(a, b) * scale`: with beta = 0 the addend is not read."""
    if node.target not in (torch.baddbmm, torch.addmm) or len(node.args) != 3 or node.kwargs.get("beta") != 0:
        return
    product = torch.bmm if node.target is torch.baddbmm else torch.mm
    with graph.inserting_before(node):
        result = graph.call_function(product, node.args[1:])
        scaled = graph.call_function(operator.mul, (result, node.kwargs.get("alpha", 1)))
    for made in (result, scaled):
        made.meta = dict(node.meta)
    node.replace_all_uses_with(scaled)
    graph.erase_node(node)


def _in_steps(model: nn.Module, graph: fx.Graph, node: fx.Node) -> None:
    """Write a mean squared error as a difference, its square and the mean of that."""
    loss = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    options = node.kwargs.values() if loss is None else [getattr(loss, "reduction", "")]
    is_mse = type(loss) is nn.MSELoss or node.target is F.mse_loss
    if not is_mse or len(node.args) != 2 or any(option not in (None, "mean") for option in options):
        return
    with graph.inserting_before(node):
        difference = graph.call_function(operator.sub, node.args)
        square = graph.call_method("square", (difference,))
        mean = graph.call_method("mean", (square,))
    for made in (difference, square, mean):
        made.meta = dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def _resolve_annotations(model: nn.Module, graph: fx.Graph) -> None:
    """Turn string annotations into types, as in files with ``from __future__ import annotations``.

    torch.fx would write the strings into its code as names, which TorchScript would look up.
    """
    try:
        hints = get_type_hints(type(model).forward)
    except Exception:  # annotations are code, and may raise anything
        hints = {}
    for node in graph.nodes:
        if isinstance(node.type, str):
            node.type = hints.get("return" if node.op == "output" else str(node.target).lstrip("*"))


def by_position(model: nn.Module, graph: fx.Graph) -> None:
    """Give first arguments, and sizes, by position."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        kwargs = dict(node.kwargs)
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        called = node.target if module is None else module.forward
        for name in ("input", "tensors", "tensor"):
            if not node.args and name in kwargs and _is_first(called, name):
                node.args = (kwargs.pop(name),)
        for name in ("shape", "size"):
            sizes = kwargs.get(name)
            by_keyword = len(node.args) == 1 and isinstance(sizes, (tuple, list))
            if by_keyword and node.target in (torch.reshape, torch.broadcast_to):
                node.args = (*node.args, kwargs.pop(name))
        if len(node.args) == 1 and node.target is torch.unflatten and {"dim", "sizes"} <= kwargs.keys():
            node.args = (*node.args, kwargs.pop("dim"), kwargs.pop("sizes"))
        node.kwargs = kwargs
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


def _is_first(function: Callable[..., Any], name: str) -> bool:
    """Is this the function's first parameter? It is in torch functions without a signature, but for two."""
    try:
        return next(iter(inspect.signature(function).parameters), None) == name
    except (TypeError, ValueError):
        return function not in (torch.where, torch.searchsorted)


def drop_expansions(traced: fx.GraphModule, values: dict[str, Any]) -> None:
    """Drop the expansion of a value over the channels if the arithmetic that reads it broadcasts anyway.

    before   gate.expand_as(x).sigmoid() * x      after   gate.sigmoid() * x

    An expanded gate would need as many channels as ``x`` keeps; one that broadcasts needs nothing.
    """
    changed = False
    for node in list(traced.graph.nodes):
        source, info = _spread(node), values.get(node.name)
        held = values.get(source.name) if source is not None else None
        if source is None or not isinstance(info, TensorInfo) or not isinstance(held, TensorInfo):
            continue
        padded = (1,) * (len(info.shape) - len(held.shape)) + held.shape
        spread = all(a in (1, b) for a, b in zip(padded, info.shape, strict=True))
        alone: dict[str, TensorInfo] = {}
        if spread and _waits(traced, node, held, info, values, alone):
            node.replace_all_uses_with(source)
            traced.graph.erase_node(node)
            values.update(alone)
            changed = True
    if changed:
        traced.recompile()


def _spread(node: fx.Node) -> fx.Node | None:
    """The tensor that the node spreads or repeats; for a concat, the only tensor that it joins."""
    name = None if node.op == "call_module" else operation_name(node, None)
    source = node.args[0] if node.args and name in _EXPANSIONS else None
    if name == "cat" and isinstance(source, (list, tuple)) and source:
        source = source[0] if all(part is source[0] for part in source) else None
    return source if isinstance(source, fx.Node) else None


def _waits(
    traced: fx.GraphModule,
    node: fx.Node,
    held: TensorInfo,
    info: TensorInfo,
    values: dict[str, Any],
    alone: dict[str, TensorInfo],
) -> bool:
    """Do all readers of the node, spread from ``held`` to ``info``, give the same result without the expansion?

    ``alone`` gets the values that become smaller.
    """
    for user in node.users:
        name, value = operation_of(traced, user), values.get(user.name)
        if writes_in_place(user, traced):
            return False
        others = [values.get(n.name) for n in user.all_input_nodes if n is not node]
        arithmetic = user.op != "call_module" and name in ("add", "sub", "mul", "div")
        if arithmetic and _broadcast([held, *others]) == info.shape:
            continue
        on_its_own = name in _ALONE or (arithmetic and not others)
        if not on_its_own or user.all_input_nodes != [node] or not isinstance(value, TensorInfo):
            return False
        smaller = alone[user.name] = TensorInfo(held.shape, value.dtype)
        if value.shape != info.shape or not _waits(traced, user, smaller, value, values, alone):
            return False
    return bool(node.users)


def add_computed_biases(traced: fx.GraphModule, values: dict[str, Any]) -> None:
    """Take a bias that is computed from the input out of the linear, and add it to the result.

    before   linear(x, weight, h.mean(0))      after   linear(x, weight) + h.mean(0)

    A layer's own weight and bias are parameters, which can be sliced.
    """
    for node in [node for node in traced.graph.nodes if node.target is F.linear]:
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if not isinstance(bias, fx.Node) or _is_constant(bias):
            continue
        node.args, node.kwargs = node.args[:2], {k: v for k, v in node.kwargs.items() if k != "bias"}
        with traced.graph.inserting_after(node):
            total = traced.graph.call_function(operator.add, (node, bias))
        node.replace_all_uses_with(total, delete_user_cb=lambda user, own=total: user is not own)
        total.meta, values[total.name] = dict(node.meta), values[node.name]
        traced.recompile()


def _is_constant(node: fx.Node) -> bool:
    """Does the node follow from parameters only?"""
    return all(one.op in ("get_attr", "call_function", "call_method") for one in ancestors(node))


def _broadcast(values: list[Any]) -> tuple[int, ...] | None:
    """The broadcast shape of tensors and numbers; None for other values, or if they do not broadcast."""
    if not all(isinstance(value, (TensorInfo, int, float)) for value in values):
        return None
    shapes = [value.shape for value in values if isinstance(value, TensorInfo)]
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
