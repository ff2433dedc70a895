"""`torch.autograd.Function`: called as it is, so that its own backward stays.

    Reverse.apply(x)   is one call in the graph; traced through, it would be what autograd makes of its forward

Nothing is known of what it does with channels: what it reads and returns is pinned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.proxy import Proxy
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction


@contextmanager
def functions_kept(tracer: fx.Tracer) -> Iterator[None]:
    """While it lasts, functions of autograd that are applied to proxies become nodes."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
            return _plain_apply.__get__(None, cls)(*args, **kwargs)
        if issubclass(cls, CheckpointFunction):
            return args[0](*args[2:])  # it recomputes what it runs, which changes no number
        return tracer.create_proxy("call_function", applied(cls), args, kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


_plain_apply = vars(torch.autograd.Function)["apply"]


@functools.cache
def applied(cls: Any) -> Callable[..., Any]:
    """The function that applies this class: one object a class, with a name that fx can write down."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = f"{cls.__name__}_apply"
    apply.__module__ = cls.__module__
    return apply
