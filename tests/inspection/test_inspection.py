"""Looking at a channel graph: what is told against hooks and networks known by hand; the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn
from torchvision import models

from smcp_fx.cli.inspect import main
from smcp_fx.inspection import Inspection, describe, inspect_model
from smcp_fx.inspection.exports import to_dot, to_graphml
from smcp_fx.inspection.page import render_inspection

_FACTORY = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(x.mean((2, 3)).cumprod(1))

def build():
    return Residual()

class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Residual()
        self.first = nn.Conv2d(3, 24, 1)
        self.last = nn.Conv2d(24, 3, 1)

    def forward(self, x):
        y = self.last(self.first(x))
        if y.mean() > 1e9:
            y = -y
        return self.inner(y)

def looks():
    return Looks()

def number():
    return 7
"""


@pytest.fixture(scope="module")
def resnet() -> Inspection:
    return inspect_model("torchvision:resnet18", input_size="64")


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "networks.py").write_text(_FACTORY)
    return f"{tmp_path / 'networks.py'}:build"


# ---- what is told ---------------------------------------------------------------------------------------


def test_shapes_are_those_that_hooks_see(resnet: Inspection) -> None:
    model = models.resnet18(weights=None).eval()
    seen: dict[str, tuple[list[int], list[int], list[int]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(
                lambda m, args, out, path=path: seen.update(
                    {path: (list(m.weight.shape), list(args[0].shape), list(out.shape))}
                )
            )
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 64))
    told = {
        layer["path"]: (layer["weight_shape"], layer["in_shape"], layer["out_shape"])
        for layer in describe(resnet)["layers"]
    }
    assert told == seen
    assert list(told) == list(seen)  # in the order they run


def test_groups_of_a_network_known_by_hand(resnet: Inspection) -> None:
    told = describe(resnet)
    groups = {group["name"]: group for group in told["groups"]}
    stream = groups["conv1"]
    assert stream["producers"] == ["conv1", "layer1.0.conv2", "layer1.1.conv2"]
    assert stream["consumers"] == [
        "layer1.0.conv1",
        "layer1.1.conv1",
        "layer2.0.conv1",
        "layer2.0.downsample.0",
    ]
    assert stream["permitted"] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert stream["pinned"] == []
    assert groups["fc"]["pinned"] == ["reaches the network's output"]
    assert told["free_share"] == 1.0
    assert told["pinned"] == [
        {"reason": "reaches the network's output", "groups": 1, "units": 1000},
        {"reason": "network input 'x'", "groups": 1, "units": 3},
    ]
    by_path = {layer["path"]: layer for layer in told["layers"]}
    assert by_path["layer2.0.conv1"]["in_group"] == ["conv1"]
    assert by_path["layer2.0.conv1"]["out_group"] == ["layer2.0.conv1"]


def test_channels_of_the_groups_cover_every_weight(resnet: Inspection) -> None:
    told = describe(resnet)
    for layer in told["layers"]:
        for side, name in (("in", "in_channels"), ("out", "out_channels")):
            total = sum(
                group["size"] * count
                for group in told["groups"]
                for path, where, count in group["channels"]
                if (path, where) == (layer["path"], side)
            )
            assert total == layer[name], (layer["path"], side)


def test_graphml_comes_back_as_the_graph(resnet: Inspection, tmp_path: Path) -> None:
    (tmp_path / "graph.graphml").write_text(to_graphml(resnet.channels))
    read = nx.read_graphml(tmp_path / "graph.graphml")
    assert dict(read.nodes(data=True)) == dict(resnet.channels.graph.nodes(data=True))
    plain = [(a, b, data["channels"]) for a, b, data in read.edges(data=True)]
    assert sorted(plain) == sorted(
        (a, b, d["channels"]) for a, b, d in resnet.channels.graph.edges(data=True)
    )


def test_dot_has_every_node_and_edge(resnet: Inspection) -> None:
    text = to_dot(resnet.channels)
    edges = set(re.findall(r'^  "([^"]+)" -> "([^"]+)"', text, re.MULTILINE))
    nodes = set(re.findall(r'^  "([^"]+)" \[', text, re.MULTILINE))
    assert edges == set(resnet.channels.graph.edges())
    assert nodes == set(resnet.channels.graph.nodes())
    dashed = set(re.findall(r'^  "group:([^"]+)" \[.*style=dashed', text, re.MULTILINE))
    assert dashed == {group.name for group in resnet.channels.groups if not group.free}


# ---- the command line -----------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_tree_names_groups_members_counts_and_reasons(
    factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, factory, "--input-size", "8")
    assert (code, err) == (0, "")
    assert "traced with 2x3x8x8" in out
    assert "4 convolutions and linears; 5 groups of channels, 1 of them free" in out
    # of the body's 16 + 32 and the head's 16 input channels 32 are free: the stream is multiplied up
    assert "50.0% of the input channels are free" in out
    body = out.index("body\n")
    line = next(line for line in out[body:].splitlines()[1:])
    assert "0  32 units, may keep 8, 16, 24, 32; read by body.2" in line
    stream = next(line for line in out.splitlines() if "stem  16 units" in line)
    assert "must stay: channels are mixed by 'cumprod'" in stream
    assert "written by body.2 too" in stream


