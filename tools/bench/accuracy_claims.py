"""The claims that the accuracy benchmark tests, and what its record says of each.

A claim is about the difference of two methods' accuracies at the end of training, at the same target of the same
cost, seed by seed: that it is positive ("better"), less than a point either way ("alike"), or not nothing
("different").
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accuracy_methods import INTERVALS, RIVALS, SCHEDULES, Case
from accuracy_statistics import CONFIRMED, UNKNOWN, Interval, Kind, paired, verdict

DEFAULT, SCALED = "soft", "soft + scaling"
#: A side that costs this much more than the other, relatively, may owe its accuracy to that.
UNEQUAL = 0.1
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Claim:
    """``ours`` against ``theirs`` at every target that both were run at."""

    number: int
    text: str
    kind: Kind
    ours: str
    theirs: str


@dataclass(frozen=True)
class Finding:
    """A claim at one target: the mean paired difference of accuracies, and what follows.

    ``ours`` and ``theirs``: mean cost that was reached, as a share of the dense network's.
    """

    claim: Claim
    cost: str
    target: float
    difference: Interval | None
    ours: float
    theirs: float

    @property
    def verdict(self) -> str:
        """As the interval says, unless the better side also costs clearly more."""
        said = verdict(self.difference, self.claim.kind)
        dearer = self.ours if said == CONFIRMED else self.theirs
        cheaper = self.theirs if said == CONFIRMED else self.ours
        if self.claim.kind == "better" and said != UNKNOWN and dearer > (1 + UNEQUAL) * cheaper:
            return UNKNOWN
        return said


CLAIMS = (
    Claim(1, "batch-norm scaling helps soft masks", "better", SCALED, DEFAULT),
    Claim(1, "soft masks beat permanent ones, neither with scaling", "better", DEFAULT, "permanent"),
    Claim(1, "soft masks with scaling beat permanent ones without", "better", SCALED, "permanent"),
    Claim(1, "soft masks beat permanent ones, both with scaling", "better", SCALED, "permanent + scaling"),
    Claim(
        1,
        "run as published: scaling helps soft masks",
        "better",
        "as published",
        "as published, no scaling",
    ),
    Claim(
        1,
        "run as published: soft with scaling beats permanent",
        "better",
        "as published",
        "as published, permanent",
    ),
    *(Claim(2, f"it beats: {rival}", "better", DEFAULT, rival) for rival in RIVALS),
    Claim(3, "layers are better not pruned", "better", SCALED, "layer pruning"),
    *(
        Claim(4, f"{name} changes accuracy by less than a point", "alike", name, DEFAULT)
        for name in SCHEDULES
    ),
    *(Claim(4, f"{name} changes accuracy", "different", name, DEFAULT) for name in INTERVALS),
    Claim(5, "coupled allocation beats the paper's", "better", DEFAULT, "paper allocation"),
    Claim(5, "worth by width beats importances added up", "better", DEFAULT, "importances added up"),
    Claim(5, "this library's defaults beat the method as published", "better", DEFAULT, "as published"),
    Claim(6, "the chain rule for γ beats the direct one", "better", SCALED, "direct γ gradient"),
)


def accuracies(lines: Lines, case: Case, when: str = "end") -> dict[int, float]:
    """Test accuracies of a case by seed, at the "end" or "at_stop"; runs without one are left out."""
    found = {}
    for line in runs(lines, case):
        value = line["accuracy"][when]
        if value is not None:
            found[line["seed"]] = value
    return found


def runs(lines: Lines, case: Case) -> list[Mapping[str, Any]]:
    """The finished runs of a case, by seed."""
    found = [line for line in lines if "accuracy" in line and case_of(line) == case]
    return sorted(found, key=lambda line: int(line["seed"]))


def case_of(line: Mapping[str, Any]) -> Case:
    """The case that a line of the record is about."""
    return Case(line["method"], line["cost"], line["target"])


def cases_in(lines: Iterable[Mapping[str, Any]]) -> list[Case]:
    """The cases with a finished run, each once."""
    return list(dict.fromkeys(case_of(line) for line in lines if "accuracy" in line))


def findings(lines: Lines) -> list[Finding]:
    """What the record says of each claim, at each target that both sides were run at, FLOPs first."""
    present = cases_in(lines)
    settings = sorted({(case.cost, case.target) for case in present}, key=lambda s: (s[0] != "flops", -s[1]))
    found = []
    for claim in CLAIMS:
        for cost, target in settings:
            ours, theirs = (Case(name, cost, target) for name in (claim.ours, claim.theirs))
            if ours in present and theirs in present:
                difference = paired(accuracies(lines, ours), accuracies(lines, theirs))
                shares = mean_cost(lines, ours), mean_cost(lines, theirs)
                found.append(Finding(claim, cost, target, difference, *shares))
    return found


def mean_cost(lines: Lines, case: Case) -> float:
    """The mean share of the dense cost that a case's runs reached: of FLOPs, or of measured latency."""
    found = runs(lines, case)
    if case.cost == "flops":
        return statistics.fmean(line["flops_share"] for line in found)
    return statistics.fmean(line["latency"]["share"] for line in found)


def untested(lines: Lines) -> list[Claim]:
    """Claims without a target at which both sides were run."""
    tested = {finding.claim for finding in findings(lines)}
    return [claim for claim in CLAIMS if claim not in tested]
