"""Reads weights from training scripts' files, and fits them to a model."""

from __future__ import annotations

import argparse
import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smcp_fx.errors import CheckpointError
from smcp_fx.interface.wrapping import INSIDE

#: Keys under which training scripts store weights; averaged ones first, since those were evaluated.
_HOLDERS = (
    *("state_dict_ema", "model_ema", "ema_state_dict", "ema", "ema_model"),
    *("state_dict", "model", "model_state", "model_state_dict", "net", "network", "weights", "params", "module"),
)  # fmt: skip
#: Keys under which training scripts store accuracy, in percent or as a fraction.
_SCORES = (
    *("best_acc1", "acc1", "best_acc", "best_accuracy", "accuracy", "acc", "best_top1", "top1", "best_prec1"),
    *("val_acc", "test_acc", "metric"),
)  # fmt: skip
#: Most names listed in a message.
_NAMED = 3


@dataclass(frozen=True)
class Weights:
    """A state dict, its source, and its accuracy there (a fraction; None if unknown).

    ``notes`` list choices and omissions; ``whole``: no layer was left out.
    """

    state: dict[str, Tensor]
    source: str
    accuracy: float | None = None
    notes: tuple[str, ...] = ()
    whole: bool = True


def read_weights(path: Path | str) -> Weights:
    """Read a state dict, or the one in a training script's checkpoint; no code of the file runs.

    Raises `CheckpointError` for missing and damaged files, for whole models, and for files without weights.
    """
    file = Path(path)
    if not file.is_file():
        there = f"{file} is a folder: give the file of weights in it" if file.is_dir() else ""
        raise CheckpointError(there or f"there are no weights at {file}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(file)
        else:
            with torch.serialization.safe_globals(_plain_classes()), warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*TorchScript archive")  # refused below, in a sentence
                content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(_unreadable(file, error)) from error
    state, place = _found(content)
    if state is None:
        held = f"its keys are {_some(map(str, content))}" if isinstance(content, Mapping) and content else ""
        raise CheckpointError(
            f"{file} holds no weights by name" + (f": {held}" if held else "") + "; save model.state_dict()"
        )
    notes = (f"{file.name}: the weights are those under {place!r}",) if place else ()
    return Weights(state, str(file), _score(content), notes)


def load_weights(model: nn.Module, weights: Weights, classes: int | None = None) -> Weights:
    """Load weights into a model and return them with notes on adaptations.

    Prefixes of wrappers (``module.``, ``_orig_mod.``, ``model.``, or any that makes names fit) are removed or
    added. If the file's last layer is missing or has another number of classes, the layer keeps its random
    start, and the noted accuracy no longer counts. Raises `CheckpointError`, and leaves the model as it was,
    if weights are missing, of other shapes, or not finite.
    """
    own = model.state_dict()
    state, renamed = _renamed(weights.state, own)
    notes = [renamed] if renamed else []
    wrong = [n for n, value in state.items() if n in own and value.shape != own[n].shape]
    missing = [n for n in own if n not in state and not n.endswith("num_batches_tracked")]
    last = list(own)[-1].rpartition(".")[0] if own else ""
    head = [n for n in wrong if classes is not None and _counts_classes(own[n], state[n], classes)]
    head += [n for n in missing if own[n].shape[:1] == (classes,) and n.rpartition(".")[0] == last]
    missing = [n for n in missing if n not in head]
    if missing:
        others_there = f"; it has {_some(weights.state)}" if len(missing) > len(own) // 2 else ""
        raise _unfit(
            weights, model, f"{_some(missing)} {'are' if len(missing) > 1 else 'is'} not there{others_there}"
        )
    others = [n for n in wrong if n not in head]
    if others:
        shapes = [f"{n} is {_shape(state[n])}, the model's {_shape(own[n])}" for n in others]
        raise _unfit(weights, model, _some(shapes, "; "))
    bad = [n for n, v in state.items() if n in own and v.is_floating_point() and not bool(v.isfinite().all())]
    if bad:
        raise _unfit(weights, model, f"{_some(bad)} {'hold' if len(bad) > 1 else 'holds'} NaN or infinity")
    if head:
        was = next((f" of {len(state[n])} classes" for n in head if n in state), "")
        notes.append(
            f"the last layer ({', '.join(head)}){was} is left out and starts anew, for {classes} classes"
        )
    unused = [n for n in state if n not in own]
    if unused:
        notes.append(f"not in the model, and left out: {_some(unused)}")
    try:
        model.load_state_dict({n: v for n, v in state.items() if n in own and n not in head}, strict=False)
    except RuntimeError as error:  # raised by a model's own hooks
        raise _unfit(weights, model, " ".join(str(error).split())[:200]) from error
    return replace(
        weights, notes=(*weights.notes, *notes), accuracy=None if head else weights.accuracy, whole=not head
    )


def _unfit(weights: Weights, model: nn.Module, why: str) -> CheckpointError:
    return CheckpointError(f"the weights in {weights.source} do not fit {type(model).__name__}: {why}")


def _plain_classes() -> list[Any]:
    """Return classes that training scripts store beside weights and that are safe to build."""
    kinds = {type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")}
    scalar = np.float64(0).__reduce__()[0]
    return [argparse.Namespace, pathlib.PosixPath, pathlib.WindowsPath, np.dtype, scalar, *kinds]


def _unreadable(file: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in text:
        name = text.partition("GLOBAL ")[2].split(" ")[0]
        return (
            f"{file} holds objects of {name}, not weights alone, and reading those runs code: where the file was "
            "made, save model.state_dict() instead"
        )
    if "TorchScript" in text:
        return f"{file} is a TorchScript model: where it was made, save model.state_dict() instead"
    if not file.stat().st_size:
        return f"{file} is empty: save the weights again"
    reason = f"{type(error).__name__}: {text[:200]}".removesuffix(": ")
    return f"{file} cannot be read as weights: it is cut off, or of another kind ({reason})"


def _found(content: Any, place: str = "") -> tuple[dict[str, Tensor] | None, str]:
    """Return the state dict in the file's content, and the keys that lead to it."""
    if not isinstance(content, Mapping):
        return None, place
    for key in _HOLDERS:
        if isinstance(content.get(key), Mapping):
            state, inner = _found(content[key], f"{place}.{key}" if place else key)
            if state is not None:
                return state, inner
    state = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return (state or None), place


def _score(content: Any) -> float | None:
    for key in _SCORES:
        value = content.get(key) if isinstance(content, Mapping) else None
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 100:
            return float(value) / (100 if value > 1 else 1)
    return None


def _renamed(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return the state with the model's names, as far as possible, and a note on the changes."""
    plain = {}
    for name, value in state.items():
        for wrapper in INSIDE:
            name = name.replace(wrapper, "")
        plain[name] = value
    best, fitting, change = plain, sum(name in own for name in plain), ""
    for prefix in _prefixes(plain, own):
        inner = {n[len(prefix) :]: v for n, v in plain.items() if n.startswith(prefix)}
        if (count := sum(name in own for name in inner)) > fitting:
            best, fitting, change = inner, count, f"names without {prefix!r}"
    for prefix in _prefixes(own, plain):
        outer = {prefix + n: v for n, v in plain.items()}
        if (count := sum(name in own for name in outer)) > fitting:
            best, fitting, change = outer, count, f"names with {prefix!r} in front"
    return best, change


def _prefixes(longer: Mapping[str, Tensor], shorter: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the prefixes that names of ``shorter`` have in ``longer``, each once."""
    seen = set()
    for name in longer:
        parts = name.split(".")
        for at in range(1, len(parts)):
            if ".".join(parts[at:]) in shorter and (prefix := ".".join(parts[:at]) + ".") not in seen:
                seen.add(prefix)
                yield prefix


def _counts_classes(own: Tensor, stored: Tensor, classes: int) -> bool:
    """Whether the two differ only in the number of classes."""
    return bool(own.dim() and stored.dim()) and own.shape[0] == classes and own.shape[1:] == stored.shape[1:]


def _some(names: Any, by: str = ", ") -> str:
    every = list(names)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return by.join(every[:_NAMED]) + more


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
