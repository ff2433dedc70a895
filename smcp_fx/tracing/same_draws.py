"""The same random numbers in each run, whatever the memory layout of their tensors.

    noise = torch.empty_like(x).bernoulli_(0.5)        filled in the order of memory, which x's layout decides

A graph that leaves out an addition of zeros has other layouts than its model, and the same values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def same_draws() -> Iterator[None]:
    """Every run draws the same numbers from torch (whose state the caller restores), Python and NumPy."""
    before = random.getstate(), np.random.get_state()
    _seed_torch()
    random.seed(0)
    np.random.seed(0)
    try:
        with _InOrder():  # type: ignore[no-untyped-call]
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _seed_torch() -> None:
    """Seed only devices in use: torch would defer other devices' seeds, and later replace the user's own."""
    torch.default_generator.manual_seed(0)
    torch.mps.manual_seed(0)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if device.is_initialized():
            device.manual_seed_all(0)


class _InOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws in the order of indices: on contiguous copies, whose values are then copied back."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **named)
        tensors = [v for v in pytree.tree_leaves((args, named)) if isinstance(v, Tensor)]
        if all(v.is_contiguous() for v in tensors):
            return func(*args, **named)
        copies = {id(v): v.contiguous() for v in tensors}
        copied, copied_named = pytree.tree_map(
            lambda v: copies[id(v)] if isinstance(v, Tensor) else v, (args, named)
        )
        result = func(*copied, **copied_named)
        for v in _written(func, args, named):
            v.copy_(copies[id(v)])
        originals = {id(copies[id(v)]): v for v in tensors}
        follows = _follows(func, named.get("memory_format"))

        def placed(value: Any) -> Any:
            if id(value) in originals:
                return originals[id(value)]
            return torch.empty_like(tensors[0], dtype=value.dtype).copy_(value) if follows else value

        return pytree.tree_map_only(Tensor, placed, result)


def _follows(function: Any, asked: torch.memory_format | None) -> bool:
    """Does a new result have the memory layout of the function's operand?"""
    takes_format = any(argument.name == "memory_format" for argument in function._schema.arguments)
    return (takes_format and asked in (None, torch.preserve_format)) or (
        function is torch.ops.aten.native_dropout.default
    )


def _written(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensor that the function writes into."""
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else named.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
            yield value
