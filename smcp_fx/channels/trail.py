"""The input of channel rules and the results of a propagation: calls, layers, norms, ties, pins and labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.channels.weight_views import Dims
from smcp_fx.tracing.operations import readable_name
from smcp_fx.tracing.trees import leaf_class, leaves_of
from smcp_fx.tracing.values import TensorInfo, held


@leaf_class
@dataclass(frozen=True)
class ParameterRef:
    """A parameter or buffer read by a `get_attr` node. It gets labels once an operation needs its elements."""

    name: str
    shape: tuple[int, ...]

    @property
    def base(self) -> ParameterRef:
        """The parameter itself."""
        return self

    def place(self, dim: int) -> int | None:
        """The parameter's dimension at ``dim`` of this tensor; None for an added dimension of size 1."""
        return dim

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """The same as `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]


@leaf_class
@dataclass(frozen=True)
class ParameterView(ParameterRef):
    """A parameter whose dimensions are moved before a layer reads it as its weight: see `channels.weight_views`."""

    parameter: ParameterRef
    dims: Dims

    @property
    def base(self) -> ParameterRef:
        """The parameter itself."""
        return self.parameter

    def place(self, dim: int) -> int | None:
        """The parameter's dimension at ``dim`` of the view; None for an added dimension of size 1."""
        return self.dims[dim]


@leaf_class
@dataclass(frozen=True)
class ConstantRef(ParameterRef):
    """A tensor of integers or booleans in the model: its values are known, so indexing by it is executed."""

    value: Tensor = field(compare=False)


@leaf_class
@dataclass(frozen=True)
class MadeRef(ParameterRef):
    """A tensor filled with one value (`torch.zeros(b, n, h, w)`): it keeps the channels of the other operands.

    ``channel_dims``: the dimensions that can hold channels, as their size is the same for all inputs.
    """

    channel_dims: tuple[int, ...]


def constant_made_by(node: str) -> str:
    """Why channels stay if they are combined with a tensor made of numbers and sizes only."""
    return f"meets a constant that {node!r} makes at full width"


