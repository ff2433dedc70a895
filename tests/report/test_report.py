"""The report: what it says, that it is self-contained and well-formed, and the channel graph's layout."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from html_page import HOSTILE, Page
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from torch import nn

import smcp_fx
from smcp_fx.errors import InputError, SmcpError
from smcp_fx.report import summary_table, summary_text, write_report
from smcp_fx.report.bars import block_bars, channel_bars, latency_bars
from smcp_fx.report.channel_map import MOST_LEVELS, MapLevel, levels
from smcp_fx.report.curves import dense_cost, solve_curves, training_curves, validation_scatter
from smcp_fx.report.formats import count, duration, milliseconds, percent, relative_change, significant
from smcp_fx.report.page import render_page
from smcp_fx.report.svg import rounded_up, ticks


class Small(nn.Module):
    """A residual block, a concat and a depthwise convolution, so that groups of each kind appear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))
        self.side = nn.Sequential(nn.Conv2d(16, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24))
        self.head = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.body(x))
        x = torch.cat([x, self.side(x)], 1)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """A report over a real channel graph; its measurements are made-up numbers that no two places share."""
    prepared = smcp_fx.prepare(Small(), torch.randn(2, 3, 8, 8))
    prepared.set_masks({"body.0": torch.arange(32) < 8, "stem": torch.arange(16) % 2 == 0})
    counts = prepared.pruner.counts
    groups = [
        {
            "name": group.name,
            "size": group.size,
            "kept": counts.get(group.name, group.size),
            "consumers": list(group.consumers),
            "producers": list(group.producers),
            "pinned": list(group.pinned),
        }
        for group in prepared.channels.groups
    ]
    smaller = dict(smcp_fx.convert(prepared).named_modules())
    layers = []
    for layer in prepared.channels.layers:
        module: Any = smaller[layer.path]
        outputs = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        inputs = module.in_features if isinstance(module, nn.Linear) else module.in_channels
        layers.append(
            {
                "path": layer.path,
                "kind": layer.kind,
                "in_channels": layer.input_channels.numel(),
                "in_kept": inputs,
                "out_channels": layer.output_channels.numel(),
                "out_kept": outputs,
                "in_group": "side.0" if layer.kind == "depthwise" else "",
                "out_group": layer.path,
            }
        )
    dense = {"accuracy": 0.9861, "latency_ms": 10.51, "latency_q1_ms": 10.37, "latency_q3_ms": 10.72}
    pruned = {"accuracy": 0.9764, "latency_ms": 4.213, "latency_q1_ms": 4.186, "latency_q3_ms": 4.254}
    return {
        "model": "torchvision:resnet18",
        "data": "digits",
        "seed": 17,
        "created": "2030-01-02T03:04:05+00:00",
        "target": "40%",
        "target_fraction": 0.4,
        "predicted_fraction": 0.3967,
        "measured_fraction": 4.213 / 10.51,
        "measured_fraction_q1": 0.3987,
        "measured_fraction_q3": 0.4032,
        "measured_fraction_error": 0.0016,
        "measured_rounds": 7,
        "correction": 1.0345,
        "cost": "ms",
        "batch": 32,
        "epochs": 6,
        "backend": {
            "backend": "onnxruntime",
            "device": "A Processor",
            "runtime": "ONNX Runtime",
            "version": "9.8.7",
            "threads": 1,
            "precision": "float32",
            "settings": {"spinning": "off"},
        },
        "versions": {"torch": "5.6.7", "python": "3.99"},
        "seconds": {"train": 62.0, "measure": 3700.0},
        "dense": {
            **dense,
            "latency_stable": True,
            "predicted_ms": 10.83,
            "params": 11_172_042,
            "flops": 555e6,
        },
        "pruned": {
            **pruned,
            "latency_stable": True,
            "predicted_ms": 4.297,
            "params": 2_841_110,
            "flops": 1.9e8,
        },
        "layers": layers,
        "groups": groups,
        "solves": [
            {
                "step": 30 * step,
                "epoch": step / 2,
                "target": 10.83 * 0.4 ** (step / 6),
                "cost": 10.7 * 0.4 ** (step / 6),
                "importance_kept": 0.9,
                "bound": 0.9125,
                "changed_share": 0.06 / step,
                "returned": 3,
                "seconds": 0.25,
            }
            for step in range(1, 7)
        ],
        "training": [
            {"epoch": epoch, "phase": phase, "loss": 1 / epoch, "accuracy": 0.97 + 0.002 * epoch}
            for phase in ("dense", "prune")
            for epoch in range(1, 7)
        ],
        "validation": [
            {"name": "dense", "predicted_ms": 10.83, "measured_ms": 10.51},
            {"name": "emitted", "predicted_ms": 4.297, "measured_ms": 4.213},
        ],
        "blocks": [
            {"name": "stem", "dense_ms": 6.25, "pruned_ms": 2.5},
            {"name": "body.0", "dense_ms": 3.75, "pruned_ms": 1.25},
        ],
        "table": {
            "path": "latency.sqlite",
            "rows": 812,
            "measured": 790,
            "reused": 22,
            "unstable": 5,
            "held_out_points": 64,
            "held_out_median": 0.0131,
            "held_out_p95": 0.0472,
        },
        "files": {"pruned": "pruned.onnx"},
        "notes": ["The stem was adapted."],
    }


