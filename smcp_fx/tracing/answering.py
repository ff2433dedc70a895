"""The interface through which proxies and stand-ins ask their tracer; `ShapeTracer` implements it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import fx
from torch.fx.proxy import Proxy

from smcp_fx.tracing.gradients import GradientQuestions


class AnsweringTracer(fx.Tracer):
    """A tracer that knows the value of every node on the example inputs."""

    gradients: GradientQuestions

    @abstractmethod
    def evaluating(self) -> bool:
        """Whether a value is being computed (and no graph is being recorded)."""

    @abstractmethod
    def value(self, node: fx.Node) -> Any:
        """The value of a node on (fake tensors like) the example inputs."""

    @abstractmethod
    def kind(self, obj: Proxy) -> type:
        """Return the type of the value behind a proxy."""

    @abstractmethod
    def is_tensor(self, obj: Proxy) -> bool:
        """Does a proxy stand for a tensor, or for a number that depends on a tensor's values?"""

    @abstractmethod
    def number(self, obj: Proxy) -> Any:
        """The number behind a proxy; everything computed from it is fixed in the graph."""

    @abstractmethod
    def index(self, obj: Proxy, asker: FrameType) -> Any:
        """The number for ``__index__``; the caller may still use the proxy itself."""

    @abstractmethod
    def length(self, obj: Proxy) -> int:
        """Return the length of a tensor, tuple or list."""

    @abstractmethod
    def known(self, obj: Proxy, value: Any) -> Any:
        """An input or a part of one; None and an enum's member themselves, as `x is None` would see the proxy."""

    @abstractmethod
    def check_parts(self, obj: Proxy) -> None:
        """Assume that a split gives as many parts as the code unpacks."""

    @abstractmethod
    def keep_symbolic(self, obj: Proxy, caller: FrameType) -> None:
        """Withdraw an assumption that only arose as a function of torch checked whether its argument is a number."""

    @abstractmethod
    def in_place(self, written: Callable[..., Any], obj: Proxy, other: Any) -> Any:
        """Record `x += y`: a write into a tensor, a new value of a number."""
