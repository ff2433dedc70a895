"""Checkpoints of a training run: all that a resumed run needs to go on as if nothing had happened.

One safetensors file holds the tensors and, in its header, a manifest in JSON with a checksum of the whole file. It is
written beside its place and renamed, so that a run that is killed at any moment leaves the last whole checkpoint. No
code is stored and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from smcp_fx.errors import CheckpointError
from smcp_fx.interface.wrapping import unwrapped
from smcp_fx.prepared import PreparedModel
from smcp_fx.pruning import ranks
from smcp_fx.pruning.solve import Solve
from smcp_fx.storage import generators
from smcp_fx.storage.files import bounded_json, brief
from smcp_fx.storage.tensor_file import TensorWriter, restore, write_together
from smcp_fx.storage.value_codec import decode_value, encode_value
from smcp_fx.storage.versions import library_versions, saved_with

FORMAT = "smcp_fx.checkpoint"
FORMAT_VERSION = 3
#: The checksum in a header, JSON within JSON. It is computed over the file with zeros in its place.
_SUM = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\"')
_NO_SUM = "0" * 64
_NO_SUM_PLACE = rb"\"sha256\": \"" + _NO_SUM.encode() + rb"\""
#: Bytes read at once.
_CHUNK = 1 << 20


class Stateful(Protocol):
    """Anything with a state dict: an optimiser, a learning-rate scheduler, a scaler, an averaged model."""

    def state_dict(self) -> Any:
        """Return the state, of tensors and plain values."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Go back to a state."""
        ...


def save_checkpoint(
    path: Path | str, model: nn.Module, *stateful: Stateful, extras: Mapping[str, Any] | None = None
) -> Path:
    """Write a training run's state to ``path`` and return the path.

    Args:
        model: saved with a prepared model's masks, importances, schedule position and history.
        stateful: optimisers, schedulers, scalers, averaged models: their state dicts are saved.
        extras: a dict of tensors, arrays and plain values, such as the epoch.

    The random generators of every rank are saved, too. Save between optimiser steps. On several ranks all must call
    it; rank 0 writes.

    Raises `CheckpointError` for values that a file cannot hold and when writing fails; the checkpoint that was
    there before stays.
    """
    path = Path(path)
    model = unwrapped(model)
    device = _device(model)
    generator_states = [text.decode() for text in ranks.gather_bytes(generators.capture().encode(), device)]
    failure: Exception | None = None
    if ranks.rank() == 0:
        try:
            write_together({path: _content(model, stateful, dict(extras or {}), generator_states)})
        except Exception as error:
            failure = error
    message = ranks.broadcast_json(None if failure is None else str(failure), device)
    if failure is not None:
        raise failure
    if message is not None:
        raise CheckpointError(f"rank 0 could not save: {message}")
    return path


def load_checkpoint(
    path: Path | str, model: nn.Module, *stateful: Stateful, generators_too: bool = True
) -> dict[str, Any]:
    """Bring a run back to where `save_checkpoint` left it, and return the ``extras``.

    ``model`` must be prepared in the same way, and ``stateful`` be of the same kinds in the same order. On
    several ranks all must call it. Their number may differ from before: a new rank keeps its random
    generators as they are. ``generators_too=False`` leaves all generators alone.

    Raises `CheckpointError` for files that are missing, damaged or of another run; the model may then be
    loaded in part.
    """
    path = Path(path)
    tensors, manifest = _read(path)
    model = unwrapped(model)
    kinds = [type(one).__name__ for one in stateful]
    if manifest.get("kinds") != kinds:
        raise CheckpointError(
            f"{path} holds the states of {_listed(manifest.get('kinds'))} and was to be loaded into "
            f"{_listed(kinds)}: pass the same kinds in the same order as to save_checkpoint"
        )
    special: dict[str, Any] = {
        "tensor": tensors.__getitem__,
        "array": lambda name: tensors[name].numpy(),
        "counter": _counter,
    }
    try:
        values = decode_value(manifest["values"], str(path), special)
        model.load_state_dict(values["model"])
        for one, state in zip(stateful, values["stateful"], strict=True):
            one.load_state_dict(state)
        if isinstance(model, PreparedModel):
            model.pruner.history = [Solve(**entry) for entry in values["history"]]
        states = manifest["generators"]
        if generators_too and ranks.rank() < len(states):
            generators.restore(states[ranks.rank()])
        extras = dict(values["extras"])
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not belong to this run: {' '.join(str(error).split())[:600]}. Prepare the same model "
            f"with the same options, or start afresh without it {saved_with(manifest)}"
        ) from error
    return extras


