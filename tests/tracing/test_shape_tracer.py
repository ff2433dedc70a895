"""Python's questions about shapes: answered from the example, written down, and checked at every call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, between, chain, conv, free_parameter, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import TraceError
from smcp_fx.tracing.tracer import trace

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def halved(s: Any, h: Tensor) -> Tensor:
    return F.max_pool2d(h, 2) if h.shape[-1] > 4 else h


def test_a_branch_on_a_size_is_an_assumption_with_its_line() -> None:
    model = between(halved).eval()
    traced = trace(model, (IMAGE,))
    assert len(traced.assumptions) == 1
    assert traced.assumptions[0].startswith(
        "traced for inputs where stem.shape[-1] > 4 (test_shape_tracer.py, line "
    )
    assert_close(run(traced.module, (IMAGE,)), run(model, (IMAGE,)), "identity")


def test_other_sizes_are_free_as_long_as_the_assumption_holds() -> None:
    model = between(halved).eval()
    traced = trace(model, (IMAGE,)).module
    for shape in [(1, 3, 8, 8), (5, 3, 10, 6)]:
        image = torch.randn(shape)
        assert torch.equal(run(traced, (image,)), run(model, (image,)))


def test_a_number_that_only_torch_looked_at_stays_free() -> None:
    class PerSample(nn.Module):  # as in CondConv: a kernel for each image, by one grouped convolution
        def __init__(self) -> None:
            super().__init__()
            self.kernels = nn.Linear(3, 8 * 3 * 9)

        def forward(self, x: Tensor) -> Tensor:
            b, c, h, w = x.shape
            kernels = self.kernels(x.mean((2, 3))).view(b * 8, c, 3, 3)
            return F.conv2d(x.reshape(1, b * c, h, w), kernels, padding=1, groups=b).view(b, 8, h, w)

    model = PerSample().eval()
    traced = trace(model, (IMAGE,))
    assert not traced.assumptions
    for batch in (1, 5):
        image = torch.randn(batch, 3, 8, 8)
        assert torch.equal(run(traced.module, (image,)), run(model, (image,)))


def test_a_number_that_python_took_as_well_is_an_assumption() -> None:
    def padded(s: Any, h: Tensor) -> Tensor:
        for _ in range(h.shape[0]):
            h = F.max_pool2d(h, h.shape[0], stride=1)
        return h

    traced = trace(between(padded).eval(), (IMAGE,))
    assert len(traced.assumptions) == 1 and "stem.shape[0] == 2" in traced.assumptions[0]


def test_an_input_that_breaks_the_assumption_is_refused_by_its_name() -> None:
    prepared = smcp_fx.prepare(between(halved).eval(), IMAGE)
    small = torch.randn(2, 3, 4, 4)
    for module in (prepared, smcp_fx.convert(prepared)):
        with pytest.raises(AssertionError, match=r"stem\.shape\[-1\] > 4 .*prepare the model again"):
            module(small)


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (lambda h: h * int(h.shape[2]), None),
        (lambda h: h * float(h.shape[2]), None),
        (lambda h: h * [1, 2, 3][h.shape[0]], "stem.shape[0] == 2"),
        (lambda h: h if h.size(1) != 8 else -h, "not stem.size(1) != 8"),
        (lambda h: h * 2 if h.shape[-2:] == (8, 8) else h, "stem.shape[-2:] == (8, 8)"),
        (lambda h: h[:, : h.shape[1] // 2] if not h.shape[2] % 2 else h, "not stem.shape[2] % 2"),
        (lambda h: h + round(h.shape[2] / 3), None),
        (lambda h: h + len(h.shape), None),
        (lambda h: h + sum(1 for _ in h.shape), None),
        (lambda h: torch.stack([row * 2 for row in h]), "len(stem) == 2"),
    ],
)
def test_what_was_assumed(question: Callable[[Tensor], Tensor], sentence: str | None) -> None:
    model = Net(lambda s, x: question(s.stem(x)), stem=conv(3, 8)).eval()
    traced = trace(model, (IMAGE,))
    assert_close(run(traced.module, (IMAGE,)), run(model, (IMAGE,)), "identity")
    found = [assumption.split(" (test_")[0] for assumption in traced.assumptions]
    assert found == ([] if sentence is None else [f"traced for inputs where {sentence}"])


def test_sizes_stay_sizes() -> None:
    """A batch that the model reads from its input, or gives to a factory, is no constant afterwards."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        b, c, *rest = h.shape
        return h.reshape(b, c, -1).view(b, c, *rest) + torch.zeros(b, c, 1, 1)

    model = between(wiring).eval()
    traced = trace(model, (IMAGE,))
    assert not [node for node in traced.module.graph.nodes if node.target is torch._assert]
    image = torch.randn(7, 3, 4, 6)
    assert torch.equal(run(traced.module, (image,)), run(model, (image,)))
    assert torch.zeros(2).shape == (2,)  # torch's own factories are back


