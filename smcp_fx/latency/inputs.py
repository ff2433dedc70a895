"""The inputs (batch, image size) at which a table knows blocks: rows at one say nothing about another."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from smcp_fx.backends.base import Fingerprint
from smcp_fx.blocks.sharing import Block
from smcp_fx.errors import TableError
from smcp_fx.latency.store import LatencyStore

#: The most batch sizes named in a message.
_NAMED = 4


def input_shapes(signature: str) -> list[list[int | str]]:
    """Return the shapes of a block's inputs from its signature, "c" for varying channels; [] without any."""
    try:
        return [list(shape[:-1]) for shape in json.loads(signature).get("inputs", [])]
    except (AttributeError, TypeError, ValueError):  # a file from elsewhere
        return []


def known_at(blocks: Iterable[Block], store: LatencyStore, fingerprint: Fingerprint) -> str:
    """Name the other inputs at which a table has rows of these blocks: "batch 1", "other image sizes"; or "".

    Blocks that have rows at their own inputs do not count.
    """
    lacking = {b.signature for b in blocks if not store.measured(b.signature, fingerprint)}
    if not lacking:
        return ""
    there = {
        row.signature
        for row in store.looked_through()
        if not isinstance(row, TableError) and row.latency is not None and row.fingerprint == fingerprint
    }
    alike: dict[str, list[str]] = {}
    for signature in there:
        alike.setdefault(_but_sizes(signature), []).append(signature)
    batches, sizes = set(), False
    for signature in lacking:
        for other in alike.get(_but_sizes(signature), ()):
            if (size := _batch(other)) != _batch(signature):
                batches.add(size)
            else:
                sizes = True
    named = sorted(batch for batch in batches if batch)
    words = [f"batch {', '.join(map(str, named[:_NAMED]))}"] if named else []
    return " and ".join([*words, *["other image sizes"] * sizes])


def _batch(signature: str) -> int:
    """Return the batch of a block's first input; 0 if it has none."""
    first = next(iter(input_shapes(signature)), [])
    return first[0] if first and isinstance(first[0], int) else 0


def _but_sizes(signature: str) -> str:
    """Return the signature without sizes of inputs and constants."""
    try:
        parts: dict[str, Any] = json.loads(signature)
        for step in parts["steps"]:
            step.pop("shape", None)
        parts["inputs"] = [
            [*("c" if s == "c" else "n" for s in shape[:-1]), shape[-1]] for shape in parts["inputs"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return signature
    return json.dumps(parts, sort_keys=True)
