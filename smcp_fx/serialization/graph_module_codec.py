"""A graph module as JSON and tensors: its graph, its modules, and its plain attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from smcp_fx.errors import CheckpointError
from smcp_fx.interface.as_traced import CALL
from smcp_fx.interface.carried import carried_attributes, carry, is_plain
from smcp_fx.interface.output_types import plain_containers
from smcp_fx.serialization.converted import ConvertedModule
from smcp_fx.serialization.graph_codec import Own, decode_graph, encode_graph, read_values
from smcp_fx.serialization.module_codec import check_targets, decode_modules, encode_modules
from smcp_fx.serialization.saved_names import check_identifier
from smcp_fx.storage.tensor_file import TensorWriter
from smcp_fx.storage.value_codec import decode_value, encode_value


def encode_graph_module(module: fx.GraphModule, tensors: TensorWriter) -> dict[str, Any]:
    """Return a module's manifest entries; `CheckpointError` names a node or module that cannot be saved."""
    graph = plain_containers(module.graph)[0]
    attributes = carried_attributes(module)
    if (
        CALL in attributes
    ):  # a file holds no enum members: calls that give these defaults outright are refused
        fixed = {name: value for name, value in attributes[CALL]["fixed"].items() if is_plain(value)}
        attributes[CALL] = attributes[CALL] | {"fixed": fixed}
    manifest = {
        "attributes": encode_value(attributes, "the model's attributes", lambda _: None),
        "graph": encode_graph(graph),
        "modules": encode_modules(module, read_values(graph), tensors),
    }
    check_targets(module, graph)
    return manifest


def decode_graph_module(
    manifest: Mapping[str, Any],
    name: Any,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    own: Own | None = None,
) -> ConvertedModule:
    """Inverse of `encode_graph_module`; device constants become ``device``; ``own``: as in `decode_graph`."""
    graph = decode_graph(manifest["graph"], device, own)
    root = decode_modules(manifest["modules"], read_values(graph), tensors)
    check_targets(root, graph)
    module = ConvertedModule(root, graph, class_name=check_identifier(name, "the model's class"))
    # The constructor copies only the members that the graph uses, in its own order: restore all of them.
    for field, value in vars(root).items():
        if field in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
            vars(module)[field] = value
    attributes = decode_value(manifest.get("attributes", {"dict": []}), "the model's attributes", {})
    if (
        type(attributes) is not dict
        or not all(type(name) is str for name in attributes)
        or not is_plain(attributes)
    ):
        raise CheckpointError("the model's attributes are not plain values by name")
    carry(module, attributes)
    return module
