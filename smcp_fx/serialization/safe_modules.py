"""The closed list of module classes that a saved model may hold, with their attributes and types."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import CheckpointError

_LARGEST = 1 << 31
_RNN_WEIGHT = re.compile(r"(weight|bias)_(ih|hh|hr)_l\d{1,3}(_reverse)?")

_CONV = (
    "in_channels:int out_channels:int kernel_size:ints stride:ints padding:ints|same|valid dilation:ints "
    "transposed:flag output_padding:ints groups:int padding_mode:zeros|reflect|replicate|circular "
    "_reversed_padding_repeated_twice:ints"
)
_NORM = "num_features:int eps:number momentum:number|none affine:flag track_running_stats:flag"
_MAX_POOL = "kernel_size:ints stride:ints|none padding:ints dilation:ints return_indices:flag ceil_mode:flag"
_RNN = (
    "mode:RNN_TANH|RNN_RELU|LSTM|GRU input_size:int hidden_size:int num_layers:int bias:flag batch_first:flag "
    "dropout:number bidirectional:flag proj_size:int _flat_weights_names:weights _all_weights:weights"
)
_RNN_CELL = "input_size:int hidden_size:int bias:flag"
_EMBEDDING = (
    "num_embeddings:int embedding_dim:int max_norm:number|none norm_type:number scale_grad_by_freq:flag "
    "sparse:flag padding_idx:int|none"
)
_UPSAMPLE = (
    "name:text size:ints|none scale_factor:numbers|none mode:nearest|nearest-exact|linear|bilinear|bicubic|trilinear "
    "align_corners:flag|none recompute_scale_factor:flag|none"
)
_LOSS = "reduction:none|mean|sum"
_BLOCK = "norm_first:flag activation:function"

#: ``module of torch.nn.modules``: class names, and ``attribute:type|type``; ``attribute?`` may be missing.
_SPECIFICATIONS: dict[str, list[tuple[str, str]]] = {
    "activation": [
        ("ReLU SELU SiLU Mish Hardsigmoid Hardswish", "inplace:flag"),
        ("LogSigmoid Sigmoid Softmax2d Softsign Tanh Tanhshrink", ""),
        ("ELU CELU", "alpha:number inplace:flag"),
        ("GELU", "approximate:none|tanh"),
        ("GLU", "dim:int"),
        ("Hardshrink Softshrink", "lambd:number"),
        ("Hardtanh ReLU6", "min_val:number max_val:number inplace:flag"),
        ("LeakyReLU", "negative_slope:number inplace:flag"),
        ("LogSoftmax Softmax Softmin", "dim:int|none"),
        ("PReLU", "num_parameters:int init:number"),
        ("RReLU", "lower:number upper:number inplace:flag"),
        ("Softplus", "beta:number threshold:number"),
        ("Threshold", "threshold:number value:number inplace:flag"),
        (
            "MultiheadAttention",
            "embed_dim:int kdim:int vdim:int _qkv_same_embed_dim:flag num_heads:int dropout:number "
            "batch_first:flag head_dim:int bias_k?:none bias_v?:none add_zero_attn:flag",
        ),
    ],
    "batchnorm": [
        ("BatchNorm1d BatchNorm2d BatchNorm3d", _NORM),
        ("SyncBatchNorm", f"{_NORM} process_group:none"),
    ],
    "channelshuffle": [("ChannelShuffle", "groups:int")],
    "container": [
        ("Sequential ModuleList ModuleDict", ""),
        ("ParameterList", "_size:int"),
    ],
    "conv": [
        ("Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d", _CONV),
    ],
    "distance": [
        ("CosineSimilarity", "dim:int eps:number"),
        ("PairwiseDistance", "norm:number eps:number keepdim:flag"),
    ],
    "dropout": [
        ("AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout", "p:number inplace:flag"),
    ],
    "flatten": [
        ("Flatten", "start_dim:int end_dim:int"),
        ("Unflatten", "dim:int unflattened_size:ints"),
    ],
    "fold": [
        ("Fold", "output_size:ints kernel_size:ints dilation:ints padding:ints stride:ints"),
        ("Unfold", "kernel_size:ints dilation:ints padding:ints stride:ints"),
    ],
    "instancenorm": [("InstanceNorm1d InstanceNorm2d InstanceNorm3d", _NORM)],
    "linear": [
        ("Identity", ""),
        ("Linear NonDynamicallyQuantizableLinear", "in_features:int out_features:int"),
        ("Bilinear", "in1_features:int in2_features:int out_features:int"),
    ],
    "loss": [
        (
            "L1Loss MSELoss KLDivLoss SoftMarginLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss",
            f"{_LOSS} log_target?:flag",
        ),
        ("BCELoss BCEWithLogitsLoss", _LOSS),
        ("CrossEntropyLoss NLLLoss", f"{_LOSS} ignore_index:int label_smoothing?:number"),
        ("SmoothL1Loss", f"{_LOSS} beta:number"),
        ("HuberLoss", f"{_LOSS} delta:number"),
    ],
    "module": [("Module", "")],
    "normalization": [
        ("CrossMapLRN2d LocalResponseNorm", "size:int alpha:number beta:number k:number"),
        ("GroupNorm", "num_groups:int num_channels:int eps:number affine:flag"),
        ("LayerNorm RMSNorm", "normalized_shape:ints eps:number|none elementwise_affine:flag"),
    ],
    "padding": [
        (
            "CircularPad1d CircularPad2d CircularPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d",
            "padding:ints",
        ),
        ("ReplicationPad1d ReplicationPad2d ReplicationPad3d", "padding:ints"),
        (
            "ConstantPad1d ConstantPad2d ConstantPad3d ZeroPad1d ZeroPad2d ZeroPad3d",
            "padding:ints value:number",
        ),
    ],
    "pixelshuffle": [("PixelShuffle", "upscale_factor:int"), ("PixelUnshuffle", "downscale_factor:int")],
    "pooling": [
        ("AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d", "output_size:ints"),
        ("AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d", "output_size:ints return_indices:flag"),
        ("AvgPool1d", "kernel_size:ints stride:ints padding:ints ceil_mode:flag count_include_pad:flag"),
        (
            "AvgPool2d AvgPool3d",
            "kernel_size:ints stride:ints padding:ints ceil_mode:flag count_include_pad:flag "
            "divisor_override:int|none",
        ),
        (
            "FractionalMaxPool2d FractionalMaxPool3d",
            "kernel_size:ints output_size:ints|none output_ratio:numbers|none return_indices:flag",
        ),
        ("LPPool1d LPPool2d LPPool3d", "norm_type:number kernel_size:ints stride:ints|none ceil_mode:flag"),
        ("MaxPool1d MaxPool2d MaxPool3d", _MAX_POOL),
        ("MaxUnpool1d MaxUnpool2d MaxUnpool3d", "kernel_size:ints stride:ints padding:ints"),
    ],
    "rnn": [
        ("RNN", f"{_RNN} nonlinearity?:tanh|relu"),
        ("GRU LSTM", _RNN),
        ("GRUCell LSTMCell", _RNN_CELL),
        ("RNNCell", f"{_RNN_CELL} nonlinearity:tanh|relu"),
    ],
    "sparse": [
        ("Embedding", _EMBEDDING),
        ("EmbeddingBag", f"{_EMBEDDING} mode:sum|mean|max include_last_offset:flag"),
    ],
    "transformer": [
        ("Transformer", "d_model:int nhead:int batch_first:flag"),
        ("TransformerDecoder", "num_layers:int norm?:none"),
        ("TransformerDecoderLayer", _BLOCK),
        (
            "TransformerEncoder",
            "num_layers:int enable_nested_tensor:flag use_nested_tensor:flag mask_check:flag norm?:none",
        ),
        ("TransformerEncoderLayer", f"{_BLOCK} activation_relu_or_gelu:int"),
    ],
    "upsampling": [("Upsample UpsamplingBilinear2d UpsamplingNearest2d", _UPSAMPLE)],
}


@lru_cache(maxsize=1)
def specifications() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the attribute types of each class, by its full name."""
    attributes_of: dict[str, dict[str, tuple[str, ...]]] = {}
    for module, rows in _SPECIFICATIONS.items():
        for names, text in rows:
            attributes = {}
            for word in text.split():
                attribute, _, types = word.partition(":")
                attributes[attribute] = tuple(types.split("|"))
            for name in names.split():
                attributes_of[f"torch.nn.modules.{module}.{name}"] = attributes
    return attributes_of


