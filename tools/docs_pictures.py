"""Draw the pictures of a compile run that README and docs show: headline.svg and kept_channels.svg.

    make compile && .venv/bin/python tools/docs_pictures.py runs/compile

The words around them (README.md, docs/index.md, docs/guides/reading_a_report.md) hold the same run's figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from smcp_fx.report.bars import channel_bars
from smcp_fx.report.formats import milliseconds, percent
from smcp_fx.report.schema import LayerRow
from smcp_fx.report.svg import line, picture, rect, text
from smcp_fx.report.trade_off import as_file
from smcp_fx.texts import significant

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


def _name(report: dict[str, Any]) -> str:
    return str(report["model"]).rpartition(":")[2].replace("resnet", "ResNet-")


def _told(report: dict[str, Any]) -> str:
    sides = [
        f"{milliseconds(report[side]['latency_ms'])} at {percent(report[side]['accuracy'])} accuracy"
        for side in ("dense", "pruned")
    ]
    return f"{_name(report)} on the digits: {sides[0]} before, {sides[1]} after"


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a compile run")
    report = json.loads((parser.parse_args().folder / "report.json").read_text(encoding="utf-8"))
    kept = channel_bars([LayerRow(**row) for row in report["layers"]])
    assert kept is not None
    (ASSETS / "headline.svg").write_text(as_file(headline(report), 15) + "\n", encoding="utf-8")
    (ASSETS / "kept_channels.svg").write_text(as_file(kept) + "\n", encoding="utf-8")
    print(_told(report))


if __name__ == "__main__":
    main()