@pytest.mark.parametrize(
    "question",
    [
        lambda h: h if h.mean() > 0 else -h,
        lambda h: h * int(h.sum()),
        lambda h: h * h.max().item() if h.max().item() > 0 else h,
        lambda h: h if torch.equal(h, h) else -h,
        lambda h: h if len(h.nonzero()) > 3 else -h,
    ],
)
def test_questions_about_values_are_refused(question: Callable[[Tensor], Tensor]) -> None:
    model = Net(lambda s, x: question(s.stem(x)), stem=conv(3, 8)).eval()
    with pytest.raises(TraceError, match=r"cannot trace Net.*test_shape_tracer\.py"):
        trace(model, (IMAGE,))


def test_a_models_buffers_are_not_touched_by_working_out_a_size() -> None:
    model = nn.Sequential(chain(8, 8)[:2], Net(lambda s, x: halved(s, x))).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(model, (IMAGE,))
    after = model.state_dict()
    moved = [name for name, old in before.items() if not torch.equal(old, after[name])]
    assert not [name for name in moved if not name.endswith("num_batches_tracked")]


def test_a_channel_count_that_goes_down_takes_its_assumption_with_it() -> None:
    def wiring(s: Any, h: Tensor) -> Tensor:
        assert h.shape[1] == 8, "channels"
        return h if h.shape[1] > 6 else -h

    prepared = smcp_fx.prepare(
        between(wiring).eval(), IMAGE, config=MethodConfig(multiple=1, batch_norm_scaling=True)
    )
    prepared.set_masks({"stem": torch.arange(8) < 3})
    sliced = smcp_fx.convert(prepared)
    assert_close(run(sliced, (IMAGE,)), run(prepared, (IMAGE,)), "slicing")
    assert not [node for node in sliced.graph.nodes if node.target is torch._assert]
    assert not [
        node for node in sliced.graph.nodes if node.target in (operator.gt, operator.eq) and node.users
    ]


def test_a_weight_computed_from_parameters_becomes_a_parameter() -> None:
    def wiring(s: Any, h: Tensor) -> Tensor:
        return F.conv2d(h, s.weight * s.gain / s.weight.pow(2).sum((1, 2, 3), keepdim=True), padding=1)

    model = between(wiring, 8, 6, weight=free_parameter(6, 8, 3, 3), gain=free_parameter(6, 1, 1, 1)).eval()
    prepared = smcp_fx.prepare(model, IMAGE, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    assert prepared.channels.free_share == 1.0
    assert set(prepared.state_dict()) >= {"weight", "gain"}  # trained as it was
    prepared.set_masks({"stem": torch.arange(8) % 2 == 0, "weight": torch.arange(6) < 4})
    sliced = smcp_fx.convert(prepared)
    assert_close(run(sliced, (IMAGE,)), run(prepared, (IMAGE,)), "slicing")
    state = {name: tuple(tensor.shape) for name, tensor in sliced.state_dict().items()}
    assert state["weight"] == (4, 4, 3, 3) and "gain" not in state
