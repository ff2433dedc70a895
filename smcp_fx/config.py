"""Options of the method, as frozen dataclasses; the command line derives its flags from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from smcp_fx.errors import InputError
from smcp_fx.masking import GammaGradient, MaskMode

ImportanceRule = Literal["abs_of_sum", "sum_of_abs"]
AllocationMethod = Literal["coupled", "paper"]


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that carries its help text for the command line."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class PruningConfig:
    """How masks, importances and scales work. The defaults are what to use; the rest is for comparison."""

    multiple: int = option(8, "keep multiples of this many channels in every layer")
    mask: MaskMode = option(
        "soft",
        "soft: pruned channels still learn and may return; hard: they do not learn; permanent: never return",
        ("soft", "hard", "permanent"),
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
        "share of the reachable importance that may be given up to leave masks as they are; 0: none (the paper)",
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
    exclude: tuple[str, ...] = option((), "modules whose output channels stay")
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
        if not isinstance(self.multiple, int) or self.multiple < 1:
            raise InputError(f"multiple must be a whole number of at least 1, not {self.multiple!r}")
        if isinstance(self.exclude, str) or not all(isinstance(name, str) for name in self.exclude):
            raise InputError(f"exclude must be a tuple of module paths, not {self.exclude!r}")
        paths = self.layer_pruning_in
        if isinstance(paths, str) or not all(isinstance(name, str) for name in paths):
            raise InputError(f"layer_pruning_in must be a tuple of module paths, not {paths!r}")
        if paths and not self.layer_pruning:
            raise InputError(
                "layer_pruning_in says where layer pruning may act: set layer_pruning=True as well"
            )
        for name in ("momentum", "memory", "tolerance", "width_exponent"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        for name, kinds in (
            ("mask", ("soft", "hard", "permanent")),
            ("importance", ("abs_of_sum", "sum_of_abs")),
            ("gamma_gradient", ("chain", "direct")),
            ("allocation", ("coupled", "paper")),
        ):
            if getattr(self, name) not in kinds:
                raise InputError(f"{name} must be one of {', '.join(kinds)}, not {getattr(self, name)!r}")
