"""docs/results/accuracy.md and its pictures, from the record alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accuracy.methods import METHODS
from accuracy.statistics import Interval, interval, paired
from smcp_fx.report.trade_off import Point, Series, trade_off

Line = dict[str, Any]
Key = tuple[str, str, str, float, float]
OURS = "ours"
#: Of the FLOPs, what a method may be above its target before that is told.
_MISSED = 0.01
_INTRO = """# Accuracy

The most accurate network at a share of the FLOPs, by training budget: a share of the optimiser steps that the dense
network was trained for. Networks for 20 × 20 images of letters and digits in typefaces that training never saw, 47
classes, coloured and distorted on noisy grounds; trained to their end before they are pruned. All methods choose by
the same 640 images, train on the same images in the same order, and learn from the dense network as well as from
labels, but where a row says otherwise. Each has the best learning rate of those tried with it (listed below), by
images of the training set's kind; accuracies are of 4,000 test images. Seeds are of the calibration images and of
training; the dense network is one.

Brackets hold 95 % intervals over paired seeds, in points; with one seed there is none.
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
        shown.append(f"![{network}, a budget of {budget:.0%}: accuracy over FLOPs saved]({name})\n")
    text = "\n".join([_INTRO, *_body(found), *shown])
    (folder / "accuracy.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")


class _Found:
    """Runs at the learning rate that is each method's best."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = [line for line in lines if line["kind"] == "run"]
        rates: dict[tuple[str, str, str, float], Line] = {}
        self.swept: dict[tuple[str, str, str, float], set[float]] = {}
        for line in self.lines:
            key = (line["task"], line["network"], line["method"], line["budget"])
            if line["seed"] == 0 and line["target"] == self.lines[0]["target"]:
                self.swept.setdefault(key, set()).add(line["rate"])
                if key not in rates or line["judged"] > rates[key]["judged"]:
                    rates[key] = line
        self.rates = {key: line["rate"] for key, line in rates.items()}
        self.seeds: dict[Key, dict[int, Line]] = {}
        for line in self.lines:
            key = (line["task"], line["network"], line["method"], line["budget"])
            if line["rate"] == self.rates.get(key):
                self.seeds.setdefault((*key, line["target"]), {})[line["seed"]] = line

    def of(self, task: str, network: str, method: str, budget: float, target: float) -> dict[int, Line]:
        """The runs of a case, by seed."""
        return self.seeds.get((task, network, method, budget, target), {})

    def networks(self) -> list[tuple[str, str]]:
        """(task, network) of all runs."""
        return list(dict.fromkeys((line["task"], line["network"]) for line in self.lines))

    def values(self, name: str, network: str) -> list[float]:
        """What the runs of a network have of a field, ascending."""
        return sorted({line[name] for line in self.lines if line["network"] == network})

    def pictures(self) -> Iterator[tuple[str, float]]:
        """Network and budget of each picture: those of more than one target."""
        for task, network in self.networks():
            for budget in self.values("budget", network):
                if (
                    sum(bool(self.of(task, network, OURS, budget, t)) for t in self.values("target", network))
                    > 1
                ):
                    yield network, budget


def _body(found: _Found) -> list[str]:
    body = []
    for task, network in found.networks():
        dense = next(
            line["dense"] for line in found.lines if (line["task"], line["network"]) == (task, network)
        )
        for target in sorted(found.values("target", network), reverse=True):
            budgets = found.values("budget", network)
            body += [
                f"## {network}, {target:.0%} of the FLOPs: {dense:.1%} before",
                "",
                "| | " + " | ".join(f"budget {budget:.0%}" for budget in budgets) + " |",
                "|---" * (len(budgets) + 1) + "|",
            ]
            for method in METHODS:
                cells = [_cell(found, task, network, method, budget, target) for budget in budgets]
                if any(cell != "–" for cell in cells):
                    body.append(f"| {method} | " + " | ".join(cells) + " |")
            body.append("")
    return [*body, *_rates(found)]


def _cell(found: _Found, task: str, network: str, method: str, budget: float, target: float) -> str:
    """Mean accuracy; for a rival, how far it lies from ours over the seeds that both have."""
    mine = found.of(task, network, method, budget, target)
    if not mine:
        return "–"
    accuracy = interval([line["accuracy"] for line in mine.values()])
    text = f"{accuracy.mean:.1%}".replace("%", " %")
    share = interval([line["flops_share"] for line in mine.values()]).mean
    if share > target + _MISSED:
        text += f" at {share:.0%} of the FLOPs"
    if method == OURS:
        return f"**{text}** ({accuracy.count} seed{'s' * (accuracy.count > 1)})"
    ours = found.of(task, network, OURS, budget, target)
    apart = paired(*({seed: line["accuracy"] for seed, line in runs.items()} for runs in (mine, ours)))
    return text if apart is None else f"{text}, {_points(apart)}"


def _points(apart: Interval) -> str:
    mean = f"{100 * apart.mean:+.1f}"
    return mean if apart.count < 2 else f"{mean} ({100 * apart.low:+.1f} to {100 * apart.high:+.1f})"


def _rates(found: _Found) -> list[str]:
    """Which learning rate was each method's best, of those tried."""
    rows = ["## Learning rates", "", "The best of those tried, by network and budget:", ""]
    columns = list(dict.fromkeys((key[1], key[3]) for key in found.rates if key[3]))
    rows += ["| | " + " | ".join(f"{network}, {budget:.0%}" for network, budget in columns) + " |"]
    rows += ["|---" * (len(columns) + 1) + "|"]
    for method in METHODS:
        cells = []
        for network, budget in columns:
            keys = [key for key in found.rates if (key[1], key[2], key[3]) == (network, method, budget)]
            tried = ", ".join(f"{rate:g}" for rate in sorted(found.swept[keys[0]])) if keys else ""
            cells.append(f"{found.rates[keys[0]]:g} of {tried}" if keys else "–")
        if any(cell != "–" for cell in cells):
            rows.append(f"| {method} | " + " | ".join(cells) + " |")
    return [*rows, ""]


def _picture(found: _Found, network: str, budget: float) -> object:
    task = next(task for task, name in found.networks() if name == network)
    series = []
    for method in METHODS:
        points = []
        for target in sorted(found.values("target", network), reverse=True):
            runs = list(found.of(task, network, method, budget, target).values())
            if runs:
                share = sum(line["flops_share"] for line in runs) / len(runs)
                values = [line["accuracy"] for line in runs]
                mean = sum(values) / len(values)
                label = f"{method}, {share:.0%} of the FLOPs: {mean:.1%}"
                points.append(Point(1 / share, mean, min(values), max(values), label))
        series.append(Series(method, tuple(points)))
    dense = next(line["dense"] for line in found.lines if line["network"] == network)
    series.append(Series("dense", (Point(1.0, dense, dense, dense, f"dense: {dense:.1%}"),)))
    title = f"{network}, a budget of {budget:.0%}: bars are the range over seeds"
    return trade_off(series, title, "dense FLOPs over FLOPs")
