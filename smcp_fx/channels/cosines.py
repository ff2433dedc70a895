"""Cosines: products of two tensors, both divided by their own norms; the forward itself divides the weight.

    scores = linear(normalize(x), normalize(weight))      scores = (x / x.norm(dim=1, keepdim=True)) @ ...

Other computed weights are replaced by their values. A cosine stays a cosine: both norms are of the kept channels, as
in `F.cosine_similarity`. Then it stays within its bounds, and the model's own class computes the same.
"""

from __future__ import annotations

from torch import fx, nn

from smcp_fx.channels.weight_factors import CASTS
from smcp_fx.channels.weight_views import factors, is_layer, is_question, weight_and_bias
from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import held


def is_cosine(module: fx.GraphModule, use: fx.Node, weight: fx.Node) -> bool:
    """Does the layer or product compute cosines with the rows of a matrix, which it reads as ``weight``?"""
    pair = [use.args[0], weight_and_bias(use)[0]] if is_layer(use) else factors(use)
    operands = [one for one in pair if isinstance(one, fx.Node)]
    if weight not in operands or len(operands) < 2:
        return False
    return all(_is_normalised(module, one) for one in operands) and _is_of_one_matrix(module, use, weight)


def _is_normalised(module: fx.GraphModule, node: fx.Node) -> bool:
    """Is it a tensor divided by its own norm, or a multiple of one?"""
    while True:
        name = operation_of(module, node) or ""
        divided = [one for one in node.args[:2] if isinstance(one, fx.Node)] if name == "div" else []
        if name == "normalize" or (len(divided) == 2 and divided[0] in ancestors(divided[1])):
            return True
        turns = has(name, Trait.PERMUTES) or (node.target is getattr and node.args[1] in ("T", "mT"))
        sources = [one for one in node.all_input_nodes if one.op != "get_attr"]
        if not (turns or name in CASTS or has(name, Trait.ELEMENTWISE)) or len(sources) != 1:
            return False
        (node,) = sources


def _is_of_one_matrix(module: fx.GraphModule, use: fx.Node, weight: fx.Node) -> bool:
    """Is the node computed from a single matrix (and factors), which has no other reader?"""
    way = ancestors(weight)
    values = {node: held(module, str(node.target)) for node in way if node.op == "get_attr"}
    matrices = [
        node
        for node, v in values.items()
        if isinstance(v, nn.Parameter) and v.dim() == 2 and min(v.shape) > 1
    ]
    if len(matrices) != 1:
        return False
    matrix = values[matrices[0]]
    reads = [n for n in module.graph.nodes if n.op == "get_attr" and held(module, str(n.target)) is matrix]
    users = {user for node in way - values.keys() | set(matrices) for user in node.users}
    return reads == matrices and all(user in way or user is use or is_question(user) for user in users)
