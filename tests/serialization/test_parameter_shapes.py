"""Attributes that tell of other sizes than the tensors have: refused when a model is saved, and when it is loaded.

PyTorch's kernels trust them: an LSTM of hidden size 0 with weights divides by it, which ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved_models import Manifest, edit_manifest
from torch import Tensor, fx, nn

from smcp_fx.errors import CheckpointError
from smcp_fx.serialization.saving import check_savable, load, save

#: A layer, and what it is called with.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv": (lambda: nn.Conv2d(4, 6, (3, 1), groups=2), torch.randn(2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), torch.randn(2, 4, 5)),
    "linear": (lambda: nn.Linear(4, 3), torch.randn(2, 4)),
    "norm": (lambda: nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), torch.randn(2, 4, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), torch.randn(2, 4, 3)),
    "layer norm": (lambda: nn.LayerNorm((3, 4)), torch.randn(2, 3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), torch.randn(2, 4)),
    "prelu": (lambda: nn.PReLU(4), torch.randn(2, 4)),
    "embedding": (lambda: nn.Embedding(5, 4), torch.tensor([1, 2])),
    "bag": (lambda: nn.EmbeddingBag(5, 4), torch.tensor([[1, 2]])),
    "lstm": (lambda: nn.LSTM(4, 3, 2, bidirectional=True), torch.randn(2, 1, 4)),
    "lstm projected": (lambda: nn.LSTM(4, 3, proj_size=2), torch.randn(2, 1, 4)),
    "gru": (lambda: nn.GRU(4, 3, bias=False), torch.randn(2, 1, 4)),
    "rnn": (lambda: nn.RNN(4, 3, nonlinearity="relu"), torch.randn(2, 1, 4)),
    "cell": (lambda: nn.GRUCell(4, 3), torch.randn(2, 4)),
}
#: Numbers that say how large the layer's tensors are.
SIZES = (
    "in_channels out_channels groups kernel_size in_features out_features num_features num_channels "
    "normalized_shape num_parameters num_embeddings embedding_dim hidden_size input_size proj_size num_layers"
).split()


def network(kind: str) -> fx.GraphModule:
    root, graph = nn.Module(), fx.Graph()
    root.layer = LAYERS[kind][0]()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    return fx.GraphModule(root, graph).eval()


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", LAYERS)
def test_sizes_that_are_not_the_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    module, x = network(kind), LAYERS[kind][1]
    path = save(module, tmp_path / "m.safetensors")
    assert torch.equal(first(load(path)(x)), first(module(x)))
    sizes = [name for name in SIZES if hasattr(module.layer, name)]
    assert sizes
    for name in sizes:
        value = getattr(module.layer, name)
        for other in (0, 3 * max(value if isinstance(value, tuple) else (value,)) + 2):
            if other == value:
                continue
            wrong = other if isinstance(value, int) else (other,) * len(value)

            def edit(manifest: Manifest, name: str = name, wrong: object = wrong) -> None:
                entry = next(entry for entry in manifest["modules"] if entry["path"] == "layer")
                entry["attributes"][name] = {"tuple": list(wrong)} if isinstance(wrong, tuple) else wrong

            save(module, path)
            edit_manifest(path, edit)
            with pytest.raises(CheckpointError):
                load(path)
            setattr(module.layer, name, wrong)
            with pytest.raises(CheckpointError):
                check_savable(module)
            setattr(module.layer, name, value)
    check_savable(module)
