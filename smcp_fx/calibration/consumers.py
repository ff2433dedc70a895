"""Convolutions and linears as products of rows with a matrix: what a least-squares regression is about.

A row holds what one output position reads: for a convolution of ``groups`` groups, [groups, inputs of a group times
kernel elements]. A transposed convolution is the plain one of its zero-stuffed input with the kernel turned round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}
_CONVOLUTIONS = {
    F.conv1d: 1, F.conv2d: 2, F.conv3d: 3,
    F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3,
}  # fmt: skip
#: The most numbers that the rows of one chunk may hold (64 MiB in float64).
_CHUNK = 2**23


@dataclass(frozen=True)
class Consumer:
    """A convolution (``rank`` 1 to 3) or linear (0) of a graph, with its parameters."""

    node: fx.Node
    path: str
    input: fx.Node
    weight: nn.Parameter
    bias: nn.Parameter | None
    rank: int
    groups: int = 1
    transposed: bool = False
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()  # as `F.pad` takes them; negative ones cut
    mode: str = "constant"

    @property
    def form(self) -> tuple[Any, ...]:
        """What uses of one weight must share to be one regression."""
        return self.rank, self.groups, self.transposed, tuple(self.weight.shape)

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as [groups, inputs, outputs], in double precision."""
        found = weight.detach().double()
        if not self.transposed:
            return found.reshape(self.groups, -1, found[0].numel()).transpose(1, 2)
        found = found.flip(tuple(range(2, found.dim())))
        found = found.reshape(self.groups, -1, *found.shape[1:])
        return found.movedim(2, -1).flatten(1, -2)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`, in the weight's shape and type."""
        if not self.transposed:
            return matrix.transpose(1, 2).reshape(self.weight.shape).to(self.weight)
        inputs, kernel = self.weight.shape[0] // self.groups, self.weight.shape[2:]
        found = matrix.reshape(self.groups, inputs, *kernel, -1).movedim(-1, 2).flatten(0, 1)
        return found.flip(tuple(range(2, found.dim()))).to(self.weight)

    def positions(self, y: Tensor) -> tuple[int, int]:
        """Images (the length of the first dimension), and output positions in all, of an output."""
        y = self._batched(y)
        channels = y.shape[1] if self.rank else y.shape[-1]
        return y.shape[0], y.numel() // channels

    def rows(self, x: Tensor, y: Tensor, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen positions (flat indices) of an input and an output of the layer, a chunk at a time.

        Yields [positions, groups, inputs] and [positions, groups, outputs], in double precision.
        """
        x, y = self._batched(x), self._batched(y)
        if self.rank:
            windows = self._windows(x, y.shape[2:])
            y = y.movedim(1, -1)
        else:
            windows = x
        lengths = y.shape[:-1]
        columns = self.matrix(self.weight).shape[:2].numel()
        for part in torch.split(chosen, max(1, _CHUNK // columns)):
            first, *others = torch.unravel_index(part, lengths)
            place: tuple[Any, ...] = (first, slice(None), *others) if self.rank else (first, *others)
            inputs = windows[place]
            outputs = y[(first, *others)]
            yield (
                inputs.double().reshape(part.numel(), self.groups, -1),
                outputs.double().reshape(part.numel(), self.groups, -1),
            )

    def _batched(self, value: Tensor) -> Tensor:
        """With a first dimension of images, which inputs of a single image lack."""
        return (
            value.unsqueeze(0) if value.dim() == self.rank + 1 and (self.rank or value.dim() == 1) else value
        )

    def _windows(self, x: Tensor, lengths: torch.Size) -> Tensor:
        """A view [images, channels, output positions ..., kernel ...] of the padded input."""
        kernel, pads, stride = self.weight.shape[2:], list(self.pads), self.stride
        if self.transposed:
            x = _stuffed(x, stride)
            stride = (1,) * self.rank
            for dim in range(self.rank):  # what is cut or added at the end follows from the output
                reach = self.dilation[dim] * (kernel[dim] - 1)
                left = reach - self.pads[2 * dim]
                place = 2 * (self.rank - 1 - dim)
                pads[place], pads[place + 1] = left, lengths[dim] + reach - left - x.shape[2 + dim]
        if any(pads):
            x = F.pad(x, pads, self.mode)
        for dim, (k, s, d) in enumerate(zip(kernel, stride, self.dilation, strict=True)):
            x = x.unfold(2 + dim, d * (k - 1) + 1, s)
        taken: tuple[Any, ...] = (..., *(slice(None, None, d) for d in self.dilation))
        return x[taken]


def consumer_of(module: fx.GraphModule, node: fx.Node) -> Consumer | None:
    """The layer that a node runs, where it is a plain convolution or linear on parameters of its own."""
    if node.op == "call_module":
        return _of_module(node, module.get_submodule(str(node.target)))
    if node.op == "call_function" and (node.target is F.linear or node.target in _CONVOLUTIONS):
        return _of_function(module, node)
    return None


def by_weight(module: fx.GraphModule) -> tuple[list[list[Consumer]], dict[str, str]]:
    """The graph's layers in the order they run, those that share a weight together; and why others are left out.

    Left out, by path, are layers whose parameters something else reads as well, or that read them in several ways.
    """
    found: dict[int, list[Consumer]] = {}
    for node in module.graph.nodes:
        consumer = consumer_of(module, node)
        if consumer is not None:
            found.setdefault(id(consumer.weight), []).append(consumer)
    reading = {consumer.node: consumer for uses in found.values() for consumer in uses}
    elsewhere = _read_elsewhere(module, reading)
    owners: dict[int, set[int]] = {}
    for consumer in reading.values():
        owners.setdefault(id(consumer.bias), set()).add(id(consumer.weight))
    kept, left = [], {}
    for uses in found.values():
        parameters = [use.weight for use in uses] + [use.bias for use in uses if use.bias is not None]
        if any(id(parameter) in elsewhere for parameter in parameters):
            why = "its parameters are read elsewhere, too"
        elif len({use.form for use in uses}) > 1:
            why = "its weight is used in several ways"
        elif any(use.bias is not None and len(owners[id(use.bias)]) > 1 for use in uses):
            why = "its bias is another layer's, too"
        else:
            kept.append(uses)
            continue
        left.update(dict.fromkeys((use.path for use in uses), why))
    return kept, left


def _of_module(node: fx.Node, layer: nn.Module) -> Consumer | None:
    given = node.args[0] if node.args else node.kwargs.get("input")
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    hooked = layer._forward_hooks or layer._forward_pre_hooks or parametrize.is_parametrized(layer)
    if not isinstance(given, fx.Node) or weight is None or hooked:
        return None
    path = str(node.target)
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return Consumer(node, path, given, weight, bias, 0)
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    kind = next((kind for kind in kinds if isinstance(layer, kind)), None)
    if (
        kind is None
        or type(layer).forward is not kind.forward
        or getattr(type(layer), "_conv_forward", None) is not getattr(kind, "_conv_forward", None)
    ):
        return None
    assert isinstance(layer, nn.modules.conv._ConvNd)
    rank, sizes = len(layer.kernel_size), (tuple(layer.stride), tuple(layer.dilation))
    pads = (
        tuple(int(length) for length in layer.padding for _ in range(2))
        if layer.transposed
        else tuple(layer._reversed_padding_repeated_twice)
    )
    return Consumer(
        node,
        path,
        given,
        weight,
        bias,
        rank,
        layer.groups,
        layer.transposed,
        *sizes,
        pads,
        _MODES[layer.padding_mode],
    )


def _of_function(module: fx.GraphModule, node: fx.Node) -> Consumer | None:
    names = ["input", "weight", "bias"]
    target: Any = node.target
    rank = _CONVOLUTIONS.get(target, 0)
    transposed = "transpose" in getattr(node.target, "__name__", "")
    if rank:
        names += [
            "stride",
            "padding",
            *(["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]),
        ]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    source, weight, bias = (given.pop(name, None) for name in names[:3])
    read, added = (_parameter(module, value) for value in (weight, bias))
    settings: list[Any] = []
    fx.node.map_aggregate(tuple(given.values()), settings.append)
    if read is None or (bias is not None and added is None) or not isinstance(source, fx.Node):
        return None
    if any(isinstance(value, fx.Node) for value in settings):
        return None
    path = str(weight.target)
    if not rank:
        return Consumer(node, path, source, read, added, 0)
    stride, dilation = (_each(given.get(name, 1), rank) for name in ("stride", "dilation"))
    padding = given.get("padding", 0)
    kernel = read.shape[2:]
    pairs = []
    for dim in range(rank):
        if isinstance(padding, str):
            total = dilation[dim] * (kernel[dim] - 1) if padding == "same" else 0
            pairs.append((total // 2, total - total // 2))
        else:
            pairs.append((_each(padding, rank)[dim],) * 2)
    pads = tuple(length for pair in (pairs if transposed else pairs[::-1]) for length in pair)
    groups = int(given.get("groups", 1))
    return Consumer(node, path, source, read, added, rank, groups, transposed, stride, dilation, pads)


def attribute(module: nn.Module, node: Any) -> Any:
    """What a `get_attr` node reads; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _parameter(module: nn.Module, node: Any) -> nn.Parameter | None:
    value = attribute(module, node)
    return value if isinstance(value, nn.Parameter) else None


def _read_elsewhere(module: fx.GraphModule, reading: dict[fx.Node, Consumer]) -> set[int]:
    """Parameters that nodes other than these layers read, or these as something else than weight and bias."""
    found: set[int] = set()
    for node in module.graph.nodes:
        if node.op == "call_module" and node not in reading:
            found.update(id(p) for p in module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            value = attribute(module, node)
            for user in node.users if isinstance(value, nn.Parameter) else ():
                layer = reading.get(user)
                if (
                    layer is None
                    or layer.input is node
                    or (value is not layer.weight and value is not layer.bias)
                ):
                    found.add(id(value))
    return found


def _stuffed(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """With stride - 1 zeros between neighbours."""
    lengths = [(length - 1) * s + 1 for length, s in zip(x.shape[2:], stride, strict=True)]
    found = x.new_zeros(*x.shape[:2], *lengths)
    place: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    found[place] = x
    return found


def _each(value: Any, rank: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * rank if len(values) == 1 else values
