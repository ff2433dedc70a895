"""The record of one solve."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from smcp_fx.texts import amount, table


@dataclass(frozen=True)
class Solve:
    """One solve: its target, cost, importance kept, and changes.

    Costs are in the unit of the cost model. ``importance_kept``: the share of all importance that is kept;
    ``bound`` adds the most that any choice within the target could gain beyond it (`smcp_fx.pruning.worth`).
    ``changed``: units whose mask changed, by group; ``returned``: units that came back; ``reverted``: changed
    units that the previous solve had changed, too; ``units``: the number that may change. ``gradient_norm``:
    the norm of all gradients at this step; ``skipped``: steps since the last solve whose gradients were not
    finite; ``scales``: the mean scale of each batch norm; ``masks``: a hash of the masks, equal on all ranks.
    """

    step: int
    target: float
    cost: float
    importance_kept: float
    bound: float
    changed: dict[str, int]
    returned: int
    units: int
    seconds: float
    reverted: int = 0
    gradient_norm: float | None = None
    skipped: int = 0
    scales: dict[str, float] = field(default_factory=dict)
    masks: str = ""

    @property
    def changed_share(self) -> float:
        """Share of the free units whose mask changed."""
        return sum(self.changed.values()) / self.units if self.units else 0.0

    @property
    def reverted_share(self) -> float:
        """Share of the free units whose mask changed back."""
        return self.reverted / self.units if self.units else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, for a logger: "cost", "changed/layer1.0.conv1", "scale/bn1" etc."""
        values = {
            "target": self.target,
            "cost": self.cost,
            "importance_kept": self.importance_kept,
            "importance_bound": self.bound,
            "changed_share": self.changed_share,
            "reverted_share": self.reverted_share,
            "returned": float(self.returned),
            "skipped_steps": float(self.skipped),
            "seconds": self.seconds,
        }
        if self.gradient_norm is not None:
            values["gradient_norm"] = self.gradient_norm
        values |= {f"changed/{name}": float(count) for name, count in self.changed.items()}
        values |= {f"scale/{name}": scale for name, scale in self.scales.items()}
        return values


def table_of(solves: Iterable[Solve], unit: str) -> str:
    """Return a table of solves; costs are in ``unit``."""
    rows = [
        (str(s.step), amount(s.target, unit), amount(s.cost, unit), f"{s.importance_kept:.1%}",
         f"{s.changed_share:.1%}")
        for s in solves
    ]  # fmt: skip
    return table(("step", "target", "cost", "importance kept", "masks changed"), rows)
