"""Channel rules of recurrent layers and cells: they read channels, and remember others from one time to the next.

All levels and directions of `torch.lstm` and its like remember equally many, so the hidden channels of equal places
in all of them are one unit. Each is written by several rows of a weight (a gate each), and read by one column.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smcp_fx.channels.propagation import Propagation, Rule, channel_labels, place
from smcp_fx.channels.rules_layers import own_inputs
from smcp_fx.channels.trail import Call, Layer, ParameterRef
from smcp_fx.tracing.plain_recurrent import RECURRENT


def recurrent(run: Propagation, call: Call) -> Any:
    """Of several times, levels and directions."""
    source, states, weights, biased, levels = call.args[:5]
    directions = 2 if call.args[7] else 1
    cells = levels * directions
    each = len(weights) // cells
    if each != (4 if biased else 2):
        return run.unknown(call, "a recurrent layer of this form has no channel rule")
    ways = [weights[each * cell : each * (cell + 1)] for cell in range(cells)]
    return _recurrent(run, call, run.of(source), states, ways, directions)


def cell(run: Propagation, call: Call) -> Any:
    """One step."""
    return _recurrent(run, call, run.of(call.args[0]), call.args[1], [call.args[2:6]], 1)


def _recurrent(
    run: Propagation, call: Call, labels: Tensor, states: Any, ways: list[Any], directions: int
) -> Any:
    if not all(isinstance(weight, ParameterRef) for way in ways for weight in way if weight is not None):
        return run.unknown(call, "a recurrent layer whose weights are computed, not parameters")
    inputs = own_inputs(run, call, channel_labels(run, labels, labels.dim() - 1))
    first = ways[0][1]
    known = run.trail.slots.get(first.name, {}).get(1)
    hidden = run.fresh(call.node.name, first.shape[1]) if known is None else known
    gates = first.shape[0] // first.shape[1]
    for index, way in enumerate(ways):
        below = inputs if index < directions else hidden.repeat(directions)
        for weight, read in ((way[0], below), (way[1], hidden)):
            run.slot(weight.name, 1, read)
            run.slot(weight.name, 0, hidden.repeat(gates))
            _record(run, call, weight, tuple(labels.shape), read, hidden.repeat(gates))
        for bias in way[2:]:
            if bias is not None:
                run.slot(bias.name, 0, hidden.repeat(gates))
    for state in states if isinstance(states, (tuple, list)) else (states,):
        one = run.of(state, [-1])
        run.tie(channel_labels(run, one, one.dim() - 1), hidden)
    shapes = [value.shape for value in (call.value if isinstance(call.value, tuple) else (call.value,))]
    made = [place(hidden.repeat(shape[-1] // hidden.numel()), shape, -1) for shape in shapes]
    return tuple(made) if isinstance(call.value, tuple) else made[0]


def _record(
    run: Propagation, call: Call, weight: ParameterRef, shape: tuple[int, ...], read: Tensor, written: Tensor
) -> None:
    """Note one weight of the node as a linear layer on every step of every image."""
    run.trail.layers.append(
        Layer(
            node=call.node.name,
            path=weight.name,
            kind="dense",
            weight=weight.name,
            bias=None,
            in_dim=1,
            out_dim=0,
            groups=1,
            in_labels=read,
            out_labels=written,
            input_channels=read,
            output_channels=written,
            images=shape[0 if len(shape) < 3 or call.args[8] else 1],
            in_shape=(*shape[:-1], read.numel()),
            out_shape=(*shape[:-1], written.numel()),
            transposed=False,
            weight_shape=weight.shape,
            axis=len(shape) - 1,
            source=weight.name,
            computed=False,
            part=weight.name.rpartition(".")[2],
        )
    )


RULES: dict[str, Rule] = {name: cell if name.endswith("cell") else recurrent for name in RECURRENT}
