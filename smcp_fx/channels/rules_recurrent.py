"""Channel rules of recurrent layers: their inputs, and their hidden sizes.

A hidden unit is a row of each gate in both weights and biases, a column of the recurrent weight, and a
channel of the output. Removing it changes no other unit, as the others no longer read it. `torch.nn` has one
hidden size a module, so the units of all layers and directions go together.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.channels.labels import place
from smcp_fx.channels.propagation import Propagation, Rule
from smcp_fx.channels.rules_layers import channel_labels, own_inputs, record, renamed
from smcp_fx.channels.trail import Call, ParameterRef, tensor_leaves
from smcp_fx.tracing.recurrent import weight_names
from smcp_fx.tracing.values import TensorInfo


def recurrent_weight(run: Propagation, call: Call) -> Any:
    """A fixed source: the layer's own rule records the weight."""
    return run.filled(call.value, run.fixed(call.node.name, "a weight of a recurrent layer"))


def recurrent(run: Propagation, call: Call) -> Any:
    """Consumes the last dimension of its input and its own state; produces hidden units along the last dimension."""
    owner, reads = call.node.args[:2]
    assert isinstance(owner, fx.Node) and isinstance(reads, (list, tuple))
    module = run.module.get_submodule(str(owner.target))
    labels = run.settled(run.of(call.args[2]), {-1})
    last = labels.dim() - 1
    varied = run.varied(labels)
    if varied and last not in varied:
        return run.unknown(call, f"{owner.target!r} mixes along a dimension without channels")
    inputs = own_inputs(run, call, channel_labels(run, labels, last))
    names = [run.parameter(f"{owner.target}.{name}") for name in weight_names(module)]
    states = next(n for n in names if n.rpartition(".")[2].startswith("weight_hh"))
    recorded = run.trail.slots.get(states, {}).get(1)
    size = run.module.get_parameter(states).shape[1]
    hidden = run.fresh(call.node.name, size) if recorded is None else recorded
    for held in tensor_leaves(call.args[3]):
        state = run.of(held, {-1})
        run.tie(channel_labels(run, state, state.dim() - 1), hidden)
    ways = 2 if isinstance(module, nn.RNNBase) and module.bidirectional else 1
    for name, read in zip(names, reads, strict=True):
        gates = run.module.get_parameter(name).shape[0] // hidden.numel()
        rows = hidden.repeat(gates)
        attribute = name.rpartition(".")[2]
        run.slot(name, 0, rows)
        if attribute.startswith("weight"):
            first = attribute in ("weight_ih", "weight_ih_l0", "weight_ih_l0_reverse")
            columns = inputs if first else hidden if "_hh" in attribute else hidden.repeat(ways)
            run.slot(name, 1, columns)
            _record(run, read, name, (columns, rows), tuple(labels.shape[:-1]))
    made = hidden if recorded is None else renamed(run, call, hidden)
    leaves, structure = pytree.tree_flatten(call.value)
    placed = [_placed(info, made, ways) for info in leaves]
    return pytree.tree_unflatten(placed, structure)


def _placed(info: Any, hidden: Tensor, ways: int) -> Any:
    """The labels of an output: the hidden units of one direction, or of both side by side."""
    if not isinstance(info, TensorInfo):
        return info
    both = ways > 1 and info.shape[-1] == ways * hidden.numel()
    return place(hidden.repeat(ways) if both else hidden, info.shape, -1)


def _record(
    run: Propagation, read: fx.Node, name: str, channels: tuple[Tensor, Tensor], positions: tuple[int, ...]
) -> None:
    """Record a weight as a separate layer: rows by columns, once a position."""
    inputs, outputs = (labels.numel() for labels in channels)
    made = TensorInfo((*positions, outputs), run.values[read.name].dtype)
    call, weight = Call(read, None, (), {}, None, made), ParameterRef(name, (outputs, inputs))
    axes, shape = (len(positions), len(positions)), (*positions, inputs)
    record(run, call, weight, None, "dense", (1, 0), 1, channels, channels, shape, axes)


RULES: dict[str, Rule] = {"recurrent": recurrent, "recurrentweight": recurrent_weight}
