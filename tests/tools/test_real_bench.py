"""The benchmark of real networks, on tiny stand-ins: its data, every kind of run once, and its page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image, ImageFont
from tolerances import assert_close
from torch import Tensor, nn

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from real import lines, pages, report, signs, sounds, things  # noqa: E402
from real import run as bench  # noqa: E402
from real.networks import Subject  # noqa: E402
from real.report import ones, paired, wilson, write_document  # noqa: E402
from real.trained import LargeDigits  # noqa: E402
from records import Record  # noqa: E402
from without_training_methods import METHODS, Setting  # noqa: E402

sys.path[:] = _PATH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Things, places, fonts and words where the packages have them."""
    shared = tmp_path / "x/usr/share"
    rng = np.random.default_rng(0)
    for name in ("zebra", "lion", "lion-2", "cow", "bee", "frog"):
        path = shared / "tuxpaint/stamps/animals" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 30, 4), dtype=np.uint8), "RGBA").save(path)
    for number in range(2):
        path = shared / "backgrounds" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8), "RGB").save(path)
    font = ImageFont.load_default(20)
    assert isinstance(font, ImageFont.FreeTypeFont)
    for family in ("one", "two", "three"):
        path = shared / "fonts/truetype" / family / f"{family}.ttf"
        path.parent.mkdir(parents=True)
        path.write_bytes(font.font_bytes)
    (shared / "dict").mkdir()
    (shared / "dict/words").write_text("some\nwords\nto\nread\n", encoding="utf-8")
    return tmp_path


def test_calibration_and_test_share_no_thing_place_or_font(folder: Path) -> None:
    parts = [things.Things(folder, part) for part in ("calibration", "test")]
    names = [{name.rstrip("-2") for name, _ in part._things} for part in parts]
    assert names[0] | names[1] == {"zebra", "lion", "cow", "bee", "frog"} and not names[0] & names[1]
    places = [part._places[0].tobytes() for part in parts]
    assert places[0] != places[1] and all(len(part._places) == 1 for part in parts)
    for part in parts:
        images, shown = part.draw(3, 5, named=True)
        again, _ = part.draw(3, 5, named=True)
        assert images.shape == (3, 3, 224, 224) and torch.equal(images, again) and "cow" not in shown
    fonts = [set(lines.Lines(folder, part).fonts) for part in ("calibration", "test")]
    assert len(fonts[0]) == 2 and len(fonts[1]) == 1 and not fonts[0] & fonts[1]
    images, texts = lines.Lines(folder, "test").draw(2, 5)
    assert images.shape == (2, 3, 48, 320) and len(set(texts)) == 2


def test_lines_are_read_as_ctc_says() -> None:
    numbers = torch.tensor([[0, 1, 1, 0, 1, 2], [2, 2, 3, 0, 0, 0]])
    assert lines.read(["", "a", "b", " "], numbers) == ["aab", "b "]
    assert lines.right(["", "a", "b", " "], ["aa b", "bb"], numbers) == [True, False]


def test_pages_are_right_where_all_lines_are_found_and_nothing_else(folder: Path) -> None:
    images, truth = pages.Pages(folder, "test").draw(4, 5)
    again, _ = pages.Pages(folder, "test").draw(4, 5)
    assert images.shape == (4, 3, 320, 320) and torch.equal(images, again) and all(truth)
    marked = torch.zeros(4, 320, 320, dtype=torch.bool)
    for page, boxes in zip(marked, truth, strict=True):
        for left, top, end, bottom in boxes:
            assert 0 <= left < end <= 320 and 0 <= top < bottom <= 320
            page[top:bottom, left:end] = True
    maps = pages.found(marked[:, None].float())
    assert torch.equal(maps, marked) and pages.right(truth, maps) == [True] * 4
    left, top, end, bottom = truth[1][0]
    maps[1, top:bottom, left:end] = False
    maps[2] |= torch.rand(320, 320) < 0.5
    assert pages.right(truth, maps) == [True, False, False, True]
    assert pages.agree(marked, maps) == [True, False, False, True]


def test_characters_are_found_by_boxes_as_the_detector_tells_them(folder: Path) -> None:
    images, truth = signs.Signs(folder, "test").draw(2, 5)
    again, _ = signs.Signs(folder, "test").draw(2, 5)
    assert images.shape == (2, 3, 416, 416) and torch.equal(images, again)
    sure, offsets = torch.zeros(2, 3549), torch.zeros(2, 3549, 4)
    for page, boxes in enumerate(truth):
        for left, top, end, bottom in boxes.tolist():
            x, y = (left + end) / 2 / 8, (top + bottom) / 2 / 8
            cell = 52 * int(y) + int(x)
            sizes = torch.tensor([(end - left) / 8, (bottom - top) / 8])
            offsets[page, cell] = torch.cat([torch.tensor([x % 1, y % 1]), sizes.log()])
            sure[page, cell : cell + 2] = torch.tensor([0.9, 0.2])
    boxes = signs.found({"boxes": offsets, "sure": sure})
    assert signs.right(truth, boxes) == [True, True] == signs.agree(truth, boxes)
    assert_close(boxes[0].sort(0).values, truth[0].sort(0).values, "slicing")
    fewer, more = [boxes[0][1:], boxes[1]], [boxes[0], torch.cat([boxes[1], boxes[1] + 300])]
    assert signs.right(truth, fewer) == [False, True] and signs.right(truth, more) == [True, False]


