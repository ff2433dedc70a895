"""Images to train and test on, in the shape a model takes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from smcp_fx.errors import InputError


@dataclass(frozen=True)
class ImageData:
    """Training and test images with integer labels; each sample is ([channels, size, size], label)."""

    name: str
    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    channels: int
    size: int

    def steps_per_epoch(self, batch: int) -> int:
        """Optimiser steps an epoch; the last, smaller batch is left out."""
        steps: int = len(self.train) // batch  # type: ignore[arg-type]
        if steps == 0:
            raise InputError(
                f"--train-batch {batch} is more than the {len(self.train)} training images of {self.name}"  # type: ignore[arg-type]
            )
        return steps

    def epoch(self, batch: int, seed: int, channels: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of shuffled training batches; equal seeds give equal batches."""
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(self.train, batch, shuffle=True, drop_last=True, generator=generator)
        return (_fit(images, channels, size, labels) for images, labels in loader)

    def tests(self, batch: int, channels: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images in order."""
        loader = DataLoader(self.test, batch)
        return (_fit(images, channels, size, labels) for images, labels in loader)


def _fit(images: Tensor, channels: int, size: int, labels: Tensor) -> tuple[Tensor, Tensor]:
    if images.shape[1] != channels:
        images = images.expand(-1, channels, -1, -1) if images.shape[1] == 1 else images.mean(1, keepdim=True)
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images.contiguous(), labels


def load_data(spec: str, base: Path | None = None) -> ImageData:
    """Load ``digits``, ``imagefolder:PATH`` or ``path/to/file.py:factory``; `InputError` says what is wrong.

    ``base``: the folder that relative paths begin at (default: the working directory).
    """
    if spec == "digits":
        return _digits()
    kind, _, rest = spec.partition(":")
    if kind == "imagefolder" and rest:
        found = image_folder((base or Path()) / rest)
        return replace(found, name=spec)
    if spec.rpartition(":")[0].endswith(".py"):
        return _from_factory(spec, base)
    raise InputError(
        f"unknown data {spec!r}: give digits, imagefolder:PATH (with train/ and val/ or test/ below it), or "
        "path/to/file.py:factory"
    )


def _digits() -> ImageData:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise InputError("--data digits needs scikit-learn: pip install scikit-learn") from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    rows = range(len(labels))
    train, test = train_test_split(rows, test_size=0.4, stratify=labels, random_state=0)
    mean, std = images[train].mean(), images[train].std()
    images = (images - mean) / std
    targets = torch.tensor(labels, dtype=torch.int64)
    return ImageData(
        name="digits (scikit-learn)",
        train=TensorDataset(images[train], targets[train]),
        test=TensorDataset(images[test], targets[test]),
        classes=10,
        channels=1,
        size=32,
    )


def image_folder(root: Path, size: int = 224) -> ImageData:
    """Load a folder of train/ and val/ (or test/) with a folder a class; images of ``size`` pixels a side."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    test_folder = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if not (root / "train").is_dir() or test_folder is None:
        raise InputError(
            f"imagefolder:{root} needs the folders train/ and val/ (or test/) with a folder a class"
        )
    normalise = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    train_transform = v2.Compose(
        [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), *normalise]
    )
    test_transform = v2.Compose([v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size), *normalise])
    try:
        train = ImageFolder(str(root / "train"), train_transform, loader=_read_image)
        test = ImageFolder(str(test_folder), test_transform, loader=_read_image)
    except FileNotFoundError as error:
        raise InputError(f"imagefolder:{root}: {error}") from error
    if train.classes != test.classes:
        raise InputError(
            f"imagefolder:{root}: train/ has {len(train.classes)} classes, the test {len(test.classes)}"
        )
    return ImageData(f"imagefolder:{root}", train, test, len(train.classes), 3, size)


def _read_image(path: str) -> Any:
    """Return an image file's picture; `InputError` names a file that holds none."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is no image that can be read, or a damaged one: {error}") from error


def _from_factory(spec: str, base: Path | None) -> ImageData:
    result = call_factory(spec, base)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise InputError(f"{spec} must return (train, test), two datasets of (image, label)")
    train, test = result
    try:
        image, _ = train[0]
        labels = {int(train[i][1]) for i in range(min(len(train), 10_000))}
        if min(labels) < 0:
            raise ValueError(f"a label is {min(labels)}")
    except InputError:
        raise
    except Exception as error:  # whatever a data set of one's own throws
        raise InputError(
            f"{spec}: samples must be (image tensor [C, H, W], integer label): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(image, Tensor) or image.dim() != 3 or image.shape[1] != image.shape[2]:
        raise InputError(
            f"{spec}: images must be square tensors [C, H, W], not {getattr(image, 'shape', type(image))}"
        )
    return ImageData(spec, train, test, max(labels) + 1, image.shape[0], image.shape[1])


def call_factory(spec: str, base: Path | None = None) -> Any:
    """Call ``path/to/file.py:factory`` without arguments and return what it returns; ``base`` as in `load_data`."""
    file, _, name = spec.rpartition(":")
    path = (base or Path()) / file
    if not path.is_file():
        raise InputError(f"{spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules.setdefault(path.stem, module)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: importing {path} failed: {_told(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InputError(f"{spec}: {path} defines no function {name!r}")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: {name}() failed: {_told(error)}") from error


def _told(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"
