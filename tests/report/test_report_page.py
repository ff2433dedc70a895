"""The page: what it says, and that it is self-contained, well-formed and safe from names."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace

from html_page import HOSTILE, Page
from printed import summary_text

from smcp_fx.report import Report
from smcp_fx.report.page import render_page
from smcp_fx.report.schema import CalibrationFacts, RepairRow, Side, TargetRow, WorthRow


def test_page_is_well_formed_and_tells_the_figures(real: Report) -> None:
    page = Page(render_page(real))
    headline = (
        "resnet18 runs in 4.21 ms instead of 10.5 ms: 40.1% of the dense latency (asked: 40%), accuracy "
        "98.6% → 97.6%"
    )
    assert headline in page.text
    for told in (
        *(
            "11.2 M",
            "2.84 M",
            "555 M",
            "17",
            "2030-01-02T03:04:05+00:00",
            "9.8.7",
            "A Processor",
            "5.6.7",
            "× 1.034",
        ),
        *(
            "median 1.3%, 95th percentile 4.7%, of 64 points",
            "1 h 01 min",
            "1 h 02 min",
            "The stem was adapted.",
        ),
        *(
            "at least 98.6% of the importance",
            "pruned.onnx",
            "790 and reused 22 in 61 s: 41 for solves; 17 repetitions",
            "rows in use that are unsteady 5",
        ),
    ):
        assert told in page.text, told
    for layer in real.layers:
        assert f"{layer.out_kept} of {layer.out_channels} output channels kept" in page.text
    assert page.text.count("Not measured in this run.") == 0


def test_page_fetches_nothing(real: Report) -> None:
    source = render_page(real)
    page = Page(source)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|<link|<img|<iframe", source)
    policies = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert [policy.split(";")[0] for policy in policies] == ["default-src 'none'"]
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "./").startswith("./"), attributes
        assert not any(name.startswith("on") for name in attributes), attributes


def test_page_is_accessible(real: Report) -> None:
    page = Page(render_page(real))
    drawings = [a for tag, a in page.elements if tag == "svg"]
    assert len(drawings) >= 7
    assert all("aria-hidden" in a or (a["aria-label"] and a["role"] in {"img", "group"}) for a in drawings)
    for node in page.having("lane") + page.having("row"):
        assert "data-rows" not in node or (node["aria-label"] and node["tabindex"] == "0")
    names = [a["id"] for _, a in page.elements if "id" in a]
    assert len(names) == len(set(names))


def test_script_finds_what_it_looks_for(real: Report) -> None:
    page = Page(render_page(real))
    script = page.raw["script"][-1]
    names = {a["id"] for _, a in page.elements if "id" in a}
    wanted = set(re.findall(r'getElementById\("([^"]+)"\)', script))
    assert wanted
    assert wanted <= names
    used = {name for _, a in page.elements for name in a}
    fields = {
        re.sub("[A-Z]", lambda m: f"-{m[0].lower()}", name) for name in re.findall(r"dataset\.(\w+)", script)
    }
    assert {f"data-{field}" for field in fields} <= used
    told = json.loads(page.raw["script"][0])
    assert told["groups"] == json.loads(json.dumps([asdict(group) for group in real.groups]))
    assert list(told["layers"]) == [layer.path for layer in real.layers]


def test_hostile_names_stay_text(real: Report) -> None:
    before = Page(render_page(real))
    report = replace(
        real,
        model=HOSTILE,
        data=HOSTILE,
        notes=(HOSTILE,),
        files={HOSTILE: HOSTILE, "run": "javascript:alert(1)", "far": "https://example.org/x"},
        versions={HOSTILE: HOSTILE},
        backend={**real.backend, "device": HOSTILE},
        layers=(replace(real.layers[0], path=HOSTILE, kind=HOSTILE), *real.layers[1:]),
        blocks=(replace(real.blocks[0], name=HOSTILE), *real.blocks[1:]),
        validation=(replace(real.validation[0], name=HOSTILE), *real.validation[1:]),
        groups=(
            replace(real.groups[0], name=HOSTILE, producers=(HOSTILE,), pinned=(HOSTILE,)),
            *real.groups[1:],
        ),
        training=(replace(real.training[0], phase=HOSTILE), *real.training[1:]),
    )
    source = render_page(report)
    page = Page(source)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == [tag for tag, _ in before.elements].count("script") == 2
    assert "b" not in tags
    assert page.text.count(HOSTILE) >= 10
    assert json.loads(page.raw["script"][0])["groups"][0]["pinned"] == [HOSTILE]
    assert not any(
        a.get("href", "./x").partition(":")[0] in {"javascript", "https"} for _, a in page.elements
    )


def test_missing_parts_are_named_not_drawn(real: Report) -> None:
    report = replace(
        real, solves=(), blocks=(), validation=(), training=(), layers=(), groups=(), table=None,
        notes=(), versions={}, seconds={}, files={},
    )  # fmt: skip
    page = Page(render_page(report))
    assert page.text.count("Not measured in this run.") == 6
    assert page.having("level") == []
    assert len(page.having("chart")) == 2  # the latency, which was measured, for wide and for narrow pages
    for nothing in (Report(), Report(dense=Side(latency_ms=1.0)), Report(pruned=Side(latency_ms=math.nan))):
        bare = Page(render_page(nothing))
        assert bare.having("chart") == []
        assert "the model has not been measured" in bare.text
        assert "not measured" in summary_text(nothing)


def test_a_run_without_an_engine_tells_what_is_predicted(real: Report) -> None:
    report = replace(real, measured_fraction=None, pruned=replace(real.pruned, latency_ms=None))
    said = "resnet18 is predicted to take 39.7% of the dense latency (asked: 40%), not yet measured, accuracy"
    assert said in Page(render_page(report)).text
    assert "predicted 39.7%, not measured; ONNX Runtime" in " ".join(summary_text(report).split())


def test_charts_fit_a_telephone_and_are_not_blown_up_on_a_screen(real: Report) -> None:
    """A wide chart fills its box, so that one that is drawn small gets letters twice as large."""
    facts = CalibrationFacts(
        worth=(WorthRow("group", 32, 16, (8, 16, 24, 32), (9.0, 1.0, 0.25, 0.0)),),
        layers=(RepairRow("a.long.name.of.a.layer.in.a.deep.network", 0.3, 0.1, repaired=True),),
    )
    target = TargetRow(0.5, measured=0.5, accuracy=0.9)
    page = Page(render_page(replace(real, calibration=facts, targets=(target,))))
    widths: dict[str, list[float]] = {"wide": [], "narrow": [], "": []}
    for tag, attributes in page.elements:
        if tag == "svg" and "chart" in (kinds := attributes["class"].split()):
            widths["".join(kinds[1:])].append(float(attributes["viewbox"].split()[2]))
    assert min(widths["wide"]) > 720 and max(widths["narrow"]) < 400
    large = len(widths["wide"]) + sum(width > 400 for width in widths[""])
    assert len(widths["narrow"]) == large == 6
