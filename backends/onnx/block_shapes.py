"""The shapes of a block's parameters, inputs and outputs at any widths, from a few builds.

A width enters most shapes linearly, so a few builds determine the others. If it does not (parts of a
concatenation thinned with rounding; channels fetched by index, or split), each width is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, fx, nn

from smcp_fx.backends.checking import eval_mode, flatten_outputs

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block

Shape = tuple[int, ...]
_WIDTH_NAMES = {"in_channels", "out_channels", "num_features", "in_features", "out_features"}
#: Builds beyond those that determine the linear functions, to check them. Chosen, not measured.
_CHECKS = 2


@dataclass(frozen=True)
class BlockShapes:
    """The shapes that an ONNX model of a block needs.

    ``structure``: a key that two blocks share if one's export serves the other. ``modules``: paths, in graph
    order. ``groups``: of each convolution. ``moves``: in graph order, the channels that are fetched and the
    sizes of the parts that others are split into.
    """

    structure: str
    modules: tuple[str, ...]
    parameters: dict[str, Shape]
    groups: dict[str, int]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    moves: tuple[tuple[int, ...], ...] = ()

    def numbers(self) -> list[int]:
        """Return all sizes as one flat sequence."""
        shapes = (*self.parameters.values(), *self.inputs, *self.outputs)
        return [*self.groups.values(), *(size for shape in shapes for size in shape)]

    def layout(self) -> tuple[object, ...]:
        """Return the facts that two builds must share for their sizes to correspond."""
        ranks = [len(shape) for shape in (*self.parameters.values(), *self.inputs, *self.outputs)]
        return (self.structure, self.modules, tuple(self.parameters), tuple(self.groups), tuple(ranks))

    def with_numbers(self, numbers: list[int]) -> BlockShapes:
        """Return these shapes with other sizes, in the order of `numbers`."""
        left = iter(numbers)
        groups = {path: next(left) for path in self.groups}
        parameters = {name: tuple(next(left) for _ in shape) for name, shape in self.parameters.items()}
        inputs = tuple(tuple(next(left) for _ in shape) for shape in self.inputs)
        outputs = tuple(tuple(next(left) for _ in shape) for shape in self.outputs)
        return BlockShapes(self.structure, self.modules, parameters, groups, inputs, outputs)


class ShapeFinder:
    """Finds the shapes of blocks with as few builds as possible."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], dict[Shape, BlockShapes]] = {}

    def shapes(self, block: Block, widths: Shape) -> BlockShapes:
        """Return the block's shapes at ``widths``."""
        seen = self._seen.setdefault((block.signature, block.name, block.grids), {})
        if widths not in seen:
            derived = _derive(seen, widths)
            if derived is not None:
                return derived
            seen[widths] = _built(block, widths)
        return seen[widths]


def _derive(seen: dict[Shape, BlockShapes], widths: Shape) -> BlockShapes | None:
    """Return the shapes by linear functions through ``seen``; None if these are too few or not linear."""
    if not seen:
        return None
    first = next(iter(seen.values()))
    if first.moves or any(other.layout() != first.layout() for other in seen.values()):
        return None
    design = np.array([[1, *at] for at in seen], dtype=np.float64)
    rank = np.linalg.matrix_rank(design)
    if len(seen) < rank + _CHECKS or np.linalg.matrix_rank(np.vstack([design, [1, *widths]])) > rank:
        return None
    sizes = np.array([shapes.numbers() for shapes in seen.values()], dtype=np.float64)
    coefficients = np.linalg.lstsq(design, sizes, rcond=None)[0]
    if np.abs(design @ coefficients - sizes).max() > 1e-6:
        return None
    predicted = np.array([1, *widths]) @ coefficients
    if np.abs(predicted - np.round(predicted)).max() > 1e-6 or predicted.min() < 1 - 1e-6:
        return None
    return first.with_numbers([int(size) for size in np.round(predicted)])


def _built(block: Block, widths: Shape) -> BlockShapes:
    module, inputs = block.build(widths)
    return built_shapes(module, inputs, block.signature)


