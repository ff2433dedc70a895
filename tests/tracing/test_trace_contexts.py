"""What a trace could lose without a word: contexts, own backwards, buffers, writes into inputs; other threads."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import TraceError


class _Net(nn.Module):
    """Three convolutions with batch norm and a head; a subclass or a function says how they are called."""

    def __init__(self, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(nn.Conv2d(i, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for i in (3, 8, 8)
        )
        self.out = nn.Conv2d(8, 4, 1)
        self.register_buffer("log_t", torch.tensor(0.3))
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def _without(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        f = net.b(net.a(x))
    return net.out(net.c(f))


def _shift(net: Any, x: Tensor) -> Tensor:
    f = net.a(x)
    with torch.no_grad():
        shift = f.mean((2, 3), keepdim=True)
    return net.out(net.c(f - shift))


def _parts(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        u, v = net.a(x).chunk(2, 1)
    return net.out(net.c(torch.cat([v, u], 1)))


def _list(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        parts = net.a(x).split(4, 1)
    return net.out(net.c(torch.cat(parts, 1)))


def _switched(net: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    f = net.a(x)
    torch.set_grad_enabled(True)
    return net.out(net.c(f))


def _by_mode(net: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(net.training):
        f = net.a(x)
    return net.out(net.c(f))


def _enabled_within(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        f = net.a(x)
        with torch.enable_grad():
            f = net.b(f)
    return net.out(net.c(f))


@torch.no_grad()
def _features(net: Any, x: Tensor) -> dict[str, Tensor]:
    return {"f": net.a(x)}


def _decorated(net: Any, x: Tensor) -> Tensor:
    return net.out(net.c(_features(net, x)["f"]))


def _same_tensor(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        f = net.a(x).contiguous()  # frozen
    g = net.b(f)
    with torch.no_grad():
        g = g.float()  # g itself, with its gradient
    return net.out(net.c(g))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return -g


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        return torch.round(x * steps) / steps, torch.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g + 0.5 * h, None


class _Halved(torch.autograd.Function):
    """It is told of its inputs apart from its forward."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x + 0.5 * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * g, g * x.sign()


_reverse, _round, _halved = _Reverse.apply, _Round.apply, _Halved.apply  # before anything is traced


def _taken_before(net: Any, x: Tensor) -> Tensor:
    u, v = _round(net.a(x), 7)
    return net.out(net.c(_halved(_reverse(u), v)))


def _taken_before_without(net: Any, x: Tensor) -> Tensor:
    f = net.a(x)
    with torch.no_grad():
        g = _reverse(f)
    return net.out(net.c(f + g))


def _reversed(net: Any, x: Tensor) -> Tensor:
    return net.out(net.c(_Reverse.apply(net.a(x))))


def _rounded(net: Any, x: Tensor) -> Tensor:
    u, v = _Round.apply(net.a(x), 7)
    return net.out(net.c(u * v))


def _autocast_off(net: Any, x: Tensor) -> Tensor:
    f = net.a(x)
    with torch.autocast("cpu", enabled=False):
        f = net.b(f.float())
    return net.out(net.c(f))


def _autocast_on(net: Any, x: Tensor) -> Tensor:
    f = net.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        f = net.b(f)
    return net.out(net.c(f.float()))


def _scaled(net: Any, x: Tensor) -> Tensor:
    x *= 2
    return net.out(net.c(net.a(x)))


def _channel(net: Any, x: Tensor) -> Tensor:
    view = x[:, 0]
    view += 1
    return net.out(net.c(net.a(x)))


def _first_relu(net: Any, x: Tensor) -> Tensor:
    return net.out(net.c(net.a(F.relu_(x))))


def _half(net: Any, x: Tensor) -> Tensor:
    f = net.a[0](x)
    view = f[:, :4]
    view *= 2
    return net.out(net.c(f))


def _temperature(net: Any, x: Tensor) -> Tensor:
    return net.out(net.c(net.a(x))) / net.log_t.exp()


_CALLS = [
    _without, _shift, _parts, _list, _switched, _by_mode, _enabled_within, _decorated, _same_tensor, _reversed,
    _rounded, _autocast_off, _autocast_on, _scaled, _channel, _first_relu, _half, _temperature,
    _taken_before, _taken_before_without,
]  # fmt: skip


def _net(call: Callable[[Any, Tensor], Any]) -> _Net:
    torch.manual_seed(0)
    return _Net(call)


def _image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))


