"""Layers that read free channels, and their inputs and outputs while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from smcp_fx.calibration.consumers import consumer_of
from smcp_fx.calibration.layer_rows import Consumer
from smcp_fx.calibration.regression import WIDEST, Gram
from smcp_fx.passes.insert_soft_masks import masked_layers
from smcp_fx.prepared import PreparedModel
from smcp_fx.tracing.modes import run_in_eval


@dataclass(eq=False)
class Reader:
    """A layer that reads free channels; ``places`` [inputs]: each column's unit, -1 for one that stays.

    ``squares`` [groups, outputs] float64: squared gradients by each output, summed over positions and images.
    """

    consumer: Consumer
    places: Tensor
    gram: Gram
    squares: Tensor | None = None


@dataclass(frozen=True)
class Run:
    """One run of a reader: its input, its output, and a function that applies another weight without bias."""

    reader: Reader
    x: Tensor
    y: Tensor
    product: Callable[[Tensor], Tensor]


#: Sees a run; may return a tensor to replace the output.
See = Callable[[Run], "Tensor | None"]


def readers_of(prepared: PreparedModel, graph: fx.GraphModule) -> tuple[list[Reader], dict[int, str]]:
    """Return the readers in run order, and for each unit that other layers read the node of one."""
    nodes = {node.name: node for node in graph.graph.nodes}
    deployed = run_in_eval(graph.graph)
    readers, others = list[Reader](), dict[int, str]()
    for layer in masked_layers(prepared.channels):
        node, places = nodes.get(layer.node), prepared.smcp.places(layer.input_channels).cpu()
        runs = node is not None and layer.node in deployed  # others only train: their weights are fused
        reader = _reader(graph, node, places) if node is not None and runs else None
        if reader is None:
            others.update(dict.fromkeys(places[places >= 0].tolist(), layer.node))
            continue
        readers.append(reader)
    return readers, others


def _reader(graph: fx.GraphModule, node: fx.Node, places: Tensor) -> Reader | None:
    consumer = consumer_of(graph, node)
    if consumer is None or places.numel() % consumer.groups:
        return None
    inputs = consumer.matrix(consumer.weight).shape[1]
    places = places.reshape(consumer.groups, -1)
    if inputs > WIDEST or inputs % places.shape[1] or not bool((places == places[:1]).all()):
        return None
    return Reader(consumer, places[0].repeat_interleave(inputs // places.shape[1]), Gram())


@contextmanager
def watching(model: nn.Module, readers: Sequence[Reader], see: See) -> Iterator[None]:
    """Call ``see`` for each run of a reader's layer in the model, be it a module or a function.

    A layer that runs several times has one reader for each of its runs, in order.
    """
    modules, functions = dict[nn.Module, list[Reader]](), dict[int, list[Reader]]()
    for reader in readers:
        if reader.consumer.node.op == "call_module":
            modules.setdefault(model.get_submodule(reader.consumer.path), []).append(reader)
        else:
            functions.setdefault(id(reader.consumer.weight), []).append(reader)
    turns = dict[Any, int]()

    def next_of(key: Any, mine: list[Reader]) -> Reader:
        turns[key] = turns.get(key, -1) + 1
        return mine[turns[key] % len(mine)]

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        def product(weight: Tensor) -> Tensor:
            own: dict[str, Tensor] = {"weight": weight}
            if isinstance(module.bias, Tensor):
                own["bias"] = torch.zeros_like(module.bias)
            with module_hooks_off(module):
                return functional_call(module, own, args, kwargs)  # type: ignore[no-any-return]

        x = args[0] if args else kwargs["input"]
        return see(Run(next_of(module, modules[module]), x, output, product))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        if functions:
            stack.enter_context(_Functions(functions, next_of, see))
        yield


@contextmanager
def module_hooks_off(module: nn.Module) -> Iterator[None]:
    """Run the module without its forward hooks."""
    hooks = module._forward_hooks.copy()
    module._forward_hooks.clear()
    try:
        yield
    finally:
        module._forward_hooks.update(hooks)


class _Functions(TorchFunctionMode):
    """Sees calls of functions on the readers' weights."""

    def __init__(
        self,
        readers: Mapping[int, list[Reader]],
        next_of: Callable[[Any, list[Reader]], Reader],
        see: See,
    ) -> None:
        super().__init__()
        self._readers, self._next_of, self._see = readers, next_of, see

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        mine = self._readers.get(id(weight)) if isinstance(weight, nn.Parameter) else None
        if mine is None or not isinstance(output, Tensor):
            return output
        reader = next((r for r in mine if r.consumer.node.target is function), None)
        if reader is None:
            return output

        def product(weight: Tensor) -> Tensor:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            named |= {"weight": weight, "bias": None}
            return function(named.pop("input"), named.pop("weight"), named.pop("bias"), *args[3:], **named)  # type: ignore[no-any-return]

        x = args[0] if args else kwargs["input"]
        replaced = self._see(Run(self._next_of(id(weight), mine), x, output, product))
        return output if replaced is None else replaced
