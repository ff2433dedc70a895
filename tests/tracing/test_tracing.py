"""Tracing: both modes in one graph, and what is refused, with a message that helps."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, Net2, Residual, between, chain, conv, free_parameter, randomise, run
from tolerances import assert_close
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError, TraceError
from smcp_fx.interface.example_inputs import as_inputs
from smcp_fx.tracing.example_runs import run_eager
from smcp_fx.tracing.tracer import trace

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_the_graph_computes_what_the_model_does_in_both_modes() -> None:
    model = randomise(Residual())
    traced = trace(model, (IMAGE,))
    for training in (False, True):
        model.train(training)
        traced.module.train(training)
        # Batch norm's running statistics move in train(): each side has seen the same number of batches.
        assert torch.equal(traced.module(IMAGE), model(IMAGE))


def test_values_are_recorded_as_shapes_and_types() -> None:
    traced = trace(between(lambda s, h: h.flatten(2).split(h.shape[0] * 16, 2)[0].view(2, 8, 4, 8)), (IMAGE,))
    shapes = [(info.shape, info.dtype) for info in traced.values.values() if hasattr(info, "dtype")]
    assert shapes[0] == ((2, 3, 8, 8), torch.float32)
    assert shapes[-1] == ((2, 4, 4, 8), torch.float32)
    assert 2 in traced.values.values() and 32 in traced.values.values()  # sizes are values too


def test_the_mode_of_every_module_is_kept() -> None:
    model = Residual().train()
    model.bn1.eval()
    modes = [module.training for module in model.modules()]
    traced = trace(model, (IMAGE,)).module
    assert [module.training for module in model.modules()] == modes
    assert traced.training and traced.stem.training and not traced.bn1.training


class Dropped(nn.Module):
    """Functional dropout in a submodule, which follows its own mode."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop half."""
        return F.dropout(x, 0.5, training=self.training)


def test_flags_follow_the_module_that_owns_them() -> None:
    model = Net(lambda s, x: F.dropout(s.inner(s.stem(x)), 0.5, s.training), inner=Dropped(), stem=conv(3, 8))
    traced = trace(model, (IMAGE,)).module
    flags = [node.target for node in traced.graph.nodes if str(node.target).endswith("training")]
    assert sorted(flags) == ["inner.training", "training"]

    def zeros() -> float:
        return float((traced(IMAGE) == 0).float().mean())

    traced.train()
    both = zeros()
    traced.inner.eval()
    one = zeros()
    traced.eval()
    assert both == pytest.approx(0.75, abs=0.08) and one == pytest.approx(0.5, abs=0.08) and zeros() == 0


def test_several_inputs_and_structured_outputs() -> None:
    model = Net2(
        lambda s, x, y: {"sum": s.one(x) + s.two(y), "pair": (x, [y])}, one=conv(3, 4), two=conv(3, 4)
    )
    inputs = as_inputs([IMAGE, IMAGE * 2], model)
    traced = trace(model.eval(), inputs)
    assert_close(run(traced.module, inputs), run(model, inputs), "identity")


def test_control_flow_on_data_is_refused_and_located() -> None:
    def branch(s: Any, h: Tensor) -> Tensor:
        return h if h.mean() > 0 else -h

    with pytest.raises(TraceError, match="Control flow must not depend on tensors") as caught:
        trace(between(branch), (IMAGE,))
    assert re.search(r"It stopped at .*\.py:\d+ \(.+\)", str(caught.value))


@pytest.mark.parametrize(
    ("inputs", "shown"),
    [
        ((torch.zeros(2, 4, 8, 8),), r"\(2, 4, 8, 8\)"),
        ((torch.zeros(2, 3, 8, 8, dtype=torch.float64),), "does not run"),
        ((), r"\(none\)"),
        ((torch.zeros(0, 3, 8, 8),), r"empty, of shape \(0, 3, 8, 8\)"),
        ((IMAGE, IMAGE), r"\(2, 3, 8, 8\), \(2, 3, 8, 8\)"),
    ],
)
def test_inputs_that_the_model_refuses(inputs: tuple[Tensor, ...], shown: str) -> None:
    with pytest.raises(InputError, match=shown):
        trace(chain(8), inputs)


def test_a_failing_run_keeps_the_modes() -> None:
    model = chain(8).train()
    with pytest.raises(InputError):
        trace(model, (torch.zeros(2, 4, 8, 8),))
    assert all(module.training for module in model.modules())


