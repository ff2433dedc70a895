"""Recurrent layers: what `convert` gives back, what it costs, and that files hold it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import IMAGE, random_masks, randomise
from models_recurrent import gru_from_a_computed_state, lstm_of_two_layers_and_directions
from tolerances import assert_close
from torch import nn

import smcp_fx
from smcp_fx.blocks.cutting import cut
from smcp_fx.channels import build
from smcp_fx.tracing.multiply_adds import MultiplyAdds
from smcp_fx.tracing.tracer import trace


@pytest.mark.parametrize("network", [lstm_of_two_layers_and_directions, gru_from_a_computed_state])
def test_a_plain_smaller_layer_comes_back(network: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, image = randomise(network()).eval(), torch.randn(IMAGE)  # type: ignore[operator]
    prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1), target=0.5).eval()
    prepared.set_masks(random_masks(prepared, 3))
    smaller = smcp_fx.convert(prepared)
    layer = smaller.get_submodule("rnn")
    assert type(layer) is type(model.rnn)
    ins, outs = smaller.kept["rnn"]
    assert (layer.input_size, layer.hidden_size) == (len(ins), len(outs))
    assert layer.input_size < model.rnn.input_size and layer.hidden_size < model.rnn.hidden_size
    type(layer).check_input(layer, torch.zeros(2, 3, layer.input_size), None)
    assert type(layer.weight_hh_l0) is nn.Parameter and layer._flat_weights[1] is layer.weight_hh_l0
    with MultiplyAdds() as counted, torch.no_grad():
        expected = smaller(image)
    assert prepared.pruner.present_cost == pytest.approx(counted.total / IMAGE[0])
    loaded = smcp_fx.load(smcp_fx.save(smaller, tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert_close(loaded(image), expected, "identity")


def test_training_gives_the_gradients_of_the_dense_layer() -> None:
    torch.manual_seed(0)
    model, image = randomise(lstm_of_two_layers_and_directions()), torch.randn(IMAGE)
    prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1), target=0.5)
    for network in (model, prepared):
        network.train()
        network(image).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(prepared.get_parameter(name).grad, parameter.grad, "accumulation", name)
    prepared.pruner.step()
    prepared.pruner.solve()
    assert prepared.pruner.present_cost <= 0.5 * prepared.pruner.full_cost


def test_it_is_one_block_with_two_widths() -> None:
    traced = trace(lstm_of_two_layers_and_directions(), (torch.randn(IMAGE),))
    (block,) = (b for b in cut(traced, build(traced.module, traced.values)) if "rnn" in b.nodes)
    assert block.full_widths == (8, 12 + 6)  # the last state is handed on, too
    module, inputs = block.build((3, 8 + 4))
    (layer,) = (part for part in module.modules() if isinstance(part, nn.LSTM))
    assert (layer.input_size, layer.hidden_size) == (3, 4)
    assert [t.shape[-1] for t in inputs] == [3] and module(*inputs)[0].shape[-1] == 8
