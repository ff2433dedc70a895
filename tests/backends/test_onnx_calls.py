"""Export of models with unusual calls: outputs that are objects, arguments left out, a second try after a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import AssumptionError, BackendError, InputError

X, T = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))


@dataclass
class Answer:
    loss: Tensor | None
    logits: Tensor


class Answering(nn.Module):
    """As transformers: the loss with labels, and a dataclass that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 5)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().mean((2, 3)))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.scores(x)
        return Answer(None if labels is None else F.cross_entropy(scores, labels), scores)


class Losing(Answering):
    """The loss alone, with labels."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.scores(x)
        return scores if labels is None else F.cross_entropy(scores, labels)


def converted(model: nn.Module, *inputs: Tensor) -> nn.Module:
    return smcp_fx.convert(smcp_fx.prepare(model.eval(), inputs), check=False)


def test_fields_of_objects_are_outputs_of_the_file(tmp_path: Path) -> None:
    file = smcp_fx.export_onnx(converted(Answering(), X), X, tmp_path / "answer.onnx")
    assert [output.name for output in onnx.load(file).graph.output] == ["logits"]


def test_a_call_that_was_not_traced_is_told_as_such(tmp_path: Path) -> None:
    smaller = converted(Losing(), X)
    with pytest.raises(AssumptionError, match="traced with labels=None"):
        smcp_fx.export_onnx(smaller, (X, T), tmp_path / "loss.onnx")
    with pytest.raises(InputError, match="does not run on example inputs"):
        smcp_fx.export_onnx(smaller, X[:, :2], tmp_path / "loss.onnx")


def test_a_refusal_leaves_no_marks_on_the_inputs(tmp_path: Path) -> None:
    smaller, x = converted(Losing(), X), X.clone()
    with pytest.raises(BackendError, match="Leave fewer axes open"):
        smcp_fx.export_onnx(smaller, x, tmp_path / "open.onnx", dynamic_axes={0: {1: "channels"}})
    smcp_fx.export_onnx(smaller, x, tmp_path / "fixed.onnx", dynamic_axes={})


def test_torch_export_of_calls_that_leave_out_arguments() -> None:
    """It interprets graphs node by node, those of other calls as well: told, with what works."""
    smaller = converted(Losing(), X, T)
    assert_close(torch.export.export(smaller, (X, T)).module()(X, T), smaller(X, T), "identity")
    with pytest.raises(InputError, match=r"Export torch.nn.Sequential\(model\) instead"):
        torch.export.export(smaller, (X,))
    exported = torch.export.export(nn.Sequential(smaller), (X,))
    assert_close(exported.module()(X).detach(), smaller(X).detach(), "identity")


def test_arguments_by_name_only_need_a_dict() -> None:
    class Named(Answering):
        def forward(self, *, x: Tensor) -> Any:  # type: ignore[override]
            return self.scores(x)

    with pytest.raises(InputError, match="takes x by name only: pass the example inputs as a dict"):
        smcp_fx.prepare(Named(), (X,))
