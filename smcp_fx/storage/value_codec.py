"""Plain values as JSON: numbers, strings, containers, dtypes, devices. Decoding evaluates nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smcp_fx.errors import CheckpointError

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

#: Limits of values in a file: depth of containers, characters of a string, elements of a range, size of an integer.
_DEEPEST, _LONGEST, _WIDEST, _LARGEST = 32, 1 << 20, 1 << 20, 1 << 64

#: Encodes values that only the caller knows (nodes, tensors); returns None for others.
Special = Callable[[Any], Any]


def encode_value(value: Any, where: str, special: Special) -> Any:
    """Return a value as JSON: None, bool, int, finite float and str as they are, else ``{tag: content}``."""
    if value is None or type(value) is bool:
        return value
    if (type(value) is int and abs(value) < _LARGEST) or (type(value) is str and len(value) <= _LONGEST):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    encoded = special(value)
    if encoded is not None:
        return encoded
    if isinstance(value, torch.Size):
        return {"size": [int(item) for item in value]}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        tag = "tuple" if isinstance(value, tuple) else "list"
        return {tag: [encode_value(item, where, special) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_value(part, where, special) for part in item] for item in value.items()]}
    if isinstance(value, (slice, range)):
        parts = (value.start, value.stop, value.step)
        return {type(value).__name__: [encode_value(part, where, special) for part in parts]}
    if value is Ellipsis:
        return {"ellipsis": None}
    if type(value) is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return {type(value).__name__: str(value)}
    raise CheckpointError(
        f"{where}: a value of type {type(value).__module__}.{type(value).__qualname__} ({value!r:.80}) cannot be "
        "saved. Numbers, strings, tuples, lists, dicts, slices, dtypes and devices can: rewrite the model with "
        "these (a named tuple becomes a tuple)."
    )


def decode_value(data: Any, where: str, special: Mapping[str, Special], depth: int = 0) -> Any:
    """Invert `encode_value`; ``special`` maps further tags to their decoders."""
    if data is None or isinstance(data, (bool, float)):
        return data
    if isinstance(data, int) and abs(data) < _LARGEST:
        return data
    if isinstance(data, str) and len(data) <= _LONGEST:
        return data
    if isinstance(data, dict) and len(data) == 1 and depth < _DEEPEST:
        ((tag, content),) = data.items()

        def inner(item: Any) -> Any:
            return decode_value(item, where, special, depth + 1)

        decoder = special.get(tag) or _DECODERS.get(tag)
        if decoder is not None:
            return decoder(content)
        if tag in _SEQUENCES and isinstance(content, list):
            return _SEQUENCES[tag](inner(item) for item in content)
        if tag == "dict" and isinstance(content, list):
            return {inner(key): inner(item) for key, item in content}
        if tag == "slice":
            start, stop, step = map(inner, content)
            return slice(start, stop, step)
        if tag == "range":
            values = range(*map(inner, content))
            if len(values) <= _WIDEST:
                return values
    raise CheckpointError(
        f"{where}: {str(data)[:80]!a} is not a value that this version reads; the manifest is damaged: save the "
        "model again"
    )


_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "list": list,
    "size": lambda items: torch.Size(list(items)),
}
_DECODERS: dict[str, Special] = {
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "ellipsis": lambda _: Ellipsis,
    "dtype": _DTYPES.__getitem__,
    "memory_format": _MEMORY_FORMATS.__getitem__,
    "layout": _LAYOUTS.__getitem__,
    "device": torch.device,
}