def test_sounds_have_the_pitch_that_is_told() -> None:
    """By the peak of each frame's autocorrelation; whole periods, as quiet even harmonics may double it."""
    parts = [sounds.Sounds(part) for part in ("calibration", "test")]
    assert not {v.low for v in parts[0]._voices} & {v.low for v in parts[1]._voices}
    frames, pitches = parts[1].draw(40, 5)
    assert torch.equal(frames, parts[1].draw(40, 5)[0])
    assert_close(torch.stack([frames.mean(1) + 1, frames.std(1)]), torch.ones(2, 40), "slicing")
    good = 0
    for frame, pitch in zip(frames, pitches, strict=True):
        period = sounds.RATE / (10 * 2 ** (pitch / 1200))
        lags = torch.fft.irfft(torch.fft.rfft(frame, 2 * sounds.FRAME).abs() ** 2)[: sounds.FRAME // 2]
        best = int(lags[round(0.7 * period) : round(1.4 * period) + 1].argmax()) + round(0.7 * period)
        good += abs(best - period) <= 0.03 * period + 1
    assert good >= 36
    probabilities = torch.zeros(2, 360)
    probabilities[0, 100], probabilities[1, 359] = 1, 1
    found = sounds.heard(probabilities)
    assert found.tolist() == pytest.approx([3997.3794084, 9177.3794084])
    assert sounds.near([4047, 9120], found) == [True, False]


def test_digits_are_large_and_equal_for_equal_seeds() -> None:
    task = LargeDigits()
    images, labels = task.draw(5, 3)
    assert images.shape == (5, 3, 32, 32) and torch.equal(images, task.draw(5, 3)[0])
    coarse = nn.functional.avg_pool2d(images.mean(1, keepdim=True), 4)[:, 0] * 0.5
    nearest = (coarse[:, None] - task._digits[task._train]).square().sum((2, 3)).argmin(1)
    assert torch.equal(task._labels[task._train][nearest], labels)


def test_intervals_are_those_of_scipy() -> None:
    values = np.array([1] * 17 + [0] * 4)
    expected = scipy.stats.binomtest(17, 21).proportion_ci(0.95, method="wilson")
    assert wilson(values) == pytest.approx((expected.low, expected.high), rel=1e-6)
    assert (ones(bench.bits([bool(v) for v in values]), 21) == values).all()
    mean, half = paired(values[::-1], values)
    error = scipy.stats.sem(values[::-1] - values)
    assert mean == 0 and half == pytest.approx(scipy.stats.norm.ppf(0.975) * error, rel=1e-6)


def subject(*_: Any) -> Subject:
    """A small trained-like network of three classes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    ).eval()  # fmt: skip
    test = torch.randn(20, 3, 8, 8)
    truth = model(test).argmax(1).tolist()

    def right(wanted: Any, found: Tensor) -> list[bool]:
        return [a == b for a, b in zip(wanted, found.tolist(), strict=True)]

    scores = lambda y: y.log_softmax(-1)  # noqa: E731
    return Subject(
        model, torch.randn(32, 3, 8, 8), test, truth, 8, "7", scores, lambda s: s.argmax(-1), right
    )


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    def fails(*_: Any) -> Any:
        raise RuntimeError("cannot")

    monkeypatch.setattr(bench, "SUBJECTS", {"small": subject})
    monkeypatch.setitem(METHODS, "Torch-Pruning", fails)
    return argparse.Namespace(
        folder=tmp_path, record=tmp_path / "record.jsonl", networks=["small"], cost="flops", targets=[0.6],
        methods=["ours", "uniform, eliminated and repaired", "Torch-Pruning"], images=32, tests=20, seed=0,
        minutes=1e9, worth=False,
    )  # fmt: skip


def test_every_kind_of_run_once(arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(arguments)
    ours, uniform, failed = Record(arguments.record).lines
    assert failed["failed"] == "RuntimeError: cannot"
    for line in (ours, uniform):
        assert line["dense"] == 1.0 and 0.2 < line["share"] <= 0.61 and line["divergence"] > 0
        assert line["accuracy"] == line["agree"] == ones(line["right"], 20).mean()
    monkeypatch.setattr(bench.Bench, "run", lambda *_: pytest.fail("repeated"))
    bench.run(arguments)
    arguments.worth = True
    bench.run(arguments)
    worth = Record(arguments.record).find("worth")
    assert {(line["group"], line["count"]) for line in worth} >= {("0", 8), ("3", 4)}
    assert all(line["estimate"] > 0 and line["measured"] > 0 for line in worth)


def test_worth_is_measured_on_weights_that_were_fitted_without_the_group() -> None:
    """Against a network into which the changed weights are written by hand."""
    of = subject()
    setting = Setting(of.model, of.images, of.labels(0), 0, batch=8, loss=of.loss)
    elimination, orders = bench.weighed(setting)
    for name, place in (("0", 3), ("3", 7)):
        refit = orders[name].refits[-1]
        ((reader, (change, offset)),) = refit.changes.items()
        changed = subject().model
        layer = changed[place]
        with torch.no_grad():
            layer.weight += change
            layer.bias -= offset
        assert reader.consumer.path == str(place)
        found = bench._refitted(elimination, refit, of.test, of)
        assert_close(found, changed(of.test).log_softmax(-1).detach(), "slicing")


def line(method: str, target: float, right: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "run", "network": "PP-OCR classifier", "method": method, "cost": "flops", "target": target,
        "images": 64, "tests": 8, "dense": 1.0, "dense_right": "ff", "right": right,
        "accuracy": ones(right, 8).mean(), "agree": 0.5, "divergence": 0.25, "divergence_error": 0.1, "share": target,
    } | more  # fmt: skip


def test_the_page_tells_where_rivals_are_ahead() -> None:
    ours = [line("ours", target, "0f") for target in (0.8, 0.7, 0.5)]
    more = line("uniform, eliminated and repaired", 0.8, "ff", agree=0.6)
    level = line("uniform, eliminated and repaired", 0.7, "1f", divergence=0.2)
    other = line("Torch-Pruning", 0.5, "ff", images=32)
    assert report._ahead([*ours, more, level, other]) == (
        "Of 2 networks of rivals, 1 are ahead of ours in agreement, 1 in divergence, and 1 by more than the interval "
        "in what is right (PP-OCR classifier at 80% of the FLOPs)."
    )


def test_the_page_tells_the_record(tmp_path: Path) -> None:
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("a\n<!-- real networks: begin -->\n<!-- real networks: end -->\nb\n")
    found = [line("ours", 0.7, "fe"), line("uniform, eliminated and repaired", 0.7, "fc", share=0.65)]
    found += [{**line("Torch-Pruning", 0.7, "00"), "failed": "RuntimeError: cannot"}]
    timed = {**line("ours", 0.7, "fe"), "cost": "latency 1"}
    found += [{**timed, "error": 0.01}, {**timed, "target": 0.5, "error": 0.02}]
    near = {
        "kind": "worth",
        "network": "PP-OCR classifier",
        "images": 64,
        "tests": 8,
        "group": "a",
        "size": 8,
        "error": 0.001,
    }
    found += [{**near, "count": 4, "share": 0.5, "estimate": 0.01 * k, "measured": 0.01} for k in (1, 3)]
    found += [{**found[-1], "network": "ResNet-50", "dense": 0.75}]
    write_document(found, tmp_path)
    text = (tmp_path / "docs/results/real.md").read_text(encoding="utf-8")
    apart = f"{-12.5:+.1f} ({100 * (-0.125 - 1.959964 / 8):+.1f} to {100 * (-0.125 + 1.959964 / 8):+.1f})"
    assert "## PP-OCR classifier: 100.0% before" in text
    assert "| 70% | **ours**, 64 images | 87.5 (52.9–97.8) | – | 50.0 | 0.250 ± 0.196 |" in text
    assert f"repaired (at 65%), 64 images | 75.0 (40.9–92.9) | {apart} |" in text
    assert "| 70% | Torch-Pruning, 64 images | failed |" in text and "50% are within a factor of two" in text
    assert "and 50% of what its 95% interval allows" in text
    assert "are 1.5 points in the median, 1.9 at most for nine in ten" in text
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| PP-OCR classifier, this library | 100.0 | 87.5 |" in readme and readme.endswith("\nb\n")
    pictures = {path.name for path in (tmp_path / "docs/results").glob("*.svg")}
    worths = {"real_pp_ocr_classifier_worth.svg", "real_resnet_50_worth.svg"}
    runs = {"real_pp_ocr_classifier_flops.svg", "real_pp_ocr_classifier_latency_1.svg"}
    assert pictures == runs | worths and "## ResNet-50: 75.0% right" in text