def _device(model: nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _counter(items: list[list[Any]]) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for key, count in items:
        counts[key] = int(count)
    return counts


def _listed(kinds: Any) -> str:
    return ", ".join(map(str, kinds))[:300] if kinds and isinstance(kinds, list) else "nothing"


class _Encoder:
    """Turns values into JSON, and adds their tensors to a file, named after the value they are part of."""

    def __init__(self) -> None:
        self.writer = TensorWriter()
        self._name = ""

    def value(self, value: Any, name: str) -> Any:
        self._name = name
        return encode_value(value, f"the checkpoint's {name}", self._special)

    def items(self, values: Mapping[str, Any], name: str) -> Any:
        return {"dict": [[key, self.value(value, f"{name}.{key}")] for key, value in values.items()]}

    def _special(self, value: Any) -> Any:
        where = f"the checkpoint's {self._name}"
        if isinstance(value, Tensor):
            return {"tensor": self.writer.add(self._name, value.detach(), where)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"array": self.writer.add(self._name, torch.from_numpy(value.copy()), where)}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Counter):  # the milestones of MultiStepLR
            return {"counter": [[key, count] for key, count in value.items()]}
        return None


def _content(
    model: nn.Module, stateful: tuple[Stateful, ...], extras: dict[str, Any], generator_states: list[str]
) -> bytes:
    encoder = _Encoder()
    kinds = [type(one).__name__ for one in stateful]
    history = model.pruner.history if isinstance(model, PreparedModel) else []
    values = {
        "model": encoder.items(model.state_dict(), "model"),
        "stateful": {
            "list": [
                encoder.value(one.state_dict(), f"{kind} {index}")
                for index, (one, kind) in enumerate(zip(stateful, kinds, strict=True))
            ]
        },
        "history": encoder.value([asdict(solve) for solve in history], "history"),
        "extras": encoder.items(extras, "extras"),
    }
    manifest = {
        "sha256": _NO_SUM,
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "libraries": library_versions(),
        "kinds": kinds,
        "values": {"dict": [[key, value] for key, value in values.items()]},
        "tensors": encoder.writer.entries,
        "generators": generator_states,
    }
    try:
        content = safetensors.torch.save(
            encoder.writer.stored, {FORMAT: json.dumps(manifest, allow_nan=False)}
        )
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the tensors cannot be written as safetensors: {error}") from error
    start, header = content.index(_NO_SUM.encode()), 8 + int.from_bytes(content[:8], "little")
    rest = memoryview(content)
    checksum = _checksum([content[:header], rest[header:]]).encode()
    return b"".join((rest[:start], checksum, rest[start + len(_NO_SUM) :]))


def _checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of a file given in parts, the first of which holds the header."""
    hasher = hashlib.sha256()
    for number, part in enumerate(parts):
        hasher.update(part if number else _SUM.sub(_NO_SUM_PLACE, part, count=1))
    return hasher.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    """Yield a file's content: its header, then chunks."""
    with open(path, "rb") as file:
        length = file.read(8)
        yield length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
        while part := file.read(_CHUNK):
            yield part


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        if not path.is_file():
            raise CheckpointError(f"there is no checkpoint {path}")
        with safetensors.safe_open(path, framework="pt") as file:
            manifest = bounded_json((file.metadata() or {})[FORMAT])
        if manifest["format"] != FORMAT or manifest["version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} is of version {brief(manifest['version'])}; this smcp_fx reads {FORMAT_VERSION}: load it "
                f"with the one that wrote it {saved_with(manifest)}"
            )
        if _checksum(_parts(path)) != manifest["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its content is not what was saved; delete it and start from an earlier one"
            )
        stored = safetensors.torch.load_file(path)
        return restore(stored, manifest["tensors"], torch.device("cpu")), manifest
    except CheckpointError:
        raise
    except (
        ArithmeticError,
        OSError,
        SafetensorError,
        RuntimeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(
            f"{path} is damaged or no checkpoint of smcp_fx.save_checkpoint ({reason}); "
            "delete it and start from an earlier one"
        ) from error
