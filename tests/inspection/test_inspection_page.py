"""The inspection page: what it holds, and how it behaves in a real browser where there is one."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from html_page import HOSTILE, Page

from smcp_fx.inspection import describe, inspect_model
from smcp_fx.inspection.page import render_inspection

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return describe(inspect_model("torchvision:resnet18", input_size="64"))


def test_page_holds_every_group_and_layer(told: dict[str, Any]) -> None:
    page = Page(render_inspection(told))
    held = json.loads(page.raw["script"][0])
    assert held["groups"] == told["groups"]
    assert {path: layer["weight_shape"] for path, layer in held["layers"].items()} == {
        layer["path"]: layer["weight_shape"] for layer in told["layers"]
    }
    rows = {a["data-name"] for a in page.having("row")}
    assert {layer["path"] for layer in told["layers"]} <= rows
    finest = [a for a in page.having("lane") if "data-groups" in a][-len(told["groups"]) :]
    assert sorted(int(a["data-groups"]) for a in finest) == list(range(len(told["groups"])))
    free = sum(not group["pinned"] for group in told["groups"])
    assert (
        f"{len(told['groups'])} groups, {free} of them free; 100.0% of the input channels are free"
        in page.text
    )
    assert "reaches the network's output" in page.text


def test_page_fetches_nothing_and_keeps_hostile_names_text(told: dict[str, Any]) -> None:
    hostile = copy.deepcopy(told)
    hostile["model"] = HOSTILE
    hostile["groups"][0]["name"] = hostile["groups"][1]["pinned"] = HOSTILE
    hostile["groups"][1]["pinned"] = [HOSTILE]
    hostile["pinned"][0]["reason"] = HOSTILE
    hostile["layers"][0]["path"] = HOSTILE
    source = render_inspection(hostile)
    page = Page(source)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert "b" not in tags
    assert page.text.count(HOSTILE) >= 4
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|<link|<img|<iframe", source)


_PROBE = """
<script>
window.addEventListener("load", () => {
  const told = { errors: window.smcpErrors, loaded: performance.now() };
  const visible = () => [...document.querySelectorAll(".level")].findIndex((n) => n.getClientRects().length);
  const panel = () => document.getElementById("cg-panel").textContent;
  const svg = () => document.querySelectorAll(".level .graph")[visible()];
  const row = (name) => [...svg().querySelectorAll(".row")].find((n) => n.dataset.name === name);
  told.level = visible();
  told.rows = svg().querySelectorAll(".row").length;
  row("layer2.0.conv1").dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  told.hover = panel();
  const width = () => svg().getBoundingClientRect().width;
  const before = width();
  document.querySelector('[data-zoom="zoom in"]').click();
  told.zoomed = width() / before;
  const box = document.querySelector(".cg .scroll");
  box.dispatchEvent(new WheelEvent("wheel", { ctrlKey: true, deltaY: 300, cancelable: true }));
  told.wheeled = width() / before;
  document.querySelector('[data-zoom="true size"]').click();
  for (let i = 0; i < 7; i++) document.querySelector('[data-zoom="zoom in"]').click();
  const from = box.scrollLeft;
  const mouse = (kind, x, on) => on.dispatchEvent(new PointerEvent(kind, { clientX: x, clientY: 300, button: 0,
    pointerType: "mouse", bubbles: true }));
  mouse("pointerdown", 300, box);
  mouse("pointermove", 250, window);
  mouse("pointerup", 250, window);
  told.moved = box.scrollLeft - from;
  document.querySelector('[data-zoom="true size"]').click();
  const search = document.getElementById("cg-search");
  search.value = "layer4.1";
  search.dispatchEvent(new Event("input"));
  told.found = document.getElementById("cg-found").textContent;
  told.lit = [...svg().querySelectorAll(".lane.on")].length;
  setTimeout(() => {
  document.querySelectorAll(".tabs input")[0].click();
  told.folded = svg().querySelectorAll(".row").length;
  const fold = [...svg().querySelectorAll(".row")].find((n) => n.dataset.expand);
  fold.querySelector(".folded").dispatchEvent(new MouseEvent("click", { bubbles: true }));
  told.opened = visible();
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(told);
  document.body.append(out);
  });
});
</script>
"""
_CATCH = "<script>window.smcpErrors = []; window.onerror = (m) => window.smcpErrors.push(String(m));</script>"


def browse(source: str, folder: Path, probe: str) -> dict[str, Any]:
    """Open a page in the browser, run a script in it when it has loaded, and return what that wrote."""
    page = folder / "page.html"
    page.write_text(source.replace("<body>", "<body>" + _CATCH).replace("</body>", probe + "</body>"))
    command = [
        *(
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=700,600",
            "--virtual-time-budget=2000",
        ),
        *(f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(
        found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )
    return told


@needs_browser
def test_page_in_a_browser(told: dict[str, Any], tmp_path: Path) -> None:
    seen = browse(render_inspection(told), tmp_path, _PROBE)
    assert seen["errors"] == []
    assert seen["rows"] == 22  # 21 layers and the input
    assert seen["level"] == 2
    for words in ("layer2.0.conv1", "weight 128 × 64 × 3 × 3", "in 2 × 64 × 16 × 16", "out 2 × 128 × 8 × 8"):
        assert words in seen["hover"]
    assert "64 units, free, may keep 8, 16, … 64" in seen["hover"]  # what it reads: the stream of layer1
    assert "1 input of layer2.0.downsample.0" in seen["hover"]  # what goes with a channel of it
    assert seen["zoomed"] == pytest.approx(1.25, rel=0.01)
    assert seen["wheeled"] < 0.6  # e^-1 of the zoomed
    assert seen["moved"] == pytest.approx(50, abs=1)
    named = [
        group
        for group in told["groups"]
        if any("layer4.1" in path for path in (*group["producers"], *group["consumers"]))
    ]
    assert seen["found"] == f"{len(named)} groups"
    assert seen["lit"] == len(named)
    assert seen["folded"] < seen["rows"]
    assert seen["opened"] == 1