# ---- the files ------------------------------------------------------------------------------------------


def test_files_come_back_as_they_were_written(real: dict[str, Any], tmp_path: Path) -> None:
    data, page = write_report(real, tmp_path / "new" / "folder")
    assert (data.name, page.name) == ("report.json", "report.html")
    assert json.loads(data.read_text(encoding="utf-8")) == real
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json"]
    again = page.read_bytes()
    write_report(real, page.parent)
    assert page.read_bytes() == again


def test_values_json_does_not_have(real: dict[str, Any], tmp_path: Path) -> None:
    report = {**real, "seed": np.int64(3), "correction": math.nan, "notes": ("a", "b")}
    report["pruned"] = {**real["pruned"], "accuracy": np.float32(0.5), "latency_q1_ms": math.inf}
    data, _ = write_report(report, tmp_path)
    read = json.loads(data.read_text(encoding="utf-8"))
    assert read["seed"] == 3
    assert read["correction"] is None
    assert read["notes"] == ["a", "b"]
    assert read["pruned"]["accuracy"] == 0.5
    assert read["pruned"]["latency_q1_ms"] is None
    before = data.read_bytes()
    with pytest.raises(InputError, match=r"report\['blocks'\]\[0\]\['name'\] is a Tensor"):
        write_report({**real, "blocks": [{"name": torch.ones(1)}]}, tmp_path)
    with pytest.raises(InputError, match="the key 3"):
        write_report({**real, "versions": {3: "x"}}, tmp_path)
    assert data.read_bytes() == before


def test_a_failed_write_leaves_the_old_report(real: dict[str, Any], tmp_path: Path) -> None:
    data, page = write_report(real, tmp_path)
    old = data.read_bytes(), page.read_bytes()
    (tmp_path / "report.html.part").mkdir()  # the second file cannot be written
    with pytest.raises(SmcpError, match="cannot write the report into"):
        write_report({**real, "seed": 99}, tmp_path)
    assert (data.read_bytes(), page.read_bytes()) == old
    assert not (tmp_path / "report.json.part").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(SmcpError, match="give another directory"):
        write_report(real, tmp_path / "file")


# ---- the table ------------------------------------------------------------------------------------------


