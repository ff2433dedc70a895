"""Models that ask whether gradients are kept: `if x.requires_grad: x = checkpoint(block, x)`.

A graph cannot ask. The model is traced with each answer; if both give the same graph, the question does not
matter. Checkpointed parts are traced as if they were called: they compute the same, without saving memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.proxy import Proxy
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from smcp_fx.errors import TraceError
from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.contexts import same_gradients

_ASKED = {"requires_grad": True, "is_leaf": False}  # with the answer if gradients are kept


#: A graph, and the tensors that are constants in it, by the names of their nodes' targets.
Traced = tuple[fx.Graph, dict[str, Tensor]]


class GradientQuestions:
    """The questions during one trace, all answered with ``answer``."""

    def __init__(self, answer: bool = False) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self._nodes: set[fx.Node] = set()

    @staticmethod
    def asks(node: fx.Node) -> bool:
        """Does the node ask a tensor whether gradients are kept?"""
        return node.op == "call_function" and node.target is getattr and node.args[1] in _ASKED

    def answered(self, node: fx.Node, where: str) -> bool:
        """The answer, recorded with the line that asked."""
        self._nodes.add(node)
        self.asked.append(where)
        return self.answer is _ASKED[str(node.args[1])]

    def enabled(self, where: str) -> bool:
        """The answer to `torch.is_grad_enabled()`, recorded in the same way."""
        self.asked.append(where)
        return self.answer

    def tell(self, node: fx.Node) -> bool:
        """Does the node's value follow from such an answer?"""
        return bool(self._nodes) and not self._nodes.isdisjoint(ancestors(node))

    def compare(self, without: Traced, kept: Traced) -> None:
        """Raise `TraceError` if the graphs differ; else nodes keep gradients where those of ``kept`` do."""
        left, right = (list(graph.nodes) for graph, _ in (without, kept))
        twin = dict(zip(right, left, strict=False))
        same = len(left) == len(right)
        for a, b in zip(left, right, strict=False):
            (one, spec), (other, other_spec) = (
                pytree.tree_flatten(_tuples((n.args, n.kwargs))) for n in (a, b)
            )
            twins = [twin.get(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in other]
            same &= a.op == b.op and spec == other_spec and list(map(repr, one)) == list(map(repr, twins))
            first, second = (graph[1].get(str(n.target)) for graph, n in ((without, a), (kept, b)))
            if a.op == "get_attr" and first is not None and second is not None:
                same &= _equal(first, second)
            else:
                same &= a.target == b.target
        if not same:
            raise TraceError(
                f"it computes something else where gradients are kept (asked at {self.asked[0]}), and a graph "
                "does not ask: branch on self.training"
            )
        for a, b in zip(left, right, strict=True):
            same_gradients(a, [b])  # what was answered may have been handed to `set_grad_enabled`


def _tuples(tree: Any) -> Any:
    """Return lists as tuples: a checkpoint hands a function one in place of the other."""
    if isinstance(tree, (tuple, list)):
        return tuple(map(_tuples, tree))
    return {key: _tuples(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _equal(first: Tensor, second: Tensor) -> bool:
    return first is second or (
        first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    )


@contextmanager
def checkpoints_called(*, every: bool = False) -> Iterator[None]:
    """While it is entered, `torch.utils.checkpoint` only calls its function, if it is being traced.

    ``every``: also if it is not being traced.
    """
    reentrant, generator = (vars(torch_checkpoint)[name] for name in ("CheckpointFunction", _GENERATOR))

    def taken(tree: Any) -> bool:
        return every or any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves(tree))

    class Called:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return function(*args) if taken(args) else reentrant.apply(function, preserve, *args)

    def called(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not taken((args, kwargs)):
            yield from generator(*args, **kwargs)
        else:
            yield

    with (
        mock.patch.object(torch_checkpoint, "CheckpointFunction", Called),
        mock.patch.object(torch_checkpoint, _GENERATOR, called),
    ):
        yield


_GENERATOR = "_checkpoint_without_reentrant_generator"
