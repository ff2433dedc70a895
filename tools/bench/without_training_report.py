"""Tables, pictures and the page of the benchmark without training, from its record alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from without_training_methods import METHODS

from smcp_fx.report.trade_off import Point, Series, trade_off

Line = dict[str, Any]
Lines = Sequence[Line]
#: Drawn in the pictures; the rest is in the tables.
_DRAWN = ("ours", "ours without repair", "Torch-Pruning", "uniform L2", "random")
_INTRO = """# Without training

What is left of a trained network when channels are removed and no optimiser takes a step
([the guide](../guides/without_training.md)). Three networks for 20 × 20 images of letters and digits in typefaces
that training never saw, 47 classes, coloured and distorted on noisy grounds; {images} calibration images with labels,
of as many seeds as each heading says; 4,000 test images. Shares are of the FLOPs. All rivals get their batch norms
re-estimated on the same images. Torch-Pruning is its global pruner with group Taylor importance.

`tools/bench/without_training.py` made the record `docs/records/without_training.jsonl`, this page and its pictures.
"""


def print_tables(lines: Lines) -> None:
    """The tables, to the terminal."""
    print("\n".join(_body(lines)))


def write_document(lines: Lines, folder: Path) -> None:
    """without_training.md, and a picture a network."""
    main = _main(lines)
    images = " or ".join(str(count) for count in sorted({line["images"] for line in main}))
    intro = _INTRO.format(images=images)
    pictures = {f"without_training_{task}_{network}": (task, network) for task, network in _networks(main)}
    for name, (task, network) in pictures.items():
        (folder / f"{name}.svg").write_text(str(_picture(main, task, network)), encoding="utf-8")
    shown = [
        f"![{network}: accuracy over FLOPs saved]({name}.svg)\n" for name, (_, network) in pictures.items()
    ]
    (folder / "without_training.md").write_text(
        "\n".join([intro, *shown, *_body(lines)]) + "\n", encoding="utf-8"
    )


def _body(lines: Lines) -> list[str]:
    main, found = _main(lines), []
    for task, network in _networks(main):
        mine = [line for line in main if (line["task"], line["network"]) == (task, network)]
        targets = sorted({line["target"] for line in mine}, reverse=True)
        found += [
            f"## {network}: {mine[0]['dense']:.1%} before",
            "",
            f"Seeds: {len({line['seed'] for line in mine})}. In brackets: the range over them.",
            "",
            "| | " + " | ".join(f"{target:.0%}" for target in targets) + " |",
            "|---" * (len(targets) + 1) + "|",
        ]
        for method in METHODS:
            if any(line["method"] == method for line in mine):
                cells = [_cell(mine, method, target) for target in targets]
                found.append(f"| {method} | " + " | ".join(cells) + " |")
        found.append("")
    varied = [line for line in lines if line["kind"] == "run" and line not in main]
    if varied:
        counts = sorted({line["images"] for line in varied})
        first = varied[0]
        found += [
            "## How many images",
            "",
            f"{first['network']} at {first['target']:.0%} of the FLOPs, one seed:",
            "",
            "| | " + " | ".join(f"{count:,}" for count in counts) + " |",
            "|---" * (len(counts) + 1) + "|",
        ]
        for labels in (True, False):
            cells = [
                " ".join(
                    f"{x['accuracy']:.1%}" for x in varied if (x["images"], x["labels"]) == (count, labels)
                )
                or "–"
                for count in counts
            ]
            found.append(f"| {'with' if labels else 'without'} labels | " + " | ".join(cells) + " |")
        found.append("")
    costs = [line for line in lines if line["kind"] == "cost"]
    if costs:
        found += [
            "## What it takes",
            "",
            "CPU seconds of one thread (`tools/bench/without_training_cost.py`):",
            "",
        ]
        found += ["| | images | gather | repair | rest | most memory |", "|---|---|---|---|---|---|"]
    for line in costs:
        took = line["cpu_seconds"]
        gather, fit = took["gather_importance"], took["repair"]
        found.append(
            f"| {line['model']}, {line['side']} pixels | {line['images']} | {gather:.0f} s | {fit:.0f} s | "
            f"{sum(took.values()) - gather - fit:.0f} s | {max(line['peak_mebibytes'].values()) / 1024:.1f} GiB |"
        )
    return found


def _main(lines: Lines) -> list[Line]:
    """Runs that compare methods: of the number of images that most have."""
    lines = [line for line in lines if line["kind"] == "run"]
    counts = [line["images"] for line in lines]
    usual = max(set(counts), key=counts.count)
    return [line for line in lines if line["images"] == usual]


def _networks(lines: Lines) -> list[tuple[str, str]]:
    return list(dict.fromkeys((line["task"], line["network"]) for line in lines))


def _of(lines: Lines, method: str, target: float) -> list[Line]:
    return [line for line in lines if (line["method"], line["target"]) == (method, target)]


def _cell(lines: Lines, method: str, target: float) -> str:
    """Mean accuracy, and the range over the seeds."""
    found = [100 * line["accuracy"] for line in _of(lines, method, target)]
    if not found:
        return "–"
    spread = "" if len(found) == 1 else f" ({min(found):.1f}–{max(found):.1f})"
    return f"{np.mean(found):.1f} %{spread}"


def _picture(lines: Lines, task: str, network: str) -> object:
    mine = [line for line in lines if (line["task"], line["network"]) == (task, network)]
    series = []
    for method in _DRAWN:
        points = []
        for target in sorted({line["target"] for line in mine}, reverse=True):
            found = [line["accuracy"] for line in _of(mine, method, target)]
            if found:
                share = float(np.mean([line["flops_share"] for line in _of(mine, method, target)]))
                label = f"{method}, {share:.0%} of the FLOPs: {np.mean(found):.1%}"
                points.append(Point(1 / share, float(np.mean(found)), min(found), max(found), label))
        series.append(Series(method, tuple(points)))
    dense = mine[0]["dense"]
    series.append(Series("dense", (Point(1.0, dense, dense, dense, f"dense: {dense:.1%}"),)))
    title = f"{network}, no training: bars are the range over seeds"
    return trade_off(series, title, "dense FLOPs over FLOPs")
