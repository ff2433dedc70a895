"""Samples of a user's data set that are none: they are named, whichever process loads them."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smcp_fx.errors import InputError
from smcp_fx.zoo.data import ImageData, OwnSamples
from smcp_fx.zoo.image_folder import image_folder
from smcp_fx.zoo.pretrained import Preprocessing

GOOD = (torch.zeros(1, 8, 8), 1)


class Odd(list[Any]):
    """One sample of them is none, and is met in the middle of training."""

    def __init__(self, sample: Callable[[], Any]) -> None:
        super().__init__([GOOD] * 40)
        self.sample = sample

    def __getitem__(self, index: Any) -> Any:
        return self.sample() if index == 17 else super().__getitem__(index)


def lost() -> Any:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (lost, "KeyError: 'lost'"),
        (sys.exit, "it called sys.exit"),
        (lambda: (torch.zeros(1, 9, 9), 0), r"its shape is \(1, 9, 9\), the first one's \(1, 8, 8\)"),
        (lambda: (torch.zeros(1, 8, 8), 2), "a label is 2, and the train images are of 2 classes"),
        (lambda: (torch.zeros(1, 8, 8), -1), "a label is -1"),
        (lambda: (torch.zeros(1, 8, 8), 0.5), "TypeError"),
        (lambda: (torch.zeros(1, 8, 8, dtype=torch.uint8), 0), "the image is torch.uint8"),
        (lambda: ("x", 0), "the image is str"),
        (lambda: None, "TypeError"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_is_none_is_named(sample: Callable[[], Any], said: str, workers: int) -> None:
    own = OwnSamples(Odd(sample), "file.py:data", "train", (1, 8, 8), 2)
    data = ImageData("own", own, own, 2, 1, 8, workers)
    with pytest.raises(InputError, match=f"^file.py:data: .*train image 17 is not: .*{said}") as told:
        list(data.epoch(8, 0, 1, 8))
    assert "Traceback" not in str(told.value)
    assert not multiprocessing.active_children()
    if not workers:
        assert (
            sum(len(labels) for _, labels in ImageData("own", [GOOD] * 16, own, 2, 1, 8).epoch(8, 0, 1, 8))
            == 16
        )


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_a_damaged_image_is_named(tmp_path: Path, damage: str) -> None:
    """By itself, not as a disk that is full."""
    from PIL import Image

    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        noise = Image.effect_noise((32, 32), 90)
        noise.save(tmp_path / part / "a" / "1.png")
    file = tmp_path / "train" / "a" / "1.png"
    whole = file.read_bytes()
    file.write_bytes({"text": b"no image", "cut": whole[: len(whole) // 2], "empty": b""}[damage])
    train, test, _ = image_folder(tmp_path, Preprocessing(16))
    assert test[0][0].shape == (3, 16, 16)
    with pytest.raises(InputError, match=r"1\.png is not a readable image, or is damaged"):
        train[0]
