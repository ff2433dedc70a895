"""The batch norms of a graph, called as modules or as functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from smcp_fx.calibration.consumers import attribute_of

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@dataclass(frozen=True)
class Normalisation:
    """A batch norm that normalises by running statistics."""

    node: fx.Node
    path: str
    input: fx.Node
    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def norms_of(module: fx.GraphModule) -> list[list[Normalisation]]:
    """Return the graph's batch norms in run order, grouped by shared statistics."""
    norms: dict[int, list[Normalisation]] = {}
    for node in module.graph.nodes:
        norm = _norm_of(module, node)
        if norm is not None:
            norms.setdefault(id(norm.mean), []).append(norm)
    return list(norms.values())


def _norm_of(module: fx.GraphModule, node: fx.Node) -> Normalisation | None:
    if node.op == "call_module":
        norm = module.get_submodule(str(node.target))
        x = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not isinstance(x, fx.Node):
            return None
        if norm.running_mean is None or norm.running_var is None:
            return None
        path, statistics = str(node.target), (norm.running_mean, norm.running_var)
        return Normalisation(node, path, x, *statistics, norm.weight, norm.bias, norm.eps)
    if node.op != "call_function" or node.target is not F.batch_norm:
        return None
    named: dict[str, Any] = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    tensors = [attribute_of(module, named.get(name)) for name in _NAMES[1:5]]
    mean, variance, weight, bias = (t if isinstance(t, Tensor) else None for t in tensors)
    eps = named.get("eps", 1e-5)
    if mean is None or variance is None or not isinstance(eps, (int, float)):
        return None
    path = str(named["running_mean"].target).rpartition(".")[0]
    return Normalisation(node, path, named["input"], mean, variance, weight, bias, eps)
