"""The values of nodes that have become constant, computed from parameters alone.

A value is kept with size 1 along every dimension in which it does not change (the batch, space): ``[1, C, 1, 1]``
for a feature map. So it fits any batch and any resolution, by broadcasting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.channels.branches import CONSTANT, NUMBER, Flow, Walk
from smcp_fx.channels.execution import moved
from smcp_fx.channels.labels import compact, narrow_uniform
from smcp_fx.channels.trail import Layer
from smcp_fx.tracing.aliases import written_buffers
from smcp_fx.tracing.operations import operation_name, result_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import held

#: Norms, and whether they refuse inputs of one element a channel.
_NORMS = {"batchnorm": False, "layernorm": False, "rmsnorm": False, "groupnorm": True, "instancenorm": True}


class NoValueError(Exception):
    """A constant's value depends on the shapes that the network will meet."""


class Constants:
    """Values of the constant nodes of a walk, in `eval()`, from the parameters that ``module`` holds now."""

    def __init__(self, module: fx.GraphModule, flow: Flow, walk: Walk) -> None:
        self.module = module
        self.flow = flow
        self.walk = walk
        self.labels = flow.channels.trail.labels
        self._layers = {layer.node: layer for layer in flow.channels.layers}
        self._known: dict[fx.Node, Any] = {}
        self._written = written_buffers(module)
        #: The result of these nodes depends on the kept channels, but here all are left.
        self._mixes = {mix.node for mix in flow.channels.trail.mixes}

    def state(self, node: fx.Node) -> int:
        """The node's state in the walk; -1 for a node added since."""
        place = self.flow.place.get(node.name)
        return -1 if place is None else self.walk.states[place]

    @torch.no_grad()
    def value(self, node: fx.Node) -> Any:
        """The value of a constant node (a tensor, or a tuple of them); raises `NoValueError`."""
        todo = [node]
        while todo:  # no recursion: a branch may be long
            first = todo[-1]
            missing = [n for n in first.all_input_nodes if self.state(n) == CONSTANT and n not in self._known]
            step = self.flow.steps[self.flow.place[first.name]]
            if missing and not step.inputs.empty(self.walk.zero):
                todo += missing
                continue
            self._known[todo.pop()] = self._computed(first)
        return self._known[node]

    def _computed(self, node: fx.Node) -> Any:
        layer = self._layers.get(node.name)
        if layer is not None and self.flow.steps[self.flow.place[node.name]].inputs.empty(self.walk.zero):
            return self._bias(layer)
        target = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        name = operation_name(node, target) or ""
        if has(name, Trait.MOVES):
            return self._moved(node)
        allowed = has(name, Trait.ELEMENTWISE) and not has(name, Trait.DRAWN)
        if node.name in self._mixes:
            raise NoValueError
        if not (allowed or name == "prelu" or _is_pointwise(name, target) or _is_steady(name, node, target)):
            raise NoValueError
        return self._applied(node, target, _NORMS.get(name, False))

    def _bias(self, layer: Layer) -> Tensor:
        """The output of a convolution or linear without input channels: its bias, or zeros."""
        shape = [1] * len(layer.out_shape)
        shape[layer.axis] = layer.output_channels.numel()
        try:
            weight = held(self.module, layer.weight)
            bias = weight.new_zeros(shape) if layer.bias is None else held(self.module, layer.bias)
        except AttributeError:  # computed, and not folded yet
            raise NoValueError from None
        assert isinstance(bias, Tensor)
        return bias.detach().reshape(shape).clone()

    def _moved(self, node: fx.Node) -> Any:
        """Move the places of the source's elements, at the recorded shape, and fetch elements by place."""
        source = node.args[0]
        if not isinstance(source, fx.Node) or self.state(source) != CONSTANT:
            raise NoValueError
        core = self._known[source]
        if not isinstance(core, Tensor):
            if not isinstance(node.args[1], int):
                raise NoValueError
            return core[node.args[1]]
        places = torch.arange(core.numel()).reshape(core.shape).expand(self.labels[source.name].shape)
        try:
            result = moved(self.module, node, self.labels, places)
        except Exception as error:  # it may fail in any way, as other operands are labels
            raise NoValueError from error

        def fetched(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            part = narrow_uniform(compact(part))
            if part.numel() > core.numel():  # it would hold sizes of the example (its resolution)
                raise NoValueError
            return core.flatten()[part]

        return pytree.tree_map(fetched, tuple(result) if isinstance(result, (tuple, list)) else result)

    def _applied(self, node: fx.Node, target: nn.Module | None, grow: bool) -> Tensor:
        """Run the node on its operands' values. ``grow``: with two elements along uniform spatial dimensions."""
        grown: set[int] = set()

        def operand(n: fx.Node) -> Any:
            state = self.state(n)
            if state == CONSTANT:
                core = self._known[n]
                if not isinstance(core, Tensor):
                    raise NoValueError
                full = self.labels[n.name].shape
                grown.update(d for d in range(2, core.dim()) if grow and core.shape[d] == 1 and full[d] > 1)
                return core.expand([2 if d in grown else size for d, size in enumerate(core.shape)]).clone()
            if n.op == "get_attr" and n.target not in self._written:
                value = held(self.module, str(n.target))
                return value.clone() if isinstance(value, Tensor) else False  # a training flag
            if state == NUMBER:
                return self.labels[n.name]
            raise NoValueError

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
        training = target is not None and target.training
        try:
            result = result_of(node, None if target is None else target.eval(), args, kwargs)
        except Exception as error:  # it may fail in any way on sizes that it was not written for
            raise NoValueError from error
        finally:
            if target is not None:
                target.train(training)
        shape = self.labels[node.name].shape if isinstance(self.labels[node.name], Tensor) else ()
        if not isinstance(result, Tensor) or result.dim() != len(shape):
            raise NoValueError
        for dim in grown:
            result = result.narrow(dim, 0, 1)
        if any(size not in (1, full) for size, full in zip(result.shape, shape, strict=True)):
            raise NoValueError
        return result.detach().clone()


def _is_pointwise(name: str, module: nn.Module | None) -> bool:
    """Does the layer read one position at a time, so that its value at one position holds for all?"""
    if name == "linear":
        return True
    if not isinstance(module, nn.modules.conv._ConvNd) or module.transposed:
        return False
    return set(module.kernel_size) == {1} and module.padding in (
        "valid",
        "same",
        (0,) * len(module.kernel_size),
    )


def _is_steady(name: str, node: fx.Node, module: nn.Module | None) -> bool:
    """Is the norm's result for a constant independent of the batch and the resolution?"""
    if name == "batchnorm" and module is None:  # steady if it uses running statistics in eval mode
        mean, training = (
            node.args[place] if len(node.args) > place else node.kwargs.get(key)
            for place, key in ((1, "running_mean"), (5, "training"))
        )
        return (isinstance(mean, fx.Node) and not training) or isinstance(training, fx.Node)
    return name in _NORMS and (name != "batchnorm" or getattr(module, "running_mean", None) is not None)
