"""Recurrent layers whose weights the graph reads, so that they can be masked.

    before   y = call_module[lstm](x)
    after    w = recurrent_weight(x, get_attr[lstm.weight_ih_l0])
             u = recurrent_weight(x, get_attr[lstm.weight_hh_l0])
             y = recurrent(get_attr[lstm], [w, u, get_attr[lstm.bias_ih_l0], ...], x, None)

`RestoreRecurrentLayers` undoes this when a model is converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from smcp_fx.tracing.operations import is_changed
from smcp_fx.tracing.own_weights import has_hooks
from smcp_fx.tracing.values import FROZEN, OPAQUE, TensorInfo

_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)


def recurrent_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Return the weight, by which a recurrent layer then reads ``x`` and its own state."""
    return weight


def recurrent(module: nn.Module, weights: list[Tensor], x: Tensor, state: Any = None) -> Any:
    """Call a recurrent layer with these tensors in place of its own, in the order of `weight_names`."""
    if isinstance(module, _CELLS):
        named = dict(zip(weight_names(module), weights, strict=True))
        return torch.func.functional_call(module, named, (x, state))
    held: Any = module._flat_weights
    module._flat_weights = list(weights)  # type: ignore[assignment]
    try:
        if has_hooks(module):
            return module(x) if state is None else module(x, state)
        return type(module).forward(module, x, state)
    finally:
        module._flat_weights = held


def projects(module: nn.Module) -> bool:
    """Does a recurrent layer return fewer channels than it has hidden units?"""
    return isinstance(module, nn.RNNBase) and module.proj_size > 0


def weight_names(module: nn.Module) -> list[str]:
    """The names of a recurrent layer's weights and biases, in its own order."""
    if isinstance(module, nn.RNNBase):
        return list(module._flat_weights_names)
    return [name for name, _ in module.named_parameters(recurse=False)]


def open_recurrent_layers(traced: fx.GraphModule, values: dict[str, Any]) -> None:
    """Let the graph read the weights of recurrent layers; adds the values of new nodes to ``values``.

    Layers with hooks, with a projection, and on packed sequences stay as they are.
    """
    opened = False
    for node in [
        node
        for node in traced.graph.nodes
        if node.op == "call_module" and not {OPAQUE, FROZEN} & node.meta.keys()
    ]:
        module = traced.get_submodule(str(node.target))
        x = node.args[0] if node.args else node.kwargs.get("input")
        if type(module) not in (*_CELLS, *_LAYERS) or is_changed(module) or projects(module):
            continue
        if not isinstance(x, fx.Node) or not isinstance(values.get(x.name), TensorInfo):
            continue
        state = node.args[1] if len(node.args) > 1 else node.kwargs.get("hx")
        _open(traced, node, module, (x, state), values)
        opened = True
    if opened:
        traced.recompile()


def _open(
    traced: fx.GraphModule, node: fx.Node, module: nn.Module, inputs: tuple[Any, Any], values: dict[str, Any]
) -> None:
    path, weights = str(node.target), []
    with traced.graph.inserting_before(node):
        owner = traced.graph.create_node("get_attr", path)
        values[owner.name] = None
        for name in weight_names(module):
            weight = getattr(module, name)
            info = TensorInfo(tuple(weight.shape), weight.dtype)
            read = traced.graph.create_node("get_attr", f"{path}.{name}")
            values[read.name] = info
            if name.startswith("weight"):
                read = traced.graph.call_function(recurrent_weight, (inputs[0], read))
                values[read.name] = info
            weights.append(read)
    node.op, node.target = "call_function", recurrent
    node.args, node.kwargs = (owner, weights, *inputs), {}
