"""Small data sets in the formats that the recipes read: a folder of JPEGs a class, and a VOCdevkit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

#: What tells the classes of `image_folder` apart.
COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))
_OBJECT = """  <object>
    <name>{name}</name>
    <pose>Unspecified</pose>
    <truncated>0</truncated>
    <difficult>{difficult}</difficult>
    <bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox>
  </object>
"""
_ANNOTATION = """<annotation>
  <folder>VOC{year}</folder>
  <filename>{name}.jpg</filename>
  <size><width>{width}</width><height>{height}</height><depth>3</depth></size>
  <segmented>0</segmented>
{objects}</annotation>
"""


def image_folder(root: Path, train: int = 8, val: int = 4) -> Path:
    """Write train/ and val/ with a folder a class, of so many images each, of different sizes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label, colour in enumerate(COLOURS):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for index in range(count):
                height, width = rng.integers(40, 90, 2)
                pixels = np.clip(rng.normal(colour, 30, (height, width, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{split}_{index}.JPEG")
    return root


def voc(root: Path, images: int = 4) -> Path:
    """Write VOCdevkit/ of 2007 (trainval and test) and 2012 (trainval), of so many images a split."""
    rng = np.random.default_rng(1)
    for year, split in (("2007", "trainval"), ("2007", "test"), ("2012", "trainval")):
        folder = root / "VOCdevkit" / f"VOC{year}"
        for name in ("ImageSets/Main", "JPEGImages", "Annotations"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        names = [f"{split}_{index:06d}" for index in range(images)]
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            height, width = (int(side) for side in rng.integers(90, 140, 2))
            pixels = np.clip(rng.normal(120, 8, (height, width, 3)), 0, 255).astype(np.uint8)
            objects = ""
            for kind, colour, share in (("dog", (220, 30, 30), 0), ("person", (30, 30, 220), 2))[
                : rng.integers(1, 3)
            ]:
                left, top = (1 + side * share // 4 + int(rng.integers(side // 6)) for side in (width, height))
                right, bottom = left + width // 4, top + height // 4
                pixels[top - 1 : bottom, left - 1 : right] = colour
                objects += _OBJECT.format(left, top, right, bottom, name=kind, difficult=0)
            Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg")
            text = _ANNOTATION.format(year=year, name=name, width=width, height=height, objects=objects)
            (folder / "Annotations" / f"{name}.xml").write_text(text)
    return root
