"""Random numbers that forward draws: torch's become nodes of the graph; others are refused, as no graph draws them.

    lam = torch.rand(())                       a node, drawn in each call
    if random.random() < 0.2: continue         refused: the graph would always take the way of this one draw

A branch on one of torch's random numbers depends on a tensor's values, and is refused as such.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smcp_fx.errors import TraceError

#: Functions that draw even without a traced tensor among their arguments.
FUNCTIONS = "rand randn randint randperm normal bernoulli multinomial poisson".split()
_SAMPLERS = "_sample_dirichlet _standard_gamma".split()
#: The methods of tensors that draw, without stand-ins.
METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(Tensor, name)
    for name in "bernoulli bernoulli_ uniform_ normal_ exponential_ random_ multinomial".split()
}


def drawing(
    record: Callable[[str, Any, Any, Any], Any], spaces: list[ModuleType | type]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield (where, name, stand-in) of everything that draws; in other threads the stand-ins just draw.

    ``record(kind, target, args, kwargs)`` makes the node.
    """
    thread = threading.get_ident()

    def noted(kind: str, function: Any, target: Any) -> Any:
        @functools.wraps(function)
        def draw(*args: Any, **kwargs: Any) -> Any:
            is_start = bool(args) and isinstance(args[0], nn.Parameter)  # a module that forward creates
            if threading.get_ident() != thread or is_start:
                return function(*args, **kwargs)
            return record(kind, target, args, kwargs)

        return draw

    def refused(function: Any, name: str) -> Any:
        @functools.wraps(function)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args, **kwargs)
            raise TraceError(
                f"it draws with {name}, whose one result a graph would hold for ever: "
                "draw with torch.rand and its like"
            )

        return draw

    for name in FUNCTIONS:
        function = getattr(torch, name)
        yield torch, name, noted("call_function", function, function)
    for name in _SAMPLERS:  # of distributions, in functions with a backward of their own
        yield torch, name, refused(getattr(torch, name), "torch.distributions")
    for name, method in METHODS.items():
        yield Tensor, name, noted("call_method", method, name)
    python = {name: value for name, value in vars(random).items() if _draws_of(value, random._inst)}
    numpys = {name: value for name, value in vars(np.random).items() if _draws_of(value, _NUMPYS)}
    for module, functions in ((random, python), (np.random, numpys)):
        stand_ins = {
            name: refused(value, f"{module.__name__}.{name}")
            for name, value in functions.items()
            if not name.endswith(("seed", "state"))
        }
        for name, value in stand_ins.items():
            yield module, name, value
        by_function = {id(functions[name]): value for name, value in stand_ins.items()}
        for space in spaces:
            if not isinstance(space, ModuleType):
                continue
            for name, value in vars(space).items():
                if id(value) in by_function:
                    yield space, name, by_function[id(value)]


_NUMPYS = getattr(np.random.random, "__self__", None)


def _draws_of(value: Any, generator: Any) -> bool:
    """Is this a method of the generator that the whole process shares?"""
    return callable(value) and generator is not None and getattr(value, "__self__", None) is generator
