"""Input shapes that a text stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smcp_fx.errors import InputError
from smcp_fx.interface.example_inputs import as_inputs, first_convolution, image_shape, shape_of_text

IMAGES = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 8, 3), nn.Conv1d(1, 1, 1))
VIDEOS, SERIES, LINEAR = nn.Conv3d(2, 8, 3), nn.Conv1d(5, 8, 3), nn.Linear(7, 2)


@pytest.mark.parametrize(
    ("model", "text", "shape"),
    [
        (IMAGES, "64", (4, 3, 64, 64)),
        (IMAGES, "3x40X56", (4, 3, 40, 56)),
        (IMAGES, "2x3x40x56", (2, 3, 40, 56)),
        (VIDEOS, "112", (4, 2, 16, 112, 112)),
        (VIDEOS, "2x8x32x32", (4, 2, 8, 32, 32)),
        (SERIES, "100", (4, 5, 100)),
        (SERIES, "5,100", (4, 5, 100)),
        (LINEAR, "3x7", (3, 7)),
    ],
)
def test_a_side_sizes_without_the_batch_and_whole_shapes(
    model: nn.Module, text: str, shape: tuple[int, ...]
) -> None:
    assert shape_of_text(model, text, batch=4) == shape


@pytest.mark.parametrize("text", ["", "a", "3x0x4", "-1", "3x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is none: give a side"):
        shape_of_text(IMAGES, text)


def test_a_side_says_nothing_without_a_convolution() -> None:
    assert first_convolution(LINEAR) is None
    with pytest.raises(InputError, match="no convolution"):
        shape_of_text(LINEAR, "64")


def test_videos_of_small_sides_have_as_few_frames() -> None:
    assert image_shape(VIDEOS, 8) == (2, 2, 8, 8, 8)


class ByName(nn.Module):
    def forward(self, **inputs: Tensor) -> Any:
        return inputs["image"]


def test_arguments_without_a_place_are_refused() -> None:
    with pytest.raises(InputError, match="takes image by name only"):
        as_inputs({"image": torch.zeros(1)}, ByName())
