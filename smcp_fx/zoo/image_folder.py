"""Folders of images, one per class, as the inputs of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from smcp_fx.errors import InputError
from smcp_fx.zoo.pretrained import Preprocessing

#: Augmentations, from none to the usual one for large networks.
AUGMENTATIONS = ("none", "usual", "strong")

#: One in this many unlabelled images is a test image. Chosen, not measured.
FOLD = 5


def image_folder(
    root: Path, images: Preprocessing | None = None, augment: str = "usual"
) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Return the training images in train/, the test images in val/ (or test/), and the number of classes.

    ``images``: size, crop and normalisation. ``augment``: "usual" is a random resized crop and a flip, "strong" adds
    TrivialAugment and random erasing, "none" treats training images like test images. Raises `InputError`.
    """
    from torchvision.datasets import ImageFolder

    images = images or Preprocessing()
    test_folder = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if not (root / "train").is_dir() or test_folder is None:
        raise InputError(
            f"imagefolder:{root} needs the folders train/ and val/ (or test/) with a folder a class"
            + absent(root)
        )
    try:
        train = ImageFolder(str(root / "train"), _training(images, augment), loader=read_image)
        test = ImageFolder(str(test_folder), _testing(images), loader=read_image)
    except FileNotFoundError as error:
        raise InputError(f"imagefolder:{root}: {error}") from error
    if train.classes != test.classes:
        raise InputError(
            f"imagefolder:{root}: train/ has {len(train.classes)} classes, the test {len(test.classes)}"
        )
    return train, test, len(train.classes)


def absent(root: Path) -> str:
    """Return words for a message if the folder is missing."""
    return "" if root.is_dir() else "; there is no such folder"


def plain_images(root: Path, images: Preprocessing | None = None) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Return all images below a folder, every fifth one for testing, and 0 classes; each has the label 0."""
    files = image_files(root)
    made = _testing(images or Preprocessing())
    tests = files[::FOLD]
    return _Files([f for f in files if f not in set(tests)], made), _Files(tests, made), 0


def image_files(root: Path) -> list[str]:
    """Return all images below a folder; `InputError` for fewer than two."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    files = sorted(str(path) for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
    if len(files) < 2:
        raise InputError(
            f"images:{root}: there are {len(files)} images below it; two are the least" + absent(root)
        )
    return files


class _Files(Dataset[Any]):
    def __init__(self, files: list[str], made: Any) -> None:
        self.files, self.made = files, made

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.made(read_image(self.files[index])), 0


def _training(images: Preprocessing, augment: str) -> Any:
    from torchvision.transforms import v2

    if augment == "none":
        return _testing(images)
    way = v2.InterpolationMode(images.interpolation)
    varied: list[Any] = [v2.RandomResizedCrop(images.size, interpolation=way, antialias=True)]
    varied += [v2.RandomHorizontalFlip(), *([v2.TrivialAugmentWide()] if augment == "strong" else [])]
    erased = [v2.RandomErasing(0.1)] if augment == "strong" else []
    return v2.Compose([*varied, *_normalised(images), *erased])


def _testing(images: Preprocessing) -> Any:
    from torchvision.transforms import v2

    way = v2.InterpolationMode(images.interpolation)
    resized = v2.Resize(round(images.size / images.crop), interpolation=way, antialias=True)
    return v2.Compose([resized, v2.CenterCrop(images.size), *_normalised(images)])


def _normalised(images: Preprocessing) -> list[Any]:
    from torchvision.transforms import v2

    values = v2.ToDtype(torch.float32, scale=True)
    return [v2.ToImage(), values, v2.Normalize(list(images.mean), list(images.std))]


def read_image(path: str) -> Any:
    """Return the picture in an image file; `InputError` names a file without one."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is not a readable image, or is damaged: {error}") from error