def test_summary_table_and_text(real: dict[str, Any]) -> None:
    assert isinstance(summary_table(real), Table)
    text = summary_text(real)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "accuracy 98.6 % 97.6 % −1.0 points" in lines
    assert "latency, predicted by the table 10.8 ms 4.30 ms −60.3 %" in lines
    assert "latency, measured 10.5 ms 4.21 ms −59.9 %" in lines
    assert "quartiles 10.4 to 10.7 ms 4.19 to 4.25 ms" in lines
    assert "speed-up 1× 2.49×" in lines
    assert "parameters 11.2 M 2.84 M −74.6 %" in lines
    assert "FLOPs per input 555 M 190 M −65.8 %" in lines
    told = " ".join(lines)
    assert "target 40 % of the dense latency, predicted 39.7 %, measured 40.1 %" in told
    assert "measured 40.1 % ± 0.2 points (quartiles of 7 rounds: 39.9 % to 40.3 %); ONNX Runtime" in told
    assert "ONNX Runtime 9.8.7, float32, 1 thread, batch 32, A Processor" in told
    assert all(line == line.rstrip() and len(line) <= 100 for line in text.splitlines())


def test_summary_says_what_is_unsure(real: dict[str, Any]) -> None:
    assert "spread too far" not in summary_text(real)
    shaky = {**real, "pruned": {**real["pruned"], "latency_stable": False}, "model": "file.py:[red]x[/red]"}
    text = " ".join(summary_text(shaky).split())
    assert "The timings of pruned spread too far" in text
    assert "[red]x[/red] on digits" in text  # not taken for markup
    assert "The timings of pruned spread too far" in Page(render_page(shaky)).text


def test_other_costs_have_their_own_sentence(real: dict[str, Any]) -> None:
    report = {**real, "cost": "FLOPs"}
    assert "target 40 % of the dense FLOPs, predicted 39.7 %, measured latency 40.1 %" in " ".join(
        summary_text(report).split()
    )
    headline = "resnet18 keeps 39.7 % of its FLOPs (asked: 40 %) and runs in 4.21 ms instead of 10.5 ms"
    assert headline in Page(render_page(report)).text
    assert dense_cost(report) == 555e6
    assert dense_cost({**real, "cost": "parameters"}) == 11_172_042
    assert dense_cost(real) == 10.83


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (significant(0.0), "0"),
        (significant(0.004213), "0.00421"),
        (significant(1234.5), "1,234"),
        (milliseconds(10.51), "10.5 ms"),
        (milliseconds(None), "not measured"),
        (milliseconds(math.nan), "not measured"),
        (percent(0.4, trim=True), "40 %"),
        (percent(0.4), "40.0 %"),
        (percent(True), "not measured"),
        (count(9999), "9,999"),
        (count(10_000), "10.0 k"),
        (count(1.82e9), "1.82 G"),
        (duration(3.21), "3.2 s"),
        (duration(200), "3 min 20 s"),
        (duration(7500), "2 h 05 min"),
        (relative_change(4.0, 5.0), "+25.0 %"),
        (relative_change(4.0, 4.0), "0.0 %"),
        (relative_change(0, 4.0), ""),
    ],
)
def test_numbers_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected


# ---- the page -------------------------------------------------------------------------------------------


def test_page_is_well_formed_and_tells_the_figures(real: dict[str, Any]) -> None:
    page = Page(render_page(real))
    headline = (
        "resnet18 runs in 4.21 ms instead of 10.5 ms: 40.1 % of the dense latency (asked: 40 %), accuracy "
        "98.6 % → 97.6 %"
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
            "median 1.3 %, 95th percentile 4.7 %, of 64 points",
            "1 h 01 min",
            "1 h 02 min",
            "The stem was adapted.",
        ),
        *(
            "at least 98.6 % of the most",
            "pruned.onnx",
            "790 and reused 22",
            "rows in use that are unsteady 5",
        ),
    ):
        assert told in page.text, told
    for layer in real["layers"]:
        assert f"{layer['out_kept']} of {layer['out_channels']} output channels kept" in page.text
    assert page.text.count("Not measured in this run.") == 0


