"""Products for masks and scales: in the graph, both multiply a weight before a layer uses it.

    before   conv1 = call_module[conv1](x)
    after    product = function(get_attr[conv1.weight], get_attr[smcp.mask_conv1])
             conv1 = forward_with_weight(get_attr[conv1], product, x)

Folding restores the call, with the product stored as the weight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx, nn

from smcp_fx.channels.weight_views import factors, first_movement, weight_of
from smcp_fx.errors import PassError
from smcp_fx.masking.masks import META, STATE, Mark, Masked, mark_of
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.own_weights import forward_with_weight
from smcp_fx.tracing.values import held


def require_buffer(module: fx.GraphModule, name: str, asking: GraphPass) -> None:
    """Raise `PassError` unless the prepared model's state has a buffer ``name``."""
    if not hasattr(module.get_submodule(STATE), name):
        raise PassError(f"{asking.name}: the module has no buffer {STATE}.{name}")


def insert_product(
    graph: fx.Graph,
    uses: list[fx.Node],
    weight: str,
    factor: str,
    function: Callable[..., Tensor],
    kind: Literal["mask", "scale"],
    computed: Mapping[fx.Node, fx.Node] | None = None,
) -> bool:
    """Let ``uses``, in order, read function(weight, state buffer ``factor``); False if they already do.

    ``computed``: the nodes of weights that are computed from the input, by the use that reads them.
    """
    own = computed or {}
    # Calls that read the same view of the weight share one reader.
    reads = dict((use, own[use]) if use in own else _read(use, weight) for use in uses)
    readers = list(reads)
    if len(readers) > 1:  # walking all nodes takes long
        readers = [node for node in graph.nodes if node in reads]
    if mark_of(readers[0]) is not None:
        return False
    products: dict[fx.Node | None, fx.Node] = {}
    for reader in readers:
        original = reads[reader]
        # Each node that computes a weight gets its own product; reads of a stored weight share one.
        by = original if original is not None and original.op != "get_attr" else None
        if by not in products:
            with graph.inserting_before(reader):
                source = original or graph.create_node("get_attr", weight)
                other = graph.create_node("get_attr", f"{STATE}.{factor}")
                products[by] = graph.call_function(function, (source, other))
        _redirect(graph, reader, original, products[by], kind)
    return True


def _read(use: fx.Node, name: str) -> tuple[fx.Node, fx.Node | None]:
    """The node that reads the weight ``name`` (the use or the weight's first movement), and the weight.

    The weight is None if a module's call reads it.
    """
    if use.op == "call_module":
        return use, None
    module, weight = use.graph.owning_module, weight_of(use)
    if weight is None:
        computed = (one for one in factors(use) if all(n.op != "placeholder" for n in ancestors(one)))
        read = next(computed, use.args[1])
        assert isinstance(read, fx.Node)
        return use, read
    assert module is not None
    return first_movement(module, weight, name) or (use, weight)


def _redirect(
    graph: fx.Graph,
    use: fx.Node,
    original: fx.Node | None,
    product: fx.Node,
    kind: Literal["mask", "scale"],
) -> None:
    if original is None:
        path = str(use.target)
        with graph.inserting_before(use):
            owner = graph.create_node("get_attr", path)
        use.op, use.target = "call_function", forward_with_weight
        use.args = (owner, product, *use.args)
        use.meta[META] = Mark(kind, path)
    else:
        use.replace_input_with(original, product)
        if not original.users:
            graph.erase_node(original)
        use.meta[META] = Mark(kind, None)


class FoldProducts(GraphPass):
    """Stores each product made by ``functions`` as the weight, and restores the layers' calls."""

    functions: ClassVar[tuple[Callable[..., Any], ...]]
    what: ClassVar[str]

    def apply(self, module: fx.GraphModule) -> PassResult:
        report = []
        graph = module.graph
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in self.functions:
                continue
            weight, factor = node.args
            if weight.op != "get_attr":
                _keep_product(module, node)
                report.append(
                    f"{node.name}: {self.what} kept beside a weight that is computed from the input"
                )
                continue
            with torch.no_grad():
                tensor = held_tensor(module, weight)
                tensor.mul_(held_tensor(module, factor).to(tensor.dtype))
            for use in list(node.users):
                _restore(graph, use, node, weight)
            for dead in (node, factor, weight):
                if not dead.users:
                    graph.erase_node(dead)
            report.append(f"{weight.target}: {self.what} folded")
        return PassResult(module, bool(report), tuple(report))

    def ensures(self, module: fx.GraphModule) -> None:
        """No product is left."""
        if any(node.target in self.functions for node in module.graph.nodes):
            raise PassError(f"{self.name} left a {self.what} in the graph")


def _keep_product(module: fx.GraphModule, node: fx.Node) -> None:
    """Turn the node into a plain product with a constant: there is no parameter to fold it into."""
    weight, factor = node.args
    assert isinstance(factor, fx.Node)
    uses = list(node.users)
    name = f"{uses[0].name}_kept"
    module.register_buffer(name, held_tensor(module, factor).detach().clone())
    with module.graph.inserting_before(node):
        kept = module.graph.create_node("get_attr", name)
        # A transposed weight has the inputs of all images as rows: repeat the constant for each image.
        if "transpose" in str(getattr(uses[0].target, "__name__", "")):
            sizes = [module.graph.call_method("size", (one, 0)) for one in (weight, kept)]
            images = module.graph.call_function(operator.floordiv, tuple(sizes))
            ones = (1,) * (held_tensor(module, factor).dim() - 1)
            kept = module.graph.call_method("repeat", (kept, images, *ones))
    node.target, node.args, node.meta[META] = operator.mul, (weight, kept), Masked(uses[0].name)
    if not factor.users:
        module.graph.erase_node(factor)
    for use in uses:
        del use.meta[META]


def kept_factor(product: fx.Node) -> fx.Node:
    """The node that reads the constant of a kept product (`_keep_product`)."""
    factor = product.args[1]
    assert isinstance(factor, fx.Node)
    while factor.op != "get_attr":
        factor = factor.all_input_nodes[0]
    return factor


def held_tensor(module: nn.Module, node: fx.Node) -> Tensor:
    """The tensor a `get_attr` node reads."""
    value = held(module, str(node.target))
    assert isinstance(value, Tensor)
    return value


def _restore(graph: fx.Graph, use: fx.Node, product: fx.Node, original: fx.Node) -> None:
    """Turn a `forward_with_weight` node back into the module call (or functional call) it was made from."""
    mark = mark_of(use)
    assert mark is not None
    if mark.path is None:
        use.replace_input_with(product, original)
    else:
        owner = use.args[0]
        use.op, use.target = "call_module", mark.path
        use.args = use.args[2:]
        assert isinstance(owner, fx.Node)
        graph.erase_node(owner)
    del use.meta[META]