class Half(nn.Module):
    """Asks whether it is being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = conv(3, 8), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.stem(x)
        return self.out(h if isinstance(h, fx.Proxy) else h + 1)  # type: ignore[no-any-return]


def test_another_way_that_tracing_takes_is_found() -> None:
    with pytest.raises(TraceError, match=r"first difference at module .*question about a type"):
        trace(Half(), (IMAGE,))


def test_inputs_without_names_are_refused() -> None:
    class Star(nn.Sequential):
        def forward(self, *images: Tensor) -> Tensor:
            return super().forward(images[0])

    with pytest.raises(TraceError, match=r"takes its inputs as \*images"):
        trace(Star(nn.Conv2d(3, 4, 1)), (IMAGE,))


def test_randomness_in_eval_is_named() -> None:
    with pytest.raises(TraceError, match="other outputs each time"):
        trace(between(lambda s, h: F.dropout(h, 0.5, True)), (IMAGE,))


@pytest.mark.parametrize("kind", ["another way through", "auxiliary head"])
def test_other_operations_in_train_than_in_eval(kind: str) -> None:
    """The graph, the prepared and the converted model do in each mode what the original does."""
    if kind == "auxiliary head":
        model = Net(
            lambda s, x: (s.out(h := s.stem(x)), s.aux(h.mean((2, 3)))) if s.training else s.out(s.stem(x)),
            stem=nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU()),
            out=conv(8, 4),
            aux=nn.Linear(8, 5),
        )
    else:
        model = between(lambda s, h: s.mid(h) if s.training else h, mid=conv(8, 8))
    model = randomise(model).double()
    image = IMAGE.double()
    prepared = smcp_fx.prepare(model, image, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    assert prepared.channels.free_share == 1.0
    graph = trace(copy.deepcopy(model), (image,)).module
    kept = torch.arange(8) % 3 > 0
    prepared.set_masks({g.name: kept for g in prepared.channels.groups if g.free})
    sliced = smcp_fx.convert(prepared)
    for mode in (False, True):
        for module in (model, graph, prepared, sliced):
            module.train(mode)
        before = copy.deepcopy(model.state_dict())
        expected = model(image)
        model.load_state_dict(before)
        found = graph(image)
        assert type(found) is type(expected)
        for a, b in zip(tree_leaves(expected), tree_leaves(found), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(tree_leaves(prepared(image)), tree_leaves(sliced(image)), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12 * float(a.detach().abs().max()))


def test_tensors_made_in_forward_stay_out_of_the_state() -> None:
    model = between(
        lambda s, h: h * torch.arange(1.0, 9.0).view(8, 1, 1) + s.shift, shift=free_parameter(8, 1, 1)
    )
    names = set(model.state_dict())
    traced = trace(model, (IMAGE,)).module
    assert set(traced.state_dict()) == names
    assert torch.equal(run(traced, (IMAGE,)), run(model, (IMAGE,)))


def test_hooked_modules_stay_calls_and_computed_weights_are_calls_of_their_own() -> None:
    model = chain(8, 8)
    model[0].register_forward_hook(lambda m, i, o: o * 2)
    nn.utils.parametrizations.weight_norm(model[1][0])
    model[1][1].register_forward_pre_hook(lambda m, i: None)
    traced = trace(model.eval(), (IMAGE,)).module
    called = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert {"0", "1.0.parametrizations.weight", "1.1"} <= called and not {"0.0", "1.0"} & called
    assert torch.equal(run(traced, (IMAGE,)), run(model, (IMAGE,)))


def test_keywords_become_positions() -> None:
    """Rules and passes find first arguments by position, whatever the model's author wrote."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = torch.cat(tensors=[F.relu(input=h), h], dim=1)
        return torch.unflatten(torch.reshape(input=h, shape=(2, -1)), dim=1, sizes=(16, 8, 8))

    traced = trace(between(wiring, 8, 16), (IMAGE,)).module
    for node in traced.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.args[0], (fx.Node, list, tuple)), node
            assert not {"input", "tensors", "shape", "sizes"} & set(node.kwargs), node


def test_running_eagerly_restores_modes_after_an_error() -> None:
    model = chain(8).train()
    with pytest.raises(RuntimeError):
        run_eager(model, (torch.zeros(1),))
    assert model.training