def test_page_fetches_nothing(real: dict[str, Any]) -> None:
    source = render_page(real)
    page = Page(source)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|<link|<img|<iframe", source)
    policies = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert [policy.split(";")[0] for policy in policies] == ["default-src 'none'"]
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "./").startswith("./"), attributes
        assert not any(name.startswith("on") for name in attributes), attributes


def test_page_is_accessible(real: dict[str, Any]) -> None:
    page = Page(render_page(real))
    drawings = [a for tag, a in page.elements if tag == "svg"]
    assert len(drawings) >= 7
    assert all("aria-hidden" in a or (a["aria-label"] and a["role"] in {"img", "group"}) for a in drawings)
    for node in page.having("lane") + page.having("row"):
        assert "data-rows" not in node or (node["aria-label"] and node["tabindex"] == "0")
    names = [a["id"] for _, a in page.elements if "id" in a]
    assert len(names) == len(set(names))


def test_script_finds_what_it_looks_for(real: dict[str, Any]) -> None:
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
    assert told["groups"] == real["groups"]
    assert list(told["layers"]) == [layer["path"] for layer in real["layers"]]


def test_hostile_names_stay_text(real: dict[str, Any]) -> None:
    report = copy.deepcopy(real)
    before = Page(render_page(report))
    report["model"] = report["data"] = HOSTILE
    report["notes"] = [HOSTILE]
    report["files"] = {HOSTILE: HOSTILE, "run": "javascript:alert(1)", "far": "https://example.org/x"}
    report["versions"] = {HOSTILE: HOSTILE}
    report["backend"]["device"] = HOSTILE
    for key, names in (("layers", ("path", "kind")), ("blocks", ("name",)), ("validation", ("name",))):
        for name in names:
            report[key][0][name] = HOSTILE
    report["groups"][0].update(name=HOSTILE, producers=[HOSTILE], pinned=[HOSTILE])
    report["training"][0]["phase"] = HOSTILE
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


def test_missing_parts_are_named_not_drawn(real: dict[str, Any]) -> None:
    report = {
        key: value for key, value in real.items() if key not in {"notes", "versions", "seconds", "files"}
    }
    for key in ("solves", "blocks", "validation", "training", "layers", "groups"):
        report[key] = []
    page = Page(render_page({**report, "table": None}))
    assert page.text.count("Not measured in this run.") == 6
    assert page.having("level") == []
    assert len(page.having("chart")) == 1  # the latency, which was measured
    for nothing in ({}, {"dense": {}, "pruned": {"latency_ms": None}}, {"dense": None, "backend": None}):
        bare = Page(render_page(nothing))
        assert bare.having("chart") == []
        assert "the model has not been measured" in bare.text
        assert "not measured" in summary_text(nothing)


def test_a_run_without_an_engine_tells_what_is_predicted(real: dict[str, Any]) -> None:
    report = {**real, "measured_fraction": None, "pruned": {**real["pruned"], "latency_ms": None}}
    said = (
        "resnet18 is predicted to take 39.7 % of the dense latency (asked: 40 %), not yet measured, accuracy"
    )
    assert said in Page(render_page(report)).text
    assert "predicted 39.7 %, not measured; ONNX Runtime" in " ".join(summary_text(report).split())


# ---- the pictures ---------------------------------------------------------------------------------------


def bars(markup: Any, class_: str) -> list[dict[str, str]]:
    assert markup is not None
    return Page(markup).having(class_)


def test_bar_lengths_are_the_numbers(real: dict[str, Any]) -> None:
    kept = [float(bar["height"]) for bar in bars(channel_bars(real["layers"]), "bar-pruned")]
    full = [float(bar["height"]) for bar in bars(channel_bars(real["layers"]), "bar-dense")]
    for layer, light, dark in zip(real["layers"], full, kept, strict=True):
        assert dark / light == pytest.approx(layer["out_kept"] / layer["out_channels"], abs=2e-3)
    for class_, key in (("bar-dense", "dense_ms"), ("bar-pruned", "pruned_ms")):
        first, second = (float(bar["width"]) for bar in bars(block_bars(real["blocks"]), class_))
        one, two = (block[key] for block in real["blocks"])
        assert first / second == pytest.approx(one / two, rel=1e-3)
    (dense,), (pruned,) = (bars(latency_bars(real), name) for name in ("bar-dense", "bar-pruned"))
    assert float(pruned["width"]) / float(dense["width"]) == pytest.approx(4.213 / 10.51, rel=1e-3)
    (target,) = bars(latency_bars(real), "target")
    assert float(target["x1"]) == pytest.approx(float(dense["x"]) + 0.4 * float(dense["width"]), abs=0.02)


