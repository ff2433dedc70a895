"""docs/results/accuracy.md and its pictures, from the record alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trade_off import Point, Series, trade_off

from accuracy.methods import METHODS
from accuracy.statistics import Interval, interval, paired

Line = dict[str, Any]
#: Task, network, cost, accuracy of the dense network.
Case = tuple[str, str, str, float]
#: A case, with method and budget.
Key = tuple[str, str, str, float, str, float]
OURS = "ours"
#: A row says so where its cost is further than this from the target. Chosen, not measured.
_MISSED = 0.01
#: Drawn in the pictures; the rest is in the tables.
_DRAWN = (OURS, "uniform, eliminated and repaired", "uniform L2", "Torch-Pruning, isomorphic", "soft masks")
_COSTS = {"latency": "latency", "flops": "FLOPs"}
_INTRO = """# Accuracy

The most accurate network at a share of the latency or of the FLOPs, by training budget: a share of the optimiser
steps that the dense network was trained for. Networks for 20 × 20 images of letters and digits in typefaces that
training never saw, 47 classes, coloured and distorted on noisy grounds (*on digits*: handwritten ones of scikit-learn
in noise, 16 × 16 pixels); trained to their end before they are pruned. All methods choose by the same 640 images,
train on the same images in the same order, and learn from the dense network as well as from labels, but where a row
says otherwise. Each has the best learning rate of those tried with it (listed below), by images of the training set's
kind; accuracies are of 4,000 test images. Seeds are of calibration images and training; the dense network is one.

*Latency* is measured in ONNX Runtime, one thread, 16 images at a time, in turns with the dense network. Every method
is asked for less until its network is within the target, and keeps multiples of eight channels, as other widths are
slow. Where one measures less by more than a point, its row says so. Of the *FLOPs* a rival takes whole
channels.

Brackets hold 95% intervals over paired seeds, in points; with one seed there is none.
Ours is from when worths were gathered twice ([the difference](../explanations/experiments.md#without-training)),
latencies are one processor's ([another's](without_training.md)).
[What it means](../explanations/accuracy.md).

`tools/bench/accuracy/` made the record `docs/records/accuracy.jsonl`, this page and its pictures.
"""


def print_tables(lines: Sequence[Line]) -> None:
    """The tables, to the terminal."""
    print("\n".join(_body(_Found(lines))))


def write_document(lines: Sequence[Line], folder: Path) -> None:
    """accuracy.md, and a picture a network and budget."""
    found, shown = _Found(lines), []
    for old in folder.glob("accuracy_*.svg"):
        old.unlink()
    for network, budget in found.pictures():
        name = f"accuracy_{network}_{round(100 * budget)}.svg"
        (folder / name).write_text(str(_picture(found, network, budget)) + "\n", encoding="utf-8")
        shown.append(f"![{network}, a budget of {budget:.0%}: accuracy over measured speed-up]({name})\n")
    text = "\n".join([_INTRO, *_body(found), *shown])
    (folder / "accuracy.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")


class _Found:
    """Runs at the learning rate that is each method's best."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = [line for line in lines if line["kind"] == "run"]
        rates: dict[Key, Line] = {}
        self.swept: dict[Key, set[float]] = {}
        least = min(line["target"] for line in self.lines)
        for line in self.lines:
            if line["seed"] == 0 and line["target"] == least:
                key = _key(line)
                self.swept.setdefault(key, set()).add(line["rate"])
                if key not in rates or line["judged"] > rates[key]["judged"]:
                    rates[key] = line
        self.rates = {key: line["rate"] for key, line in rates.items()}
        self.seeds: dict[tuple[Key, float], dict[int, Line]] = {}
        for line in self.lines:
            if line["rate"] == self.rates.get(_key(line)):
                self.seeds.setdefault((_key(line), line["target"]), {})[line["seed"]] = line

    def of(self, key: Key, target: float) -> dict[int, Line]:
        """The runs of a case, by seed."""
        return self.seeds.get((key, target), {})

    def cases(self) -> list[Case]:
        """The cases of all runs, latencies first."""
        found = dict.fromkeys(_case(line) for line in self.lines)
        return sorted(found, key=lambda case: case[2] != "latency")

    def values(self, name: str, of: Case) -> list[float]:
        """What the runs of a case have of a field, ascending."""
        return sorted({line[name] for line in self.lines if _case(line) == of})

    def pictures(self) -> Iterator[tuple[str, float]]:
        """Network and budget of each picture: those of more than one target of the latency."""
        for case in self.cases():
            for budget in self.values("budget", case) if case[2] == "latency" else ():
                targets = self.values("target", case)
                if sum(bool(self.of((*case, OURS, budget), target)) for target in targets) > 1:
                    yield case[1], budget


