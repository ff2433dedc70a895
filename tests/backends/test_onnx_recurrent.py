"""Recurrent layers in ONNX files: ONNX's own operators, for any number of steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.backends.onnx.export import export_onnx

OPEN = {"x": {0: "batch", 1: "time"}}


class Reads(nn.Module):
    """Two recurrent layers in a row, whose last states are outputs, too."""

    def __init__(self, kind: Any, first: Any, second: Any) -> None:
        super().__init__()
        wide = 6 * (1 + first.get("bidirectional", False))
        self.first, self.second = kind(4, 6, batch_first=True, **first), kind(wide, 5, **second)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, begun = self.first(x, state)
        z, last = self.second(y.transpose(0, 1))
        return z, begun, last


def run(path: Path, *given: Tensor) -> list[Tensor]:
    """What ONNX Runtime computes."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {i.name: tensor.numpy() for i, tensor in zip(session.get_inputs(), given, strict=True)}
    return [torch.from_numpy(value) for value in session.run(None, feeds)]


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [t for part in outputs for t in flat(part)]


def kinds(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(
    ("kind", "more", "given"),
    [
        (nn.LSTM, {}, ("state_0", "state_1")),
        (nn.GRU, {}, ("state",)),
        (nn.RNN, {}, ()),
        (nn.RNN, {"nonlinearity": "relu"}, ("state",)),
    ],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_operators_compute_what_the_layers_do_at_any_length(
    kind: Any, more: Any, given: tuple[str, ...], tmp_path: Path
) -> None:
    """Both directions, two layers, with and without biases and given states."""
    torch.manual_seed(0)
    model = Reads(kind, {"bidirectional": True, "num_layers": 2} | more, {"bias": False} | more).eval()

    def inputs(batch: int, steps: int) -> tuple[Any, ...]:
        states = tuple(torch.randn(4, batch, 6) for _ in given)
        return (torch.randn(batch, steps, 4), *([states] if kind is nn.LSTM else states))

    axes = OPEN | {name: {1: "batch"} for name in given}
    path = smcp_fx.export_onnx(model, inputs(2, 5), tmp_path / "n.onnx", dynamic_axes=axes)
    assert not {"Split", "Unsqueeze", "Expand", "MatMul", "Gemm"} & kinds(path).keys()
    assert kinds(path)[kind.__name__] == 3
    names = {node.name for node in onnx.load(path).graph.node}
    assert kind is nn.RNN or {"first.l0", "first.l1", "second.l0"} <= names
    for batch, steps in ((2, 5), (3, 11), (1, 1)):
        example = inputs(batch, steps)
        with torch.no_grad():
            assert_close(run(path, *flat(example)), flat(model(*example)), "slicing")


def test_states_of_zeros_and_one_sequence(tmp_path: Path) -> None:
    """As tutorials write them; they are what the operator begins with."""

    class Begins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 6, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(2, x.size(0), 6)
            whole = self.rnn(x, (state, state))[0]
            return whole + self.rnn(x[0])[0]

    model, x = Begins().eval(), torch.randn(3, 7, 4)
    path = smcp_fx.export_onnx(model, x, tmp_path / "n.onnx", dynamic_axes=OPEN, opset=17)
    assert kinds(path)["LSTM"] == 4
    assert not {"Expand", "ConstantOfShape"} & kinds(path).keys()
    with torch.no_grad():
        assert_close(run(path, x), [model(x)], "slicing")


def test_pruned_layers_go_out_and_come_in_again(tmp_path: Path) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 6, batch_first=True, bidirectional=True), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    x = torch.randn(2, 5, 4)
    prepared = smcp_fx.prepare(Tagger().eval(), x)
    masks, free = prepared.masks, [group.name for group in prepared.channels.groups if not group.pinned]
    prepared.set_masks({name: torch.arange(len(masks[name])) > 0 for name in free})
    smaller = smcp_fx.convert(prepared).eval()
    path = smcp_fx.export_onnx(smaller, x, tmp_path / "n.onnx", dynamic_axes=OPEN)
    assert kinds(path)["GRU"] == 1
    again = smcp_fx.from_onnx(path, x)
    assert any(isinstance(layer, nn.GRU) and layer.hidden_size == 5 for layer in again.modules())
    with torch.no_grad():
        assert_close(again(x), smaller(x), "slicing")


def test_half_precision(tmp_path: Path) -> None:
    model, x = nn.GRU(4, 6, batch_first=True).eval(), torch.randn(2, 5, 4)
    path = export_onnx(model, x, tmp_path / "n.onnx", precision="fp16")
    assert kinds(path)["GRU"] == 1
    with torch.no_grad():
        expected = [value.half() for value in model(x)]
    assert_close(run(path, x.half()), expected, "identity")
