"""Results that are told from shapes and types: against what torch computes on tensors with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from smcp_fx.tracing.known_results import known_result, on_meta

X, HALF = torch.randn(2, 3, 8), torch.randn(2, 3, 8).bfloat16()
MANY, FEW = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
#: What is called, with what, and whether the result is told; what is not must run.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]] = {
    "softmax": (lambda x: x.softmax(-1), (X,), True),
    "softmax in another type": (lambda x: F.softmax(x, dim=-1, dtype=torch.float64), (X,), False),
    "softmax in another type, by place": (lambda x: x.softmax(-1, torch.float64), (X,), False),
    "softmax of moved dimensions": (lambda x: x.softmax(-1), (X.mT,), False),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), (X,), True),
    "layer norm of other sizes": (lambda x: F.layer_norm(x, (3, 8)), (X,), True),
    "group norm": (lambda x: F.group_norm(x, 3), (X,), True),
    "batch norm": (lambda x, m, v: F.batch_norm(x, m, v), (X, torch.zeros(3), torch.ones(3)), True),
    "linear": (lambda x, w: F.linear(x, w), (X, torch.randn(5, 8)), True),
    "linear of moved dimensions": (lambda x, w: F.linear(x, w), (torch.randn(2, 8, 3).mT, torch.randn(5, 8)), True),
    "roll": (lambda x: x.roll(1, 1), (X,), True),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (X, X[:, :2]), True),
    "attention, all by name": (
        lambda q, k: F.scaled_dot_product_attention(value=k, key=k, query=q), (X, X[:, :2]), False
    ),
    "attention of fewer keys": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), (MANY, FEW), False
    ),
    "sum": (lambda x, y: x + y, (X, X), True),
    "sum with a row": (lambda x, y: x + y, (X, torch.randn(8)), True),
    "row with all": (lambda x, y: x + y, (torch.randn(8), X), False),
    "sum with a complex number": (lambda x: x + 1j, (X,), False),
    "sum of types": (lambda x, y: x * y, (X, HALF), False),
    "quotient of whole numbers": (lambda x, y: x / y, (torch.ones(2, dtype=torch.int64),) * 2, False),
    "activation": (lambda x: F.gelu(x), (HALF,), True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_what_torch_gives(case: str) -> None:
    call, given, told = CASES[case]
    graph = torch.fx.symbolic_trace(call).graph
    (node,) = (node for node in graph.nodes if node.op in ("call_function", "call_method"))
    on = dict(zip((n for n in graph.nodes if n.op == "placeholder"), map(on_meta, given), strict=True))
    found = known_result(node, None, *torch.fx.node.map_arg((node.args, node.kwargs), on.__getitem__))
    assert (found is not None) == told
    if found is not None:
        expected: Tensor = call(*given)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.stride() == expected.stride()
