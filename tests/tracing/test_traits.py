"""Traits of operations, held against what PyTorch's operations do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from smcp_fx.tracing.operations import normal_name
from smcp_fx.tracing.traits import Trait, has, operations_with

VALUES = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
SHUFFLED = torch.tensor([2, 0, 3, 1])


def unary() -> dict[str, Any]:
    """Functions of torch that take one tensor alone, by their normal name."""
    found: dict[str, Any] = {}
    for space in (torch, F, torch.Tensor):
        for name in dir(space):
            function = getattr(space, name)
            known = normal_name(name)
            if name.startswith("_") or name.endswith("_") or not callable(function) or known in found:
                continue
            if has(known, ~Trait(0)):
                try:
                    made = function(VALUES.clone())
                except Exception:
                    continue
                if isinstance(made, Tensor):
                    found[known] = function
    return found


UNARY = unary()


def test_most_operations_are_tried() -> None:
    assert len(UNARY) > 70


STEADY = [name for name in UNARY if has(name, Trait.ELEMENTWISE) and not has(name, Trait.DRAWN)]


@pytest.mark.parametrize("name", sorted(name for name in STEADY if "dropout" not in name))
def test_an_element_wise_operation_looks_at_one_place(name: str) -> None:
    function = UNARY[name]
    torch.testing.assert_close(function(VALUES.clone())[SHUFFLED], function(VALUES[SHUFFLED]), equal_nan=True)


@pytest.mark.parametrize("name", sorted(UNARY.keys() & operations_with(Trait.MOVES)))
def test_a_movement_makes_no_new_values(name: str) -> None:
    assert torch.isin(UNARY[name](VALUES.clone()), VALUES).all()


@pytest.mark.parametrize("name", sorted((UNARY.keys() & operations_with(Trait.DRAWN)) - {"emptylike"}))
def test_what_is_drawn_is_no_function_of_the_values(name: str) -> None:
    values, options = (-VALUES, {"training": True}) if name == "rrelu" else (VALUES, {})
    draws = [UNARY[name](values.clone(), **options) for _ in range(8)]
    assert any(not torch.equal(draws[0], other) for other in draws)


PAIRS = torch.rand(2, 2, 2)
SEEN = {
    "adjoint": PAIRS.adjoint(), "asstrided": PAIRS.as_strided((2, 2), (1, 2)), "dsplit": PAIRS.dsplit(2)[0],
    "einsum": torch.einsum("ijk->jik", PAIRS), "hsplit": PAIRS.hsplit(2)[0], "ravel": PAIRS.ravel(),
    "real": torch.real(PAIRS), "resolveconj": PAIRS.resolve_conj(), "resolveneg": PAIRS.resolve_neg(),
    "unfold": PAIRS.unfold(0, 2, 1), "viewascomplex": torch.view_as_complex(PAIRS), "vsplit": PAIRS.vsplit(2)[0],
}  # fmt: skip


def test_views_are_the_memory_of_their_operand() -> None:
    memory = {name: view.untyped_storage().data_ptr() for name, view in SEEN.items()}
    assert set(memory.values()) == {PAIRS.untyped_storage().data_ptr()}
    assert operations_with(Trait.VIEWS) - SEEN.keys() == {"imag", "meshgrid", "viewasreal"}


def test_traits_that_refine_others() -> None:
    assert operations_with(Trait.COPIES) <= operations_with(Trait.MOVES)
    assert operations_with(Trait.REGROUPS) <= operations_with(Trait.MOVES)
    assert operations_with(Trait.DRAWN) <= operations_with(Trait.ELEMENTWISE)
    assert not operations_with(Trait.MOVES) & operations_with(Trait.ELEMENTWISE | Trait.VIEWS)
    assert not has(None, ~Trait(0)) and not has("conv2d", ~Trait(0))
