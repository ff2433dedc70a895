"""Properties of repair and of the elimination order that hold for any network."""

from __future__ import annotations

import torch
from models import random_masks, randomise, run
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smcp_fx
from smcp_fx.calibration.batches import each_batch
from smcp_fx.calibration.elimination import Elimination


def check_repair(model: nn.Module, inputs: Tensor, seed: int) -> int:
    """Assert that repair leaves a whole network alone, and changes a sliced one no more than it reports.

    The sliced one keeps its shapes and types, no layer's error grows, and its outputs are finite. Groups are
    eliminated in an order that has each unit once. Returns how many layers were repaired.
    """
    model, inputs = randomise(model).double().eval(), inputs.double()
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(inputs.shape, generator=generator, dtype=torch.float64) for _ in range(6)]
    prepared = smcp_fx.prepare(model, inputs, config=smcp_fx.PruningConfig(multiple=1))
    whole = smcp_fx.convert(prepared)
    smcp_fx.repair(whole, prepared, batches)
    assert_close(run(whole, (inputs,)), run(model, (inputs,)), "slicing", "repaired with nothing removed")
    prepared.set_masks(random_masks(prepared, seed))
    sliced = smcp_fx.convert(prepared)
    before = {name: (tensor.shape, tensor.dtype) for name, tensor in sliced.state_dict().items()}
    report = smcp_fx.repair(sliced, prepared, batches)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in sliced.state_dict().items()} == before
    assert all(layer.after <= layer.before for layer in report.layers)
    outputs = run(sliced, (inputs,))
    expected = run(model, (inputs,))
    for found, wanted in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True):
        if isinstance(found, Tensor):
            assert found.shape == wanted.shape
            assert torch.equal(found.isfinite(), wanted.isfinite())
    elimination = Elimination(prepared, len(batches))
    for batch in each_batch(batches):
        elimination.add(batch)
    for group in prepared.channels.groups:
        order = elimination.order(group.name) if group.free else None
        units = range(prepared.smcp.of_group(prepared.smcp.keep, group.name).numel()) if group.free else ()
        assert order is None or order.units.sort().values.tolist() == [*units]
    return sum(layer.repaired for layer in report.layers)
