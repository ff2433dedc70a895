"""Images for training and testing, in the shape that a model takes."""

from __future__ import annotations

import importlib.util
import operator
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from smcp_fx.errors import InputError
from smcp_fx.output_kinds import named_tensors
from smcp_fx.zoo.answers import Answers
from smcp_fx.zoo.image_folder import image_folder, plain_images
from smcp_fx.zoo.pretrained import Preprocessing

#: Most processes that load images by default. Chosen, not measured.
_MOST_WORKERS = 8


@dataclass(frozen=True)
class ImageData:
    """Training and test images with integer labels; each sample is ([channels, size, size], label).

    ``workers``: processes that load the images; 0: this one. ``labelled``: False if the labels mean nothing;
    ``answers`` then gives the kinds of the outputs beside the test samples, once there are any. ``alone``:
    the network takes one sample at a time, so its outputs need no axis of samples.
    """

    name: str
    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    channels: int
    size: int
    workers: int = 0
    labelled: bool = True
    answers: Answers | None = None
    alone: bool = False

    def right(self, outputs: Any, labels: Any) -> float:
        """Return how many test samples of a batch are right, by their labels or by ``answers``' agreement."""
        if self.answers is not None:
            return self.answers.agreement(outputs, labels, self.alone)
        return int((outputs.argmax(1).cpu() == labels).sum())

    def drawn(self, count: int, seed: int) -> ImageData:
        """Return the data with only this many training images, drawn by ``seed``."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        return replace(self, train=Subset(self.train, order[:count].tolist()))

    def beside(self, network: nn.Module, channels: int, size: int) -> ImageData:
        """Return the data with a network's outputs, by name, as labels of the test samples. Raises `InputError`."""
        device = next((p.device for p in network.parameters()), torch.device("cpu"))
        kept: list[dict[str, Tensor]] = []
        training = network.training
        network.eval()
        with torch.no_grad():
            for inputs, _ in self.tests(64, channels, size):
                batch = as_tuple(inputs)
                outputs = named_tensors(network(*(tensor.to(device) for tensor in batch)))
                every: list[Any] = [slice(None)] if self.alone else list(range(len(batch[0])))
                if not outputs or any(len(o) != len(every) for o in outputs.values() if not self.alone):
                    sizes = ", ".join(str(list(output.shape)) for output in outputs.values()) or "none"
                    raise InputError(
                        f"the network's outputs ({sizes}) are not numbers for each of {len(every)} samples in their "
                        "first axis, so that samples cannot be compared: prune it in Python, by a loss of your own"
                    )
                kept += [{name: output[i].cpu().clone() for name, output in outputs.items()} for i in every]
        network.train(training)
        return replace(self, test=_Beside(self.test, kept))

    def steps_per_epoch(self, batch: int) -> int:
        """Return the optimiser steps of an epoch; the last, smaller batch is dropped."""
        steps: int = len(self.train) // batch  # type: ignore[arg-type]
        if steps == 0:
            raise InputError(
                f"--train-batch {batch} is more than the {len(self.train)} training images of {self.name}"  # type: ignore[arg-type]
            )
        return steps

    def epoch(self, batch: int, seed: int, channels: int, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield one epoch of shuffled training batches; equal seeds give equal batches."""
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            self.train, batch, shuffle=True, drop_last=True, generator=generator, num_workers=self.workers
        )
        return (_fit(images, channels, size, labels) for images, labels in _told(loader))

    def tests(self, batch: int, channels: int, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield the test images in order."""
        loader = DataLoader(self.test, batch, num_workers=self.workers)
        return (_fit(images, channels, size, labels) for images, labels in _told(loader))


def _told(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the loader's batches; strip the traceback from an error of a loading process."""
    try:
        yield from loader
    except InputError as error:
        traceback.clear_frames(error.__traceback__)  # ends its processes now: garbage collection waits 5 s
        raise InputError(str(error).rpartition(f"{InputError.__module__}.InputError: ")[2].strip()) from error


def as_tuple(inputs: Any) -> tuple[Tensor, ...]:
    """Return a batch's inputs as a tuple."""
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


class _Beside(Dataset[Any]):
    """Samples with a network's outputs as labels."""

    def __init__(self, samples: Dataset[Any], outputs: list[dict[str, Tensor]]) -> None:
        self.samples, self.outputs = samples, outputs

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Tensor]]:
        return self.samples[index][0], self.outputs[index]


