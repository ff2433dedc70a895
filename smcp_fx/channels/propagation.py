"""Run a traced graph on channel labels instead of numbers.

Every producer's output channels get fresh labels. Data movements run on the labels; element-wise operations
tie their operands' labels; consumers record the label of each input slot; an operation without a rule pins
its operands. The rules are in `rules_*.py`, each a function ``rule(run, call) -> labels of the output``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.channels.facts import Facts
from smcp_fx.channels.labels import compact, narrow_uniform, paired, uniform, varied_dims
from smcp_fx.channels.sizes import Sizes
from smcp_fx.channels.trail import (
    INPUT,
    Call,
    ConstantRef,
    MadeRef,
    ParameterRef,
    ParameterView,
    Reason,
    Trail,
    constant_made_by,
    named_leaves,
    tensor_leaves,
)
from smcp_fx.channels.written_views import written_views
from smcp_fx.tracing.operations import operation_name
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.trees import leaves_of, mapped
from smcp_fx.tracing.values import OPAQUE, ORIGIN, PASSED_ON, TensorInfo, has_tensors, held

Rule = Callable[["Propagation", Call], Any]

_LOG = logging.getLogger("smcp_fx.channels")
#: Start of the reason for an operation in a form that its rule does not handle.
UNFIT = "no channel rule fits this form of"
#: Operations, by the start of their name, whose rules label operands of one value (`MadeRef`) themselves.
_LABELLING = tuple("bymode indexadd indexcopy indexfill indexreduce recurrent scatter setitem".split())


class Propagation:
    """One run of the graph on labels. ``seen`` maps labels of an earlier run to their units, if there was one."""

    def __init__(
        self,
        module: fx.GraphModule,
        values: dict[str, Any],
        rules: dict[str, Rule],
        earlier: tuple[Trail, Tensor] | None = None,
        other: dict[str, Any] | None = None,
        turned: Collection[str] = (),
        mixed_up: Collection[str] = (),
        facts: Facts | None = None,
    ) -> None:
        self.module, self.values, self.rules, self.turned = module, values, rules, turned
        self.sizes = Sizes(module, values, other or {})
        self.mixed_up = mixed_up  # reshapes that read positions as channels
        self.trail = Trail(turned=frozenset(turned))
        self.node = ""  # the node being executed
        self.blind = False  # Did a rule pin channels because it could not see ties that come later?
        self._asked: Counter[str] = Counter()
        self._alone: list[tuple[int, int]] = []  # ranges of labels of parameters outside layers
        self._alone_ends = torch.empty(2, 0)  # these ranges, ascending: first labels, last labels
        self.seen: Tensor | None = None
        self.as_tensors: set[str] = set()  # parameters read as weights and also element by element: codebooks
        self.contracted: set[fx.Node] = set()  # products that sum over a block of a matrix: `channels.blocks`
        if earlier is not None:  # the same nodes get the same labels, so that the earlier ties still hold
            self.trail.ties = list(earlier[0].ties)
            self.trail.origins = dict(earlier[0].origins)
            self.trail.count = earlier[0].count
            self.seen = earlier[1]
            self.as_tensors = earlier[0].slots.keys() & earlier[0].elements.keys()
        self.facts = facts or Facts(module, values).at(values, turned)
        self.trail.computed = dict(self.facts.described)

    # ---- labels -----------------------------------------------------------------------------------------

    def fresh(self, node: str, count: int) -> Tensor:
        """Return ``count`` new labels for a node."""
        key = (node, self._asked[node])
        self._asked[node] += 1
        first, size = self.trail.origins.get(key, (0, -1))
        if size != count:
            first = self.trail.count
            self.trail.count += count
            self.trail.origins[key] = (first, count)
        return torch.arange(first, first + count)

    def reason(self, node: str, why: str, kind: str = "") -> int:
        """Register a reason and return its index."""
        _LOG.debug("%s: %s", node, why, stack_info=True)
        self.trail.reasons.append(Reason(node, why, kind))
        return len(self.trail.reasons) - 1

    def fixed(self, node: str, why: str, kind: str = "") -> int:
        """Return a negative label: a source whose elements always stay."""
        return -1 - self.reason(node, why, kind)

    def pin(self, labels: Tensor, node: str, why: str) -> None:
        """Record that these channels must stay."""
        kept = torch.unique(narrow_uniform(labels))
        kept = kept[kept > 0]
        if kept.numel():
            self.trail.pins.append((kept, self.reason(node, why)))

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Tie labels element by element, after broadcasting; labels opposite a fixed source are pinned."""
        pairs, pins = paired(left, right)
        if pairs.shape[1] > 2048:  # large tensors often repeat the same pairs
            single = torch.unique((pairs.amin(0) << 32) | pairs.amax(0))
            pairs = torch.stack([single >> 32, single & 0xFFFFFFFF])
        if pairs.numel():
            self.trail.ties.append((pairs, self.node))
        self.trail.pins += pins

    def tie_along(self, labels: Tensor, dim: int) -> Tensor:
        """Tie the labels along a dimension and return them with that dimension uniform."""
        core = narrow_uniform(labels, keep=[dim])
        self.tie(core, core.narrow(dim, 0, 1).expand_as(core))
        return compact(labels.narrow(dim, 0, 1).expand(labels.shape))

    def units(self, labels: Tensor) -> Tensor:
        """Labels merged by the ties of the earlier run (for uniformity tests only)."""
        if self.seen is None:
            return labels
        core = narrow_uniform(labels)
        count = self.seen.numel()  # labels from ``count`` on are new, and exceed every unit
        units = self.seen[core.clamp(min=0, max=count - 1)]
        return compact(torch.where((core > 0) & (core < count), units, core).expand(labels.shape))

    def varied(self, labels: Tensor) -> list[int]:
        """Dimensions along which the labels still change once the earlier run's ties merge them."""
        return varied_dims(self.units(labels))

    def of(self, value: Any, along: Collection[int] | None = None) -> Tensor:
        """Return the labels of a tensor argument. The elements of a parameter get labels at its first use.

        ``along``: the only dimensions (counted from the last, -1) that can hold the parameter's channels. A
        position embedding that is added to tokens thus gets one label a channel, not one an element.
        """
        if isinstance(value, ParameterView):
            base = self.of(value.base)
            moved = [dim for dim in value.dims if dim is not None]
            left = [dim for dim in range(base.dim()) if dim not in moved]  # of size 1
            return base.permute(*moved, *left).reshape(value.shape)
        if not isinstance(value, ParameterRef):
            assert isinstance(value, Tensor)
            return value
        if value.name not in self.trail.elements:
            rank = len(value.shape)
            dims = range(rank) if along is None else [d + rank for d in along if d + rank >= 0]
            if isinstance(value, MadeRef):
                fitting = [d for d in dims if d in value.channel_dims]
                dims = [1] if along is None and rank > 2 and 1 in fitting else fitting
            shape = [size if d in dims else 1 for d, size in enumerate(value.shape)]
            count = math.prod(shape)
            why = constant_made_by(value.name) if isinstance(value, MadeRef) else "a parameter of one element"
            self.trail.elements[value.name] = labels = (
                uniform(self.fixed(value.name, why), value.shape)
                if count == 1
                else self.fresh(value.name, count).reshape(shape).expand(value.shape)
            )
            if isinstance(value, MadeRef) or value.name in self.facts.learned:
                self.trail.free_standing.add(value.name)
            if not isinstance(value, ConstantRef) and count > 1:
                self.stand_alone(labels)
        return self.trail.elements[value.name]

    def settled(self, labels: Tensor, channel_dims: Collection[int]) -> Tensor:
        """Tie labels of learned tokens or position embeddings along dimensions without channels; return them.

        ``channel_dims``: the dimensions (counted from the last, -1) in which the other operand has channels. Until
        it meets that operand, each element of the parameter has its own label.
        """
        varied = [dim - labels.dim() for dim in varied_dims(labels)]
        extra = [dim for dim in varied if dim not in channel_dims]
        if len(extra) in (0, len(varied)) or not self.is_alone(labels):
            return labels
        for dim in extra:
            labels = self.tie_along(labels, dim + labels.dim())
        return labels

    def met(self, tensors: Iterable[Any]) -> set[int]:
        """The dimensions (from the last) with channels in these tensors; parameters outside layers do not count."""
        return {
            dim - labels.dim()
            for labels in tensors
            if isinstance(labels, Tensor) and not self.is_alone(labels)
            for dim in varied_dims(labels)
        }

    def stand_alone(self, labels: Tensor) -> None:
        """Record that these labels belong to parameters outside layers, or to sums of them."""
        core = narrow_uniform(labels)
        self._alone.append((int(core.min()), int(core.max())))

    def is_alone(self, labels: Tensor) -> bool:
        """Whether all these labels belong to parameters outside layers."""
        if not self._alone or not labels.numel():
            return False
        core = narrow_uniform(labels).flatten().contiguous()
        if self._alone_ends.shape[1] != len(self._alone):
            self._alone_ends = torch.tensor(sorted(self._alone)).t().contiguous()
        first, last = self._alone_ends
        place = torch.searchsorted(first, core, right=True) - 1
        return bool(((place >= 0) & (core <= last[place.clamp(min=0)])).all())

    def reads_blocks(self, node: fx.Node) -> list[fx.Node]:
        """The tensors with a second block of channels that the node reads."""
        blocks = self.trail.blocks
        return [source for source in node.all_input_nodes if source.name in blocks] if blocks else []

    def pin_blocks(self, node: fx.Node) -> None:
        """Pin the second block's channels of every tensor that the node reads."""
        for source in self.reads_blocks(node):
            why = f"columns of a matrix of channels by channels, which {node.name!r} reads"
            self.pin(self.trail.blocks[source.name], node.name, why)

    # ---- parameters -------------------------------------------------------------------------------------

    def parameter(self, path: str) -> str:
        """Return the canonical name of a parameter, which several modules may share."""
        return self.facts.names.get(path, path)

    def slot(self, parameter: str, dim: int, labels: Tensor) -> Tensor:
        """Record the channel slots of a parameter, tied to those recorded before; returns the first labels."""
        slots = self.trail.slots.setdefault(parameter, {})
        if dim in slots:
            self.tie(slots[dim], labels)
            return slots[dim]
        slots[dim] = labels
        return labels

    # ---- the run ----------------------------------------------------------------------------------------

    def run(self) -> Trail:
        """Execute every node and return the trail."""
        for node in self.module.graph.nodes:
            self.node = node.name
            self.trail.labels[node.name] = self._execute(node)
        for name, made in self.trail.labels.items():
            if isinstance(made, MadeRef):
                self.trail.labels[name] = self.of(made, ())
        self.blind |= not self.trail.slots.keys().isdisjoint(self.trail.elements)
        for name in self.trail.slots.keys() & self.trail.elements.keys():
            for labels in (*self.trail.slots[name].values(), self.trail.elements[name]):
                self.pin(labels, name, f"{name!r} is a layer's weight and is also read as a tensor")
        return self.trail

    def _execute(self, node: fx.Node) -> Any:
        value = self.values[node.name]
        if self.trail.blocks and (node.op == "output" or not (has_tensors(value) or _asks_no_size(node))):
            self.pin_blocks(node)
        if node.op == "placeholder":
            kind = "" if ORIGIN in node.meta else INPUT
            source = self.fixed(node.name, node.meta.get(ORIGIN, f"network input {node.name!r}"), kind)
            return self.filled(value, source)
        if name := self.facts.computed.get(node.name):
            return ParameterRef(name, self.trail.computed[name].shape)
        if node.name in self.facts.hidden:
            return None
        if node.name in self.facts.made:
            return self._made_tensor(node, value)
        if node.op == "get_attr":
            return self._attribute(str(node.target), value)
        if node.name in self.facts.views:
            path, dims = self.facts.views[node.name]
            weight = ParameterRef(self.parameter(path), tuple(self.module.get_parameter(path).shape))
            return ParameterView(weight.name, value.shape, weight, dims)
        environment = self.trail.labels
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: environment[n.name])
        if node.op == "output":
            for index, (key, leaf) in enumerate(named_leaves(args)):
                if index not in node.meta.get(PASSED_ON, ()):
                    why = node.meta.get(ORIGIN, f"reaches the network's output{key}")
                    self.pin(self.of(leaf), node.name, why)
            return None
        module = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        call = Call(node, operation_name(node, module), tuple(args), dict(kwargs), module, value)
        if call.name != "setitem" and not has_tensors(value):
            if not has(call.name, Trait.ASKS) and tensor_leaves((args, kwargs)):
                # A number computed from a tensor's values, or an object that may hold tensors.
                returned = bool(node.users) and all(user.op == "output" for user in node.users)
                self.unknown(call, "reaches the network's output" if returned else None)
            return value  # sizes and other numbers: as recorded
        for view, why in written_views(self.module, node):
            for labels in tensor_leaves(self.trail.labels[view.name]):
                self.pin(self.of(labels), node.name, why)
        result = self._ruled(call)
        return mapped(lambda t: compact(t) if isinstance(t, Tensor) else t, result)

    def _ruled(self, call: Call) -> Any:
        """Apply the operation's rule. If it fails or gives wrong shapes, the operation counts as unknown."""
        if OPAQUE in call.node.meta:
            return self.unknown(call, str(call.node.meta[OPAQUE]))
        rule = self.rules.get(self.facts.kinds.get(call.node, call.name or ""))
        if rule is None:
            return self.unknown(call)
        if not (has(call.name, Trait.ELEMENTWISE | Trait.JOINS) or str(call.name).startswith(_LABELLING)):
            operands = (call.args, call.kwargs)
            args, kwargs = mapped(lambda v: self.of(v) if isinstance(v, MadeRef) else v, operands)
            call = replace(call, args=args, kwargs=kwargs)
        try:
            result = rule(self, call)
        except Exception as error:  # the rule was not written for this form, and may fail anywhere
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return self.unknown(call, f"{UNFIT} {call.shown!r} ({said})")
        leaves = leaves_of(result)
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, (Tensor, ConstantRef, MadeRef))]
        expected = [leaf.shape for leaf in leaves_of(call.value) if isinstance(leaf, TensorInfo)]
        if shapes != expected:
            return self.unknown(call, f"{UNFIT} {call.shown!r} (labels of shapes {shapes}, not {expected})")
        return result

    def _made_tensor(self, node: fx.Node, value: Any) -> Any:
        """A tensor computed from sizes only: it takes the channels of the features that it is combined with."""
        among = self.facts.made[node.name]
        met = None if among is None else self.made(node, value.shape)
        self.trail.made[node.name] = among or set()
        return met or self.filled(value, self.fixed(node.name, constant_made_by(node.name)))

    def made(self, node: fx.Node, shape: tuple[int, ...]) -> MadeRef | None:
        """A tensor that gets labels from the other operands of its reader; None if no dimension can hold channels."""
        channel_dims = tuple(
            dim for dim, size in enumerate(shape) if size > 1 and not self.sizes.follow_input(node, dim)
        )
        return MadeRef(f"{node.name}()", shape, channel_dims) if channel_dims else None

    def _attribute(self, target: str, value: Any) -> Any:
        if not isinstance(value, TensorInfo):
            return value
        if not value.is_continuous and target not in self.facts.written:
            integers = held(self.module, target).detach().cpu().clone()
            return ConstantRef(self.parameter(target), value.shape, integers)
        return ParameterRef(self.parameter(target), value.shape)

    def filled(self, value: Any, label: int) -> Any:
        """Labels for a recorded value: ``label`` everywhere."""
        return mapped(lambda v: uniform(label, v.shape) if isinstance(v, TensorInfo) else v, value)

    def unknown(self, call: Call, why: str | None = None) -> Any:
        """Pin all operands and parameters of the call. Its output always stays."""
        why = why or call.unknown
        self.pin_blocks(call.node)
        for leaf in tensor_leaves((call.args, call.kwargs)):
            self.keep(leaf, call.node.name, why)
        if call.module is not None:  # other modules may share its parameters
            for name, tensor in (*call.module.named_parameters(), *call.module.named_buffers()):
                reference = ParameterRef(self.parameter(f"{call.node.target}.{name}"), tuple(tensor.shape))
                self.keep(reference, call.node.name, why)
        return self.filled(call.value, self.fixed(call.node.name, why))

    def keep(self, value: Any, node: str, why: str) -> None:
        """Pin a whole tensor or parameter; ignore other values. Unlabelled parameters get a fixed label."""
        if isinstance(value, Tensor):
            self.pin(value, node, why)
        if not isinstance(value, ParameterRef):
            return
        parameter = value.base
        for labels in self.trail.slots.get(parameter.name, {}).values():
            self.pin(labels, node, why)
        if parameter.name in self.trail.elements:
            self.pin(self.trail.elements[parameter.name], node, why)
        else:
            self.trail.elements[parameter.name] = uniform(self.fixed(node, why), parameter.shape)


def _asks_no_size(node: fx.Node) -> bool:
    """Does the node ask a tensor for something that does not depend on its number of channels?"""
    return node.target == "dim" or (node.target is getattr and node.args[1] in ("ndim", "dtype", "device"))
