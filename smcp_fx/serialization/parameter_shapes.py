"""The shapes that a layer's attributes require of its tensors.

PyTorch's kernels trust the attributes: an LSTM of hidden size 0 with weights of 16 rows crashes the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from smcp_fx.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
_GATES = {"LSTM": 4, "GRU": 3, "LSTMCell": 4, "GRUCell": 3}


def check_shapes(module: nn.Module, where: str) -> None:
    """Raise `CheckpointError` if a module's tensors do not have the shapes that its attributes require."""
    expected = next((shapes(module) for kind, shapes in _SHAPES.items() if isinstance(module, kind)), {})
    for name, shape in expected.items():
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{where}: by its attributes its {name} is of shape {str(shape)[:80]}, and it is of shape "
                f"{str(tuple(tensor.shape))[:80]}"
            )


def _convolution(module: Any) -> Shapes:
    ends = [module.out_channels, module.in_channels // module.groups]
    if module.transposed:
        ends = [module.in_channels, module.out_channels // module.groups]
    return {"weight": (*ends, *module.kernel_size), "bias": (module.out_channels,)}


def _linear(module: Any) -> Shapes:
    return {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}


def _bilinear(module: Any) -> Shapes:
    sizes = (module.out_features, module.in1_features, module.in2_features)
    return {"weight": sizes, "bias": sizes[:1]}


def _of_channels(module: Any) -> Shapes:
    return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (module.num_features,))


def _of_groups(module: Any) -> Shapes:
    return dict.fromkeys(("weight", "bias"), (module.num_channels,))


def _of_layers(module: Any) -> Shapes:
    return dict.fromkeys(("weight", "bias"), tuple(module.normalized_shape))


def _prelu(module: Any) -> Shapes:
    return {"weight": (module.num_parameters,)}


def _embedding(module: Any) -> Shapes:
    return {"weight": (module.num_embeddings, module.embedding_dim)}


def _attention(module: Any) -> Shapes:
    size = module.embed_dim
    inputs = {"q_proj_weight": size, "k_proj_weight": module.kdim, "v_proj_weight": module.vdim}
    shapes: Shapes = {name: (size, width) for name, width in inputs.items()}
    shapes |= {"in_proj_weight": (3 * size, size), "in_proj_bias": (3 * size,)}
    return shapes | dict.fromkeys(("bias_k", "bias_v"), (1, 1, size))


def _recurrent(module: Any) -> Shapes:
    hidden, out = module.hidden_size, module.proj_size or module.hidden_size
    rows, shapes = _GATES.get(module.mode, 1) * hidden, Shapes()
    sides = ("", "_reverse")[: 1 + module.bidirectional]
    held = [name for name in module._parameters if name.startswith("weight_ih")]
    if len(held) != module.num_layers * len(sides):
        raise CheckpointError(f"{len(held)} weights are not those of {module.num_layers} layers")
    for layer in range(module.num_layers):
        width = module.input_size if layer == 0 else out * len(sides)
        for side in sides:
            shapes[f"weight_ih_l{layer}{side}"], shapes[f"weight_hh_l{layer}{side}"] = (
                (rows, width),
                (rows, out),
            )
            shapes[f"bias_ih_l{layer}{side}"] = shapes[f"bias_hh_l{layer}{side}"] = (rows,)
            shapes[f"weight_hr_l{layer}{side}"] = (out, hidden)
    return shapes


def _cell(module: Any) -> Shapes:
    rows = _GATES.get(type(module).__name__, 1) * module.hidden_size
    shapes: Shapes = {"weight_ih": (rows, module.input_size), "weight_hh": (rows, module.hidden_size)}
    return shapes | dict.fromkeys(("bias_ih", "bias_hh"), (rows,))


_SHAPES: dict[type[nn.Module], Callable[[Any], Shapes]] = {
    nn.modules.conv._ConvNd: _convolution,
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    nn.modules.batchnorm._NormBase: _of_channels,
    nn.GroupNorm: _of_groups,
    nn.LayerNorm: _of_layers,
    nn.RMSNorm: _of_layers,
    nn.PReLU: _prelu,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding,
    nn.MultiheadAttention: _attention,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
}