def _fit(images: Tensor, channels: int, size: int, labels: Any) -> tuple[Tensor, Any]:
    if images.shape[1] != channels:
        images = images.expand(-1, channels, -1, -1) if images.shape[1] == 1 else images.mean(1, keepdim=True)
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images.contiguous(), labels


def load_data(
    spec: str,
    base: Path | None = None,
    *,
    images: Preprocessing | None = None,
    augment: str = "usual",
    workers: int | None = None,
) -> ImageData:
    """Load ``digits``, ``imagefolder:PATH``, ``images:PATH`` or ``path/to/file.py:factory``.

    ``images:`` takes all images below a folder, without labels (0 classes). ``base``: the folder that
    relative paths start from (default: the working directory). ``images`` and ``augment``: how image files
    become inputs. ``workers``: as in `ImageData`; by default none, but for image files one per usable core,
    eight at most. Raises `InputError`.
    """
    if spec == "digits":
        return replace(_digits(), workers=workers or 0)
    kind, _, rest = spec.partition(":")
    if kind in ("imagefolder", "images") and rest:
        made, root = images or Preprocessing(), (base or Path()) / rest
        sets = image_folder(root, made, augment) if kind == "imagefolder" else plain_images(root, made)
        several = min(_usable_cores(), _MOST_WORKERS) if workers is None else workers
        return ImageData(spec, *sets, 3, made.size, several, labelled=kind == "imagefolder")
    if spec.rpartition(":")[0].endswith(".py"):
        return replace(_from_factory(spec, base), workers=workers or 0)
    raise InputError(
        f"unknown data {spec!r}: give digits, imagefolder:PATH (with train/ and val/ or test/ below it), images:PATH "
        "(without labels), or path/to/file.py:factory"
    )


def _usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _from_factory(spec: str, base: Path | None) -> ImageData:
    result = call_factory(spec, base)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise InputError(f"{spec} must return (train, test), two datasets of (image, label)")
    train, test = (OwnSamples(one, spec, part) for one, part in zip(result, ("train", "test"), strict=True))
    image, _ = train[0]
    if image.dim() != 3 or image.shape[1] != image.shape[2]:
        raise InputError(f"{spec}: images must be square tensors [C, H, W], not {tuple(image.shape)}")
    classes = max(train[i][1] for i in range(min(len(train), 10_000))) + 1
    train, test = (replace(one, shape=image.shape, classes=classes) for one in (train, test))
    len(test), test[0]
    return ImageData(spec, train, test, classes, image.shape[0], image.shape[1])


@dataclass(frozen=True)
class OwnSamples(Dataset[Any]):
    """A user's data set: an error or a malformed sample raises an `InputError` that names the sample.

    ``shape`` of the images and number of ``classes``, if already known.
    """

    samples: Any
    name: str
    part: str
    shape: tuple[int, ...] | None = None
    classes: int | None = None

    def __len__(self) -> int:
        try:
            count = len(self.samples)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{self.name}: len() of the {self.part} images failed: {_reason(error)}"
            ) from error
        if count == 0:
            raise InputError(f"{self.name}: there are no {self.part} images")
        return count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image, label = self.samples[index]
            number = operator.index(label)
            if not isinstance(image, Tensor) or not image.is_floating_point():
                raise TypeError(f"the image is {getattr(image, 'dtype', type(image).__name__)}")
            if self.shape is not None and image.shape != self.shape:
                raise ValueError(f"its shape is {tuple(image.shape)}, the first one's {tuple(self.shape)}")
            if number < 0 or (self.classes is not None and number >= self.classes):
                range_words = (
                    "" if self.classes is None else f", and the train images are of {self.classes} classes"
                )
                raise ValueError(f"a label is {number}{range_words}")
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{self.name}: samples must be (image tensor [C, H, W] of floats, integer label), and {self.part} "
                f"image {index} is not: {_reason(error)}"
            ) from error
        return image, number


def call_factory(spec: str, base: Path | None = None) -> Any:
    """Call ``path/to/file.py:factory`` without arguments, return its result; ``base`` as in `load_data`."""
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
        raise InputError(f"{spec}: importing {path} failed: {_reason(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InputError(f"{spec}: {path} defines no function {name!r}")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: {name}() failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"
