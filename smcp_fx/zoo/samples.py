"""Samples for the network of an ONNX file: images, or arrays by the names of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from smcp_fx.errors import InputError
from smcp_fx.zoo.answers import class_axis, outputs_of
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.image_folder import FOLD, image_files, read_image
from smcp_fx.zoo.pretrained import Preprocessing

#: Test samples whose outputs are kept to compare with, at most. Chosen, not measured.
_MOST_TESTS = 512


@dataclass(frozen=True)
class Samples(ImageData):
    """Unlabelled samples of any inputs; ``most``: how many the network takes at once.

    A batch is a tensor, or a tuple of them where the network has several inputs.
    """

    most: int = 64

    def epoch(self, batch: int, seed: int, channels: int, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield the training samples, shuffled; the last batch may be smaller."""
        generator = torch.Generator().manual_seed(seed)
        return iter(DataLoader(self.train, min(batch, self.most), shuffle=True, generator=generator))

    def tests(self, batch: int, channels: int, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield the test samples in order, with the outputs to compare with."""
        return iter(DataLoader(self.test, min(batch, self.most)))

    def labelled_by(self, network: nn.Module, channels: int, size: int) -> ImageData:
        """Return the data with a network's outputs beside the test samples."""
        kept: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for inputs, _ in self.tests(self.most, 0, 0):
                outputs = outputs_of(network(*as_tuple(inputs)))
                if any(output.dim() == 0 or len(output) != len(as_tuple(inputs)[0]) for output in outputs):
                    raise InputError(
                        "the network's outputs are not one for each sample in their first axis, so that samples "
                        "cannot be compared: prune it with smcp_fx.from_onnx and a loss of your own"
                    )
                kept += [tuple(output[i].clone() for output in outputs) for i in range(len(outputs[0]))]
        first = kept[0][0][None]
        axis = class_axis(first)
        classes = 1000 if axis is None else first.shape[axis]
        return replace(self, test=_Beside(self.test, kept), classes=classes)


def as_tuple(inputs: Any) -> tuple[Tensor, ...]:
    """Return a batch's inputs as a tuple."""
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


class _Beside(Dataset[Any]):
    def __init__(self, samples: Dataset[Any], outputs: list[tuple[Tensor, ...]]) -> None:
        self.samples, self.outputs = samples, outputs

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> tuple[Any, tuple[Tensor, ...]]:
        return self.samples[index][0], self.outputs[index]


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
        made: Any = _Prepared(tuple(next(iter(examples.values())).shape[1:]), images)
    else:
        every = sorted(str(path) for path in root.rglob("*.npz"))
        dataset, made = _Arrays, examples
    if len(every) < 2:
        raise InputError(f"{spec}: there are {len(every)} files; two are the least")
    tests = every[::FOLD][:_MOST_TESTS]
    train = [file for file in every if file not in set(tests)]
    return Samples(spec, dataset(train, made), dataset(tests, made), 0, 0, 0, labelled=False, most=most)


def _told(examples: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in examples.items())


@dataclass(frozen=True)
class _Prepared:
    """An image file as the input of these sizes, [c, h, w] or [h, w, c]."""

    sizes: tuple[int, ...]
    images: Preprocessing

    def __call__(self, file: str) -> Tensor:
        last = self.sizes[-1] in (1, 3) and self.sizes[0] not in (1, 3)
        channels, height, width = (self.sizes[2], *self.sizes[:2]) if last else self.sizes
        if channels not in (1, 3):
            raise InputError(f"an input of sizes {list(self.sizes)} is no image: give --data npz:FOLDER")
        picture = (
            read_image(file).convert("L" if channels == 1 else "RGB").resize((width, height), resample=2)
        )
        values = np.asarray(picture, np.float32).reshape(height, width, channels) / 255
        values = values[..., ::-1] if self.images.order == "bgr" else values
        mean, std = (
            np.resize(np.asarray(v, np.float32), channels) for v in (self.images.mean, self.images.std)
        )
        values = np.ascontiguousarray((values - mean) / std)
        return torch.from_numpy(values if last else values.transpose(2, 0, 1).copy())


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
            with np.load(file, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files if name in self.examples}
        except (OSError, ValueError, EOFError) as error:
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