def _trained(model: nn.Module, image: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """The output in train mode, the input after the call, and the gradients of all parameters."""
    model.train()
    output = model(image)
    output.square().mean().backward()
    return output.detach(), image, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("call", _CALLS)
def test_a_prepared_model_trains_what_the_original_trains(call: Callable[[Any, Tensor], Any]) -> None:
    model, example = _net(call), _image()
    prepared = smcp_fx.prepare(model, example)
    assert torch.equal(example, _image())  # preparing changes no one's tensors
    assert set(model.state_dict()) <= set(prepared.state_dict())
    output, after, gradients = _trained(copy.deepcopy(model), _image(3))
    own_output, own_after, own_gradients = _trained(prepared, _image(3))
    assert_close(own_output, output, "identity")
    assert torch.equal(own_after, after)
    for name, gradient in gradients.items():
        assert (own_gradients[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_close(own_gradients[name], gradient, "accumulation", name)


@pytest.mark.parametrize("call", _CALLS)
def test_the_sliced_model_computes_and_trains_what_the_masked_one_does(
    call: Callable[[Any, Tensor], Any],
) -> None:
    prepared = smcp_fx.prepare(_net(call), _image())
    free = [group for group in prepared.channels.groups if group.free]
    assert free
    prepared.set_masks({group.name: torch.arange(group.size) % 2 == 0 for group in free})
    sliced = smcp_fx.convert(prepared)
    prepared.eval()
    sliced.eval()
    with torch.no_grad():
        masked = prepared(_image(3))
        assert_close(sliced(_image(3)), masked, "slicing")
    _, _, gradients = _trained(prepared, _image(3))
    _, _, left = _trained(sliced, _image(3))
    for name, gradient in left.items():
        assert (gradient is None) == (gradients[name] is None), name


def _detached(net: Any, x: Tensor) -> Tensor:
    return net.out(net.c(net.b(net.a(x)).detach()))


def _data(net: Any, x: Tensor) -> Tensor:
    return net.out(net.c(net.b(net.a(x)).data))


@pytest.mark.parametrize("call", [_without, _detached, _data])
def test_layers_that_run_without_gradients_are_pinned_and_it_is_said(call: Any) -> None:
    channels = smcp_fx.prepare(_net(call), _image()).channels
    assert [group.name for group in channels.groups if group.free] == ["c.0"]
    pinned = "; ".join(reason for group in channels.groups for reason in group.pinned)
    assert "runs without gradients" in pinned


def _through(net: Any, x: Tensor) -> Tensor:
    return net.out(net.c(net.b(net.a(x))))


def _detached_in_eval(net: Any, x: Tensor) -> Tensor:
    return _through(net, x) if net.training else _through(net, x).detach()


@pytest.mark.parametrize(
    "call",
    [
        lambda net, x: _through(net, x) + _through(net, x).detach(),
        lambda net, x: _through(net, x) + net.b(net.a(x)).detach().mean(),
        _detached_in_eval,
    ],
)
def test_layers_that_are_also_read_with_gradients_stay_free(call: Any) -> None:
    channels = smcp_fx.prepare(_net(call), _image()).channels
    assert {"a.0", "b.0", "c.0"} <= {group.name for group in channels.groups if group.free}


def test_a_write_into_a_tensor_with_gradients_under_no_grad_is_refused() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        f = net.a(x)
        with torch.no_grad():
            f.mul_(0.5)
        return net.out(net.c(f))

    with pytest.raises(TraceError, match=r"under torch\.no_grad"):
        smcp_fx.tracing.tracer.trace(_net(forward), (_image(),))


def test_autocast_around_everything_is_refused_by_name() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.out(net.c(net.a(x)))

    with pytest.raises(TraceError, match=r"enters `torch\.autocast`"):
        smcp_fx.prepare(_net(forward), _image())


def _off_in_eval(net: Any, x: Tensor) -> Tensor:
    f = net.a(x)
    with torch.autocast("cpu", enabled=net.b.training and torch.is_autocast_enabled("cpu")):
        f = net.b(f.float())
    return net.out(net.c(f))


def _cuda(net: Any, x: Tensor) -> Tensor:
    f = net.a(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cuda", torch.bfloat16):
            f = net.b(f)
    return net.out(net.c(f))


@pytest.mark.parametrize("call", [_autocast_off, _off_in_eval])
def test_autocast_stays_off_inside(call: Any, tmp_path: Path) -> None:
    model = _net(call).eval()
    prepared = smcp_fx.prepare(model, _image()).eval()
    assert prepared.channels.free_share == 1 and not prepared.regions
    converted = smcp_fx.convert(prepared)
    smcp_fx.save(converted, tmp_path / "model.safetensors")
    torch.save(converted, tmp_path / "model.pt")
    loaded = smcp_fx.load(tmp_path / "model.safetensors")
    again = smcp_fx.convert(smcp_fx.prepare(loaded, _image())).eval()
    found = [prepared, converted, copy.deepcopy(converted), loaded, again]
    found.append(torch.load(tmp_path / "model.pt", weights_only=False))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(_image())
        rounded = model.out(model.c(model.b(model.a(_image()))))
        assert not torch.equal(rounded, expected)
        for other in found:
            assert torch.equal(other(_image()), expected)


def test_autocast_that_this_machine_lacks_is_not_taken_for_switched_off() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has it")
    assert "enters `torch.autocast`" in smcp_fx.prepare(_net(_cuda), _image()).untraced[""]


def test_a_buffer_that_is_loaded_takes_effect() -> None:
    model = _net(_temperature).eval()
    prepared = smcp_fx.prepare(model, _image()).eval()
    state = model.state_dict() | {"log_t": torch.tensor(1.5)}
    model.load_state_dict(state)
    prepared.load_state_dict(prepared.state_dict() | state)
    with torch.no_grad():
        expected = model(_image())
        assert_close(prepared(_image()), expected, "identity")
        assert_close(smcp_fx.convert(prepared).eval()(_image()), expected, "slicing")


def test_another_thread_runs_its_model_while_one_is_prepared() -> None:
    other, stop, failures = _net(_without).eval(), threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    other(_image())
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            smcp_fx.prepare(_net(_shift), _image())
    finally:
        stop.set()
        thread.join()
    assert not failures
