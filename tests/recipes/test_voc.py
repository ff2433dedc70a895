"""PASCAL VOC: what is read from the files, and mean average precision on boxes with a known answer."""

from __future__ import annotations

from pathlib import Path

import generated_data
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from smcp_fx.errors import InputError
from smcp_fx.recipes.detection import CLASSES, Detection, MeanAveragePrecision, VOCImages
from smcp_fx.recipes.recipe import load_recipe


def test_boxes_are_where_the_objects_are(tmp_path: Path) -> None:
    images = VOCImages(generated_data.voc(tmp_path), "2007", "test", 128, augment=False)
    assert len(images) == 4
    for image, target in images:
        assert image.shape == (3, 128, 128)
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            own = {"dog": 0, "person": 2}[CLASSES[int(label) - 1]]
            coloured = (image[own] - image[2 - own]) > 1.5  # of 3.6 in the object, 0 behind it
            rows, columns = coloured.any(1).nonzero(), coloured.any(0).nonzero()
            seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert [float(side) for side in seen] == pytest.approx((box * 128).tolist(), abs=2)
        assert not target["difficult"].any()


def test_pixels_count_from_one(tmp_path: Path) -> None:
    root = generated_data.voc(tmp_path, images=1)
    folder = root / "VOCdevkit" / "VOC2007"
    Image.fromarray(np.zeros((100, 200, 3), np.uint8)).save(folder / "JPEGImages" / "test_000000.jpg")
    both = "".join(
        generated_data._OBJECT.format(*box, name="cat", difficult=difficult)
        for box, difficult in (((1, 1, 200, 100), 0), ((101, 51, 150, 75), 1))
    )
    (folder / "Annotations" / "test_000000.xml").write_text(f"<annotation>{both}</annotation>")
    _, target = VOCImages(root, "2007", "test", 64, augment=False)[0]
    expected = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.75, 0.75]])  # whole image, and a part of it
    torch.testing.assert_close(target["boxes"], expected)
    assert target["difficult"].tolist() == [False, True]
    assert target["labels"].tolist() == [8, 8]


def test_training_images_are_augmented_and_keep_their_boxes(tmp_path: Path) -> None:
    task = Detection(load_recipe("ssd512-resnet50-25", ["size=64"]), generated_data.voc(tmp_path))
    assert len(task.train) == 8
    assert len(task.test) == 4
    shapes = set()
    for _ in range(5):
        images, targets = task.collate([task.train[index] for index in range(8)])
        assert images.shape == (8, 3, 64, 64)
        for target in targets:
            boxes = target["boxes"]
            assert type(boxes) is Tensor
            assert len(boxes) == len(target["labels"])
            assert bool((boxes >= 0).all()) and bool((boxes <= 1).all())
            assert bool((boxes[:, 2:] > boxes[:, :2]).all())
            shapes |= {tuple(round(v, 3) for v in box) for box in boxes.tolist()}
    assert len(shapes) > 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation><object>", "ParseError"),
        ("<annotation>" + generated_data._OBJECT.format(5, 5, 9, 9, name="unicorn", difficult=0) + "</annotation>",
         "unicorn"),
        ("<annotation>" + generated_data._OBJECT.format(9, 9, 5, 5, name="cat", difficult=0) + "</annotation>",
         "a box from"),
    ],
)  # fmt: skip
def test_damaged_annotations_are_named(text: str, message: str, tmp_path: Path) -> None:
    root = generated_data.voc(tmp_path, images=1)
    (root / "VOCdevkit" / "VOC2007" / "Annotations" / "test_000000.xml").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        VOCImages(root, "2007", "test", 64, augment=False)[0]
    assert "test_000000.jpg" in str(caught.value)


def found(boxes: list[list[float]], labels: list[int], scores: list[float]) -> dict[str, Tensor]:
    return {
        "boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels), "scores": torch.tensor(scores),
    }  # fmt: skip


def true(boxes: list[list[float]], labels: list[int], difficult: list[bool]) -> dict[str, Tensor]:
    return {
        "boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels),
        "difficult": torch.tensor(difficult),
    }  # fmt: skip


A, B, C = [0.1, 0.1, 0.4, 0.4], [0.5, 0.5, 0.9, 0.9], [0.1, 0.6, 0.3, 0.9]


def test_average_precision_of_known_boxes() -> None:
    meter = MeanAveragePrecision(torch.zeros(1, 4))
    # Class 1: right, wrong, right; of three objects. Precisions 1, 1/2, 2/3 at recalls 1/3, 1/3, 2/3: interpolated,
    # 1 up to a third (0, .1, .2, .3), 2/3 up to two thirds (.4, .5, .6), 0 beyond.
    meter.add([found([A, C, B], [1, 1, 1], [0.9, 0.8, 0.7])], [true([A, B], [1, 1], [False, False])])
    meter.add([found([], [], [])], [true([A], [1], [False])])
    assert meter.compute()["mAP"] == pytest.approx(100 * (4 * 1 + 3 * 2 / 3) / 11, rel=1e-5)
    # Class 2: found, with a double that counts as wrong behind it; all recalls have precision 1. The mean of both.
    meter.add([found([B, B], [2, 2], [0.9, 0.8])], [true([B], [2], [False])])
    assert meter.compute()["mAP"] == pytest.approx(100 * ((4 + 2) / 11 + 1) / 2, rel=1e-5)


def test_difficult_objects_do_not_count() -> None:
    meter = MeanAveragePrecision(torch.zeros(1, 4))
    # The detection of a difficult object, ahead of the right one, is not wrong; the difficult one is not missed.
    meter.add([found([B, A], [1, 1], [0.9, 0.8])], [true([A, B, C], [1, 1, 1], [False, True, True])])
    assert meter.compute()["mAP"] == pytest.approx(100.0)


def test_overlap_must_be_a_half() -> None:
    for shift, expected in ((0.09, 100.0), (0.11, 0.0)):  # (0.3 - s) / (0.3 + s) is a half at 0.1
        meter = MeanAveragePrecision(torch.zeros(1, 4))
        moved = [A[0] + shift, A[1], A[2] + shift, A[3]]
        meter.add([found([moved], [1], [0.9])], [true([A], [1], [False])])
        assert meter.compute()["mAP"] == pytest.approx(expected)
