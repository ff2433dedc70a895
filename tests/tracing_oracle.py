"""Checks that a trace keeps the eager model's outputs and gradients, in both modes, at every accepted size."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from models import random_masks, randomise, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import AssumptionError

#: The example's shape, then another batch, another image, and both.
SHAPES = ((2, 3, 8, 8), (3, 3, 8, 8), (2, 3, 12, 10), (1, 3, 7, 9))


def image(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    """Random numbers in double precision."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_gradients(model: nn.Module, x: Tensor, training: bool) -> tuple[Any, dict[str, Tensor]]:
    """The output of a copy of the model, and the gradients of a signed sum of it."""
    model = copy.deepcopy(model).train(training)
    output = model(x.clone())
    (output * torch.linspace(-1, 1, output.numel(), dtype=x.dtype).view_as(output)).sum().backward()
    named = model.named_parameters()
    return output.detach(), {name: p.grad for name, p in named if p.grad is not None and bool(p.grad.any())}


def check_traced(
    model: nn.Module,
    refused: Iterable[int] = (),
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    trains: bool = True,
) -> smcp_fx.PreparedModel:
    """Prepared against eager, and sliced against masked, at each of the ``shapes``; the first one is the example.

    At the shapes whose places are in ``refused``, the prepared model raises `AssumptionError`. ``trains=False``: the
    eager model has no gradients to compare with (autograd refuses its in-place operations).
    """
    model = randomise(model).double().eval()
    prepared = smcp_fx.prepare(model, image(shapes[0]), config=smcp_fx.PruningConfig(multiple=1))
    taken = [shape for place, shape in enumerate(shapes) if place not in set(refused)]
    for shape in set(shapes) - set(taken):
        try:
            prepared.eval()(image(shape))
        except AssumptionError:
            continue
        raise AssertionError(f"{shape} is taken, and was to be refused")
    for shape in taken:
        assert_close(run(prepared, (image(shape),)), run(model, (image(shape),)), "identity", f"{shape}")
        for training in (False, True) if trains else ():
            expected, slopes = with_gradients(model, image(shape), training)
            found, gradients = with_gradients(prepared, image(shape), training)
            assert_close(found, expected, "identity", f"{shape}, training {training}")
            scale = max(float(slope.abs().max()) for slope in slopes.values())
            for name, slope in slopes.items():
                got = gradients.get(name, torch.zeros_like(slope))
                assert float((got - slope).abs().max()) <= 1e-11 * scale, f"gradient of {name} at {shape}"
    for seed in (0, 1):
        prepared.set_masks(random_masks(prepared, seed))
        sliced = smcp_fx.convert(prepared)
        for shape in taken:
            assert_close(run(sliced, (image(shape),)), run(prepared, (image(shape),)), "slicing", f"{shape}")
    return prepared
