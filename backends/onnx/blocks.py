"""ONNX models of a block at many widths, from one export.

An export takes half a second, and a latency table has hundreds of rows. So blocks of one structure (same operations
and hyperparameters) share one exported template: its weights are resized to the widths wanted and filled with random
numbers, and constants that move channels are replaced. Every model's output shapes are compared with the module's;
if they differ (a channel count written into a reshape), the block is exported again.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from smcp_fx.backends.onnx.block_shapes import BlockShapes, Shape, ShapeFinder
from smcp_fx.backends.onnx.export import export_model_proto
from smcp_fx.backends.onnx.together import export_side_by_side, path_of
from smcp_fx.errors import BackendError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smcp_fx.blocks.sharing import Block

_log = logging.getLogger(__name__)
#: Rank of a reshape's target -> axis of its channels: (N, C), (N, C, H, W), (N, groups, C, H, W).
_CHANNEL_AXIS = {2: 1, 4: 1, 5: 2}
#: Operations whose second input, a constant, says which channels to take.
_MOVING = ("Gather", "Split")
#: Constants with at most this many numbers may define shapes (scales of a resize). Chosen, not measured.
_SMALL = 64
#: Most numbers in the parameters, inputs and outputs of one joint export: 256 MiB. Chosen.
_MOST_NUMBERS = 64 << 20
_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}


@dataclass(frozen=True)
class Template:
    """An exported block. ``modules``: the paths of its modules, in the order of the graph.

    ``moves``: for each move of its `BlockShapes`, the first output of the node that holds it.
    """

    model: onnx.ModelProto
    modules: tuple[str, ...]
    moves: tuple[str, ...] = ()


class Templates:
    """Makes ONNX models of modules from one export per structure; ``exports`` counts the exports."""

    def __init__(self, opset: int | None = None) -> None:
        self._opset = opset
        self._templates: dict[str, Template] = {}
        self.exports = 0

    def model(
        self, shapes: BlockShapes, build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    ) -> onnx.ModelProto:
        """Return a model of these fixed shapes with random weights (its own if newly exported).

        ``build`` returns the module and example inputs to export if no earlier export fits. `BackendError` if
        ONNX cannot express the module.
        """
        template = self._templates.get(shapes.structure)
        if template is not None:
            model = fitted_to(template, shapes)
            if model is not None and consistent(model):
                return model
        self.exports += 1
        exported = export_model_proto(*build(), opset=self._opset, dynamic_batch=False)
        moves = _moving_nodes(exported, shapes.moves)
        self._templates[shapes.structure] = Template(exported, shapes.modules, moves)
        copy = onnx.ModelProto()
        copy.CopyFrom(exported)
        return copy

    def lacks(self, shapes: BlockShapes) -> bool:
        """Whether these shapes still need an export."""
        return shapes.structure not in self._templates

    def export_together(self, wanted: Sequence[tuple[BlockShapes, nn.Module, tuple[Tensor, ...]]]) -> None:
        """Export modules in one go. One that fails is exported alone when needed, which raises its error."""
        if not wanted:
            return
        built = [(module, inputs) for _, module, inputs in wanted]
        try:
            models = export_side_by_side(built, [len(shapes.outputs) for shapes, _, _ in wanted], self._opset)
        except BackendError as error:
            _log.debug("%d blocks cannot be exported together: %s", len(wanted), error)
            half = len(wanted) // 2
            for part in (wanted[:half], wanted[half:]) if half else ():
                self.export_together(part)
            return
        self.exports += 1
        for index, ((shapes, _, _), model) in enumerate(zip(wanted, models, strict=True)):
            modules = tuple(path_of(index, path) for path in shapes.modules)
            self._templates[shapes.structure] = Template(model, modules, _moving_nodes(model, shapes.moves))


class BlockModels:
    """Makes ONNX models of blocks at given widths, with random weights; ``exports`` counts the exports."""

    def __init__(self, opset: int | None = None) -> None:
        self._templates = Templates(opset)
        self._finder = ShapeFinder()

    @property
    def exports(self) -> int:
        """The number of exports so far."""
        return self._templates.exports

    def expect(self, blocks: Sequence[Block]) -> None:
        """Export the templates that these blocks lack, up to `_MOST_NUMBERS` numbers at once."""
        wanted: dict[str, tuple[BlockShapes, nn.Module, tuple[Tensor, ...]]] = {}
        numbers = 0
        for block in blocks:
            widths = tuple(grid[-1] for grid in block.grids)
            try:
                shapes = self._finder.shapes(block, widths)
                size = sum(
                    math.prod(s) for s in (*shapes.parameters.values(), *shapes.inputs, *shapes.outputs)
                )
                if size > _MOST_NUMBERS or shapes.structure in wanted or not self._templates.lacks(shapes):
                    continue
                if numbers + size > _MOST_NUMBERS:
                    self._templates.export_together(list(wanted.values()))
                    wanted, numbers = {}, 0
                wanted[shapes.structure] = shapes, *block.build(widths)
                numbers += size
            except Exception as error:  # whatever a module throws: measuring the block will report it
                _log.debug("block %r is not exported with the others: %s", block.name, error)
        self._templates.export_together(list(wanted.values()))

    def model(self, block: Block, widths: tuple[int, ...]) -> onnx.ModelProto:
        """Return the model of ``block`` at ``widths``, all shapes fixed.

        `BackendError` if ONNX cannot express it.
        """
        shapes = self._finder.shapes(block, widths)
        try:
            return self._templates.model(shapes, lambda: block.build(widths))
        except BackendError as error:
            raise BackendError(f"block {block.name!r} at widths {widths}: {error}") from error


def _moving_nodes(model: onnx.ModelProto, moves: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Return the first outputs of the nodes that hold ``moves``; none if they do not match one to one."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) == 1}
    nodes = [
        node
        for node in model.graph.node
        if node.op_type in _MOVING and node.input[1:2] and node.input[1] in constants
    ]
    held = [tuple(numpy_helper.to_array(constants[node.input[1]]).tolist()) for node in nodes]
    return tuple(str(node.output[0]) for node in nodes) if held == list(moves) else ()


def fitted_to(template: Template, wanted: BlockShapes) -> onnx.ModelProto | None:
    """Return ``template`` with random weights of the ``wanted`` shapes; None if the two do not correspond."""
    if len(template.modules) != len(wanted.modules) or len(template.moves) != len(wanted.moves):
        return None
    paths = dict(zip(template.modules, wanted.modules, strict=True))
    model = _skeleton(template.model)
    graph, shapes = model.graph, dict[str, Shape]()
    for tensor in template.model.graph.initializer:
        name = _renamed(tensor.name, paths)
        if name in wanted.parameters:
            shapes[tensor.name] = wanted.parameters[name]
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        weight = shapes.get(node.input[1])
        if weight is None:
            return None
        if len(node.input) > 2:
            shapes[node.input[2]] = (weight[0],)
        path = _renamed(node.input[1], paths).removesuffix(".weight")
        for attribute in node.attribute:
            if attribute.name == "group":
                attribute.i = wanted.groups.get(path, attribute.i)
    _exchange_moves(graph, dict(zip(template.moves, wanted.moves, strict=True)))
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    reshapes = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    for tensor in template.model.graph.initializer:
        if tensor.name not in used:
            continue
        if tensor.name in shapes:
            if len(shapes[tensor.name]) != len(tensor.dims) or tensor.data_type not in _FLOATS:
                return None  # integers carry meaning: random ones would not do
            graph.initializer.append(_random_tensor(tensor, shapes[tensor.name]))
        elif tensor.name in reshapes:
            graph.initializer.append(_open_channels(tensor))
        else:
            graph.initializer.append(tensor)
    pairs = (*zip(graph.input, wanted.inputs, strict=True), *zip(graph.output, wanted.outputs, strict=True))
    for value, shape in pairs:
        _set_shape(value, shape)
    for node in graph.node:
        if node.op_type == "Reshape":
            kept = [a for a in node.attribute if a.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend(kept)
    return model


def _exchange_moves(graph: onnx.GraphProto, moves: dict[str, tuple[int, ...]]) -> None:
    """Give each node with such a first output its own constant, as an export shares equal constants."""
    for node in graph.node:
        if node.output[0] in moves:
            node.input[1] = f"{node.output[0]}.moves"
            values = np.array(moves[node.output[0]], np.int64)
            graph.initializer.append(numpy_helper.from_array(values, node.input[1]))


def _skeleton(template: onnx.ModelProto) -> onnx.ModelProto:
    """Return the template without weights and intermediate shapes."""
    graph = helper.make_graph(
        list(template.graph.node),
        template.graph.name,
        list(template.graph.input),
        list(template.graph.output),
    )
    return helper.make_model(graph, opset_imports=list(template.opset_import), ir_version=template.ir_version)


def _renamed(name: str, paths: dict[str, str]) -> str:
    """Return the name that a template's parameter has in another block."""
    for path, other in paths.items():
        if name == path or name.startswith(f"{path}."):
            return other + name[len(path) :]
    return name


