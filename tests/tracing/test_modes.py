"""Each mode of a model runs what is its own: held against the original, module by module and mode by mode."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import random_masks, randomise
from tolerances import assert_close
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import smcp_fx
from smcp_fx.blocks.cutting import cut
from smcp_fx.tracing.modes import ALWAYS, by_mode, conditions, evaluated_graph
from smcp_fx.tracing.tracer import trace

CONFIG = smcp_fx.PruningConfig(multiple=1)


class DropPath(nn.Module):
    """Drops whole branches at random, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W]."""
        if not self.training:
            return x
        return x * torch.bernoulli(torch.full((x.shape[0], 1, 1, 1), 0.5, dtype=x.dtype)) / 0.5


class SplitNorm(nn.Module):
    """Half of the batch through a norm of its own, in training only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.main, self.aux = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W]."""
        if not self.training:
            return self.main(x)
        left, right = x.chunk(2, 0)
        return torch.cat([self.main(left), self.aux(right)], 0)


class Residual(nn.Module):
    def __init__(self, channels: int, drop: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(channels)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W]."""
        return F.relu(x + self.drop(self.norm(self.conv(x))))


class WithHead(nn.Module):
    """Returns another structure in training: an auxiliary head."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.aux = nn.Sequential(Residual(8, drop), nn.Conv2d(8, 5, 1))
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        """[N, 3, H, W]."""
        h = self.stem(x)
        if self.training:
            return {"out": self.out(h), "aux": self.aux(h)}
        return self.out(h)


class Forward(nn.Module):
    """Two convolutions, and between them what the test says."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        if between is _unused_norm:
            self.norm = nn.BatchNorm2d(8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W]."""
        return self.second(self.between(self, self.first(x)))


def _noisy(model: Any, h: Tensor) -> Tensor:
    noise = torch.randn_like(h)  # drawn in both modes, used in one
    return h + noise if model.training else h


def _unused_norm(model: Any, h: Tensor) -> Tensor:
    normed = model.norm(h)  # counts in both modes, read in one
    return h if model.training else normed


def _in_place_when_trained(model: Any, h: Tensor) -> Tensor:
    if model.training:
        h.mul_(2)
    return h


def _in_place_when_evaluated(model: Any, h: Tensor) -> Tensor:
    y = h + 1 if model.training else h.clamp_(0)
    return y + h


def _reparametrised(model: Any, h: Tensor) -> Tensor:
    mean, deviation = h, torch.exp(0.5 * h)
    if model.training:
        deviation = torch.randn_like(deviation).mul(deviation)
    return deviation.add(mean)


def _other_numbers(model: Any, h: Tensor) -> Tensor:
    return F.leaky_relu(h, 0.3 if model.training else 0.1)


def _asserts(model: Any, h: Tensor) -> Tensor:
    if not model.training:
        torch._assert(h.shape[0] < 100, "many images at once are for training only")
    return h


class Asking(Residual):
    """Assumes something of its output, whose name in the assertion depends on the mode."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W]."""
        y = super().forward(x)
        return y.relu() if y.ndim == 4 and y.shape[-1] % 2 == 0 else y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "questions behind a drop path": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), Asking(8, DropPath()), Asking(8, DropPath()), nn.Conv2d(8, 4, 1)
    ),
    "drop path": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), *[Residual(8, DropPath()) for _ in range(3)], nn.Conv2d(8, 4, 1)
    ),
    "split norm": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), Residual(8, nn.Identity(), SplitNorm(8)), SplitNorm(8), nn.Conv2d(8, 4, 1)
    ),
    "auxiliary head": lambda: WithHead(nn.Identity()),
    "auxiliary head that drops": lambda: WithHead(DropPath()),
    "noise drawn in both": lambda: Forward(_noisy),
    "norm read in one": lambda: Forward(_unused_norm),
    "in place when trained": lambda: Forward(_in_place_when_trained),
    "in place when evaluated": lambda: Forward(_in_place_when_evaluated),
    "reparametrised": lambda: Forward(_reparametrised),
    "other numbers": lambda: Forward(_other_numbers),
    "assertion": lambda: Forward(_asserts),
}
IMAGE = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def outcome(model: nn.Module, seed: int = 3) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Output, gradients and buffers of one call in the modes the modules are in."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(IMAGE.clone())
    sum((leaf.square().mean() for leaf in pytree.tree_leaves(output)), torch.zeros(())).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    buffers = {n: b for n, b in model.named_buffers() if not n.startswith("smcp.")}
    return output, gradients, buffers


def assert_same(found: nn.Module, expected: nn.Module, where: str) -> None:
    """One call, with gradients, of copies of both."""
    left, right = outcome(copy.deepcopy(found)), outcome(copy.deepcopy(expected))
    assert_close(left[0], right[0], "identity", where)
    for name, gradient in right[1].items():
        ours = left[1].get(name)
        assert (gradient is None) == (ours is None), f"{where}: {name}"
        if gradient is not None and float(gradient.abs().max()) > 1e-12:
            assert_close(ours, gradient, "gradient", f"{where}: {name}")
    for name, buffer in right[2].items():
        assert_close(left[2][name], buffer, "identity", f"{where}: {name}")


@pytest.mark.parametrize("name", MODELS)
def test_each_mode_is_the_originals(name: str) -> None:
    """All modules in one mode, and each but convolutions in the other: prepared, and converted with all channels."""
    model = randomise(MODELS[name]()).double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    # Where one module decides whether another's forward runs, both are taken to be in one mode.
    nested = name == "auxiliary head that drops"
    deciding = [
        path
        for path, part in model.named_modules()
        if not (nested or path.startswith("aux.") or isinstance(part, nn.Conv2d))
    ]
    for training, other in itertools.product((True, False), [None, *deciding]):
        for one in (model, prepared):
            one.train(training)
            if other is not None:
                one.get_submodule(other).training = not training
        assert_same(prepared, model, f"training={training}, but {other!r}")
        assert_same(smcp_fx.convert(prepared), model, f"converted, training={training}, but {other!r}")


