"""The recipe files against the paper's numbers, typed here again from its tables and supplement."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError
from smcp_fx.recipes.recipe import Recipe, load_recipe, recipe_names
from smcp_fx.recipes.timeline import Timeline

#: name: network, share of the latency kept, batch of the latency table, where the baseline comes from
ROWS = {
    "resnet50-80": ("torchvision:resnet50", 0.80, 256, "torchvision:IMAGENET1K_V1"),
    "resnet50-55": ("torchvision:resnet50", 0.55, 256, "torchvision:IMAGENET1K_V1"),
    "resnet50-30": ("torchvision:resnet50", 0.30, 256, "torchvision:IMAGENET1K_V1"),
    "resnet50-eagleeye-80": ("torchvision:resnet50", 0.80, 256, "file"),
    "resnet50-eagleeye-50": ("torchvision:resnet50", 0.50, 256, "file"),
    "resnet50-eagleeye-30": ("torchvision:resnet50", 0.30, 256, "file"),
    "resnet50-eagleeye-25": ("torchvision:resnet50", 0.25, 256, "file"),
    "resnet101-60": ("torchvision:resnet101", 0.60, 256, "torchvision:IMAGENET1K_V1"),
    "resnet101-50": ("torchvision:resnet101", 0.50, 256, "torchvision:IMAGENET1K_V1"),
    "resnet101-30": ("torchvision:resnet101", 0.30, 256, "torchvision:IMAGENET1K_V1"),
    "resnet101-25": ("torchvision:resnet101", 0.25, 256, "torchvision:IMAGENET1K_V1"),
    "mobilenet-v1-60": ("smcp:mobilenet_v1", 0.60, 512, "file"),
    "mobilenet-v1-40": ("smcp:mobilenet_v1", 0.40, 512, "file"),
    "ssd512-resnet50-25": ("smcp:ssd512_resnet50", 0.25, 1, "file"),
}


def test_the_guide_gives_the_published_method() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "paper_experiments.md"
    changes = re.findall(r"--set (method\S+)", guide.read_text(encoding="utf-8").replace("`", " "))
    method = load_recipe("resnet50-30", changes).method
    assert len(changes) == 4 and method == MethodConfig.published(keep_first_convolution=True)


def test_every_row_has_a_recipe() -> None:
    assert set(recipe_names()) == {*ROWS, "ssd300-resnet50"}  # SSD300 is the rival, and is not pruned
    assert load_recipe("ssd300-resnet50").pruning.target == 1.0


@pytest.mark.parametrize("name", ROWS)
def test_recipe_holds_the_papers_numbers(name: str) -> None:
    network, target, table_batch, weights = ROWS[name]
    recipe = load_recipe(name)
    assert (recipe.network, recipe.pruning.target, recipe.latency.batch, recipe.weights) == (
        network, target, table_batch, weights,
    )  # fmt: skip
    assert recipe.row.endswith(f"SMCP-{round(100 * target)}%")
    assert recipe.row.startswith(name.rpartition("-")[0] if "ssd" not in name else "voc")
    assert recipe.method.multiple == 8
    assert recipe.method.keep_first_convolution
    assert recipe.training.mixed_precision
    pruning, training = recipe.pruning, recipe.training
    schedule = (training.epochs, pruning.warmup, pruning.ramp, pruning.cooldown, pruning.every)
    if "ssd" in name:
        assert schedule == (800, 60, 250, 350, 100)
        assert (training.batch, recipe.size, recipe.task) == (16, 512, "detection")
        assert (training.weight_decay, training.momentum, training.bias_rate) == (2e-3, 0.9, 2.0)
        assert training.sync_batch_norm
    else:
        assert schedule == (90, 10, 30, 45, 80)
        assert (training.batch, recipe.size, recipe.task) == (256, 224, "classification")
        assert (training.weight_decay, training.momentum) == (1 / 32768, 0.875)
        assert training.label_smoothing == 0.1
        assert not training.sync_batch_norm
    assert not training.batch_norm_decay


def test_timeline_of_imagenet() -> None:
    timeline = Timeline.of(load_recipe("resnet50-30"), 1281167, 8, 1.0)
    steps = 1281167 // 2048
    assert timeline.schedule.steps_per_epoch == steps == 625
    assert timeline.total_batch == 2048
    assert timeline.rate(0) == pytest.approx(2.048 / (8 * steps))
    assert timeline.rate(8 * steps - 1) == pytest.approx(2.048)
    for epoch in (8, 30, 60, 89):
        expected = 1.024 * (1 + math.cos(math.pi * (epoch - 8) / 82))
        assert timeline.rate(epoch * steps) == pytest.approx(expected)
    due = [step for step in range(1, 90 * steps + 1) if timeline.schedule.due(step)]
    assert timeline.solves == len(due) == 274  # 21,875 steps, and the last
    for step in (0, 6250, 6329, 6330, 6331, 20000, 28090, 28124, 28125, 28126, 56250):
        assert timeline.solves_until(step) == sum(one <= step for one in due), step


def test_timeline_of_voc() -> None:
    timeline = Timeline.of(load_recipe("ssd512-resnet50-25"), 16551, 8, 1.0)
    steps = timeline.schedule.steps_per_epoch
    assert steps == 129
    rates = {25: 4e-3, 50: 8e-3, 599: 8e-3, 600: 3e-3, 699: 3e-3, 700: 1e-3, 740: 4e-4, 770: 4e-5, 799: 4e-5}
    for epoch, rate in rates.items():
        assert timeline.rate(epoch * steps) == pytest.approx(rate, rel=1e-3), epoch


@pytest.mark.parametrize("fraction", [0.1, 0.0125])
def test_a_fraction_is_the_same_recipe_shorter(fraction: float) -> None:
    recipe = load_recipe("resnet50-30")
    whole, part = (Timeline.of(recipe, 1281167, 8, share) for share in (1.0, fraction))
    assert part.schedule.total_steps == pytest.approx(fraction * whole.schedule.total_steps, abs=1)
    assert part.solves == pytest.approx(whole.solves, rel=0.03)
    for share in (0.05, 0.2, 0.7, 0.95):  # of the training
        at, whole_at = (round(share * t.schedule.total_steps) for t in (part, whole))
        assert part.rate(at) == pytest.approx(whole.rate(whole_at), rel=0.05)
        aims = (t.schedule.target(s, 1.0, 0.3) for t, s in ((part, at), (whole, whole_at)))
        assert next(aims) == pytest.approx(next(aims), rel=0.01)


def test_evaluations_come_every_so_many_epochs() -> None:
    recipe = load_recipe("ssd512-resnet50-25")
    timeline = Timeline.of(recipe, 16551, 8, 1.0)
    found = [epoch for epoch in range(1, 801) if timeline.evaluated(epoch * 129)]
    assert found == list(range(20, 801, 20))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.bacth=3", "did you mean training.batch"),
        ("training.batch=many", "training.batch must be a whole number"),
        ("training.batch=true", "training.batch must be a whole number"),
        ("training.batch=0", "training.batch must be positive"),
        ("training.rate_decay=linear", "cosine or steps"),
        ("pruning.target=1.5", "fraction in"),
        ("task=segmentation", "task must be"),
        ("method.mask=firm", "mask must be one of"),
        ("weights=imagenet", "weights must be"),
        ("size", "KEY=VALUE"),
        ("size.x=3", "not a table"),
        ("training=3", "must be a table"),
        ("training.rate_steps=[[5, 0.1], [4, 0.1]]", "ascending"),
        ("training.rate_steps=[[5]]", "list of 2"),
    ],
)
def test_bad_fields_are_named(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("resnet50-30", [override])


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'base = "imagenet"\nnetwork = "torchvision:resnet18"\nweights = "none"\n[pruning]\ntarget = 0.5\n'
    )
    recipe = load_recipe(str(file))
    assert recipe == replace(recipe, name="mine", network="torchvision:resnet18")
    assert recipe.training == load_recipe("resnet50-30").training
    for text, message in (
        ('base = "cifar"', "there are imagenet, voc"),
        ("a = ", "is not TOML"),
        ('base = "imagenet"', "lacks the field network"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            load_recipe(str(file))
    with pytest.raises(InputError, match="cannot be read"):
        load_recipe(str(tmp_path / "none.toml"))


def test_what_does_not_fit_the_data_is_refused() -> None:
    recipe: Recipe = load_recipe("resnet50-30")
    with pytest.raises(InputError, match="fewer than one batch"):
        Timeline.of(recipe, 100, 1, 1.0)
    with pytest.raises(InputError, match="leaves no step"):
        Timeline.of(load_recipe("resnet50-30", ["training.batch=8"]), 8, 1, 0.005)
    short = Timeline.of(load_recipe("resnet50-30", ["training.batch=8"]), 24, 1, 0.02).schedule
    assert (
        short.target(short.last_step, 1.0, 0.3) == 0.3
    )  # the target arrives with the last solve, if not before
    with pytest.raises(InputError, match="fraction"):
        Timeline.of(recipe, 10_000, 1, 0.0)
