"""Parts that untraced Python calls without gradients keep their channels: nothing tells what these are worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_models import IMAGES, Split, check_exact, conv, prepare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _block(model: Split, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.body(x)


@torch.no_grad()
def _decorated(model: Split, x: Tensor) -> Tensor:
    return model.body(x)


def _switched(model: Split, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        return model.body(x)


def _inference(model: Split, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = model.body(x)
    return y.clone()


def _detached(model: Split, x: Tensor) -> Tensor:
    return model.body(x).detach()


def _of_its_data(model: Split, x: Tensor) -> Tensor:
    return model.body(x).data * 2


def _of_numbers(model: Split, x: Tensor) -> Tensor:
    return torch.from_numpy(model.body(x).detach().numpy())


def _one_way(model: Split, x: Tensor) -> Tensor:
    y = model.body(x)
    return y + y.detach()


def _as_the_mode_says(model: Split, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(model.training):
        return model.body(x)


def _once_with(model: Split, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model.body(x)
    return model.body(x) - 0.5 * target


def _back_on(model: Split, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.enable_grad():
        return model.body(x)


def _checkpointed(model: Split, x: Tensor) -> Tensor:
    return checkpoint(model.body, x, use_reentrant=True)


def _checkpointed_anew(model: Split, x: Tensor) -> Tensor:
    return checkpoint(model.body, x, use_reentrant=False)


class _Calls(Split):
    """The body, whose layers are `body.0.0` and `body.1.0`, is called as ``how`` says."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 12), conv(12, 12))  # where something may go in any case
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        f = self.stem(x)
        if f.mean() > 1e6:  # no graph can hold this
            f = -f
        return self.head(self.how(self, f).mean((2, 3))) + f.mean()  # through which the stem learns


def _free(prepared: Any) -> set[str]:
    """The layers that make channels which may go."""
    return {layer for found in prepared.channels.groups if found.free for layer in found.producers}


def _trains(prepared: nn.Module, layer: str) -> bool:
    prepared.train()
    prepared(IMAGES).square().sum().backward()
    grad = prepared.get_parameter(f"{layer}.weight").grad
    return grad is not None and bool(grad.abs().sum() > 0)


@pytest.mark.parametrize(
    "how", [_block, _decorated, _switched, _inference, _detached, _of_its_data, _of_numbers]
)
def test_without_gradients_channels_stay(how: Callable[..., Tensor]) -> None:
    prepared = prepare(_Calls(how))
    assert "body" in prepared.regions
    assert _free(prepared) == {"stem.0.0"}
    assert not _trains(prepared, "body.0.0")
    check_exact(prepared, (IMAGES,))


def test_what_goes_straight_into_such_a_part_says_why_it_stays() -> None:
    class Straight(Split):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(conv(3, 12), conv(12, 12))
            self.beside = nn.Sequential(conv(12, 16), conv(16, 20))  # through which the stem learns

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            y = (_block(self, h) + self.beside(h)).mean((2, 3))
            return self.head(-y if y.mean() > 1e6 else y)

    prepared = prepare(Straight())
    assert _free(prepared) == {"stem.0.0", "beside.0.0"}
    pinned = "; ".join(reason for found in prepared.channels.groups for reason in found.pinned)
    assert "'body.0.0' runs without gradients" in pinned
    check_exact(prepared, (IMAGES,))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, in eval
@pytest.mark.parametrize(
    "how", [_as_the_mode_says, _once_with, _one_way, _back_on, _checkpointed, _checkpointed_anew]
)
def test_with_gradients_they_are_free(how: Callable[..., Tensor]) -> None:
    prepared = prepare(_Calls(how))
    assert "body" in prepared.regions
    assert _free(prepared) == {"stem.0.0", "body.0.0"}
    assert _trains(prepared, "body.0.0")
    check_exact(prepared, (IMAGES,))


def test_a_nested_part_alone() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Sequential(conv(12, 16), conv(16, 20))
            self.free = nn.Sequential(conv(20, 16), conv(16, 20))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                f = self.frozen(x)
            if f.mean() > 1e6:
                f = -f
            return self.free(f)

    class Outer(Split):
        def __init__(self) -> None:
            super().__init__()
            self.body = Inner()

    prepared = prepare(Outer())
    assert {"body.frozen", "body.free"} <= set(prepared.regions)
    assert _free(prepared) == {"body.free.0.0"}
    check_exact(prepared, (IMAGES,))


def test_a_part_that_holds_buffers_alone() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kernel", torch.rand(12, 12, 3, 3) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.conv2d(x, self.kernel, padding=1)  # type: ignore[arg-type]

    class Filters(Split):
        def __init__(self) -> None:
            super().__init__()
            self.fixed = Fixed()

        def between(self, f: Tensor) -> Tensor:
            with torch.no_grad():
                return self.fixed(f)

    prepared = prepare(Filters())
    assert _free(prepared) == {"body.0.0"}
    check_exact(prepared, (IMAGES,))


def test_code_that_cannot_keep_gradients_in_eval() -> None:
    """Inference code that takes NumPy arrays still runs, and training that fails says nothing against it."""

    class Numbers(_Calls):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("targets should not be none")
            return torch.from_numpy(super().forward(x).numpy())

    prepared = prepare(Numbers(_as_the_mode_says))
    assert "body" in prepared.regions
    check_exact(prepared, (IMAGES,))
