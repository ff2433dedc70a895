"""Table rows and engine layers side by side: each block's predicted time, and its layers' measured time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smcp_fx.blocks.fused import FusedBlock


def blocks_beside_layers(
    blocks: Iterable[FusedBlock], predicted_ms: Mapping[str, float], layers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return ``{"blocks": [...], "other_layers": [...]}`` in ms.

    A layer belongs to the block whose convolution or linear it computes (ONNX nodes carry their modules'
    paths). A layer that computes several blocks is split among them as predicted. Layers of no block, such as
    copies into other formats, are ``other_layers``; blocks without a layer have ``measured_ms`` None.
    """
    home = {path: block.name for block in blocks for path in _paths(block)}
    measured: dict[str, float] = {}
    names: dict[str, list[str]] = {}
    others = []
    for layer in layers:
        owners = list(dict.fromkeys(home[node] for node in layer["nodes"] if node in home))
        if not owners:
            others.append({"name": layer["name"], "ms": layer["ms"], "reformat": layer["reformat"]})
        total = sum(predicted_ms.get(owner, 0.0) for owner in owners)
        for owner in owners:
            share = predicted_ms.get(owner, 0.0) / total if total > 0 else 1 / len(owners)
            measured[owner] = measured.get(owner, 0.0) + share * layer["ms"]
            names.setdefault(owner, []).append(layer["name"])
    rows = [
        {"name": name, "predicted_ms": ms, "measured_ms": measured.get(name), "layers": names.get(name, [])}
        for name, ms in predicted_ms.items()
    ]
    return {"blocks": rows, "other_layers": others}


def _paths(block: FusedBlock) -> list[str]:
    """Return the paths of the block's modules, by which ONNX nodes are named."""
    graph = block.module.graph
    return [str(node.target) for node in graph.nodes if node.op == "call_module" and node.name in block.nodes]