def test_the_first_difference_is_named() -> None:
    with pytest.raises(TraceError, match="first difference at module 'out'"):
        trace(Half(), (IMAGE,))


class Averages(nn.Module):
    """A batch norm by hand, whose averages are changed in place, assigned, or copied from what is computed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W], less the mean of the batch in `train()`, of the average in `eval()`."""
        if not self.training:
            return x - self.mean.view(1, -1, 1, 1)
        mean = x.mean((0, 2, 3))
        if self.how == "in place":
            self.mean.mul_(0.9).add_(0.1 * mean.detach())
        elif self.how == "assigned":
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        elif self.how == "copied":
            self.mean.copy_(mean.detach())
        elif self.how == "asked for":
            self.mean.mul_(0.9 if float(self.mean.sum()) < 1e6 else 0.5)
        self.seen += 1
        return x - mean.view(1, -1, 1, 1)


@pytest.mark.parametrize("how", ["in place", "assigned", "copied", "asked for", "counter only"])
def test_modules_that_write_their_buffers(how: str) -> None:
    """Only in `train()`, once a call, and not while they are traced. Where Python asks, they stay modules."""
    wiring = nn.Sequential(
        nn.Conv2d(3, 8, 3), Averages(how), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1)
    )
    x = torch.randn(2, 3, 8, 8)
    before = wiring[1].mean.clone()
    prepared = smcp_fx.prepare(wiring, x, config=smcp_fx.PruningConfig(multiple=1))
    assert torch.equal(wiring[1].mean, before)
    opaque = ("'1' writes into its own buffers",)
    assert prepared.channels["0"].pinned == (opaque if how == "asked for" else ())
    assert prepared.channels["2"].free
    for model in (wiring, prepared):
        model.train()
        model(x)
        model.eval()
        model(x)
    if how != "counter only":
        assert not torch.equal(wiring[1].mean, before)
        assert torch.equal(dict(prepared.named_buffers())["1.mean"], wiring[1].mean)
    assert torch.equal(prepared(x), wiring(x))


def test_a_model_that_writes_its_own_buffers_by_their_values_is_refused() -> None:
    with pytest.raises(TraceError, match="the model itself writes into its own buffers"):
        trace(Averages("asked for"), (torch.randn(2, 8, 4, 4),))


def test_a_graph_that_does_not_run_is_refused() -> None:
    """It asks whether it is being traced."""
    model = Net(
        lambda s, x: s.out(torch.cat(x if isinstance(x, fx.Proxy) else [x], 1)), out=nn.Conv2d(3, 4, 1)
    )
    with pytest.raises(TraceError, match=r"does not run: cat\(\).*isinstance"):
        trace(model, (torch.randn(2, 3, 8, 8),))


def test_hooks_of_the_model_itself_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(TraceError, match="has hooks or a forward of its own instance"):
        trace(model, (torch.randn(2, 3, 8, 8),))


def test_keywords_of_modules_keep_their_places() -> None:
    """``input`` is not always first."""

    class Choice(nn.Module):
        def forward(self, mask: Tensor, input: Tensor) -> Tensor:
            return torch.where(mask, input, 0.1 * input)

    model = Net(lambda s, x: s.part(mask=x > 0, input=x), part=Choice())
    x = torch.randn(2, 3)
    assert torch.equal(trace(model, (x,), ("part",)).module(x), model(x))


def test_forwards_that_a_decorator_wraps() -> None:
    """As transformers has them: what is outside takes anything, and the names are those of what is inside."""

    def decorated(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("return_dict", None)
            given = (*args, *kwargs.values())
            return forward(self, *given[:1], scale=2)

        return wrapper

    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        @decorated
        def forward(self, image: Tensor, mask: Any = None, *, scale: int = 1, **more: Any) -> Tensor:
            return self.layer(image) * scale  # type: ignore[no-any-return]

    model = Decorated().eval()
    traced = trace(model, (IMAGE,)).module
    assert [node.target for node in traced.graph.nodes if node.op == "placeholder"] == ["image"]
    assert torch.equal(run(traced, (IMAGE,)), run(model, (IMAGE,)))


def test_attributes_that_cannot_change_stay() -> None:
    class Frozen(dict[str, int]):
        def update(self, *args: Any, **kwargs: Any) -> None:
            raise TypeError("frozen")

    model = chain(4, 4).eval()
    model.config = Frozen(width=4)
    trace(model, (IMAGE,))
    assert model.config == {"width": 4}