def _case(line: Line) -> Case:
    return line["task"], line["network"], line["cost"], line["dense"]


def _title(case: Case) -> str:
    return case[1] if case[0] == "glyphs" else f"{case[1]} on {case[0]}"


def _key(line: Line) -> Key:
    return *_case(line), line["method"], line["budget"]


def _body(found: _Found) -> list[str]:
    body = []
    for case in found.cases():
        for target in sorted(found.values("target", case), reverse=True):
            budgets = found.values("budget", case)
            body += [
                f"## {_title(case)}, {target:.0%} of the {_COSTS[case[2]]}: {case[3]:.1%} before",
                "",
                "| | " + " | ".join(f"budget {budget:.0%}" for budget in budgets) + " |",
                "|---" * (len(budgets) + 1) + "|",
            ]
            for method in METHODS:
                cells = [_cell(found, (*case, method, budget), target) for budget in budgets]
                if any(cell != "–" for cell in cells):
                    body.append(f"| {method} | " + " | ".join(cells) + " |")
            body.append("")
    return [*body, *_rates(found)]


def _share(line: Line) -> float:
    """The share of the cost that was aimed at."""
    return float(line["latency_share" if line["cost"] == "latency" else "flops_share"])


def _cell(found: _Found, key: Key, target: float) -> str:
    """Mean accuracy; for a rival, how far it lies from ours over the seeds that both have."""
    mine = found.of(key, target)
    if not mine:
        return "–"
    accuracy = interval([line["accuracy"] for line in mine.values()])
    text = f"{accuracy.mean:.1%}"
    share = interval([_share(line) for line in mine.values()]).mean
    if abs(share - target) > _MISSED:
        text += f" at {share:.0%} of the {_COSTS[key[2]]}"
    if key[4] == OURS:
        return f"**{text}** ({accuracy.count} seed{'s' * (accuracy.count > 1)})"
    ours = found.of((*key[:4], OURS, key[5]), target)
    apart = paired(*({seed: line["accuracy"] for seed, line in runs.items()} for runs in (mine, ours)))
    return text if apart is None else f"{text}, {_points(apart)}"


def _points(apart: Interval) -> str:
    mean = f"{100 * apart.mean:+.1f}"
    return mean if apart.count < 2 else f"{mean} ({100 * apart.low:+.1f} to {100 * apart.high:+.1f})"


def _rates(found: _Found) -> list[str]:
    """Which learning rate was each method's best, of those tried."""
    rows = ["## Learning rates", "", "The best of those tried, by network, cost and budget:", ""]
    columns = list(dict.fromkeys((key[:4], key[5]) for key in found.rates if key[5]))
    heads = [f"{_title(case)}, {_COSTS[case[2]]}, {budget:.0%}" for case, budget in columns]
    rows += ["| | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in METHODS:
        cells = []
        for case, budget in columns:
            tried = sorted(found.swept.get((*case, method, budget), ()))
            best = f"{found.rates[(*case, method, budget)]:g} of " if tried else "–"
            cells.append(best + ", ".join(f"{rate:g}" for rate in tried))
        if any(cell != "–" for cell in cells):
            rows.append(f"| {method} | " + " | ".join(cells) + " |")
    return [*rows, ""]


def _picture(found: _Found, network: str, budget: float) -> object:
    case = next(case for case in found.cases() if case[1:3] == (network, "latency"))
    series = []
    for method in _DRAWN:
        points = []
        for target in sorted(found.values("target", case), reverse=True):
            runs = list(found.of((*case, method, budget), target).values())
            if runs:
                share = sum(_share(line) for line in runs) / len(runs)
                values = [line["accuracy"] for line in runs]
                mean = sum(values) / len(values)
                label = f"{method}, {share:.0%} of the latency: {mean:.1%}"
                points.append(Point(1 / share, mean, min(values), max(values), label))
        series.append(Series(method, tuple(points)))
    dense = case[3]
    series.append(Series("dense", (Point(1.0, dense, dense, dense, f"dense: {dense:.1%}"),)))
    title = f"{network}, a budget of {budget:.0%}: bars are the range over seeds"
    return trade_off(series, title, "measured speed-up")