def class_name(module: nn.Module, where: str) -> str:
    """Return the name under which a module's class is saved; `CheckpointError` if it is not on the list."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in specifications() or find_class(name, where) is not kind:
        raise CheckpointError(
            f"{where}: the class {name} cannot be saved by name. Allowed are the layers of torch.nn. Other modules "
            "are traced into, unless they are named in leaves=[...], or hooks or parametrisations keep them whole: "
            "take these off before smcp_fx.prepare (torch.nn.utils.parametrize.remove_parametrizations)."
        )
    return name


def find_class(name: Any, where: str) -> type[nn.Module]:
    """Return the module class of a saved name; `CheckpointError` if it is not on the list."""
    if isinstance(name, str) and name in specifications():
        module, _, attribute = name.rpartition(".")
        cls = vars(importlib.import_module(module)).get(attribute)
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            return cls
    raise CheckpointError(
        f"{where}: the class {str(name)[:120]!a} is not a module class that a saved model may hold. The manifest was "
        "made by another version of a library, or was tampered with: save the model again with the versions here."
    )


def attribute_names(name: str) -> dict[str, bool]:
    """Return the attributes of a listed class, and whether each is required."""
    return {attribute.rstrip("?"): not attribute.endswith("?") for attribute in specifications()[name]}


def check_attributes(name: str, attributes: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for attributes that are missing, or whose types the class does not allow."""
    types = specifications()[name]
    for attribute, needed in attribute_names(name).items():
        if attribute not in attributes:
            if needed:
                raise CheckpointError(f"{where}: {name} needs its attribute {attribute!r}")
            continue
        allowed = types[attribute if needed else f"{attribute}?"]
        value = attributes[attribute]
        if not any(_is(value, one) for one in allowed):
            raise CheckpointError(
                f"{where}: {_told(value)} is not a value of {name}'s {attribute!r}, "
                f"which is {' or '.join(allowed)}"
            )


def _told(value: Any) -> str:
    """Return a value as text, tensors without their numbers: printing numbers imports modules."""
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return f"a {type(value).__name__} of tensors" if not isinstance(value, Tensor) else "a tensor"
    return ascii(str(value)[:80])


def _is(value: Any, kind: str) -> bool:
    if kind == "none":
        return value is None or value == "none"
    if kind == "flag":
        return isinstance(value, bool)
    if kind == "int":
        return type(value) is int and abs(value) <= _LARGEST
    if kind == "number":
        return _is(value, "int") or isinstance(value, float)
    if kind in ("ints", "numbers"):
        return _is(value, kind[:-1]) or (
            isinstance(value, (tuple, list)) and all(part is None or _is(part, kind[:-1]) for part in value)
        )
    if kind == "text":
        return isinstance(value, str) and len(value) <= 100
    if kind == "function":
        return callable(value) and not isinstance(value, (type, nn.Module, Tensor))
    if kind == "weights":
        return isinstance(value, list) and all(
            _is(part, kind) if isinstance(part, list) else bool(_RNN_WEIGHT.fullmatch(str(part)))
            for part in value
        )
    return isinstance(value, str) and value == kind
