"""Constants that tracing baked into a graph, rewritten for the channels that are kept.

Sizes on the channel axis of view, reshape, expand and unflatten become the new size; chunk becomes split; split
sizes, slices and indices are recounted; a channel shuffle that loses channels becomes one index_select; a channel
count that is used as a number (``y * c ** -0.5``, ``y / (c * h * w)``) keeps its value.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.channels.rules_movement import SPREADS
from smcp_fx.channels.trail import ParameterRef, ParameterView
from smcp_fx.errors import PassError
from smcp_fx.passes.label_runs import LabelRuns, repeat
from smcp_fx.passes.movement_rewrites import REWRITES, SIZES, fitted
from smcp_fx.passes.original_numbers import OriginalNumbers, recomputed
from smcp_fx.passes.size_rewrites import fill, keep_scale, pad, set_argument
from smcp_fx.passes.sliced_labels import Sliced, size_of
from smcp_fx.tracing.modes import is_by_mode
from smcp_fx.tracing.operations import operation_name, writes_in_place
from smcp_fx.tracing.traits import Trait, has

#: Movements of a weight that take its sizes as arguments, or depend on which sizes are 1.
_SHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze"}


def rewrite_graph(module: fx.GraphModule, sliced: Sliced) -> list[str]:
    """Rewrite every constant that the kept channels change; return a line for each rewrite."""
    rewriter = _Rewriter(module, sliced)
    for node in list(module.graph.nodes):
        rewriter.visit(node)
    for node in reversed(rewriter.dead):
        if not node.users:
            module.graph.erase_node(node)
    return rewriter.report


class _Rewriter:
    def __init__(self, module: fx.GraphModule, sliced: Sliced) -> None:
        self.module = module
        self.sliced = sliced
        self.trail = sliced.channels.trail
        self.old: dict[str, Any] = dict(self.trail.labels)
        self.new: dict[str, Any] = {}
        self.originals = OriginalNumbers(module.graph, self.old, self.new)
        self.runs = LabelRuns(module, self.old, self.new)
        self.dead: list[fx.Node] = []
        self.report: list[str] = []

    def visit(self, node: fx.Node) -> None:
        name = node.name
        old = self.old.get(name)
        if node.op == "output":
            self._freeze_numbers(node)
            return
        if node.op == "placeholder":
            self.new[name] = pytree.tree_map(
                lambda v: self.sliced.slice(v) if isinstance(v, Tensor) else v, old
            )
            return
        if name in self.trail.mixed:
            self._mixed_weight(node)
            return
        if node.op == "get_attr":
            labels = self.trail.elements.get(old.name) if isinstance(old, ParameterRef) else old
            if isinstance(labels, Tensor):
                self.new[name] = self.sliced.slice(labels)
            else:
                self.new[name] = self._of_size(old) if isinstance(old, ParameterRef) else old
            return
        if isinstance(old, ParameterView):
            self._weight_view(node, old)
            return
        if name in self.trail.virtual and self._is_thinned(node):
            self.new[name] = None  # no node reads it once its chain is replaced
            self.dead.append(node)
            return
        if node.target is torch._assert:
            if not self._holds(node):
                self.dead.append(node)
            self.new[name] = None
            return
        if is_by_mode(node) and not node.users and any(n in self.dead for n in node.all_input_nodes):
            self.dead.append(node)  # it only says in which mode the dead operand runs
            return
        if not any(isinstance(v, Tensor) for v in pytree.tree_leaves(old)):
            written = writes_in_place(node, self.module)  # running it would overwrite the labels
            self.new[name] = old if written else recomputed(node, old, self.new)
            return
        self.new[name] = pytree.tree_map(lambda v: self.sliced.slice(v) if isinstance(v, Tensor) else v, old)
        self._rewrite(node, old)

    def _rewrite(self, node: fx.Node, old: Any) -> None:
        """Rewrite the channel counts, sizes and positions that the node's arguments hold."""
        name = node.name
        target = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        operation = operation_name(node, target)
        if name in self.trail.shuffles and self._is_thinned(node):
            self._shuffle(node)
        elif name in self.trail.made:
            self._select_made(node, old, self.trail.made[name])
        elif name in self.trail.selected:
            self._select_made(node, old, set())
        elif has(operation, Trait.MOVES):
            self._move(node, operation or "")
        elif name in self.trail.full:
            self._at_full_width(node)
        elif has(operation, Trait.FILLS) and isinstance(old, Tensor) and self.sliced.axis(old) is not None:
            self.report.append(fill(self, node, old))
        elif operation == "pad" and node.op == "call_function":
            self._freeze_numbers(node)
            self.report += pad(self, node)
        elif operation in ("layernorm", "rmsnorm"):
            self._resize_norm(node, target)
        elif operation == "groupnorm":
            self._regroup(node, target)
        elif operation == "scaleddotproductattention":
            self._freeze_numbers(node)
            self.report += keep_scale(self, node)
        elif name in self.trail.kernels:
            self._count_kernels(node)
        else:
            self._freeze_numbers(node)

    # ---- weights ----------------------------------------------------------------------------------------

    def _of_size(self, weight: ParameterRef) -> ParameterRef:
        """The same parameter, or view of one, in the shape of its kept channels."""
        slots = self.trail.slots.get(weight.name, {})
        left: dict[int | None, int] = {
            d: self.sliced.positions(labels).numel() for d, labels in slots.items()
        }
        places = enumerate(weight.shape)
        return replace(weight, shape=tuple(left.get(weight.place(dim), size) for dim, size in places))

    def _weight_view(self, node: fx.Node, old: ParameterView) -> None:
        """Replace a movement that depends on a weight's old sizes by a reshape to its new ones."""
        new = self.new[node.name] = self._of_size(old)
        if new.shape != old.shape and operation_name(node, None) in _SHAPES:
            node.op, node.target, node.args, node.kwargs = (
                "call_method",
                "reshape",
                (node.args[0], *new.shape),
                {},
            )
            self.report.append(f"{node.name}: now of shape {new.shape}")

    def _mixed_weight(self, node: fx.Node) -> None:
        """Update the sizes in the arguments of a node that computes a weight from the input."""
        parts = self.trail.mixed[node.name]
        shape = [self.sliced.of_parts(dim).numel() for dim in parts]
        nothing = torch.zeros((), dtype=torch.int64)  # carries shapes only, no labels
        self.old[node.name] = nothing.expand([prod(map(size_of, dim)) for dim in parts])
        self.new[node.name] = nothing.expand(shape)
        start = 1 + (operation_name(node, None) == "unflatten")
        if operation_name(node, None) not in SIZES or node.op == "call_module":
            self._freeze_numbers(node)
            return
        written: Any = node.args[start:]
        as_tuple = len(written) == 1 and isinstance(written[0], (tuple, list))
        sizes = list(written[0]) if as_tuple else list(written)
        if len(sizes) == 1 and isinstance(sizes[0], fx.Node) and isinstance(self.old[sizes[0].name], tuple):
            sizes, as_tuple = self.parts_of(sizes[0], node), start > 1
        base = int(node.args[1]) % (len(shape) - len(sizes) + 1) if start > 1 else len(shape) - len(sizes)  # type: ignore[arg-type]
        fit = fitted(self, sizes, shape[base : base + len(sizes)])
        if fit != sizes:
            node.args = (*node.args[:start], tuple(fit)) if as_tuple else (*node.args[:start], *fit)
            self.report.append(f"{node.name}: now of shape {tuple(shape)}")

    # ---- numbers ----------------------------------------------------------------------------------------

    def _holds(self, node: fx.Node) -> bool:
        """Does the assertion still hold? Fewer channels may break it, unless it tests an input for None."""
        if not isinstance(condition := node.args[0], fx.Node) or condition.target is operator.is_:
            return True
        return bool(self.new.get(condition.name, True))

    def _freeze_numbers(self, node: fx.Node) -> None:
        """Numbers that came from a channel count and are used in arithmetic keep their original value."""
        self.report += self.originals.put_into(node)

    def _resize_norm(self, node: fx.Node, module: Any) -> None:
        """Update the sizes of the last dimensions that a norm is given."""
        source = self.new[node.args[0].name] if isinstance(node.args[0], fx.Node) else None
        if not isinstance(source, Tensor):
            return
        if module is not None:
            module.normalized_shape = tuple(source.shape[-len(module.normalized_shape) :])
            return
        shape: Any = node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]
        current = self.new[shape.name] if isinstance(shape, fx.Node) else fx.node.map_arg(shape, self._now)
        wanted = tuple(source.shape[-len(current) :])
        if tuple(current) != wanted:
            sizes = self.parts_of(shape, node) if isinstance(shape, fx.Node) else shape
            pairs = zip(sizes, current, wanted, strict=True)
            set_argument(node, 1, "normalized_shape", tuple(s if n == w else w for s, n, w in pairs))

    def _regroup(self, node: fx.Node, module: Any) -> None:
        """Update the number of groups of a group norm, which falls if whole groups go."""
        source = node.args[0]
        if not isinstance(source, fx.Node) or not isinstance(self.new[source.name], Tensor):
            return
        left = self.new[source.name].shape[1]
        groups, labels = self.trail.grouped.get(node.name, (None, None))
        if module is not None:
            module.num_channels = left
            module.num_groups = (
                module.num_groups if labels is None or groups is None else groups * left // labels.numel()
            )
            return
        count = node.args[1] if len(node.args) > 1 else node.kwargs["num_groups"]
        before, current = (
            (self.old[count.name], self.new[count.name]) if isinstance(count, fx.Node) else (count, count)
        )
        wanted = before if labels is None or groups is None else groups * left // labels.numel()
        if current != wanted:
            set_argument(node, 1, "num_groups", wanted)

    def _count_kernels(self, node: fx.Node) -> None:
        """Set a depthwise convolution's groups to its channels; keep a computed number that is right."""
        groups: Any = node.args[6] if len(node.args) > 6 else node.kwargs["groups"]
        current = self.new[groups.name] if isinstance(groups, fx.Node) else groups
        wanted = self.new[node.name].shape[self.trail.kernels[node.name]]
        if current != wanted and isinstance(groups, fx.Node):
            groups = self.originals.in_proportion(groups, current, wanted)
        set_argument(node, 6, "groups", 1)
        self._freeze_numbers(node)
        set_argument(node, 6, "groups", groups if isinstance(groups, fx.Node) else wanted)

    def _now(self, node: fx.Node) -> Any:
        return self.new[node.name]

    # ---- movements --------------------------------------------------------------------------------------

    def _is_thinned(self, node: fx.Node) -> bool:
        """Does the chain of movements that this node belongs to lose channels?"""
        for end, shuffle in self.trail.shuffles.items():
            if node.name == end or node.name in shuffle.through:
                return self.sliced.axis(self.old[shuffle.root]) is not None
        return False

    def _shuffle(self, node: fx.Node) -> None:
        shuffle = self.trail.shuffles[node.name]
        root = next(n for n in self.module.graph.nodes if n.name == shuffle.root)
        kept_in = self.sliced.axis(self.old[root.name])
        kept_out = self.sliced.axis(self.old[node.name])
        assert kept_in is not None
        wanted = shuffle.order if kept_out is None else shuffle.order[kept_out[1]]
        self._select(node, root, shuffle.axis, kept_in[1], wanted)

    def _select(self, node: fx.Node, source: fx.Node, dim: int, kept: Tensor, wanted: Tensor) -> None:
        """Turn the node into ``index_select(source, dim, ...)`` that fetches old positions ``wanted``."""
        place = torch.full((int(kept.max()) + 1,), -1, dtype=torch.int64)
        place[kept] = torch.arange(kept.numel())
        index = self._held(node, place[wanted])
        node.op, node.target = "call_function", torch.index_select
        node.args, node.kwargs = (source, dim, index), {}
        self.report.append(f"{node.name}: now an index_select of {wanted.numel()} channels")

    def _select_made(self, node: fx.Node, labels: Any, among: set[str]) -> None:
        """Select the kept channels of a tensor computed at full width; its users in ``among`` read it whole.

        A tuple of tensors (a mesh grid) stays whole; the tensors made from it are selected.
        """
        self._freeze_numbers(node)
        if not isinstance(labels, Tensor) or (kept := self.sliced.axis(labels)) is None:
            return
        graph = self.module.graph
        with graph.inserting_after(node):
            selected = graph.call_function(torch.index_select, (node, kept[0]))
        selected.args = (*selected.args, self._held(selected, kept[1]))
        node.replace_all_uses_with(selected, lambda user: user is not selected and user.name not in among)
        self.new[selected.name], self.old[selected.name] = self.new[node.name], labels
        self.report.append(f"{node.name}: an index_select of {kept[1].numel()} channels")

    def _move(self, node: fx.Node, operation: str) -> None:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not isinstance(
            self.old.get(source.name), (Tensor, ParameterRef)
        ):
            return  # an element of a tuple of tensors
        if operation not in SIZES:
            self._freeze_numbers(node)
        old = self.old[source.name]
        before = self.trail.elements[old.name] if isinstance(old, ParameterRef) else old
        outputs = [v for v in pytree.tree_leaves(self.old[node.name]) if isinstance(v, Tensor)]
        if all(self.sliced.axis(v) is None for v in (before, *outputs)):
            self._freeze_numbers(node)
            return
        kept_in, kept_out = self.sliced.axis(before), self.sliced.axis(outputs[0])
        order = None
        if kept_in is not None and len(outputs) == 1:
            order = self.runs.order(node, before.shape, kept_in[0], self.old)
        rewrite, written = REWRITES.get(operation), (node.op, node.target, node.args, node.kwargs)
        if rewrite is not None and rewrite(self, node, before, outputs):
            self.report.append(f"{node.name}: {operation} rewritten")
        if operation in SPREADS and kept_in is None and self.runs.fits(node, self.sliced.slice(outputs[0])):
            return  # one value for all channels: only the labels differ
        # A diagonal also depends on positions in another dimension, so equal labels do not prove it right.
        coupled = operation == "diagonal"
        if (
            not coupled
            and self.runs.agrees(node, self.new[node.name])
            and (
                kept_in is None
                or order is None
                or not repeat(before, kept_in[0])
                or self.runs.orders(node, kept_in, order if kept_out is None else order[kept_out[1]])
            )
        ):
            return
        if kept_in is None or len(outputs) != 1:
            raise PassError(
                f"{node.name!r} ({operation}) cannot be rewritten for the channels kept: input "
                f"{tuple(before.shape)}, output {tuple(outputs[0].shape)}. Exclude the layer that feeds it."
            )
        node.op, node.target, node.args, node.kwargs = written
        if order is not None and self.runs.keeps_others(node, before.shape, kept_in[0]):
            wanted = order if kept_out is None else order[kept_out[1]]  # None: all outputs stay
            self._select(node, source, kept_in[0], kept_in[1], wanted)
        else:
            self._on_all(node, source, kept_in, kept_out)

    def _on_all(
        self, node: fx.Node, source: fx.Node, kept_in: tuple[int, Tensor], kept_out: tuple[int, Tensor] | None
    ) -> None:
        """Let the operation move the original number of channels, then select the kept ones from its result.

        The first kept channel fills the places of removed ones; nothing reads it there.
        """
        self._freeze_numbers(node)
        graph, dim = self.module.graph, kept_in[0]
        with graph.inserting_before(node):
            filled = graph.call_function(torch.index_select, (source, dim))
            moved = graph.create_node(node.op, node.target, (filled, *node.args[1:]), dict(node.kwargs))
        size = self.old[source.name].shape[dim]
        place = torch.zeros(size, dtype=torch.int64).index_put_(
            (kept_in[1],), torch.arange(kept_in[1].numel())
        )
        filled.args = (*filled.args, self._held(filled, place))
        if kept_out is None:
            node.replace_all_uses_with(moved)
            self.dead.append(node)
            self.old[moved.name], self.new[moved.name] = self.old[node.name], self.new[node.name]
        else:
            node.op, node.target, node.kwargs = "call_function", torch.index_select, {}
            node.args = (moved, kept_out[0], self._held(node, kept_out[1]))
        self.report.append(f"{node.name}: moves all channels, of which those kept are selected")

    def _at_full_width(self, node: fx.Node) -> None:
        """Run the operation on all channels, zeros for removed ones, then select the kept ones."""
        self._freeze_numbers(node)
        source, dim, graph = node.args[0], self.trail.full[node.name], self.module.graph
        assert isinstance(source, fx.Node)
        labels = self.old[source.name]
        kept_in, kept_out = self.sliced.axis(labels), self.sliced.axis(self.old[node.name])
        if kept_in is None or kept_out is None:
            return
        place = torch.full((labels.shape[dim],), kept_in[1].numel())  # where the zeros are
        place[kept_in[1]] = torch.arange(kept_in[1].numel())
        with graph.inserting_before(node):
            zero = (0, 0) * (labels.dim() - 1 - dim) + (0, 1)
            padded = graph.call_function(F.pad, (source, zero))
            whole = graph.call_function(torch.index_select, (padded, dim))
            wide = graph.create_node(node.op, node.target, (whole, *node.args[1:]), dict(node.kwargs))
        whole.args = (*whole.args, self._held(whole, place))
        node.op, node.target, node.kwargs = "call_function", torch.index_select, {}
        node.args = (wide, dim, self._held(node, kept_out[1]))
        self.report.append(
            f"{node.name}: runs on all {labels.shape[dim]} channels, zeros for those that are gone"
        )

    def _held(self, node: fx.Node, index: Tensor) -> fx.Node:
        """Store the index in a buffer; return a new node, before this one, that reads it."""
        name = f"{node.name}_index"
        self.module.register_buffer(name, index)
        with self.module.graph.inserting_before(node):
            return self.module.graph.create_node("get_attr", name)

    def parts_of(self, sizes: fx.Node, before: fx.Node) -> list[Any]:
        """Split a shape held by one node into one new node a dimension, placed before the node ``before``."""
        parts = []
        for index, old in enumerate(self.old[sizes.name]):
            with self.module.graph.inserting_before(before):
                part = self.module.graph.call_function(operator.getitem, (sizes, index))
            new = self.new[sizes.name]
            self.old[part.name], self.new[part.name] = old, new[index] if isinstance(new, tuple) else old
            parts.append(part)
        return parts
