"""A recipe: one experiment of the paper as a file of settings, read into frozen dataclasses.

A file in ``catalogue/``, or a user's own, may name a ``base`` (``catalogue/bases/``) that it changes. The
name, type and range of every field are checked.
"""

from __future__ import annotations

import difflib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError
from smcp_fx.storage.files import brief

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Largest number a recipe may hold.
_LARGEST = 1e12
_CATALOGUE = Path(__file__).parent / "catalogue"


@dataclass(frozen=True)
class Training:
    """The training of the network; everything counted in epochs shrinks with ``--fraction``.

    ``batch``: images per rank. ``rate`` is the learning rate for ``rate_batch`` images in all, and grows with
    the total batch; it rises over ``rate_warmup`` epochs. ``rate_decay``: "cosine" to 0, or "steps", with
    ``rate_steps`` listing (epoch, factor from then on). ``bias_rate``: factor for the rates of biases.
    ``evaluate_every``: epochs between two evaluations.
    """

    epochs: float
    batch: int
    rate: float
    rate_batch: int
    rate_warmup: float
    rate_decay: Literal["cosine", "steps"]
    weight_decay: float
    evaluate_every: float
    rate_steps: tuple[tuple[float, float], ...] = ()
    momentum: float = 0.9
    batch_norm_decay: bool = False
    bias_rate: float = 1.0
    label_smoothing: float = 0.0
    mixed_precision: bool = True
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "rate", "rate_batch", "evaluate_every", "bias_rate"):
            _require(getattr(self, name) > 0, f"training.{name} must be positive, not {getattr(self, name)}")
        for name in ("rate_warmup", "weight_decay"):
            _require(getattr(self, name) >= 0, f"training.{name} must not be negative")
        for name in ("momentum", "label_smoothing"):
            _require(0 <= getattr(self, name) < 1, f"training.{name} must be in [0, 1)")
        _require(
            self.rate_decay in ("cosine", "steps"),
            f"training.rate_decay must be cosine or steps, not {self.rate_decay!r}",
        )
        steps = self.rate_steps
        ordered = [epoch for epoch, _ in steps] == sorted({epoch for epoch, _ in steps})
        _require(
            ordered and all(len(step) == 2 and step[1] > 0 for step in steps),
            "training.rate_steps must list (epoch, factor), epochs ascending and factors positive",
        )


@dataclass(frozen=True)
class Pruning:
    """The target, and the schedule: K_w, K_t and K_c in epochs, r (``every``) in steps. A target of 1: no pruning."""

    target: float
    warmup: float
    ramp: float
    cooldown: float
    every: int

    def __post_init__(self) -> None:
        _require(0 < self.target <= 1, f"pruning.target must be a fraction in (0, 1], not {self.target}")


@dataclass(frozen=True)
class Latency:
    """The latency that the target limits: of a run on ``batch`` images."""

    batch: int

    def __post_init__(self) -> None:
        _require(self.batch > 0, f"latency.batch must be positive, not {self.batch}")


@dataclass(frozen=True)
class Recipe:
    """One experiment. ``name``: the file's name; ``row``: the paper's row to reproduce ("resnet50/SMCP-30%").

    ``weights``: initial weights for pruning, "torchvision:NAME", "none" (random), or "file" (given by
    ``--weights``); ``dense_weights``: initial weights of the unpruned network, if it is trained here.
    ``images``: the number of training images in the paper's data set.
    """

    name: str
    task: Literal["classification", "detection"]
    network: str
    weights: str
    size: int
    images: int
    training: Training
    pruning: Pruning
    latency: Latency
    row: str = ""
    dense_weights: str = "none"
    weights_note: str = ""
    method: MethodConfig = field(default_factory=MethodConfig)

    def __post_init__(self) -> None:
        _require(
            self.task in ("classification", "detection"),
            f"task must be classification or detection, not {self.task!r}",
        )
        _require(self.size > 0 and self.images > 0, "size and images must be positive")
        for name in ("weights", "dense_weights"):
            kind = getattr(self, name)
            _require(
                kind in ("file", "none") or kind.startswith("torchvision:"),
                f"{name} must be file, none or torchvision:NAME, not {kind!r}",
            )


