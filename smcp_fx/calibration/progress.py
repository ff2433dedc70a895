"""The progress of work on batches, reported to a waiting caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from smcp_fx.errors import InputError

#: Called with the share of the work that is done, rising to 1.
Progress = Callable[[float], object]


@dataclass(frozen=True)
class Stretch:
    """A part of the work, from one share of the whole to another; reports nothing without a function."""

    tell: Progress | None
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if self.tell is not None and not callable(self.tell):
            raise InputError(f"progress must be a function of the share that is done, not {self.tell!r}")

    def __call__(self, done: float) -> None:
        """Report that this share of the part is done."""
        if self.tell is not None:
            self.tell(self.at(done))

    def at(self, share: float) -> float:
        """Return the share of the whole work at a share of this part."""
        return self.start + share * (self.end - self.start)

    def split(self, *shares: float) -> list[Stretch]:
        """Return consecutive parts that end at these shares, and the rest."""
        ends = [0.0, *shares, 1.0]
        return [replace(self, start=self.at(a), end=self.at(b)) for a, b in pairwise(ends)]
