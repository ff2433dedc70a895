"""The pictures of a compile run: SVG files of their own that say what the report says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

_FILE = Path(__file__).parents[2] / "tools" / "docs_pictures.py"
_SPEC = importlib.util.spec_from_file_location("docs_pictures", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
docs_pictures: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(docs_pictures)

SIDES = {
    "dense": {"latency_ms": 80.0, "accuracy": 0.99, "params": 11.2e6, "flops": 139e6},
    "pruned": {"latency_ms": 32.0, "accuracy": 0.985, "params": 3e6, "flops": 80e6},
}
LAYERS = [
    {"path": name, "out_channels": 64, "out_kept": kept} for name, kept in (("conv1", 64), ("conv2", 16))
]


def test_both_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {**SIDES, "target_fraction": 0.4, "model": "torchvision:resnet18", "layers": LAYERS}
    (tmp_path / "report.json").write_text(json.dumps(report))
    monkeypatch.setattr(docs_pictures, "ASSETS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs_pictures.py", str(tmp_path)])
    docs_pictures.main()
    headline, kept = (
        ElementTree.parse(tmp_path / f"{name}.svg").getroot() for name in ("headline", "kept_channels")
    )
    words = " ".join(headline.itertext())
    for said in ("ResNet-18, pruned to 40%", "80.0 ms", "32.0 ms", "99.0%", "98.5%", "11.2 M → 3.00 M"):
        assert said in words, said
    bars = [
        float(rect.get("width", 0)) for rect in headline.iter() if str(rect.get("class")).startswith("bar-")
    ]
    assert bars[1] / bars[0] == pytest.approx(0.4)
    heights = [float(rect.get("height", 0)) for rect in kept.iter() if rect.get("class") == "bar-pruned"]
    assert heights[1] / heights[0] == pytest.approx(0.25, rel=0.01)
    group, slicing = (ElementTree.parse(tmp_path / f"{name}.svg").getroot() for name in ("group", "slicing"))
    assert (
        sum(rect.get("class") == "outline" for rect in group.iter()) == 4
    )  # a unit has a slot in each layer's side
    colours = [rect.get("class") for rect in slicing.iter() if str(rect.get("class")).startswith("bar-")]
    assert colours.count("bar-dense") == 2 * (4 + 5)  # two channels: a row of four and a column of five each
