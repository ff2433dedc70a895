"""Photographs of things (Tux Paint's stamps) on photographs of places, for networks that know ImageNet's classes.

Half of the things and of the places are for calibration, the others for testing; photographs of one thing that differ
by a number only stay together. Equal seeds give equal images.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

SIDE = 224
#: Where Tux Paint keeps its photographs, by kind; drawings are told by a word in their path.
_KINDS = "animals food vehicles household plants hobbies sports clothes medical town".split()
_DRAWN = ("cartoon", "_mirror", "roadsigns", "flags", "outline", "plastic")
#: Longest side of a thing and of a place, in pixels, before it is put on an image.
_THING, _PLACE = 400, 900
#: The numbers of the ImageNet classes that name a thing; things that are not here calibrate only.
CLASSES = {
    name: tuple(map(int, numbers.split(",")))
    for name, _, numbers in (
        entry.partition(":")
        for entry in """
747:404 Strawberry2:949 apple_granny_smith:948 apple_green:948 badger:362 balloon360:417 banana:954 basketball:430
bassoon:432 bear:294,295,297 beaver:337 bee:309 binoculars:447 bison:347 broccoli:937 camel:354 camera_35mm:759
cello:486 cep:997,947 cep-1:997,947 cep-2:997,947 chicken_profile:7,8 chimp:367 chineseJunk:780,724,871,914
clownfish:393 corn:987,998 crowned_crane:134 dingo:273 drake:97 dromedary:354 drumkit:541 duck:97,98 echidna:102
edward_bear:850 elephant:385,386,101 european-bear:294 ferret:356,358,359 firetruck:555 fly:308 fox:277
frog:30,31,32 frog-1:30,31,32 gander:99 garbagecan:412 garbagetruck:569 gorilla:366 grasshopper:311 guitar2:402,546
guitar_classical:402 guitar_electric:546 guitar_electric_bass:546 hammer:587 hen:8 heron_greatblue:131,132
hippopotamus:344 horse:339 iguana:39 indycar:751 kangaroo:104 kettle:849 koala:105 lemon:951 lion:291 lion-2:291
lionfish:396 little-penguin:145 lobster:122 magellanic_penguin:145 magpie:18 mantis:315 marmot:336
measuring_tape:769 mountaingoat:350 mug:504 mushroom:947 orange:950 orange_seville:950 orca:148 ostrich:9 otter:360
owl:24 paintbrush_large:696 peacock:84 pelican:144 penguin:145 pepper:945 pig:341 pig_golden:341 pig_golden2:341
pineapple:953 pink_flamingo:130 pink_tricycle:870 pitcher_small:725 pizza:963 pomegranate:957 rabbit:330,331
rabbit-2:330,331 rabbit_little:330,331 rainbow-lorikeet:90 ram:348,349 rooster:7 sea_lion:150 sedan_police:734
soccer:805 sombrero:808 spade:792 sportscar2:817 squirrel:335 stethoscope:823 strawberry:949 syringe:845 t_sock:806
t_tshirt:610 teapot:849 tennis_ball:852 tennis_racket:752 tiger:292 tiger_sumatran:292 toilet:861 trumpet:513
tucan:96 usps_mailbox:637 violin:889 vulture:23 whale:147,148 wheel_tractor:866 wildboar:342 wombat:106
yellowpepper:945 zebra:340
""".split()
    )
}


class Things:
    """The things and places of one ``part``, "calibration" or "test", below the folder that `fetch.sh` filled."""

    def __init__(self, folder: Path, part: str) -> None:
        rng, shared = random.Random(7), folder / "x/usr/share"
        stamps = [
            path for kind in _KINDS for path in sorted((shared / "tuxpaint/stamps" / kind).rglob("*.png"))
        ]
        stamps = [path for path in stamps if not any(word in str(path) for word in _DRAWN)]
        places = [
            path for path in sorted(shared.rglob("*.jpg")) if path.parent.name in ("backgrounds", "nature")
        ]
        names = sorted({_name(path) for path in stamps})
        rng.shuffle(names)
        rng.shuffle(places)
        mine = slice(0, None, 2) if part == "calibration" else slice(1, None, 2)
        of = set(names[mine])
        self._things = [(path.stem, _thing(path)) for path in stamps if _name(path) in of]
        self._places = [_place(path) for path in places[mine]]

    def draw(self, count: int, seed: int, named: bool) -> tuple[Tensor, list[str]]:
        """So many images [count, 3, 224, 224] (pixels less 127, over 128) and what they show.

        ``named``: only things that ImageNet has a class for.
        """
        rng = random.Random(seed)
        known = [thing for thing in self._things if thing[0] in CLASSES or not named]
        images, names = torch.empty(count, 3, SIDE, SIDE), list[str]()
        for image in images:
            name, thing = rng.choice(known)
            pixels = np.array(self._one(thing, rng), dtype=np.float32)
            image.copy_(torch.from_numpy(pixels).permute(2, 0, 1).sub(127).div(128))
            names.append(name)
        return images, names

    def place(self, rng: random.Random, size: int) -> Image.Image:
        """Some square of some place, so many pixels wide and high."""
        place = rng.choice(self._places)
        side = rng.uniform(0.3, 1.0) * min(place.size)
        x, y = rng.uniform(0, place.width - side), rng.uniform(0, place.height - side)
        return place.resize((size, size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side))

    def _one(self, thing: Image.Image, rng: random.Random) -> Image.Image:
        image = self.place(rng, SIDE)
        scale = rng.uniform(0.55, 0.95) * SIDE / max(thing.size)
        size = max(1, round(thing.width * scale)), max(1, round(thing.height * scale))
        thing = thing.resize(size, Image.Resampling.BICUBIC)
        if rng.random() < 0.5:
            thing = thing.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image.paste(thing, (rng.randint(0, SIDE - size[0]), rng.randint(0, SIDE - size[1])), thing)
        for change in (ImageEnhance.Brightness, ImageEnhance.Contrast):
            image = change(image).enhance(rng.uniform(0.8, 1.2))
        return image


def right(names: Sequence[str], classes: Tensor) -> list[bool]:
    """Whether each image's class [images] names what it shows."""
    return [number in CLASSES[name] for name, number in zip(names, classes.tolist(), strict=True)]


def _name(path: Path) -> str:
    return path.stem.lower().rstrip("0123456789-")


def _thing(path: Path) -> Image.Image:
    image = Image.open(path).convert("RGBA")
    image.thumbnail((_THING, _THING))
    return image.crop(image.getchannel("A").getbbox())


def _place(path: Path) -> Image.Image:
    image = Image.open(path).convert("RGB")
    image.thumbnail((_PLACE, _PLACE))
    return image