_POOL = np.random.default_rng(0).normal(size=1 << 17)


def random_values(shape: Shape, dtype: Any, name: str = "") -> np.ndarray[Any, Any]:
    """Return random numbers of ``shape``, scaled like an initialised weight, drawn quickly from a pool.

    Each ``name`` gets different numbers, as a runtime may keep a single copy of equal weights.
    """
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    half = _POOL.size // 2
    first = zlib.crc32(name.encode()) % half
    pool = (_POOL[first : first + half] / np.sqrt(max(fan_in, 1))).astype(dtype)
    return np.resize(pool, shape)


def _random_tensor(like: onnx.TensorProto, shape: Shape) -> onnx.TensorProto:
    dtype = helper.tensor_dtype_to_np_dtype(like.data_type)
    values = random_values(shape, dtype, like.name)
    if len(shape) == 1:  # variances and scales have to be positive
        values = np.abs(values) + np.asarray(0.5, dtype)
    return numpy_helper.from_array(values, like.name)


def _open_channels(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Let a reshape copy the batch size and infer the channels."""
    target = numpy_helper.to_array(tensor).copy()
    axis = _CHANNEL_AXIS.get(len(target))
    if axis is not None and np.all(target >= 0):
        target[0], target[axis] = 0, -1
    return numpy_helper.from_array(target, tensor.name)


def _set_shape(value: onnx.ValueInfoProto, shape: Shape) -> None:
    kind = value.type.tensor_type
    del kind.shape.dim[:]
    for size in shape:
        kind.shape.dim.add(dim_value=size)


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with weights as inputs: their shapes suffice, and values may take hundreds of MB."""
    graph, weights, constants = model.graph, list[onnx.ValueInfoProto](), list[onnx.TensorProto]()
    for tensor in graph.initializer:
        if tensor.data_type in _FLOATS and math.prod(tensor.dims) > _SMALL:
            weights.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            constants.append(tensor)
    light = helper.make_graph(
        list(graph.node), graph.name, [*graph.input, *weights], list(graph.output), constants
    )
    return helper.make_model(light, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def consistent(model: onnx.ModelProto) -> bool:
    """Whether inputs and weights lead to the declared output shapes.

    Also checks that constant indices stay in range and that reshapes keep the number of elements: both were
    written for other widths, and shape inference does not check them.
    """
    declared = _without_weights(model)
    for output in declared.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(
            declared, check_type=True, strict_mode=True, data_prop=True
        )
    except onnx.shape_inference.InferenceError:
        return False
    shapes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    }
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[1] in constants and node.input[0] in shapes:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            if numpy_helper.to_array(constants[node.input[1]]).max(initial=0) >= shapes[node.input[0]][axis]:
                return False
        if node.op_type == "Reshape" and {node.input[0], node.output[0]} <= shapes.keys():
            before, after = (math.prod(shapes[name]) for name in (node.input[0], node.output[0]))
            if before and before != after:  # zero if a size is unknown
                return False
    return all(
        [d.dim_value for d in a.type.tensor_type.shape.dim]
        == [d.dim_value for d in b.type.tensor_type.shape.dim]
        for a, b in zip(inferred.graph.output, model.graph.output, strict=True)
    )