def test_blocks_beyond_forty_are_summed() -> None:
    blocks = [{"name": f"block {i}", "dense_ms": 2.0 + (i % 2), "pruned_ms": 1.0} for i in range(62)]
    page = Page(block_bars(blocks) or "")
    assert len(page.having("bar-dense")) == 40
    assert (
        "and 22 smaller blocks, together 44.0 → 22.0 ms" in page.text
    )  # the 31 of 3 ms and 9 of 2 ms are drawn


def test_scatter_puts_equal_pairs_on_the_diagonal() -> None:
    pairs = [{"name": str(v), "predicted_ms": v, "measured_ms": v} for v in (1.0, 2.5, 7.0)]
    page = Page(validation_scatter([*pairs, {"name": "x", "predicted_ms": None, "measured_ms": 1.0}]) or "")
    (diagonal,) = page.having("diagonal")
    x1, y1, x2, y2 = (float(diagonal[key]) for key in ("x1", "y1", "x2", "y2"))
    points = page.having("point")
    assert len(points) == 3
    for point in points:
        x, y = float(point["cx"]), float(point["cy"])
        assert (x - x1) / (x2 - x1) == pytest.approx((y - y1) / (y2 - y1), abs=1e-3)
    assert validation_scatter([{"name": "x", "predicted_ms": None, "measured_ms": 1.0}]) is None


def test_curves_have_a_point_for_each_entry(real: dict[str, Any]) -> None:
    assert len(bars(solve_curves(real), "bar-pruned")) == 6
    curve = Page(training_curves(real["training"]) or "")
    assert len(curve.having("point")) == 24  # accuracy and loss, both phases
    assert len(curve.having("phase")) == 1
    partly = [{**entry, "accuracy": None} for entry in real["training"]]
    assert len(bars(training_curves(partly), "point")) == 12
    assert training_curves([{"epoch": 1, "phase": "dense", "loss": None, "accuracy": None}]) is None
    one = {**real, "solves": real["solves"][:1], "epochs": None}
    assert len(bars(solve_curves(one), "bar-pruned")) == 1


@given(st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_round_and_inside(high: float, about: int) -> None:
    marks = ticks(0.0, high, about)
    assert marks[0] == 0
    assert marks[-1] <= high * (1 + 1e-9)
    assert len(marks) <= about + 1
    step = marks[1] - marks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - factor) for factor in (1, 2, 5)) < 1e-6
    assert high * (1 - 1e-9) <= rounded_up(high, about) <= high + step * (1 + 1e-9)


# ---- the channel graph's layout ---------------------------------------------------------------------------


def groups_of(level: MapLevel) -> list[int]:
    return sorted(
        [index for lane in level.lanes for index in lane.groups]
        + [index for row in level.rows for index in row.inside]
    )


def check_layout(level: MapLevel, count_of_groups: int) -> None:
    """Every group once; no two lanes share a column and a row; each node on a row that writes it."""
    assert groups_of(level) == list(range(count_of_groups))
    taken: set[tuple[int, int]] = set()
    for lane in level.lanes:
        cells = {(lane.column, row) for row in range(min(lane.marks), lane.bottom + 1)}
        assert not cells & taken
        taken |= cells
        assert lane.marks[lane.top] in {"write", "both"}


