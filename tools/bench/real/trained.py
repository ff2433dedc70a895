"""Networks that no package has weights of, trained for a few minutes on digits: their worths alone are compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from pretrained.dense import train
from pretrained.tasks import Digits
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision import models

from real.networks import Subject

#: Seed of the calibration images.
_SEED = 900_000_001
_SIDE, _BATCH = 32, 32


class LargeDigits(Digits):
    """scikit-learn's digits, enlarged to 32 pixels and three channels, with little noise."""

    _noise = 0.1

    def _draw(self, rows: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        picked = rows[torch.randint(len(rows), (count,), generator=g)]
        images = nn.functional.interpolate(self._digits[picked, None], size=_SIDE, mode="bilinear")
        images = images + self._noise * torch.randn(images.shape, generator=g)
        return images.repeat(1, 3, 1, 1) / 0.5, self._labels[picked]


def vit_s(num_classes: int) -> nn.Module:
    """The small ViT, of 16 patches."""
    return models.VisionTransformer(
        _SIDE, patch_size=8, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536, num_classes=num_classes
    )


def trained(
    make: Callable[..., nn.Module], steps: int, rate: float, head: str, folder: Path, images: int, tests: int
) -> Subject:
    """What ``make`` returns, trained where the folder lacks it."""
    task, file = LargeDigits(), folder / f"{make.__name__}-digits.safetensors"
    torch.manual_seed(0)
    model = make(num_classes=task.classes)
    if not file.exists():
        train(model, task, steps, 0, file, rate, _BATCH)
    model.load_state_dict(load_file(file))
    test, truth = task.test[0][:tests], task.test[1][:tests].tolist()
    return Subject(
        model.eval(), task.draw(images, _SEED)[0], test, truth, 16, head, lambda y: y.log_softmax(-1),
        lambda s: s.argmax(-1), lambda t, a: [x == y for x, y in zip(t, a.tolist(), strict=True)]
    )  # fmt: skip


#: As `SUBJECTS`.
TRAINED: dict[str, Callable[[Path, int, int], Subject]] = {
    "ResNet-50": partial(trained, models.resnet50, 300, 0.02, "fc"),
    "MobileNetV2": partial(trained, models.mobilenet_v2, 200, 0.05, "classifier.1"),
    "ConvNeXt-T": partial(trained, models.convnext_tiny, 600, 1e-3, "classifier.2"),
    "ViT-S": partial(trained, vit_s, 800, 5e-4, "heads.head"),
}
