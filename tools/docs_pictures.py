"""Draw the pictures that README and docs show, into docs/assets.

    .venv/bin/python tools/docs_pictures.py                                   slicing.svg, group.svg
    make compile && .venv/bin/python tools/docs_pictures.py runs/compile      headline.svg and kept_channels.svg, too

The words around them (README.md, docs/index.md, docs/guides/reading_a_report.md) hold the same run's figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from markupsafe import Markup

from smcp_fx.report.bars import channel_bars
from smcp_fx.report.formats import milliseconds, percent
from smcp_fx.report.schema import LayerRow
from smcp_fx.report.svg import dot, line, picture, rect, text
from smcp_fx.texts import significant

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from trade_off import as_file

sys.path.pop(0)

ASSETS = Path(__file__).parents[1] / "docs" / "assets"


def headline(report: dict[str, Any]) -> Markup:
    """Latency and accuracy of the dense and the pruned network, and the target."""
    dense, pruned, asked = report["dense"], report["pruned"], report["target_fraction"]
    title = f"{_name(report)}, pruned to {percent(asked, trim=True)} of its latency: measured on the device"
    body = [text(24, 36, title, "bold")]
    for top, name, side in ((62, "dense", dense), (112, "pruned", pruned)):
        width = 416 * side["latency_ms"] / dense["latency_ms"]
        body.append(text(24, top + 22, name, "label"))
        body.append(rect(96, top, width, 34, f"bar-{name}", rx=3))
        body.append(text(524, top + 24, milliseconds(side["latency_ms"]), "number"))
        body.append(text(636, top + 23, percent(side["accuracy"]), "label"))
    at = 96 + 416 * asked
    body += [
        line(at, 54, at, 156, "target"),
        text(at, 176, f"asked: {percent(asked, trim=True)}", "label", "middle"),
    ]
    body += [text(524, 176, "latency", "label"), text(636, 176, "accuracy", "label")]
    sizes = [[f"{significant(side[key] / 1e6)} M" for side in (dense, pruned)] for key in ("params", "flops")]
    words = (
        f"{' → '.join(sizes[0])} parameters, {' → '.join(sizes[1])} multiply-adds; ONNX Runtime, one thread"
    )
    return picture(720, 232, _told(report), [*body, text(24, 212, words, "note")])


def slicing() -> Markup:
    """The weights of two layers, masked and sliced: rows of the writer and columns of the reader go together."""
    gone, body = {1, 4}, [text(24, 28, "masked", "bold"), text(424, 28, "sliced", "bold")]
    for left, shown in ((24, [*range(6)]), (424, [i for i in range(6) if i not in gone])):
        kinds = ["bar-dense" if i in gone else "bar-pruned" for i in shown]
        for row, kind in enumerate(kinds):
            body += [rect(left + 22 * column, 66 + 22 * row, 20, 20, kind, rx=2) for column in range(4)]
            body += [rect(left + 150 + 22 * row, 66 + 22 * column, 20, 20, kind, rx=2) for column in range(5)]
        body.append(text(left, 56, "A: a row a channel", "label"))
        body.append(text(left + 150, 56, "B: a column a channel", "label"))
    body.append(text(372, 126, "\N{RIGHTWARDS ARROW}", "number"))
    words = "Grey: a mask multiplies B's columns by 0: nothing reads these channels. Sliced, outputs are the same."
    return picture(760, 240, "Masks and slices of two layers", [*body, text(24, 226, words, None)])


def group() -> Markup:
    """A residual block: which channels of its layers are one group, and which slots are one unit."""
    body = [text(24, 28, "group conv0", "series s0"), text(150, 28, "group conv1", "series s1")]
    body.append(text(276, 28, "outlined: the slots of one unit, which go together", "label"))
    for index, (name, ends) in enumerate(
        (("conv0", ".0"), ("conv1", "01"), ("conv2", "10"), ("conv3", "0."))
    ):
        left = 24 + 186 * index
        body += [
            rect(left, 84, 120, 104, "paper baseline", rx=6),
            text(left + 60, 140, name, "label", "middle"),
        ]
        for at, end in zip((left + 8, left + 94), ends, strict=True):
            for row in range(4):
                class_ = "paper baseline" if end == "." else f"mark s{end}"
                body.append(rect(at, 92 + 23 * row, 18, 18, class_, rx=3))
            if end == "0":
                body.append(rect(at - 3, 112, 24, 24, "outline", rx=5))
        if index:
            body.append(line(left - 66, 136, left, 136, "baseline"))
    body += [line(177, 136, 177, 60, "baseline"), line(177, 60, 549, 60, "baseline")]
    body += [
        line(549, 60, 549, 126, "baseline"),
        dot(549, 136, 11, "paper baseline"),
        text(549, 141, "+", "bold", "middle"),
    ]
    words = (
        "The sum ties what conv0 and conv2 write, channel by channel; conv1 and conv3 read it.",
        "What conv1 writes, conv2 alone reads: a group of its own.",
    )
    body += [text(24, 218 + 20 * index, each, None) for index, each in enumerate(words)]
    return picture(760, 254, "A group and a unit of a residual block", body)


def _name(report: dict[str, Any]) -> str:
    return str(report["model"]).rpartition(":")[2].replace("resnet", "ResNet-")


def _told(report: dict[str, Any]) -> str:
    sides = [
        f"{milliseconds(report[side]['latency_ms'])} at {percent(report[side]['accuracy'])} accuracy"
        for side in ("dense", "pruned")
    ]
    return f"{_name(report)} on the digits: {sides[0]} before, {sides[1]} after"


def main() -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="of a compile run")
    folder = parser.parse_args().folder
    drawn = {"slicing": as_file(slicing()), "group": as_file(group())}
    if folder is not None:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        kept = channel_bars([LayerRow(**row) for row in report["layers"]])
        assert kept is not None
        drawn |= {"headline": as_file(headline(report), 15), "kept_channels": as_file(kept)}
        print(_told(report))
    for name, drawing in drawn.items():
        (ASSETS / f"{name}.svg").write_text(drawing + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