def test_layout_of_a_network_by_hand() -> None:
    layers = [{"path": path, "kind": "dense"} for path in ("stem", "a.x", "a.y", "b.x", "b.y", "head")]
    layers[4].update(kind="depthwise", in_group="b.x", out_group="b.x")
    groups: list[dict[str, Any]] = [
        {"name": "image", "producers": [], "consumers": ["stem"], "pinned": ["network input 'x'"]},
        {"name": "stem", "producers": ["stem", "a.y"], "consumers": ["a.x", "b.x"], "pinned": []},
        {"name": "a.x", "producers": ["a.x"], "consumers": ["a.y"], "pinned": []},
        {"name": "b.x", "producers": ["b.x"], "consumers": ["head"], "pinned": []},
        {"name": "b.x#2", "producers": ["b.x"], "consumers": ["head"], "pinned": []},
        {"name": "head", "producers": ["head"], "consumers": [], "pinned": ["network output"]},
    ]
    coarse, fine = levels(layers, groups)
    assert [row.label for row in coarse.rows] == ["input", "stem", "a", "b", "head"]
    assert [row.inside for row in coarse.rows] == [(), (), (2,), (), ()]
    assert {lane.groups: dict(lane.marks) for lane in coarse.lanes} == {
        (0,): {0: "write", 1: "read"},
        (1,): {1: "write", 2: "both", 3: "read"},
        (3, 4): {3: "write", 4: "read"},
        (5,): {4: "write"},
    }
    assert [row.label for row in fine.rows] == ["input", "stem", "a.x", "a.y", "b.x", "b.y", "head"]
    assert {lane.groups: dict(lane.marks) for lane in fine.lanes} == {
        (0,): {0: "write", 1: "read"},
        (1,): {1: "write", 2: "read", 3: "write", 4: "read"},
        (2,): {2: "write", 3: "read"},
        (3,): {4: "write", 5: "carry", 6: "read"},
        (4,): {4: "write", 6: "read"},
        (5,): {6: "write"},
    }
    for level in (coarse, fine):
        check_layout(level, len(groups))


def test_layout_of_a_real_network_is_its_channel_graph(real: dict[str, Any]) -> None:
    found = levels(real["layers"], real["groups"])
    for level in found:
        check_layout(level, len(real["groups"]))
    finest = found[-1]
    for lane in finest.lanes:
        (index,) = lane.groups
        group = real["groups"][index]
        for mark, key in (("write", "producers"), ("read", "consumers")):
            drawn = {
                finest.rows[row].label
                for row, found_mark in lane.marks.items()
                if found_mark in {mark, "both"}
            }
            assert drawn - {"input"} == set(group[key])
    depthwise = next(row for row, shown in enumerate(finest.rows) if shown.label == "side.1")
    assert [lane.marks[depthwise] for lane in finest.lanes if depthwise in lane.marks] == ["carry"]


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    names = st.lists(st.sampled_from("abc"), min_size=1, max_size=9).map(".".join)
    paths = draw(st.lists(names, min_size=1, max_size=14, unique=True))
    some = st.lists(st.sampled_from(paths), max_size=4, unique=True)
    members = draw(st.lists(st.tuples(some, some, st.booleans()), min_size=1, max_size=12))
    groups = [
        {"name": str(i), "producers": writes, "consumers": reads, "pinned": ["why"] * pinned}
        for i, (writes, reads, pinned) in enumerate(members)
        if writes or reads
    ]
    return [{"path": path, "kind": "dense"} for path in paths], groups


@given(networks())
def test_any_layout_is_sound(network: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    layers, groups = network
    found = levels(layers, groups)
    assert (len(found) == 0) == (len(groups) == 0)
    assert len(found) <= MOST_LEVELS
    sizes = [len(level.rows) for level in found]
    assert sizes == sorted(set(sizes))
    for level in found:
        check_layout(level, len(groups))
    if found:
        shown = {row.label for row in found[-1].rows} - {"input"}
        assert shown == {layer["path"] for layer in layers}