def test_a_model_that_is_traced_in_regions(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = (factory.replace(":build", ":looks"), "--input-size", "8")
    code, out, _ = run(capsys, *ask)
    assert code == 0
    assert "traced in regions: inner, first, last; the rest stays Python: torch.fx cannot trace Looks" in out
    assert "networks.py:" in out
    assert "first  24 units, may keep 8, 16, 24; read by last" in out
    assert "13 units of 2 groups: leaves the traced regions for code that was not traced" in out
    told = json.loads(run(capsys, *ask, "--json")[1])
    assert told["regions"] == ["inner", "first", "last"]
    assert list(told["untraced"]) == [""]
    page = render_inspection(told)
    assert "Traced in regions: inner, first, last. The rest stays Python" in page


def test_depth_folds_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "torchvision:resnet18", "--input-size", "32", "--depth", "1")
    assert "layer1  2 groups, 128 units, all free" in out
    assert "layer1.0" not in out.split("groups by the module")[1].split("layer1  2 groups")[1]
    _, out, _ = run(capsys, "torchvision:resnet18", "--input-size", "32", "--depth", "9")
    assert out.count("units, may keep") == 12


def test_one_group_one_module_one_channel(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = (factory, "--input-size", "8")
    _, out, _ = run(capsys, *ask, "--group", "body.0")
    assert out.splitlines() == [
        "body.0",
        "32 units, free; may keep 8, 16, 24, 32",
        "written by",
        "  - body.0: 1 output channel a unit",
        "read by",
        "  - body.2: 1 input channel a unit",
    ]
    _, out, _ = run(capsys, *ask, "--module", "body")
    assert out.splitlines()[0] == "body.0  weight 32x16x3x3, 2x16x8x8 to 2x32x8x8"
    assert "  writes 32 channels of body.0" in out.splitlines()
    _, out, _ = run(capsys, *ask, "--module", "body.2", "--channel", "5", "--side", "in")
    assert "It is free. With it go:" in out
    assert "output channel 5 of 'body.0'" in out
    _, out, _ = run(capsys, *ask, "--module", "stem", "--channel", "5")
    assert "It must stay:" in out


def test_json_is_the_description(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = (factory, "--input-size", "2x3x8x8", "--json")
    told = json.loads(run(capsys, *ask)[1])
    assert told == json.loads(json.dumps(describe(inspect_model(factory, input_size="8"))))
    groups: Any = json.loads(run(capsys, *ask, "--group", "stem")[1])
    assert groups == next(group for group in told["groups"] if group["name"] == "stem")
    layers = json.loads(run(capsys, *ask, "--module", "body")[1])
    assert [layer["path"] for layer in layers] == ["body.0", "body.2"]


def test_files_are_written(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {kind: tmp_path / "new" / f"graph.{kind}" for kind in ("html", "graphml", "dot")}
    flags = [part for kind, path in places.items() for part in (f"--{kind}", str(path))]
    code, out, _ = run(capsys, factory, "--input-size", "8", *flags)
    assert code == 0
    for path in places.values():
        assert f"wrote {path}" in out
        assert path.stat().st_size > 500
    assert sorted(places.values()) == sorted((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["torchvision:resnet19"],
            "torchvision has no model 'resnet19'; it has resnet18",
        ),
        (["resnet18"], "unknown model 'resnet18': give torchvision:NAME"),
        (["{folder}/none.py:build"], "there is no file"),
        (["{factory}", "--input-size", "8", "--group", "stm"], "there is no group 'stm'"),
        (["{factory}", "--input-size", "8", "--module", "stm"], "'stm' is not a convolution or linear"),
        (
            ["{factory}", "--input-size", "8", "--module", "stem", "--channel", "16"],
            "has 16 output channels; 16 is",
        ),
        (["{factory}", "--input-size", "8", "--channel", "1"], "--channel needs --module"),
        (["{factory}", "--group", "stem", "--module", "stem"], "give one of them"),
        (["{factory}", "--input-size", "8y8"], "input size '8y8' is none"),
        (["{factory}", "--input-size", "4x8x8"], "does not run on the example inputs (2, 4, 8, 8)"),
        (["{factory}", "--depth", "0"], "--depth must be at least 1"),
        (["{factory}", "--exclude", "nothing"], "exclude: 'nothing'"),
        (["{folder}/networks.py:number"], "must return an nn.Module, not int"),
        (["{factory}", "--html", "{folder}/x", "--dot", "{folder}/x"], "name the same file"),
        (["{factory}", "--html", "{folder}/networks.py/x.html"], "cannot write the channel graph"),
    ],
)
def test_bad_input_is_told_in_a_paragraph(
    argv: list[str], words: str, factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run(capsys, *(part.format(factory=factory, folder=tmp_path) for part in argv))
    assert code == 2
    assert err.startswith("smcp-inspect: ")
    assert err.count("\n") == 1
    assert words in err
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(p)] == before


def test_debug_shows_the_error(factory: str) -> None:
    with pytest.raises(ValueError, match="there is no group"):
        main([factory, "--input-size", "8", "--group", "none", "--debug"])


def test_no_file_is_half_written(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, dot = tmp_path / "a.html", tmp_path / "b.dot"
    page.write_text("old")
    dot.mkdir()  # the second file cannot be put into place
    code, _, err = run(capsys, factory, "--input-size", "8", "--dot", str(dot), "--html", str(page))
    assert code == 2
    assert "cannot write the channel graph" in err
    assert page.read_text() == "old"
    assert not list(tmp_path.glob("*.part"))