def built_shapes(module: nn.Module, inputs: tuple[Tensor, ...], signature: str) -> BlockShapes:
    """Return a module's shapes. This runs it without its weights, which may be lost."""
    structure, moves = structure_key(module, inputs, signature), moves_of(module)
    named = (*module.named_parameters(), *module.named_buffers())
    return BlockShapes(
        structure,
        module_paths(module),
        {name: tuple(tensor.shape) for name, tensor in named},
        {path: int(m.groups) for path, m in module.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d)},
        tuple(tuple(tensor.shape) for tensor in inputs),
        _output_shapes(module, inputs),
        moves,
    )


def _output_shapes(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Shape, ...]:
    """Return the shapes of the module's outputs, on the meta device if PyTorch allows that."""
    with eval_mode(module), torch.no_grad():
        try:
            outputs = module.to("meta")(*(tensor.to("meta") for tensor in inputs))
        except (RuntimeError, NotImplementedError, TypeError):
            module.to_empty(device="cpu")
            outputs = module(*inputs)
    return tuple(tuple(tensor.shape) for tensor in flatten_outputs(outputs))


def structure_key(module: nn.Module, inputs: tuple[Tensor, ...], signature: str) -> str:
    """Return a key that two blocks share if a template of one serves the other.

    Names do not matter (nodes and modules are numbered in the order of the graph), nor do the sizes of split parts.
    """
    lines = ["; ".join(f"{tensor.dtype}:{tensor.dim()}" for tensor in inputs)]
    if not isinstance(module, fx.GraphModule):
        return f"{lines[0]} {signature}"
    number = {node: index for index, node in enumerate(module.graph.nodes)}
    modules = {path: f"m{index}" for index, path in enumerate(module_paths(module))}
    for node in module.graph.nodes:
        operands = node.args
        if (sizes := _sizes_of(node)) is not None:
            operands = (operands[0], f"{len(sizes)} parts", *operands[2:])
        arguments = fx.map_arg((operands, tuple(node.kwargs.items())), lambda n: f"%{number[n]}")
        if node.op == "placeholder":
            lines.append("input")
        elif node.op == "call_module":
            path = str(node.target)
            lines.append(f"{modules[path]} {arguments} {_describe(module.get_submodule(path))}")
        else:
            lines.append(f"{node.op} {modules.get(str(node.target), node.target)} {arguments}")
    return "\n".join(lines)


def moves_of(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return the channels that each ``index_select`` of a graph module fetches, and each split's sizes, in order."""
    if not isinstance(module, fx.GraphModule):
        return ()
    moves = []
    for node in module.graph.nodes:
        sizes = _sizes_of(node)
        if sizes is not None:
            moves.append(sizes)
        elif node.target is torch.index_select and len(node.args) == 3 and _is_attribute(node.args[2]):
            moves.append(tuple(attrgetter(str(node.args[2].target))(module).flatten().tolist()))
    return tuple(moves)


def _is_attribute(argument: object) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "get_attr"


def _sizes_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the sizes of a split's parts if they are constants (as `SliceChannels` writes them)."""
    if node.target is not torch.split or len(node.args) < 2 or not isinstance(node.args[1], (list, tuple)):
        return None
    sizes = tuple(size for size in node.args[1] if isinstance(size, int))
    return sizes if len(sizes) == len(node.args[1]) else None


def module_paths(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules and attributes that a graph module uses, in order, each once."""
    if not isinstance(module, fx.GraphModule):
        return ()
    used = (str(node.target) for node in module.graph.nodes if node.op in ("call_module", "get_attr"))
    return tuple(dict.fromkeys(used))


def _describe(module: nn.Module) -> str:
    """Return a module's class and hyperparameters, without channel counts."""
    constants = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _WIDTH_NAMES | {"training"}
        if isinstance(value, int | float | str | tuple | bool | type(None))
    }
    if constants.get("groups", 1) != 1:
        depthwise = constants["groups"] == getattr(module, "in_channels", None)
        constants["groups"] = "depthwise" if depthwise else constants["groups"]
    parameters = sorted(name for name, _ in module.named_parameters())
    described = constants or any(hasattr(module, name) for name in _WIDTH_NAMES)
    if not described or next(module.children(), None) is not None:
        return f"{type(module).__qualname__} {module!r} {parameters}"
    return f"{type(module).__qualname__} {sorted(constants.items())} {parameters}"
