"""Reads the engine inspector: the types of an engine's layers, and the ONNX nodes that each computes.

The inspector's JSON differs by version: types are "Half" or "Row major linear FP16 format", under
"Format/Datatype" up to TensorRT 10 and under "Format" and "DataType" from 11; ONNX nodes stand in the
layer's name ("conv1 + relu"), and from 8.6 in its metadata.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

Layer = dict[str, Any]
#: The inspector's words for each type. The first match counts, so that BF16 is not taken for FP16.
_TYPES = (
    ("bf16", re.compile(r"bf16|bfloat16", re.I)),
    ("fp16", re.compile(r"fp16|half|float16", re.I)),
    ("fp8", re.compile(r"fp8|e4m3|e5m2", re.I)),
    ("fp32", re.compile(r"fp32|float", re.I)),
    ("int8", re.compile(r"int8", re.I)),
    ("int", re.compile(r"int|bool", re.I)),
)
#: Layers that multiply and add, for which the precision matters.
_PRODUCTS = re.compile(r"conv|gemm|matrix|matmul|fully.?connected|correlation|gemv", re.I)
#: The same in the names of kernels, for layers that are called just "fusion".
_KERNELS = re.compile(r"gemm|gemv|fprop", re.I)
_MOVES = re.compile(r"reformat|^copy|noop|shuffle|constant", re.I)
_ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")


def parse_layers(text: str) -> list[Layer] | None:
    """Return the layers of the inspector's JSON about an engine; None if it is not valid JSON."""
    try:
        found = json.loads(text).get("Layers", [])
    except ValueError:  # quotes in a layer's metadata are not escaped
        return None
    return [layer if isinstance(layer, dict) else {"Name": str(layer)} for layer in found]


def parse_layer(text: str) -> Layer:
    """Return one layer of the inspector's JSON; just its name and kind if that is not valid JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        told = re.findall(r'"(Name|LayerType)"\s*:\s*"([^"]*)"', text)
        return dict(reversed(told))  # the first of each is the layer's, the others its tensors'
    return found if isinstance(found, dict) else {"Name": str(found)}


def type_of(text: str) -> str | None:
    """Return the type that the inspector's words name: "fp32", "fp16", "bf16" ...; None if they name none."""
    return next((name for name, pattern in _TYPES if pattern.search(text)), None)


def is_product(layer: Layer) -> bool:
    """Whether a layer is a convolution or a matrix product."""
    told = f"{layer.get('LayerType', '')} {layer.get('ParameterType', '')}"
    if _MOVES.search(told):
        return False
    kernel = str(layer.get("TacticName", ""))
    return bool(_PRODUCTS.search(told)) or "Weights" in layer or bool(_KERNELS.search(kernel))


def layer_type(layer: Layer) -> str | None:
    """Return the type a layer computes in: that of its weights, else of its first input; None if unknown."""
    weights = layer.get("Weights")
    told = type_of(str(weights.get("Type", ""))) if isinstance(weights, dict) else None
    if told is not None and told != "int":
        return told
    for tensor in layer.get("Inputs") or []:
        words = {key.lower(): str(value) for key, value in tensor.items()}
        formats = " ".join(value for key, value in words.items() if "format" in key)
        found = type_of(words.get("datatype", "")) or type_of(formats)
        if found is not None:
            return found
    return None


def count_types(layers: Iterable[Layer]) -> dict[str, int]:
    """Count convolutions and matrix products by the type they compute in ("unknown" if none is given)."""
    return dict(Counter(layer_type(layer) or "unknown" for layer in layers if is_product(layer)))


def wrong_precision(layers: Sequence[Layer], asked: str, quantised: Sequence[str] = ()) -> str | None:
    """Return a message if convolutions or products do not compute in ``asked``; None if all do.

    In int8 only layers that compute ``quantised`` ONNX nodes count; others may stay in float.
    """
    if asked == "int8":
        layers = [layer for layer in layers if nodes_of(layer, quantised)]
    wrong = [
        (str(layer.get("Name", "?")), found)
        for layer in layers
        if is_product(layer) and (found := layer_type(layer)) is not None and found != asked
    ]
    if not wrong:
        return None
    told = ", ".join(f"{name} in {kind}" for name, kind in wrong[:5])
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    count = f"{len(wrong)} of {sum(map(is_product, layers))} convolutions and products"
    return f"{count} do not compute in {asked}: {told}{more}"


def is_reformat(layer: Layer) -> bool:
    """Whether a layer only copies a tensor into another format."""
    return "reformat" in f"{layer.get('LayerType', '')} {layer.get('Name', '')}".lower()


def nodes_of(layer: Layer, known: Sequence[str]) -> list[str]:
    """Return which of the ``known`` ONNX nodes a layer computes, by its metadata and its name."""
    told = _ONNX_LAYER.findall(str(layer.get("Metadata", "")))
    if not told and not is_reformat(layer):
        told = [part.strip() for part in re.split(r" \+ |\|\||\.\.\.|,", str(layer.get("Name", "")))]
    names = {
        re.sub(r"^(?:\{?ForeignNode\[|PWN\(|PWN|\(|\[)+|[\])}]+$", "", part).strip() for part in told
    } | set(told)
    return [name for name in known if name in names]
