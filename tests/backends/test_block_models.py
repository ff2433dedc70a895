"""One export of a structure serves all widths, where it does."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
import torchvision
from fake_blocks import ABlock, InexpressibleBlock
from torch import fx, nn

from smcp_fx.backends.checking import flatten_outputs
from smcp_fx.backends.onnx import block_shapes
from smcp_fx.backends.onnx.block_shapes import BlockShapes
from smcp_fx.backends.onnx.blocks import BlockModels, Template, consistent, fitted_to
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeEngine
from smcp_fx.backends.timing.measuring import (
    TimingConfig,
)
from smcp_fx.blocks.cutting import cut
from smcp_fx.channels import build
from smcp_fx.errors import BackendError
from smcp_fx.tracing.tracer import trace

FAST = TimingConfig(min_repeats=2, max_repeats=3, budget_ms=1, attempts=1, warmup_ms=1)


@pytest.mark.parametrize(
    ("block", "points", "exports"),
    [
        (ABlock("conv"), [(8, 16), (24, 8), (16, 32), (64, 64), (40, 8), (8, 8), (32, 56)], 1),
        (ABlock("depthwise"), [(8,), (16,), (24,), (40,), (64,)], 1),
        (ABlock("head"), [(8,), (16,), (24,), (40,), (64,)], 1),
        (ABlock("shuffle"), [(8,), (16,), (24,), (40,), (64,)], 1),
    ],
)
def test_one_export_serves_all_widths(block, points, exports, monkeypatch):
    """Shapes at most widths follow from those at a few, for which the block is built."""
    built, build = [], block_shapes._built
    monkeypatch.setattr(block_shapes, "_built", lambda *at: built.append(at) or build(*at))
    models = BlockModels()
    for widths in points:
        model = models.model(block, widths)
        onnx.checker.check_model(model, full_check=True)
        module, inputs = block.build(widths)
        with torch.no_grad():
            expected = module(*inputs)
        with OnnxRuntimeEngine(model.SerializeToString()) as engine:
            (found,) = engine.run([i.numpy() for i in inputs])
        assert found.shape == tuple(expected.shape)
        weights = sum(np.prod(t.dims) for t in model.graph.initializer if len(t.dims) > 1)
        assert weights == sum(p.numel() for p in module.parameters() if p.dim() > 1)
    assert models.exports == exports
    assert 0 < len(built) < len(points)


@pytest.mark.parametrize(("kind", "exports"), [("moves", 1), ("dead moves", 3)])
def test_moved_channels_are_those_of_each_width(kind, exports):
    """One export serves where its constants are the module's, one for one; elsewhere every width is exported."""
    models = BlockModels()
    for width in (3, 9, 2):
        module, (x,) = ABlock(kind).build((width,))
        model = models.model(ABlock(kind), (width,))
        onnx.checker.check_model(model, full_check=True)
        with OnnxRuntimeEngine(model.SerializeToString()) as engine:
            (found,) = engine.run([x.numpy()])
        assert np.array_equal(found, module(x).numpy())
    assert models.exports == exports


def test_a_template_whose_reshapes_lose_numbers_does_not_serve():
    """A transformer's blocks at other heads and widths: the sizes of reshapes are written into the export."""
    traced = trace(
        torchvision.models.VisionTransformer(32, 8, 1, 2, 32, 64).eval(), (torch.randn(1, 3, 32, 32),)
    )
    models = BlockModels()
    blocks = cut(traced, build(traced.module, traced.values))
    sizes_written = {"reshape", "unflatten", "flatten", "scaled_dot_product_attention"}
    reshaping = [block for block in blocks if sizes_written & {*block.nodes}]
    assert len(reshaping) == 4
    for block in reshaping:
        small, full = ([grid[end] for grid in block.grids] for end in (0, -1))
        alone = (*full[:1], *small[1:])  # the first one changes
        for widths in dict.fromkeys((tuple(small), alone, tuple(full))):
            module, inputs = block.build(widths)
            with torch.no_grad():
                expected = flatten_outputs(module(*inputs))
            with OnnxRuntimeEngine(models.model(block, widths).SerializeToString()) as engine:
                found = engine.run([value.numpy() for value in inputs])
            assert [value.shape for value in found] == [tuple(value.shape) for value in expected], block.name


