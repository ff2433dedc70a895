"""Sounds of known pitch, sung and played, for networks that hear pitch; and how near what they hear is.

A voice is a row of harmonics under an envelope of its own, in a range of its own: half of them sing (formants), half
play (all harmonics or odd ones, of any tilt). Other voices are for calibration than for testing; their ranges
overlap. Frames differ in pitch, vibrato, swell and noise. Equal seeds give equal frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Samples a second, and a frame.
RATE, FRAME = 16_000, 1024
#: Voices of a part, and the seeds they are drawn by.
_VOICES, _SEEDS = 64, {"calibration": 11, "test": 12}
#: Hz: where the first three formants of a voice lie, and how wide they are.
_FORMANTS, _WIDTHS = ((270, 850), (900, 2300), (2300, 3200)), (60, 200)
#: Pitch in Hz of voices that sing and that play.
_SUNG, _PLAYED = (80, 700), (55, 1500)
#: Cents over 10 Hz of the first of the classes of CREPE, the step between two, and how far off still is right.
_FIRST, _STEP, _NEAR = 1997.3794084376191, 20, 50


@dataclass(frozen=True)
class _Voice:
    """``tilt``: decibels an octave; ``step``: 2 where even harmonics are missing; ``low``: lowest pitch, in Hz."""

    formants: np.ndarray
    widths: np.ndarray
    tilt: float
    step: int
    low: float

    @staticmethod
    def drawn(rng: np.random.Generator, sings: bool) -> _Voice:
        lowest, highest = _SUNG if sings else _PLAYED
        formants = [rng.uniform(*span) for span in _FORMANTS] if sings else []
        low = lowest * (highest / lowest / 2) ** rng.random()
        step = 1 if sings or rng.random() < 0.6 else 2
        return _Voice(
            np.array(formants), rng.uniform(*_WIDTHS, len(formants)), rng.uniform(-12, -3), step, low
        )

    def envelope(self, hertz: np.ndarray) -> np.ndarray:
        """How loud harmonics of these frequencies are."""
        found = (hertz / hertz[0]) ** (self.tilt / (20 * np.log10(2)))
        for formant, width in zip(self.formants, self.widths, strict=True):  # resonances in a row
            across = hertz / formant
            found = found / np.hypot(1 - across**2, across * width / formant)
        return found

    def frame(self, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        """A frame of mean 0 and deviation 1, and the pitch in its middle, in cents over 10 Hz."""
        pitch = self.low * 2 ** rng.random()
        time = (np.arange(FRAME) - FRAME / 2) / RATE
        depth, beat, phase = rng.uniform(0, 30), rng.uniform(4, 7), rng.uniform(0, 2 * np.pi)
        cents = depth * (np.sin(2 * np.pi * beat * time + phase) - np.sin(phase))
        angle = 2 * np.pi * np.cumsum(pitch * 2 ** (cents / 1200)) / RATE
        numbers = np.arange(1, RATE / 2 / pitch - 1, self.step)
        waves = np.sin(numbers[:, None] * angle + rng.uniform(0, 2 * np.pi, (len(numbers), 1)))
        sound = self.envelope(numbers * pitch) @ waves
        sound = sound * np.exp(rng.uniform(-20, 20) * time)
        loud = 10 ** (-rng.uniform(-5, 30) / 20) * sound.std()
        sound = sound + rng.normal(0, loud, FRAME)
        return (sound - sound.mean()) / sound.std(ddof=1), float(1200 * np.log2(pitch / 10))


class Sounds:
    """The voices of one ``part``, "calibration" or "test"."""

    def __init__(self, part: str) -> None:
        rng = np.random.default_rng(_SEEDS[part])
        self._voices = [_Voice.drawn(rng, number % 2 == 0) for number in range(_VOICES)]

    def draw(self, count: int, seed: int) -> tuple[Tensor, list[float]]:
        """So many frames [count, 1024], each of mean 0 and deviation 1, and their pitches in cents over 10 Hz."""
        rng = np.random.default_rng(seed)
        frames, pitches = torch.empty(count, FRAME), list[float]()
        for frame in frames:
            samples, pitch = self._voices[rng.integers(_VOICES)].frame(rng)
            frame.copy_(torch.from_numpy(samples))
            pitches.append(pitch)
        return frames, pitches


def heard(probabilities: Tensor) -> Tensor:
    """The pitches [frames] in cents over 10 Hz of the likeliest classes, from [frames, 360]."""
    return _FIRST + _STEP * probabilities.argmax(-1).double()


def near(pitches: Sequence[float] | Tensor, found: Tensor) -> list[bool]:
    """Whether each pitch is within 50 cents (raw pitch accuracy, Poliner et al. 2007)."""
    return ((found - torch.as_tensor(pitches).to(found)).abs() <= _NEAR).tolist()
