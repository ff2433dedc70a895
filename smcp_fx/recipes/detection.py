"""PASCAL VOC 07+12 for SSD: torchvision's reader, SSD's augmentation, its loss, and VOC's mean average precision."""

from __future__ import annotations

import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset
from torchvision import tv_tensors
from torchvision.datasets import VOCDetection
from torchvision.transforms import v2

from smcp_fx.errors import InputError
from smcp_fx.recipes.multibox import multibox_loss
from smcp_fx.recipes.recipe import Recipe
from smcp_fx.recipes.task import Meter, torchmetrics
from smcp_fx.zoo.boxes import detections
from smcp_fx.zoo.ssd import SSD300, SSD512, priors_of

CLASSES = tuple(
    """
aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep
sofa train tvmonitor
""".split()
)
_MEAN, _SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DETECTORS = {"smcp:ssd512_resnet50": SSD512, "smcp:ssd300_resnet50": SSD300}


class VOCImages(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """One split of one year: images [3, size, size], and targets.

    A target has ``boxes`` [n, 4] (corners, shares of the image), ``labels`` [n] from 1, and ``difficult`` [n]
    bool, except with augmentation, which drops boxes.
    """

    def __init__(self, root: Path, year: str, split: str, size: int, augment: bool) -> None:
        try:
            self._files = VOCDetection(str(root), year=year, image_set=split)
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"{root} holds no {split} split of PASCAL VOC {year} ({error}). --data is the folder that "
                f"VOCdevkit/ lies in, with VOCdevkit/VOC{year}/ImageSets/Main/{split}.txt, Annotations/ and "
                "JPEGImages/"
            ) from error
        self._size = size
        self._augment = augment
        self._transform = _augmentation(size) if augment else _plain(size)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            picture, annotation = self._files[index]
            objects = annotation["annotation"].get("object", [])
            corners, labels, difficult = _objects(objects)
        except (OSError, xml.etree.ElementTree.ParseError, KeyError, TypeError, ValueError) as error:
            name = self._files.images[index]
            raise InputError(
                f"{name} and its annotation cannot be read: {type(error).__name__}: {error}"
            ) from error
        boxes = tv_tensors.BoundingBoxes(
            torch.tensor(corners).reshape(-1, 4), format="XYXY", canvas_size=(picture.height, picture.width)
        )
        image, target = self._transform(
            tv_tensors.Image(v2.functional.pil_to_tensor(picture)),
            {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64)},
        )
        target["boxes"] = target["boxes"].as_subclass(Tensor) / self._size
        if not self._augment:
            target["difficult"] = torch.tensor(difficult, dtype=torch.bool)
        return image.as_subclass(Tensor), target


def _objects(objects: Sequence[dict[str, Any]]) -> tuple[list[list[float]], list[int], list[bool]]:
    """Return corners in pixels from 0 (files count from 1, end included), labels, and difficult flags."""
    corners, labels, difficult = [], [], []
    for entry in objects:
        left, top, right, bottom = (float(entry["bndbox"][k]) for k in ("xmin", "ymin", "xmax", "ymax"))
        if not (left <= right and top <= bottom):
            raise ValueError(f"a box from ({left}, {top}) to ({right}, {bottom})")
        if entry["name"] not in CLASSES:
            raise ValueError(f"an object {entry['name']!r}, which is not a class of PASCAL VOC")
        corners.append([left - 1, top - 1, right, bottom])
        labels.append(CLASSES.index(entry["name"]) + 1)
        difficult.append(entry.get("difficult", "0") == "1")
    return corners, labels, difficult


def _plain(size: int) -> v2.Transform:
    return v2.Compose(
        [
            v2.Resize((size, size), antialias=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_MEAN, _SPREAD),
        ]
    )


def _augmentation(size: int) -> v2.Transform:
    """Return the transform: colours, zooming out, crops by overlap, mirroring (Liu et al., 2.2 and 3.6)."""
    grey = {tv_tensors.Image: [round(255 * mean) for mean in _MEAN], "others": 0}
    return v2.Compose(
        [
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill=grey),
            v2.RandomIoUCrop(),
            v2.RandomHorizontalFlip(),
            v2.SanitizeBoundingBoxes(),
            _plain(size),
        ]
    )


class Detection:
    """Trains on the trainval splits of 2007 and 2012; tests on the test split of 2007."""

    classes = len(CLASSES) + 1

    def __init__(self, recipe: Recipe, data: Path) -> None:
        if recipe.network not in _DETECTORS:
            raise InputError(f"detection needs one of {', '.join(_DETECTORS)}, not {recipe.network}")
        detector, size = _DETECTORS[recipe.network], recipe.size
        train = (("2007", "trainval"), ("2012", "trainval"))
        self.train: Dataset[Any] = ConcatDataset(
            [VOCImages(data, year, split, size, augment=True) for year, split in train]
        )
        self.test: Dataset[Any] = VOCImages(data, "2007", "test", size, augment=False)
        self.priors = priors_of(detector, size)

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Stack the images; targets stay a list."""
        images, targets = zip(*samples, strict=True)
        return torch.stack(images), list(targets)

    def loss(self, outputs: tuple[Tensor, Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        """SSD's loss."""
        return multibox_loss(*outputs, targets, self.priors.to(outputs[0].device))

    def meter(self, device: torch.device) -> Meter:
        """VOC2007's mean average precision."""
        return MeanAveragePrecision(self.priors.to(device))


class MeanAveragePrecision:
    """VOC2007's measure: matches from an overlap of 0.5, precision averaged at the recalls 0, 0.1, ... 1.

    torchmetrics computes it, counting like COCO with other thresholds. Objects marked difficult count neither
    way: they are passed as COCO's crowds, whose overlap is a share of the detection alone.
    """

    def __init__(self, priors: Tensor) -> None:
        detection = torchmetrics().detection
        try:
            self._metric = detection.MeanAveragePrecision(
                iou_thresholds=[0.5],
                rec_thresholds=[k / 10 for k in range(11)],
                max_detection_thresholds=[1, 10, 100],
            ).to(priors.device)
        except ModuleNotFoundError as error:
            raise InputError(f"mAP needs pycocotools: pip install pycocotools ({error})") from error
        self._metric.warn_on_many_detections = False
        self._priors = priors

    def update(self, outputs: tuple[Tensor, Tensor], targets: list[dict[str, Tensor]]) -> None:
        """Add the outputs of a batch."""
        self.add(detections(*outputs, self._priors), targets)

    def add(self, found: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> None:
        """Add boxes, labels and scores, image by image."""
        truth = [
            {"boxes": t["boxes"], "labels": t["labels"], "iscrowd": t["difficult"].long()} for t in targets
        ]
        self._metric.update(found, truth)

    def compute(self) -> dict[str, float]:
        """Return the mean average precision as a percentage."""
        return {"mAP": 100 * max(float(self._metric.compute()["map"]), 0.0)}
