"""Remove the channels that are not kept: from parameters, modules and the graph's constants.

    before   conv1.weight [64, 3, 7, 7]   split(x, [32, 32], 1)   view(b, 64, -1)
    after    conv1.weight [40, 3, 7, 7]   split(x, [16, 24], 1)   view(b, 40, -1)

Every movement of data is then executed again on the labels of the kept channels, and must give its earlier
result without the removed channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.weight_views import is_layer
from smcp_fx.errors import PassError
from smcp_fx.masking.masks import META, Constant, Masked, mark_of
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.passes.rewrite_constants import rewrite_graph
from smcp_fx.passes.size_rewrites import set_argument
from smcp_fx.passes.sliced_labels import Sliced, size_of
from smcp_fx.passes.weight_products import kept_factor
from smcp_fx.tracing.values import canonical_names, held


class SliceChannels(GraphPass):
    """Keeps the pinned units, and the others where ``keep``, a bool for every unit, is true."""

    def __init__(self, channels: ChannelGraph, keep: Tensor) -> None:
        self.channels = channels
        self._keep = keep
        #: For each parameter that was cut, the kept positions along each dimension that lost some.
        self.cut: dict[str, dict[int, Tensor]] = {}

    @property
    def keep(self) -> Tensor:
        """The units that stay; `RemoveBranches` may have added some before this pass runs."""
        return self._keep.cpu() | ~self.channels.free_units

    def requires(self, module: fx.GraphModule) -> None:
        """No mask or scale is left in the graph; no layer is left without channels."""
        if any(mark_of(node) is not None for node in module.graph.nodes):
            raise PassError("SliceChannels needs FoldMasks and FoldBatchNormScalers to have run")
        keep = self.keep
        if all(bool(keep[group.units].any()) for group in self.channels.groups):
            return
        sliced = Sliced(self.channels, keep)
        present = {node.name for node in module.graph.nodes}
        for layer in self.channels.layers:
            for labels in (layer.input_channels, layer.output_channels) if layer.node in present else ():
                if not bool(sliced.kept(labels).any()):
                    index = int(self.channels.group_of_unit[self.channels.units.of(labels)[0]])
                    group = self.channels.groups[index]
                    raise PassError(
                        f"group {group.name!r} would keep nothing, and {layer.path!r} no channels"
                    )

    def apply(self, module: fx.GraphModule) -> PassResult:
        """Slice parameters and modules, then rewrite constants."""
        sliced = Sliced(self.channels, self.keep)
        indices = self._indices(sliced)
        owners = _owners(module)
        for name, dims in indices.items():
            size = getattr(*owners[name][0]).shape if name in owners else ()
            lost = {dim: p for dim, p in dims.items() if size and p.numel() < size[dim]}
            if lost:
                self.cut[name] = lost
        report = _slice_parameters(owners, {**indices, **self._constants(module, sliced)})
        if not report and any(self._goes(name, dims) for name, dims in indices.items() if name in owners):
            return PassResult(module, False)  # sliced already: every parameter has its final shape
        report += self._resize_modules(module, sliced)
        report += rewrite_graph(module, sliced)
        _drop_products_with_ones(module)
        return PassResult(module, bool(report), tuple(report))

    def ensures(self, module: fx.GraphModule) -> None:
        """Raise `PassError` if a module's fields contradict the shapes of its weights."""
        check_shapes(module)

    def _indices(self, sliced: Sliced) -> dict[str, dict[int, Tensor]]:
        """For each parameter, the kept positions along each of its channel dimensions."""
        trail = self.channels.trail
        return {
            name: {dim: sliced.of_parts(factors) for dim, factors in self.channels.factors(name).items()}
            for name in (*trail.slots, *trail.elements, *trail.mixed_parameters)
        }

    def _constants(self, module: fx.GraphModule, sliced: Sliced) -> dict[str, dict[int, Tensor]]:
        """The same for constants that removed branches left, and for masks kept beside computed weights."""
        cuts: dict[str, dict[int, Tensor]] = {}
        for node in module.graph.nodes:
            mark = node.meta.get(META)
            if isinstance(mark, Constant):
                axis = sliced.axis(self.channels.trail.labels[mark.of])
                if axis is not None and module.get_parameter(str(node.target)).shape[axis[0]] > 1:
                    cuts[str(node.target)] = dict([axis])
            elif isinstance(mark, Masked):
                layer = next(one for one in self.channels.layers if one.node == mark.layer)
                mask = str(kept_factor(node).target)
                sides = ((layer.in_dim, layer.in_labels), (layer.out_dim, layer.out_labels))
                wide = [dim for dim, size in enumerate(held(module, mask).shape) if size > 1]
                cuts[mask] = {dim: sliced.positions(labels) for dim, labels in sides if dim in wide}
        return cuts

    def _goes(self, name: str, dims: dict[int, Tensor]) -> bool:
        factors = self.channels.factors(name)
        return any(len(positions) < math.prod(map(size_of, factors[dim])) for dim, positions in dims.items())

    def _resize_modules(self, module: fx.GraphModule, sliced: Sliced) -> list[str]:
        report = []
        whole = {layer.path for layer in self.channels.layers if layer.kind == "depthwise"}
        # Include modules that are not called: the graph may read their weight only (subclassed convolutions).
        for path, target in module.named_modules():
            before = _sizes(target)
            resize_fields(target, path in whole)
            if _sizes(target) != before:
                report.append(f"{path}: {before} -> {_sizes(target)}")
        nodes = {node.name: node for node in module.graph.nodes}
        for name, (_, labels) in self.channels.trail.grouped.items():
            if name in nodes and nodes[name].op == "call_module":  # still there, not removed with its branch
                norm, left = module.get_submodule(str(nodes[name].target)), sliced.positions(labels).numel()
                if isinstance(norm, nn.modules.batchnorm._NormBase) and norm.num_features != left:
                    norm.num_features = left
                    report.append(f"{nodes[name].target}: {left} channels")
        for layer in self.channels.layers:
            node = nodes.get(layer.node)
            if layer.kind == "depthwise" and node is not None and is_layer(node):
                left = sliced.positions(layer.input_channels).numel()
                groups = layer.groups * left // layer.input_channels.numel()
                if groups != layer.groups:
                    set_argument(node, 6, "groups", groups)
        return report