@dataclass(frozen=True)
class Call:
    """One node about to be executed on labels."""

    node: fx.Node
    name: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None
    value: Any  # the recorded output: TensorInfo in place of tensors

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the (first) output tensor."""
        return next(v.shape for v in leaves_of(self.value) if isinstance(v, TensorInfo))

    @property
    def shown(self) -> str:
        """The operation in messages: a module's class, or the name by which the network calls it."""
        return type(self.module).__name__ if self.module is not None else readable_name(self.node)

    @property
    def unknown(self) -> str:
        """Why the channels stay if the operation has no rule."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return f"{self.node.name!r} is compiled by torch.jit: prepare the model that it was made from"
        return f"operation {readable_name(self.node)!r} has no channel rule"

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def option(self, position: int, name: str, default: Any = None) -> Any:
        """Return a setting: the module's field of that name, or the function's argument."""
        if self.module is not None:
            return getattr(self.module, name)
        return self.argument(position, name, default)


@dataclass(frozen=True)
class Layer:
    """A convolution or linear: where its weight's input and output channels are, and their labels.

    ``in_labels`` has one label per slot of ``weight``'s dimension ``in_dim``, ``out_labels`` of ``out_dim``
    (grouped convolutions keep in_channels / groups resp. out_channels / groups slots on one of them).
    """

    node: str
    path: str  # module path; the weight's name for functional calls
    kind: str  # "dense", or "depthwise": groups go as a whole, each with its inputs and outputs
    weight: str
    bias: str | None
    in_dim: int
    out_dim: int
    groups: int
    in_labels: Tensor
    out_labels: Tensor
    output_channels: Tensor  # labels of the output's channels, all of them
    input_channels: Tensor
    images: int  # batch size of the example run
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    transposed: bool
    weight_shape: tuple[int, ...]
    axis: int  # of the output's channels
    source: str  # the parameter that the weight is, or is computed from
    computed: bool  # is it computed, so that its gradients are those of its mask?
    #: Other dimensions of the weight that are not summed over for a pair of channels: the matrices of a stack, a
    #: bilinear layer's other input.
    beside: tuple[int, ...] = ()
    read: str = ""  # the node of a weight that is computed from the input

    def tensor(self, module: nn.Module) -> Tensor:
        """The parameter that the weight is, or one that it is computed from."""
        parameter = held(module, self.source)
        assert isinstance(parameter, Tensor)
        return parameter


@dataclass(frozen=True)
class Computed:
    """A weight or bias that is computed from parameters; the gradients of one, ``source``, tell whether it learns.

    ``unread``: the parameters and buffers that nothing else reads, which converting leaves out.
    """

    shape: tuple[int, ...]
    source: str
    unread: frozenset[str]


@dataclass(frozen=True)
class Norm:
    """A call of a batch norm (module or function), and the labels of its input's channels.

    ``path``: the module that holds its parameters and statistics; ``weight``: the weight's name, or "".
    """

    node: str
    path: str
    labels: Tensor
    weight: str


@dataclass(frozen=True)
class Mix:
    """An operation that mixes the channels of an operand and can be restricted to the kept ones.

    ``operand``: its position among the node's arguments; ``labels``: the operand's, of size 1 where they are uniform;
    ``form``: how it is restricted (`masking.kept_statistics.BEFORE`), or "instead" if another function replaces it;
    ``options``: further arguments of that function.
    """

    node: str
    operand: int
    labels: Tensor
    form: str
    options: tuple[Any, ...] = ()

    @property
    def scores(self) -> bool:
        """Does the gradient of its mask measure the worth of each channel?"""
        return self.form in ("zero", "mean", "spread")


@dataclass(frozen=True)
class Shuffle:
    """A chain of movements that equals ``index_select(root, axis, order)``."""

    root: str
    axis: int
    order: Tensor
    through: tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """An operand of size 1 along some dimensions in which the others vary. It is tied or pinned at the end.

    ``merged``: labels of the other operands; ``operand``: its own, with as many dimensions; ``reason``: for pinning.
    """

    merged: Tensor
    operand: Tensor
    reason: int


class Reason(NamedTuple):
    """Why units must stay: the node that pins them, and words for the user. Code reads only the ``kind``."""

    node: str
    text: str
    kind: str = ""  # `INPUT`, `EMPTY`, or any other reason


#: Kinds of reasons: channels of the network's inputs; units without which a tensor would have no channel left.
INPUT, EMPTY = "input", "empty"


#: A dimension's factors in memory order: labels of channels, or a size. `Mixed`: those of each dimension.
Factors = tuple[Tensor | int, ...]
Mixed = tuple[Factors, ...]


@dataclass
class Trail:
    """The result of a propagation."""

    labels: dict[str, Any] = field(default_factory=dict)  # node name -> pytree of label tensors and values
    ties: list[tuple[Tensor, str]] = field(default_factory=list)  # pairs of labels [2, n], their node
    pins: list[tuple[Tensor, int]] = field(default_factory=list)  # labels, index of reason
    reasons: list[Reason] = field(default_factory=list)
    #: Nodes with a reason -> the line of the model's code that calls them, if known.
    lines: dict[str, str] = field(default_factory=dict)
    spread: list[Spread] = field(default_factory=list)
    slots: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # parameter -> dim -> labels
    elements: dict[str, Tensor] = field(default_factory=dict)  # parameter -> labels of its shape
    #: Parameters that no layer needs to write (learned tokens, embeddings), and tensors made of one value.
    free_standing: set[str] = field(default_factory=set)
    layers: list[Layer] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    computed: dict[str, Computed] = field(default_factory=dict)  # weights and biases, by name
    #: The factors of each dimension of tensors that compute weights from the input.
    mixed: dict[str, Mixed] = field(default_factory=dict)  # nodes
    mixed_parameters: dict[str, Mixed] = field(default_factory=dict)
    #: Products with a weight computed from the input that mix positions, not channels.
    passed: set[str] = field(default_factory=set)
    #: Parameters with statistics computed beside their layers: dimensions of input and output channels.
    beside: dict[str, tuple[int, int]] = field(default_factory=dict)
    mixes: list[Mix] = field(default_factory=list)
    #: Norms whose groups go as a whole: the number of groups, and channel labels.
    grouped: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    #: Group norms with many groups that lose channels of each, and convolutions that lose whole groups.
    turned: frozenset[str] = frozenset()
    #: Convolutions that lose equally many channels of every group: the number of groups, labels of both sides.
    within: dict[str, tuple[int, tuple[Tensor, ...]]] = field(default_factory=dict)
    #: Nodes that run on all channels, with zeros for removed ones: the channels' dimension.
    full: dict[str, int] = field(default_factory=dict)
    #: Reshapes that read positions as channels; the kept channels of their result are selected.
    selected: set[str] = field(default_factory=set)
    #: Depthwise convolutions whose kernels are computed: the channels' dimension.
    kernels: dict[str, int] = field(default_factory=dict)
    #: Products with stacks of matrices: the names of the weight's input and output dimensions.
    stacks: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Matrices of channels by channels: labels of the columns, see `channels.blocks`.
    blocks: dict[str, Tensor] = field(default_factory=dict)
    #: Nodes computed from sizes only -> their users of the same kind; other users read the kept channels.
    made: dict[str, set[str]] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)  # nodes whose tensors hold a part of another's elements
    shuffles: dict[str, Shuffle] = field(default_factory=dict)
    virtual: set[str] = field(default_factory=set)  # nodes exempt from rectangularity
    #: (node, n-th request of it) -> the first label, and how many.
    origins: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    count: int = 1  # labels handed out, 0 unused

    def explained(self, reason: Reason) -> str:
        """A reason with its node, and the line of the model's code, if known."""
        line = f" in {self.lines[reason.node]}" if reason.node in self.lines else ""
        return f"{reason.text} (at {reason.node!r}{line})" if reason.node else reason.text


def tensor_leaves(tree: Any) -> list[Tensor | ParameterRef]:
    """All label tensors and parameter references in a pytree (slices included)."""
    leaves: list[Tensor | ParameterRef] = []
    for leaf in leaves_of(tree):
        if isinstance(leaf, slice):
            leaves += tensor_leaves((leaf.start, leaf.stop, leaf.step))
        elif isinstance(leaf, (Tensor, ParameterRef)):
            leaves.append(leaf)
    return leaves


def named_leaves(tree: Any) -> Iterator[tuple[str, Tensor | ParameterRef]]:
    """The leaves of `tensor_leaves`, each with its quoted key in the outermost dictionary; "" without one."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        names = [f" {key.key!r}" for key in path if isinstance(key, pytree.MappingKey)]
        for tensor in tensor_leaves(leaf):
            yield "".join(names[:1]), tensor
