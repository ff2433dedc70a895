"""Options of the method, as frozen dataclasses; the command line derives its flags from them."""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from smcp_fx.errors import InputError

ImportanceRule = Literal["abs_of_sum", "sum_of_abs"]
MaskMode = Literal["soft", "permanent"]
GammaGradient = Literal["chain", "direct"]
AllocationMethod = Literal["coupled", "paper"]


def is_number(value: Any) -> bool:
    """Tell whether it is a real number (NumPy's are); True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Tell whether it is of a type of whole numbers; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def names(pattern: str, path: str) -> bool:
    """Whether a pattern with * and ? names the module at this path, or one that holds it."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that carries its help text for the command line."""
    return field(default=default, metadata={"help": help, "choices": choices})


_LIMIT = re.compile(r"\s*(\S+?)\s*(>=|<=|=)\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class WidthLimit:
    """A limit on the output channels of layers: "layer4.* >= 50%".

    ``pattern``: module paths with * and ?; ``sign``: ">=", "<=" or "="; ``number``: of channels, or a share of them.
    """

    text: str
    pattern: str
    sign: str
    number: float
    is_share: bool

    @classmethod
    def of(cls, text: str) -> WidthLimit:
        """Return the limit that a text says; `InputError` for other texts."""
        match = _LIMIT.fullmatch(text)
        number = float(match[3]) if match else 0.0
        if match is None or number <= 0 or (number > 100 if match[4] else not number.is_integer()):
            raise InputError(
                f"widths: {text!r} is no limit; give a layer or pattern, >=, <= or =, and a number of channels or a "
                "share, as 'stem >= 16' or 'layer4.* = 50%'"
            )
        return cls(text, match[1], match[2], number / 100 if match[4] else number, bool(match[4]))


@dataclass(frozen=True)
class PruningConfig:
    """How masks, importances and scales work. The defaults are what to use; the rest is for comparison."""

    multiple: int = option(8, "keep multiples of this many channels in every layer")
    mask: MaskMode = option(
        "soft",
        "soft: pruned channels still learn and may return; permanent: they do neither",
        ("soft", "permanent"),
    )
    importance: ImportanceRule = option(
        "abs_of_sum",
        "a channel's importance over its layers: |sum| (the paper's theorem) or sum of | | (its formula)",
        ("abs_of_sum", "sum_of_abs"),
    )
    momentum: float = option(
        0.9, "weight of the past in the importance gathered between two solves, in [0, 1)"
    )
    memory: float = option(
        0.995, "weight of the importances before the last solve; 0 forgets them (the paper)"
    )
    width_exponent: float = option(
        0.9,
        "how importances grow in a group that is narrowed: where a share r of it is kept, r ** -this; 0: they do "
        "not, and add up (the paper)",
    )
    tolerance: float = option(
        0.009,
        "share of the reachable importance that a schedule may give up to leave masks be; 0: none (the paper)",
    )
    batch_norm_scaling: bool = option(
        False,
        "scale batch norms by the share of input channels kept (the paper; for long training); layer pruning does",
    )
    gamma_gradient: GammaGradient = option(
        "chain",
        "gradient of a scaled batch norm's weight: chain rule, or as if scaled itself",
        ("chain", "direct"),
    )
    keep_first_convolution: bool = option(
        False, "never prune the first convolution's outputs (the paper's setting)"
    )
    exclude: tuple[str, ...] = option((), "modules whose output channels stay, by name or pattern (layer4.*)")
    widths: tuple[str, ...] = option(
        (), "limits on output channels of layers: 'stem >= 16', 'layer4.* >= 50%', 'head <= 64', 'neck = 25%'"
    )
    layer_pruning: bool = option(
        False,
        "let layers keep no channel at all where the network stays in one piece: branches go as a whole",
    )
    layer_pruning_in: tuple[str, ...] = option(
        (), "with layer pruning: only layers in these modules may keep nothing; by default all"
    )
    allocation: AllocationMethod = option(
        "coupled",
        "how counts are chosen: all taken together, or by the paper's linearisation",
        ("coupled", "paper"),
    )

    def __post_init__(self) -> None:
        if not is_whole(self.multiple) or self.multiple < 1:
            raise InputError(f"multiple must be a whole number of at least 1, not {self.multiple!r}")
        for name in ("exclude", "widths", "layer_pruning_in"):
            paths = getattr(self, name)
            if not isinstance(paths, (tuple, list)) or not all(isinstance(path, str) for path in paths):
                kind = "limits" if name == "widths" else "module paths"
                raise InputError(f"{name} must be a tuple of {kind}, not {paths!r}")
        for limit in self.widths:
            WidthLimit.of(limit)
        for name in ("batch_norm_scaling", "keep_first_convolution", "layer_pruning"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.layer_pruning_in and not self.layer_pruning:
            raise InputError(
                "layer_pruning_in says where layer pruning may act: set layer_pruning=True as well"
            )
        for name in ("momentum", "memory", "tolerance", "width_exponent"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise InputError(f"{name} must be a number in [0, 1), not {value!r}")
        for name, kinds in (
            ("mask", ("soft", "permanent")),
            ("importance", ("abs_of_sum", "sum_of_abs")),
            ("gamma_gradient", ("chain", "direct")),
            ("allocation", ("coupled", "paper")),
        ):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in kinds:
                raise InputError(f"{name} must be one of {', '.join(kinds)}, not {getattr(self, name)!r}")