def test_blocks_that_are_expected_are_exported_together():
    one, two = ((8, 16, 64),), ((8, 16, 64), (8, 32))
    blocks = [ABlock("conv", "a", grids=two), ABlock("depthwise", "b", grids=one), ABlock("head", "c", grids=one),
              ABlock("conv", "d", size=4, grids=two), ABlock("moves", "e", grids=one),
              ABlock("no such", "f"), ABlock("moves", "g", size=4, grids=one)]  # fmt: skip
    models = BlockModels()
    models.expect(blocks)
    models.expect(blocks)
    assert models.exports == 1
    for block in blocks:
        for widths in itertools.product(*block.grids) if block.grids else ():
            module, inputs = block.build(widths)
            model = models.model(block, widths)
            onnx.checker.check_model(model, full_check=True)
            with OnnxRuntimeEngine(model.SerializeToString()) as engine:
                (found,) = engine.run([x.numpy() for x in inputs])
            with torch.no_grad():
                expected = module(*inputs).numpy()
            assert found.shape == expected.shape
            assert block.kind != "moves" or np.array_equal(found, expected)
    assert models.exports == 1


def test_blocks_that_cannot_be_exported_together_are_exported_apart():
    blocks = [InexpressibleBlock("svd", "x", grids=((8,),)), ABlock("depthwise", "y", grids=((8,),))]
    models = BlockModels()
    models.expect(blocks)
    assert models.exports == 1
    models.model(blocks[1], (8,))
    assert models.exports == 1
    with pytest.raises(BackendError, match="linalg_svd"):
        models.model(blocks[0], (8,))


def test_whole_numbers_are_not_made_up():
    """A template whose parameter is an index that it does not know as a move serves no other width."""
    value = functools.partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    for kind, serves in ((np.int64, False), (np.float32, True)):
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("Gather" if kind is np.int64 else "Add", ["x", "index"], ["y"])], "g",
            [value("x", shape=[3])], [value("y", shape=[3])],
            [onnx.numpy_helper.from_array(np.array([2, 1, 0], kind), "index")],
        )  # fmt: skip
        template = Template(onnx.helper.make_model(graph), ())
        wanted = BlockShapes("", (), {"index": (4,)}, {}, ((4,),), ((4,),))
        assert (fitted_to(template, wanted) is not None) == serves


def test_constants_that_an_export_shares_are_told_apart():
    """Two fetches of the same channels at the width that is exported, and of others at the next."""

    class Twice(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.register_buffer("first", torch.tensor(first))
            self.register_buffer("second", torch.tensor(second))

        def forward(self, x):
            return torch.index_select(torch.relu(torch.index_select(x, 1, self.first)), 1, self.second)

    class Block(ABlock):
        def build(self, widths):
            both = Twice([1, 0], [1, 0]) if widths == (2,) else Twice([2, 0, 1], [2, 1, 0])
            return fx.symbolic_trace(both).eval(), (torch.randn(1, *widths, 2, 2),)

    models = BlockModels()
    for widths in ((2,), (3,)):
        module, (x,) = Block("twice").build(widths)
        with OnnxRuntimeEngine(models.model(Block("twice"), widths).SerializeToString()) as engine:
            (found,) = engine.run([x.numpy()])
        assert np.array_equal(found, module(x).numpy())
    assert models.exports == 1


def test_blocks_of_one_structure_share_an_export_whatever_their_size_and_name():
    models = BlockModels()
    models.model(ABlock("conv"), (8, 16))
    model = models.model(ABlock("conv", name="other", size=4, batch=3), (16, 8))
    assert models.exports == 1
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [3, 8, 4, 4]
    strided = models.model(ABlock("conv", stride=2), (16, 8))
    assert models.exports == 2
    assert [d.dim_value for d in strided.graph.output[0].type.tensor_type.shape.dim] == [2, 8, 4, 4]


def test_a_template_that_gathers_what_is_not_there_does_not_serve():
    gather = onnx.helper.make_node("Gather", ["x", "indices"], ["y"], axis=1)
    value = functools.partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    indices = onnx.numpy_helper.from_array(np.array([0, 2, 5]), "indices")
    for channels, serves in ((6, True), (5, False)):
        graph = onnx.helper.make_graph(
            [gather], "g", [value("x", shape=[1, channels, 2])], [value("y", shape=[1, 3, 2])], [indices]
        )
        assert consistent(onnx.helper.make_model(graph)) == serves


def test_a_template_of_other_modules_does_not_serve():
    models = BlockModels()
    models.model(ABlock("conv"), (8, 16))
    (template,) = models._templates._templates.values()
    shapes = models._finder.shapes(ABlock("conv"), (8, 16))
    assert fitted_to(template, shapes) is not None
    assert fitted_to(template, replace(shapes, modules=(*shapes.modules, "another"))) is None


def test_a_block_onnx_cannot_express_is_named():
    with pytest.raises(BackendError, match=r"block 'block' at widths \(8,\): .*linalg_svd"):
        BlockModels().model(InexpressibleBlock("svd"), (8,))
