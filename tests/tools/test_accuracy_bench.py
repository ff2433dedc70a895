"""The accuracy benchmark: its statistics, every kind of run once, what a second run repeats, and its page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from safetensors.torch import save_file

from smcp_fx.compiler.seeking import CLOSE, TRIES

_PATH = sys.path[:]
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from accuracy import run as bench  # noqa: E402
from accuracy import training  # noqa: E402
from accuracy.report import write_document  # noqa: E402
from accuracy.statistics import interval, paired  # noqa: E402
from pretrained.latency import Share, Stopwatch, widths_of  # noqa: E402
from pretrained.networks import NETWORKS, MobileNet  # noqa: E402
from pretrained.tasks import Digits  # noqa: E402
from records import Record  # noqa: E402
from without_training_methods import METHODS as CHOICES  # noqa: E402
from without_training_methods import Setting  # noqa: E402

sys.path[:] = _PATH


def test_paired_differences_are_those_of_the_t_test() -> None:
    ours, theirs = {0: 0.91, 1: 0.93, 2: 0.9, 5: 0.97}, {0: 0.9, 1: 0.9, 2: 0.91, 5: 0.92, 7: 0.1}
    shared = [0, 1, 2, 5]
    test = scipy.stats.ttest_rel([ours[s] for s in shared], [theirs[s] for s in shared])
    expected = test.confidence_interval(0.95)
    found = paired(ours, theirs)
    assert found is not None and found.count == 4
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert interval([0.5]).half == float("inf")


class Small(Digits):
    """Few test images."""

    def __init__(self) -> None:
        super().__init__()
        self.test = (self.test[0][:64], self.test[1][:64])


class Short(MobileNet):
    """Three of the six blocks: two with a residual, one with a stride."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(channels, classes)
        last = torch.nn.Conv2d(40, 160, 1, bias=False)
        self.features = torch.nn.Sequential(
            *self.features[:4], *self.features[5:7], last, *self.features[10:]
        )


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(bench, "tasks", lambda _: {"digits": Small()})
    monkeypatch.setattr(bench, "IMAGES", 64)
    monkeypatch.setattr(bench, "JUDGED", 64)
    monkeypatch.setattr(training, "_BATCH", 16)
    monkeypatch.setitem(NETWORKS, "mobilenet", Short)
    torch.manual_seed(0)
    save_file(NETWORKS["mobilenet"](1, 10).state_dict(), tmp_path / "digits-mobilenet-0.safetensors")
    methods = ["ours", "uniform L2", "soft masks", "as published", "narrow, from scratch"]
    return argparse.Namespace(
        work=tmp_path, record=tmp_path / "record.jsonl", seeds=1, targets=[0.5], budgets=[0.0, 0.02],
        rates=[0.01, 0.1], tasks=["digits"], networks=["mobilenet"], methods=methods, minutes=1e9, cost="flops",
    )  # fmt: skip


