"""Small networks of kinds that the model libraries do not have, for `sweep_onnx.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tagger(nn.Module):
    """Words [b, t] to scores [b, t, tags]: an embedding, two layers of a bidirectional LSTM, a linear layer."""

    def __init__(self, words: int = 50, width: int = 32, tags: int = 9) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, 48, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, tags)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        states: Tensor = self.lstm(self.words(x))[0]
        scores: Tensor = self.head(states)
        return scores


def _block(inputs: int, outputs: int) -> nn.Sequential:
    parts = []
    for width in (inputs, outputs):
        parts += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """Images of any height and width to two maps of the same size."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the maps."""
        seen = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            seen.append(x)
        for block, before in zip(self.up, seen[-2::-1], strict=True):
            larger = F.interpolate(x, size=before.shape[2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([before, larger], 1))
        scores: Tensor = self.head(x)
        return scores


class Tensors(nn.Module):
    """A model of transformers: images [b, 3, h, w] to scores, and to boxes where it has any."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        found = self.model(pixel_values=x)
        return tuple(found[name] for name in ("logits", "pred_boxes") if name in found)
