"""Tables, pictures and the page of the benchmark without training, from its record alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from trade_off import Point, Series, svg_file, trade_off
from without_training_methods import METHODS

from smcp_fx.report.svg import Panel, dot, line, path, text

Line = dict[str, Any]
Lines = Sequence[Line]
#: What is compared, and drawn in the pictures.
COMPARED = (
    "ours",
    "ours without repair",
    "uniform, eliminated and repaired",
    "Torch-Pruning",
    "uniform L2",
)
_COSTS = {"flops": "FLOPs", "latency": "measured latency"}
#: A share of the cost this near to the target needs no word.
_NEAR = 0.015
_INTRO = """# Without training

What is left of a trained network when channels are removed and no optimiser takes a step
([the guide](../guides/without_training.md)). {networks} networks for 20 × 20 images of letters and digits in
typefaces that training never saw, 47 classes, coloured and distorted on noisy grounds; {images} labelled images to
calibrate by, 4,000 to test on. Cells are means over seeds of the calibration images, with their range.
*Uniform, eliminated and repaired* keeps the same share of every group, chosen by our elimination, with our repair;
the other rivals get their batch norms re-estimated on the same images. Torch-Pruning is its global pruner with group
Taylor importance. By FLOPs, ours keeps multiples of eight channels, as `compress` does by default, and rivals keep
any number.
{latency}
`tools/bench/without_training.py` made the record `docs/records/without_training.jsonl`, this page and its pictures.
"""
_LATENCY = """
Latencies are of emitted ONNX files in ONNX Runtime, one thread, batches of 16, measured in turns with the dense
network. Every method narrows until its file is within the target. All keep multiples of eight channels there, as
other widths are slow; where many layers step at once, a network may cost less than asked for, and its cell says how
much. Ours are {mean:.1f} points off on average, {most:.1f} at most ({count} networks).
"""


def print_tables(lines: Lines) -> None:
    """The tables, to the terminal."""
    print("\n".join(_body(lines)))


def write_document(lines: Lines, folder: Path) -> None:
    """without_training.md, and its pictures."""
    main = _main(lines)
    images = " or ".join(str(count) for count in sorted({one["images"] for one in main}))
    count = ("No", "One", "Two", "Three")[len(_networks(main))]
    intro = _INTRO.format(networks=count, images=images, latency=_latency_words(main))
    pictures = {
        f"without_training_{network}_{cost}": (network, cost)
        for cost in _COSTS
        for network in _networks(main)
        if _select(main, network, cost)
    }
    shown = []
    for name, (network, cost) in pictures.items():
        (folder / f"{name}.svg").write_text(str(_picture(main, network, cost)), encoding="utf-8")
        shown.append(f"![{network}: accuracy over {_COSTS[cost]} saved]({name}.svg)\n")
    if _varied(lines):
        (folder / "without_training_images.svg").write_text(_images_picture(lines), encoding="utf-8")
    (folder / "without_training.md").write_text(
        "\n".join([intro, *shown, *_body(lines)]).rstrip() + "\n", encoding="utf-8"
    )


def _body(lines: Lines) -> list[str]:
    main, found = _main(lines), []
    for network in _networks(main):
        dense = next(one["dense"] for one in main if one["network"] == network)
        found += [f"## {network}: {dense:.1%} before", ""]
        for cost, name in _COSTS.items():
            mine = _select(main, network, cost)
            if mine:
                found += [*_table(mine, name), ""]
    if _varied(lines):
        found += [*_images_table(lines), ""]
    costs = [one for one in lines if one["kind"] == "cost"]
    return found + (_cost_table(costs) if costs else [])


def _table(lines: Lines, cost: str) -> list[str]:
    """Methods down, targets across."""
    targets = sorted({one["target"] for one in lines}, reverse=True)
    seeds = len({one["seed"] for one in lines})
    head = f"{cost}, {seeds} seed{'s' * (seeds > 1)}"
    found = [
        f"| {head} | " + " | ".join(f"{t:.0%}" for t in targets) + " |",
        "|---" * (len(targets) + 1) + "|",
    ]
    for method in METHODS:
        if any(one["method"] == method for one in lines):
            cells = [_cell(lines, method, target) for target in targets]
            found.append(f"| {method} | " + " | ".join(cells) + " |")
    return found


def _latency_words(main: Lines) -> str:
    off = [
        abs(one["share"] - one["target"])
        for one in main
        if one["cost"] == "latency" and one["method"] == "ours"
    ]
    if not off:
        return ""
    return _LATENCY.format(count=len(off), mean=100 * np.mean(off), most=100 * max(off))


# ---- numbers of images ------------------------------------------------------------------------------------


def _varied(lines: Lines) -> Lines:
    main = _main(lines)
    return [one for one in lines if one["kind"] == "run" and one not in main]


def _images_table(lines: Lines) -> list[str]:
    varied = _varied(lines)
    counts = sorted({one["images"] for one in varied})
    found = [
        "## How many images",
        "",
        f"{varied[0]['network']} at {varied[0]['target']:.0%} of the FLOPs, one seed:",
        "",
        "![accuracy over the number of calibration images](without_training_images.svg)",
        "",
        "| | " + " | ".join(f"{count:,}" for count in counts) + " |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for labels in (True, False):
        known = {one["images"]: f"{one['accuracy']:.1%}" for one in varied if one["labels"] == labels}
        cells = [known.get(count, "–") for count in counts]
        found.append(f"| {'with' if labels else 'without'} labels | " + " | ".join(cells) + " |")
    return found


def _images_picture(lines: Lines) -> str:
    """Accuracy over the number of images, doubled from mark to mark, with labels and without."""
    varied = _varied(lines)
    counts = sorted({one["images"] for one in varied})
    low = 100 * min(one["accuracy"] for one in varied)
    high = 100 * varied[0]["dense"]
    panel = Panel(56, 52, 560, 260, (0, math.log2(counts[-1] / counts[0])), (low - 1, high + 1))
    title = f"{varied[0]['network']} at {varied[0]['target']:.0%} of the FLOPs"
    body = [text(panel.left, 18, title, "heading"), *panel.y_axis("test accuracy, %", about=6)]
    body.append(line(panel.left, panel.bottom, panel.right, panel.bottom, "baseline"))

    def across(count: int) -> float:
        return panel.x(math.log2(count / counts[0]))

    for count in counts:
        body.append(text(across(count), panel.bottom + 18, f"{count:,}", "tick", "middle"))
    body.append(
        text((panel.left + panel.right) / 2, panel.bottom + 38, "calibration images", "label", "middle")
    )
    body.append(line(panel.left, panel.y(high), panel.right, panel.y(high), "grid"))
    body.append(text(panel.right, panel.y(high) - 6, f"dense, {high:.1f}%", "tick", "end"))
    for index, labels in enumerate((True, False)):
        points = sorted((x["images"], 100 * x["accuracy"]) for x in varied if x["labels"] == labels)
        places = [(across(count), panel.y(accuracy)) for count, accuracy in points]
        body.append(path(places, f"curve s{index}"))
        name = f"{'with' if labels else 'without'} labels"
        for (x, y), (count, accuracy) in zip(places, points, strict=True):
            body.append(dot(x, y, 4.2, f"mark s{index}", f"{name}, {count:,} images: {accuracy:.1f}%"))
        body.append(text(panel.right - 90, panel.bottom - 40 + 20 * index, name, f"key{index}"))
        body.append(line(panel.right - 118, panel.bottom - 44 + 20 * index, panel.right - 98,
                         panel.bottom - 44 + 20 * index, f"curve s{index}"))  # fmt: skip
    return str(
        svg_file(panel.bottom + 50, panel.bottom + 50, f"{title}: accuracy over calibration images", body)
    )


# ---- time and memory --------------------------------------------------------------------------------------


def _cost_table(costs: Lines) -> list[str]:
    parts = (
        "gather_importance",
        "solve_best",
        "repair",
        "elimination alone",
        "Torch-Pruning, Taylor",
    )
    found = [
        "## What it takes",
        "",
        "In forward passes over the images: CPU time over that of running the model on all of them, random weights,",
        "images of noise at 224 pixels (`tools/bench/without_training_cost.py`). Beside the parts of `compress`:",
        "inputs gathered and channels ordered without gradients (*elimination*), and Torch-Pruning's gradients and",
        "step (*Taylor*). Part of the time does not grow with the images.",
        "",
        "| | FLOPs | images | threads | gather | candidates | repair | elimination | Taylor | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in costs:
        took, memory = one["cpu_seconds"], one["peak_mebibytes"]
        passes = "".join(f"{took[part] / took['pass']:.1f} | " for part in parts)
        found.append(
            f"| {one['model']} | {one['target']:.0%} | {one['images']} | {one['threads']} | {passes}"
            f"{memory['repair'] / 1024:.1f} GiB |"
        )
    return found


# ---- parts of the record ----------------------------------------------------------------------------------


def _main(lines: Lines) -> list[Line]:
    """Runs that compare methods: of the number of images that most have."""
    lines = [one for one in lines if one["kind"] == "run"]
    counts = [one["images"] for one in lines]
    usual = max(set(counts), key=counts.count)
    return [one for one in lines if one["images"] == usual]


def _networks(lines: Lines) -> list[str]:
    return list(dict.fromkeys(one["network"] for one in lines))


def _select(lines: Lines, network: str, cost: str) -> list[Line]:
    return [one for one in lines if (one["network"], one["cost"]) == (network, cost)]


def _of(lines: Lines, method: str, target: float) -> list[Line]:
    return [one for one in lines if (one["method"], one["target"]) == (method, target)]


def _cell(lines: Lines, method: str, target: float) -> str:
    """Mean accuracy, the range over the seeds, and the share of the cost where it is not the target."""
    runs = _of(lines, method, target)
    found = [100 * one["accuracy"] for one in runs]
    if not found:
        return "–"
    spread = "" if len(found) == 1 else f" ({min(found):.1f}–{max(found):.1f})"
    share = float(np.mean([one["share"] for one in runs]))
    told = f" at {share:.0%}" if abs(share - target) > _NEAR else ""
    return f"{np.mean(found):.1f}%{spread}{told}"


def _picture(lines: Lines, network: str, cost: str) -> object:
    mine, series = _select(lines, network, cost), []
    name = _COSTS[cost]
    for method in COMPARED:
        points = []
        for target in sorted({one["target"] for one in mine}, reverse=True):
            found = [one["accuracy"] for one in _of(mine, method, target)]
            if found:
                share = float(np.mean([one["share"] for one in _of(mine, method, target)]))
                label = f"{method}, {share:.0%} of the {name}: {np.mean(found):.1%}"
                points.append(Point(1 / share, float(np.mean(found)), min(found), max(found), label))
        series.append(Series(method, tuple(points)))
    dense = mine[0]["dense"]
    series.append(Series("dense", (Point(1.0, dense, dense, dense, f"dense: {dense:.1%}"),)))
    title = f"{network}, no training: bars are the range over seeds"
    return trade_off(series, title, "dense FLOPs over FLOPs" if cost == "flops" else "measured speed-up")