def test_every_kind_of_run_once(arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(arguments)
    lines = bench.Record(arguments.record).lines
    assert len(lines) == 2 + 5 * 2  # two methods need no training; each of the rest at two rates
    for line in lines:
        assert 0.3 < line["flops_share"] <= 0.5 or line["method"] == "as published"
        assert line["steps"] == round(line["budget"] * 500) and 0 <= line["accuracy"] <= 1
    monkeypatch.setattr(bench.Bench, "run", lambda *_: pytest.fail("repeated"))
    bench.run(arguments)


class Known(Stopwatch):
    """Its latencies are known: a tenth is overhead that no width changes."""

    measured = 0

    def share(self, model: torch.nn.Module, again: bool = False) -> Share:
        self.measured += 1
        sizes = [sum(p.numel() for p in net.parameters()) for net in (model, self._dense)]
        return Share(0.1 + 0.9 * sizes[0] / sizes[1], 0.001)


def test_networks_are_narrowed_until_they_measure_the_target(tmp_path: Path) -> None:
    watch = Known("known", torch.nn.Linear(1, 1000), torch.zeros(1, 1), Record(tmp_path / "record.jsonl"))
    aim = watch.narrowed(0.4, lambda share: (torch.nn.Linear(1, round(1000 * share)), share), 0.4)
    assert 0.1 + 0.9 * aim == pytest.approx(0.4, abs=CLOSE) and watch.measured <= 2 * (TRIES + 1)
    other = Known("known", torch.nn.Linear(1, 1), torch.zeros(1, 1), watch._record, "torch")
    assert (watch.name, other.name) == ("known", "known, torch")  # records never mix backends


@pytest.mark.parametrize("method", ["ours", "uniform, eliminated and repaired"])
def test_what_a_method_returns_for_its_aim_measures_the_target(method: str, tmp_path: Path) -> None:
    """Ours is the network that was judged: once solved and measured, it stays."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 128, 3), torch.nn.ReLU(), torch.nn.Conv2d(128, 128, 3), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(128, 3),
    ).eval()  # fmt: skip
    images = torch.randn(32, 3, 8, 8)
    watch = Known("known", model, images, Record(tmp_path / "record.jsonl"))
    setting = Setting(model, images, None, 0, batch=8, head="6", narrow=watch.narrowed)
    setting.target = 0.5
    aim = setting.aim(method)
    network, share = CHOICES[method](setting, aim)
    assert watch.share(network).fraction == pytest.approx(0.5, abs=CLOSE)
    assert share <= aim < 0.5  # FLOPs fall with the parameters here, and these must be 4/9
    if method == "ours":
        masks = setting.trusted("ours").masks
        assert all(torch.equal(mask, masks[name]) for name, mask in setting.solved("ours", aim).masks.items())


def test_widths_are_told_apart_whatever_the_weights() -> None:
    first, second, other = (NETWORKS["resnet"](channels, 10) for channels in (3, 3, 1))
    assert widths_of(first) == widths_of(second) != widths_of(other)


def line(method: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "run", "task": "glyphs", "network": "resnet", "method": method, "cost": "latency", "target": 0.25,
        "budget": 0.1, "rate": 0.1, "seed": seed, "dense": 0.8, "accuracy": accuracy, "judged": accuracy,
        "latency_share": 0.25, "flops_share": 0.4,
    } | more  # fmt: skip


def test_the_page_tells_the_record(tmp_path: Path) -> None:
    lines = [line("ours", seed, 0.70 + 0.01 * seed) for seed in range(3)]
    lines += [line("ours", 0, 0.99, rate=0.01, judged=0.5)]  # better by the test images, which do not judge
    lines += [line("random", seed, 0.60 + 0.02 * seed) for seed in range(3)]
    lines += [line("ours", 0, 0.75, target=0.5, latency_share=0.5)]
    lines += [line("as published", 0, 0.65, latency_share=0.4)]
    lines += [line("uniform L2", 0, 0.5, cost="flops", latency_share=None)]
    test = scipy.stats.ttest_rel([0.60, 0.62, 0.64], [0.70, 0.71, 0.72]).confidence_interval(0.95)
    (tmp_path / "accuracy_of_before.svg").write_text("")
    write_document(lines, tmp_path)
    text = (tmp_path / "accuracy.md").read_text(encoding="utf-8")
    assert "| ours | **71.0%** (3 seeds) |" in text
    assert f"| random | 62.0%, -9.0 ({100 * test.low:+.1f} to {100 * test.high:+.1f}) |" in text
    assert "| as published | 65.0% at 40% of the latency, -5.0 |" in text
    assert "| uniform L2 | 50.0% at 40% of the FLOPs |" in text
    assert "## resnet, 50% of the latency: 80.0% before" in text and "0.1 of 0.01, 0.1" in text
    assert [path.name for path in tmp_path.glob("*.svg")] == ["accuracy_resnet_10.svg"]
