"""Random numbers do not depend on the memory layout of what they are drawn for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from smcp_fx.tracing.same_draws import same_draws

LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
]
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "dropout in place": lambda x: F.dropout(x * 1, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, training=True),
    "feature dropout": F.dropout2d,
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint_like": lambda x: x * torch.randint_like(x, 3),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid().detach()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(x.sigmoid().detach()),
    "normal_": lambda x: x + torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(1)),
    "normal": lambda x: x + torch.normal(x.detach(), 0.1),
    "out": lambda x: x * torch.rand(x.shape, out=torch.empty_like(x)),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "twice": lambda x: F.dropout(x * torch.rand_like(x)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_go_to_the_same_places_in_every_layout(name: str) -> None:
    """Outputs and gradients; layouts are those that the operations give by themselves."""
    values = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        with same_draws():
            y = DRAWS[name](x)
            (gradient,) = torch.autograd.grad((y * values).sum(), x)
        return y.detach(), gradient

    output, gradient = run(values)
    assert not torch.equal(output, values)
    for laid_out in (layout(values) for layout in LAYOUTS):
        found, its_gradient = run(laid_out)
        torch.testing.assert_close(found, output)
        torch.testing.assert_close(its_gradient, gradient)
        assert found.stride() == DRAWS[name](laid_out).stride()


def test_the_generators_of_python_and_numpy_are_as_they_were() -> None:
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist()
    with torch.random.fork_rng(), same_draws():
        first = random.random(), np.random.rand(), float(torch.rand(()))
    with torch.random.fork_rng(), same_draws():
        assert (random.random(), np.random.rand(), float(torch.rand(()))) == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
