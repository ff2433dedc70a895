"""Options of the method, as frozen dataclasses; the command line derives its flags from them."""

from __future__ import annotations

import numbers
import re
import warnings
from dataclasses import dataclass, field, fields
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
        """Parse a limit; raises `InputError` for other texts."""
        match = _LIMIT.fullmatch(text)
        number = float(match[3]) if match else 0.0
        if match is None or number <= 0 or (number > 100 if match[4] else not number.is_integer()):
            raise InputError(
                f"widths: {text!r} is no limit; give a layer or pattern, >=, <= or =, and a number of channels or a "
                "share, as 'stem >= 16' or 'layer4.* = 50%'"
            )
        return cls(text, match[1], match[2], number / 100 if match[4] else number, bool(match[4]))


class Method:
    """The method's constants. Use these defaults; `MethodConfig` changes them for comparison."""

    mask: MaskMode = "soft"
    importance: ImportanceRule = "abs_of_sum"
    momentum: float = 0.9
    memory: float = 0.995
    width_exponent: float = 0.9
    tolerance: float = 0.009
    batch_norm_scaling: bool = False
    gamma_gradient: GammaGradient = "chain"
    keep_first_convolution: bool = False
    allocation: AllocationMethod = "coupled"


@dataclass(frozen=True)
class PruningConfig(Method):
    """Which channels may be pruned, and in which steps."""

    multiple: int = option(8, "keep multiples of this many channels in every layer")
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

    def __new__(cls, *_: Any, **options: Any) -> PruningConfig:
        """Make a `MethodConfig`, with a warning, if one of its options is given (until version 0.2)."""
        moved = sorted(options.keys() & Method.__annotations__)
        if cls is PruningConfig and moved:
            instead = f"PruningConfig({moved[0]}=...) is now smcp_fx.config.MethodConfig({moved[0]}=...)"
            warnings.warn(instead, DeprecationWarning, stacklevel=2)
            return object.__new__(MethodConfig)
        return object.__new__(cls)

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


@dataclass(frozen=True)
class MethodConfig(PruningConfig):
    """Options of the method for comparison with the paper and with its variants, as recipes set them."""

    mask: MaskMode = option(
        Method.mask,
        "soft: pruned channels still learn and may return; permanent: they do neither",
        ("soft", "permanent"),
    )
    importance: ImportanceRule = option(
        Method.importance,
        "a channel's importance over its layers: |sum| (the paper's theorem) or sum of | | (its formula)",
        ("abs_of_sum", "sum_of_abs"),
    )
    momentum: float = option(
        Method.momentum, "weight of the past in the importance gathered between two solves, in [0, 1)"
    )
    memory: float = option(
        Method.memory, "weight of the importances before the last solve; 0 forgets them (the paper)"
    )
    width_exponent: float = option(
        Method.width_exponent,
        "how importances grow in a group that is narrowed: where a share r of it is kept, r ** -this; 0: they do "
        "not, and add up (the paper)",
    )
    tolerance: float = option(
        Method.tolerance,
        "share of the reachable importance that a schedule may give up to leave masks be; 0: none (the paper)",
    )
    batch_norm_scaling: bool = option(
        Method.batch_norm_scaling,
        "scale batch norms by the share of input channels kept (the paper; for long training); layer pruning does",
    )
    gamma_gradient: GammaGradient = option(
        Method.gamma_gradient,
        "gradient of a scaled batch norm's weight: chain rule, or as if scaled itself",
        ("chain", "direct"),
    )
    keep_first_convolution: bool = option(
        Method.keep_first_convolution, "never prune the first convolution's outputs (the paper's setting)"
    )
    allocation: AllocationMethod = option(
        Method.allocation,
        "how counts are chosen: all taken together, or by the paper's linearisation",
        ("coupled", "paper"),
    )

    @classmethod
    def published(cls, **options: Any) -> MethodConfig:
        """The method as the paper describes it, with these other options."""
        zero: dict[str, Any] = dict.fromkeys(("width_exponent", "memory", "tolerance"), 0.0)
        return cls(**{**zero, "allocation": "paper", "batch_norm_scaling": True, **options})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "memory", "tolerance", "width_exponent"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise InputError(f"{name} must be a number in [0, 1), not {value!r}")
        for entry in fields(self):
            value, kinds = getattr(self, entry.name), entry.metadata["choices"]
            if kinds and (not isinstance(value, str) or value not in kinds):
                raise InputError(f"{entry.name} must be one of {', '.join(kinds)}, not {value!r}")
