"""Render letters and digits of every usable font below a folder, for the glyphs of `glyphs.py`.

    apt-get download texlive-fonts-extra && dpkg -x texlive-fonts-extra_*.deb fonts
    python tools/bench/pretrained/render.py fonts glyphs.npz          some minutes on one core

glyphs.npz: ``masks`` [fonts, 62, 40, 40] uint8, ``names`` and ``families`` [fonts]. A family is a folder of fonts of
one kind; at most eight styles of each are taken, chosen by a fixed seed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SIDE = 40
_STYLES, _POINTS, _LARGEST = 8, 64, 200
#: A font with fewer different glyphs is one of symbols, which repeats what it lacks.
_DIFFERENT = 40


def families(folder: Path) -> dict[str, list[Path]]:
    """Font files by family and format, in a fixed order."""
    found: dict[str, list[Path]] = {}
    for extension in ("otf", "ttf", "pfb"):
        for file in sorted(folder.rglob(f"*.{extension}")):
            found.setdefault(f"{extension}/{file.parent.name}", []).append(file)
    return dict(sorted(found.items()))


def glyphs(file: Path) -> np.ndarray | None:
    """The characters of a font, [62, 40, 40] uint8; None where it has not all of them."""
    try:
        font = ImageFont.truetype(str(file), _POINTS)
        found = [_glyph(font, character) for character in CHARACTERS]
    except (OSError, ValueError, MemoryError):
        return None
    return np.stack(found) if len({glyph.tobytes() for glyph in found}) >= _DIFFERENT else None


def _glyph(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
    """One character in the middle of a square, as large as it goes; `ValueError` where it is empty or huge."""
    left, top, right, bottom = (round(edge) for edge in font.getbbox(character))
    width, height = right - left, bottom - top
    if not (2 < width <= _LARGEST and 2 < height <= _LARGEST):
        raise ValueError(character)
    side = max(width, height) + 4
    image = Image.new("L", (side, side))
    place = (side - width) // 2 - left, (side - height) // 2 - top
    ImageDraw.Draw(image).text(place, character, fill=255, font=font)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS), dtype=np.uint8)


def rendered(folder: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Family, name and glyphs of every font that is taken."""
    rng = random.Random(0)
    for key, files in families(folder).items():
        took = 0
        for file in rng.sample(files, len(files)):
            found = glyphs(file) if took < _STYLES else None
            if found is not None:
                took += 1
                yield key.partition("/")[2], file.stem, found


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    found = list(rendered(arguments.folder))
    if not found:
        parser.error(f"{arguments.folder} holds no font with letters and digits (.otf, .ttf, .pfb)")
    of, names, masks = zip(*found, strict=True)
    np.savez_compressed(arguments.out, masks=np.stack(masks), names=np.array(names), families=np.array(of))
    print(f"{len(names)} fonts of {len(set(of))} families")


if __name__ == "__main__":
    main()
