"""Samples for the network of an ONNX file: images, or arrays by the names of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from smcp_fx.errors import InputError
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.image_folder import FOLD, absent, image_files, read_image
from smcp_fx.zoo.pretrained import Preprocessing

#: Most test samples whose outputs are kept for comparison. Chosen, not measured.
_MOST_TESTS = 512


@dataclass(frozen=True)
class Samples(ImageData):
    """Unlabelled samples of any inputs; ``most``: the largest batch that the network takes.

    A batch is a tensor, or a tuple of tensors if the network has several inputs.
    """

    most: int = 64

    def epoch(self, batch: int, seed: int, channels: int, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield the training samples, shuffled; the last batch may be smaller."""
        generator = torch.Generator().manual_seed(seed)
        return iter(DataLoader(self.train, min(batch, self.most), shuffle=True, generator=generator))

    def tests(self, batch: int, channels: int, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield the test samples in order."""
        return iter(DataLoader(self.test, min(batch, self.most), collate_fn=_alone if self.alone else None))


def load_samples(
    spec: str, base: Path, examples: dict[str, Tensor], images: Preprocessing, most: int
) -> Samples:
    """Load ``images:FOLDER`` or ``npz:FOLDER`` for inputs like ``examples``, by name. Raises `InputError`."""
    kind, _, rest = spec.partition(":")
    if kind not in ("images", "npz") or not rest:
        raise InputError(
            f"--data {spec!r}: for an ONNX file give images:FOLDER, or npz:FOLDER of arrays by input name"
        )
    root = base / rest
    if kind == "images":
        if len(examples) != 1 or next(iter(examples.values())).dim() != 4:
            raise InputError(
                f"--data {spec}: the network's inputs are {_told(examples)}, not one image: give npz:FOLDER"
            )
        every: list[Any] = image_files(root)
        dataset: Any = _Images
        made: Any = _Prepared(next(iter(examples.values()))[0], images)
    else:
        every = sorted(str(path) for path in root.rglob("*.npz"))
        dataset, made = _Arrays, examples
        if len(every) < 2:
            raise InputError(f"{spec}: there are {len(every)} .npz files; two are the least" + absent(root))
    tests = every[::FOLD][:_MOST_TESTS]
    train = [file for file in every if file not in set(tests)]
    sets = dataset(train, made), dataset(tests, made)
    return Samples(spec, *sets, 0, 0, 0, labelled=False, alone=most == 1, most=most)


def _alone(samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return one sample as a batch, with the outputs beside it unchanged."""
    ((inputs, outputs),) = samples
    return default_collate([inputs]), outputs


def _told(examples: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in examples.items())


@dataclass(frozen=True)
class _Prepared:
    """Turns image files into inputs like ``example``, [c, h, w] or [h, w, c]; normalises only floats."""

    example: Tensor
    images: Preprocessing

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise InputError(
                f"an input of sizes {list(self.example.shape)} is no image: give --data npz:FOLDER"
            )

    @property
    def last(self) -> bool:
        """Whether the channels are the last axis."""
        return self.example.shape[-1] in (1, 3) and self.example.shape[0] not in (1, 3)

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self.example.shape[-1 if self.last else 0]

    def __call__(self, file: str) -> Tensor:
        sizes = self.example.shape[:2] if self.last else self.example.shape[1:]
        picture = read_image(file).convert("L" if self.channels == 1 else "RGB")
        values: Any = np.asarray(picture.resize(tuple(reversed(sizes)), resample=2), np.float32)
        values = values.reshape(*sizes, self.channels)[..., :: -1 if self.images.order == "bgr" else 1]
        if self.example.is_floating_point():
            mean, std = (
                np.resize(np.asarray(numbers, np.float32), self.channels)
                for numbers in (self.images.mean, self.images.std)
            )
            values = (values / 255 - mean) / std
        arranged = values if self.last else values.transpose(2, 0, 1)
        return torch.from_numpy(arranged.copy()).to(self.example.dtype)


@dataclass(frozen=True)
class _Images(Dataset[Any]):
    files: list[str]
    made: _Prepared

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.made(self.files[index]), 0


@dataclass(frozen=True)
class _Arrays(Dataset[Any]):
    files: list[str]
    examples: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file = self.files[index]
        try:
            with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files if name in self.examples}
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise InputError(f"{file} cannot be read as arrays: {error}") from error
        missing = [name for name in self.examples if name not in arrays]
        if missing:
            raise InputError(
                f"{file} has no array {missing[0]!r}; the network's inputs are {_told(self.examples)}"
            )
        inputs = []
        for name, like in self.examples.items():
            array = torch.from_numpy(arrays[name])
            array = array[0] if array.dim() == like.dim() and len(array) == 1 else array
            if array.shape != like.shape[1:]:
                raise InputError(
                    f"{file}: {name!r} is of sizes {list(array.shape)}; one sample is {list(like.shape[1:])}"
                )
            inputs.append(array.to(like.dtype))
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), 0