@pytest.mark.parametrize("name", MODELS)
def test_masked_is_sliced_in_each_mode(name: str) -> None:
    model = randomise(MODELS[name]()).double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    assert prepared.channels.free_share == 1.0
    prepared.set_masks(random_masks(prepared, 1))
    random = name in ("noise drawn in both", "reparametrised")  # as many numbers as there are channels
    for training in (False,) if random else (True, False):
        prepared.train(training)
        sliced = smcp_fx.convert(prepared)
        assert_close(outcome(sliced)[0], outcome(prepared)[0], "slicing", f"training={training}")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_deployed_is_what_is_counted(name: str) -> None:
    model = MODELS[name]().double().eval()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(IMAGE)
    assert prepared.pruner.full_cost == counter.get_total_flops() / 2 / len(IMAGE)


def test_modules_of_the_other_mode_are_not_called() -> None:
    prepared = smcp_fx.prepare(MODELS["auxiliary head"]().double(), IMAGE, config=CONFIG)
    for model in (prepared, smcp_fx.convert(prepared)):
        called: list[str] = []
        for path, module in model.named_modules():
            if path.startswith("aux") and not list(module.children()):
                module.register_forward_hook(lambda *_, path=path, called=called: called.append(path))
        model.eval()(IMAGE)
        assert not called
        model.train()(IMAGE)
        assert called


def test_norms_count_each_step_once() -> None:
    model = MODELS["drop path"]().double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG).train()
    for _ in range(3):
        prepared(IMAGE)
    assert [int(b) for n, b in prepared.named_buffers() if n.endswith("num_batches_tracked")] == [3, 3, 3]


def test_blocks_hold_what_is_deployed() -> None:
    model = MODELS["auxiliary head"]().double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    traced = trace(copy.deepcopy(model), (IMAGE,))
    blocks = cut(traced, prepared.channels)
    assert [block.name for block in blocks] == ["stem", "out"]


def test_the_code_branches_and_says_so() -> None:
    code = trace(MODELS["drop path"](), (IMAGE.float(),)).module.code
    assert code.count("if _1_drop_training:") == 1
    assert code.count(" if _1_drop_training else ") == 1


def test_runtimes_take_a_model_of_two_modes(tmp_path: Path) -> None:
    import onnxruntime as ort

    prepared = smcp_fx.prepare(MODELS["drop path"](), IMAGE.float(), config=CONFIG)
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared).eval()
    image = IMAGE.float()
    expected = sliced(image).detach()
    path = smcp_fx.export_onnx(sliced, image, tmp_path / "model.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: image.numpy()})[0])
    assert_close(found, expected, "slicing")
    assert_close(copy.deepcopy(sliced)(image).detach(), expected, "identity")
    assert_close(torch.export.export(sliced, (image,)).module()(image).detach(), expected, "identity")
    compiled = torch.compile(sliced, backend="eager")
    for training in (False, True):
        sliced.train(training)
        torch.manual_seed(1)
        eager = sliced(image)
        torch.manual_seed(1)
        assert_close(compiled(image), eager, "slicing", f"compiled, training={training}")


def test_a_region_has_both_modes() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MODELS["drop path"]()

        def forward(self, x: Tensor) -> Tensor:
            """[N, 3, H, W]."""
            y = self.body(x)
            return y if float(y.detach().abs().amax()) < 1e9 else -y

    model = randomise(Untraceable()).double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    assert prepared.regions == ("body",)
    for training in (True, False):
        for one in (model, prepared):
            one.train(training)
        assert_same(prepared, model, f"training={training}")
        model.body[1].drop.training = prepared.get_submodule("body.1.drop").training = not training
        assert_same(prepared, model, f"training={training}, but one")


# ---- when a node runs -------------------------------------------------------------------------------------------


def _nested() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Within what the outer flag wants in training, something that the inner one wants in eval mode."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {"x": graph.placeholder("x")}
    for name in ("outer", "inner"):
        nodes[name] = graph.get_attr(f"{name}.training")
    nodes["deep"] = graph.call_function(torch.neg, (nodes["x"],))
    nodes["shared"] = graph.call_function(torch.abs, (nodes["x"],))
    nodes["chosen"] = graph.call_function(by_mode, (nodes["inner"], nodes["deep"], nodes["shared"]))
    nodes["end"] = graph.call_function(by_mode, (nodes["outer"], nodes["shared"], nodes["chosen"]))
    graph.output(nodes["end"])
    return graph, nodes


def test_conditions_of_nested_choices() -> None:
    graph, nodes = _nested()
    when = conditions(graph.nodes)
    outer, inner = nodes["outer"].name, nodes["inner"].name
    assert when[nodes["deep"]] == {frozenset([(outer, True), (inner, False)])}
    assert when[nodes["chosen"]] == {frozenset([(outer, True)])}
    assert when[nodes["shared"]] == {frozenset([(outer, False)]), frozenset([(inner, True)])} or when[
        nodes["shared"]
    ] == {frozenset([(outer, False)]), frozenset([(outer, True), (inner, True)])}
    assert when[nodes["end"]] == when[nodes["x"]] == ALWAYS


def test_the_evaluated_graph_has_no_choices() -> None:
    graph, nodes = _nested()
    left = evaluated_graph(graph)
    assert [node.name for node in left.nodes if node.op == "call_function"] == [nodes["shared"].name]