def recipe_names() -> tuple[str, ...]:
    """Return the names of the installed recipes."""
    return tuple(sorted(path.stem for path in _CATALOGUE.glob("*.toml")))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its name, or from a file that ends in .toml.

    ``overrides`` change single fields, as "training.batch=32". Raises `InputError` for unknown names, files that
    cannot be read, fields that do not exist or are missing, and values that do not fit.
    """
    path = Path(name) if name.endswith(".toml") else _CATALOGUE / f"{name}.toml"
    if not name.endswith(".toml") and name not in recipe_names():
        near = difflib.get_close_matches(name, recipe_names(), 3)
        raise InputError(
            f"there is no recipe {name!r}"
            + (f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(recipe_names())}")
            + " (A file of your own ends in .toml.)"
        )
    values = _merged(path)
    for override in overrides:
        _override(values, override)
    values.setdefault("name", path.stem)
    recipe: Recipe = _built(Recipe, values, f"recipe {name}", "")
    return recipe


def _merged(path: Path) -> dict[str, Any]:
    """Return a file's tables, laid over the tables of its base."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise InputError(f"the recipe {path} is not TOML: it is nested too deep") from None
    except OSError as error:
        raise InputError(f"the recipe {path} cannot be read: {error}") from error
    except ValueError as error:  # TOML's own errors, bad text, numbers of too many digits
        raise InputError(f"the recipe {path} is not TOML: {error}") from error
    base = values.pop("base", None)
    if base is None:
        return values
    bases = sorted(p.stem for p in (_CATALOGUE / "bases").glob("*.toml"))
    if base not in bases:
        raise InputError(f"the recipe {path} has base {brief(base)}; there are {', '.join(bases)}")
    return _over(_merged(_CATALOGUE / "bases" / f"{base}.toml"), values)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"--set {text!r} must be KEY=VALUE, such as --set training.batch=32")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except (ValueError, RecursionError):  # words need no quotes on a command line
        parsed = value.strip()
    inner = values
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InputError(f"--set {text!r}: {part!r} is not a table of the recipe")
    inner[path[-1]] = parsed


def _built(kind: Any, values: Mapping[str, Any], where: str, prefix: str) -> Any:
    """Make a dataclass from a table, and check every field."""
    hints = typing.get_type_hints(kind)
    entries = {entry.name: entry for entry in fields(kind)}
    for key in values:
        if key not in entries:
            near = difflib.get_close_matches(key, entries, 1)
            advice = f"did you mean {prefix}{near[0]}?" if near else f"it may have {', '.join(entries)}"
            raise InputError(f"{where} has no field {prefix}{key[:80]}; {advice}")
    arguments = {}
    for name, entry in entries.items():
        if name in values:
            arguments[name] = _typed(values[name], hints[name], where, prefix + name)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise InputError(f"{where} lacks the field {prefix}{name}")
    try:
        return kind(**arguments)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _typed(value: Any, hint: Any, where: str, name: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: {name} must be a table, not {brief(value)}")
        return _built(hint, value, where, f"{name}.")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where}: {name} must be a list, not {brief(value)}")
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise InputError(f"{where}: {name} must be a list of {len(kinds)}, not {brief(value)}")
        return tuple(_typed(v, k, where, name) for v, k in zip(value, kinds, strict=True))
    if origin in (typing.Union, types.UnionType):
        hint = next(kind for kind in inner if kind is not type(None))
    if origin is Literal:
        hint = str
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -_LARGEST <= value <= _LARGEST:
            raise InputError(f"{where}: {name} must be a finite number, not {brief(value)}")
        return float(value)
    if hint is int and isinstance(value, int) and abs(value) > _LARGEST:
        raise InputError(f"{where}: {name} must be at most {_LARGEST:g}, not {brief(value)}")
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        raise InputError(f"{where}: {name} must be {names[hint]}, not {brief(value)}")
    return value


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)