def _drop_products_with_ones(module: fx.GraphModule) -> None:
    """Drop masks of weights computed from the input that are all ones after slicing."""
    for node in list(module.graph.nodes):
        if isinstance(node.meta.get(META), Masked):
            weight, kept = node.all_input_nodes[0], kept_factor(node)
            if bool(held(module, str(kept.target)).all()):
                node.replace_all_uses_with(weight)
                todo = [node]
                while todo:
                    dead = todo.pop()
                    todo += [one for one in dead.all_input_nodes if one is not weight]
                    if not (dead.users or dead._erased):
                        module.graph.erase_node(dead)
                delattr(module, str(kept.target))


def _slice_parameters(
    owners: dict[str, list[tuple[nn.Module, str]]], indices: dict[str, dict[int, Tensor]]
) -> list[str]:
    report = []
    for name, dims in indices.items():
        places = owners.get(name, [])
        if not places:
            continue
        old = getattr(*places[0])
        new = old.detach()
        for dim, positions in dims.items():
            if positions.numel() < old.shape[dim]:
                new = new.index_select(dim, positions.to(new.device))
        if new.shape == old.shape:
            continue
        report.append(f"{name}: {tuple(old.shape)} -> {tuple(new.shape)}")
        last = old.dim() == 4 and not old.is_contiguous()
        last = last and old.is_contiguous(memory_format=torch.channels_last)
        new = new.clone(memory_format=torch.channels_last if last else torch.preserve_format)
        new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        for owner, attribute in places:
            setattr(owner, attribute, new)
    return report


def _owners(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """All owners of each tensor, by its first name; a shared tensor has several."""
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    for name, canonical in canonical_names(module).items():
        path, _, attribute = name.rpartition(".")
        owners.setdefault(canonical, []).append((module.get_submodule(path), attribute))
    return owners


def _sizes(module: nn.Module) -> dict[str, int]:
    """The fields that `resize_fields` may set, and others of their type."""
    return {name: value for name, value in vars(module).items() if type(value) is int}


def resize_fields(module: nn.Module, whole: bool = False) -> None:
    """Set a module's size fields from its tensors' shapes; ``whole``: a convolution loses whole groups."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.modules.conv._ConvNd) and isinstance(weight, Tensor):
        first, second = weight.shape[:2]
        if whole or (module.groups == module.in_channels and module.groups > 1):
            channels = module.in_channels if module.transposed else module.out_channels
            module.groups = first // (channels // module.groups)
        if module.transposed:
            module.in_channels, module.out_channels = first, second * module.groups
        else:
            module.out_channels, module.in_channels = first, second * module.groups
    elif isinstance(module, nn.Linear) and isinstance(weight, Tensor):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Bilinear):
        module.out_features, module.in1_features, module.in2_features = module.weight.shape
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        size = next((t.shape[0] for t in (weight, module.running_mean) if isinstance(t, Tensor)), None)
        module.num_features = module.num_features if size is None else size
    elif isinstance(module, nn.GroupNorm) and isinstance(weight, Tensor):
        module.num_channels = weight.numel()
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and isinstance(weight, Tensor):
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.numel()
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not getattr(module, "proj_size", 0):
        layer = "_l0" if isinstance(module, nn.RNNBase) else ""
        module.input_size = getattr(module, f"weight_ih{layer}").shape[1]
        module.hidden_size = getattr(module, f"weight_hh{layer}").shape[1]
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]


def check_shapes(module: fx.GraphModule) -> None:
    """Raise `PassError` if a called module's fields disagree with its weight's shape."""
    called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
    for path, part in module.named_modules():
        if path not in called:  # the graph may read its weights, but not its fields
            continue
        weight = getattr(part, "weight", None)
        expected: tuple[int, ...] | None = None
        if isinstance(part, nn.modules.conv._ConvNd):
            expected = (
                (part.in_channels, part.out_channels // part.groups)
                if part.transposed
                else (part.out_channels, part.in_channels // part.groups)
            )
        elif isinstance(part, nn.Linear):
            expected = (part.out_features, part.in_features)
        elif isinstance(part, nn.modules.batchnorm._NormBase):
            expected = (part.num_features,)
        if (
            expected is not None
            and isinstance(weight, Tensor)
            and tuple(weight.shape[: len(expected)]) != expected
        ):
            raise PassError(f"{path!r} says {expected}, its weight has shape {tuple(weight.shape)}")
