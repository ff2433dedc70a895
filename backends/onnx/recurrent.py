"""Recurrent layers as ONNX's own operators, for any number of steps; the exporter would write every step.

    LSTM [i, f, g, o]  ->  [i, o, f, c]        GRU [r, z, n]  ->  [z, r, h], linear_before_reset = 1

A layer is one operator, with both directions. `torch.export` sees one operation for all layers, `smcp_fx::recurrent`;
`TRANSLATIONS` tells the exporter how to write it, and `fold_weights` reorders the gates once, in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxscript import opset18
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smcp_fx.backends.onnx.clean import constant_tensors
from smcp_fx.errors import BackendError

#: By PyTorch's function: the operator, the places of ONNX's gates among PyTorch's, and attributes.
_KINDS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "lstm": ("LSTM", [0, 3, 1, 2], {}),
    "gru": ("GRU", [1, 0, 2], {"linear_before_reset": 1}),
    "rnn_tanh": ("RNN", [0], {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", [0], {"activations": ["Relu"]}),
}
_OPERATORS = {operator for operator, _, _ in _KINDS.values()}

torch.library.define(
    "smcp_fx::recurrent",
    "(Tensor x, Tensor[] states, Tensor[] weights, str kind, bool biases, int layers, bool bidirectional,"
    " bool batch_first) -> Tensor[]",
)


@torch.library.register_fake("smcp_fx::recurrent")  # type: ignore[untyped-decorator]
def _shapes(
    x: Tensor, states: list[Tensor], weights: list[Tensor], kind: str, biases: bool, layers: int,
    bidirectional: bool, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    out = x.new_empty((*x.shape[:2], states[0].shape[2] * (1 + bidirectional)))
    return [out, *(torch.empty_like(state) for state in states)]


class WholeRecurrentLayers(TorchFunctionMode):
    """While entered, `torch.export` sees recurrent layers whole.

    The exporter translates layers on packed sequences, layers in double precision (which ONNX Runtime's
    operators lack), and layers with dropout in training. `BackendError` for layers with a projection.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kind = getattr(function, "__name__", "")
        if kind not in _KINDS or function is not getattr(torch, kind) or len(args) != 9 or kwargs:
            return function(*args, **(kwargs or {}))
        x, states, weights, biases, layers, dropout, training, bidirectional, batch_first = args
        if not isinstance(biases, bool) or x.dtype == torch.float64 or (dropout and training):
            return function(*args)
        if len(weights) != layers * (1 + bidirectional) * (4 if biases else 2):
            raise BackendError(
                "ONNX's LSTM has no projection (proj_size): put a linear layer behind an LSTM without one, and train "
                "that, or export what stands before and behind"
            )
        states = list(states) if kind == "lstm" else [states]
        outputs = torch.ops.smcp_fx.recurrent(
            x, states, list(weights), kind, biases, layers, bidirectional, batch_first
        )
        return tuple(outputs)


def _translated(
    x: Any, states: Sequence[Any], weights: Sequence[Any], kind: str, biases: bool, layers: int,
    bidirectional: bool, batch_first: bool,
) -> list[Any]:  # fmt: skip
    op: Any = opset18  # typed for tensors alone, but lists become constants
    directions = 1 + bidirectional
    operator, order, attributes = _KINDS[kind]
    direction = "bidirectional" if bidirectional else "forward"
    if "activations" in attributes:
        attributes = {"activations": attributes["activations"] * directions}

    def ordered(weight: Any) -> Any:
        if len(order) == 1:
            return weight
        gates = op.Split(weight, num_outputs=len(order), axis=0)
        return op.Concat(*(gates[place] for place in order), axis=0)

    def both(parts: list[Any]) -> Any:
        return op.Concat(*(op.Unsqueeze(part, [0]) for part in parts), axis=0)

    set_states = [None if _is_zeros(state) else state for state in states]
    ends: list[list[Any]] = [[] for _ in states]
    each = 4 if biases else 2
    y = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    for layer in range(layers):
        own = [
            [ordered(weight) for weight in weights[place * each : (place + 1) * each]]
            for place in range(layer * directions, (layer + 1) * directions)
        ]
        bias = both([op.Concat(*parts[2:], axis=0) for parts in own]) if biases else None
        begin = [layer * directions], [(layer + 1) * directions], [0]
        starts = [None if state is None else op.Slice(state, *begin) for state in set_states]
        y, *last = getattr(op, operator)(
            y, both([parts[0] for parts in own]), both([parts[1] for parts in own]), bias, None, *starts,
            hidden_size=weights[1].shape[1], direction=direction, **attributes,
        )  # fmt: skip
        y = (
            op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])
            if bidirectional
            else op.Squeeze(y, [1])
        )
        for end, state in zip(ends, last, strict=False):
            end.append(state)
    y = op.Transpose(y, perm=[1, 0, 2]) if batch_first else y
    return [y, *(op.Concat(*end, axis=0) if layers > 1 else end[0] for end in ends)]


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.smcp_fx.recurrent.default: _translated
}


def _is_zeros(state: Any) -> bool:
    """Is a state all zeros, of any size? The operators begin with zeros by default."""
    maker = state.producer()
    if maker is None or maker.op_type != "Expand":
        return False
    filler = maker.inputs[0].producer()
    if filler is None or filler.op_type != "Constant":
        return False
    return not filler.attributes["value"].value.numpy().any()


def fold_weights(model: onnx.ModelProto) -> None:
    """Fold the inputs of recurrent operators that depend on parameters alone; name these (``rnn.l0``)."""
    graph = model.graph
    tensors, origin = constant_tensors(graph), {tensor.name: tensor.name for tensor in graph.initializer}
    wanted: set[str] = set()
    taken = {node.name for node in graph.node}
    for node in reversed(graph.node):
        if node.op_type in _OPERATORS:
            wanted.update(node.input[1:4])
        elif wanted & set(node.output):
            wanted.update(node.input)
    for node in list(graph.node):
        if node.op_type in _OPERATORS and "weight_ih_" in origin.get(node.input[1], ""):
            name = origin[node.input[1]].replace("weight_ih_", "")
            if name not in taken:  # a layer may be called twice
                node.name = name
                taken.add(name)
        if not wanted & set(node.output) or not node.input or not tensors.keys() >= set(node.input):
            continue
        values = {name: numpy_helper.to_array(tensors[name]) for name in node.input}
        for name, value in zip(node.output, ReferenceEvaluator(node).run(None, values), strict=True):
            tensors[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
            origin[name] = origin.get(node.input[0], "")
            graph.initializer.append(tensors[name])
        graph.node.remove(node)
