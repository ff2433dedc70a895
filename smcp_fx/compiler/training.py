"""The compile command's training: SGD with Nesterov momentum, a one-cycle learning rate, cross entropy."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from smcp_fx.calibration.batches import device_of
from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.errors import InputError
from smcp_fx.training import Teacher, TrainingLoop
from smcp_fx.zoo.data import ImageData, as_tuple
from smcp_fx.zoo.models import FittedModel

#: Share of the steps in which the learning rate rises, and label smoothing.
_RISE, _SMOOTHING = 0.15, 0.05


def training_loop(
    network: nn.Module,
    fitted: FittedModel,
    data: ImageData,
    settings: CompileSettings,
    phase: str,
    *,
    epochs: float,
    lr: float,
    seed: int,
    teacher: tuple[Teacher | None, float] = (None, 0.0),
) -> TrainingLoop:
    """Return the loop that trains ``network``, the fitted model or one made from it, on its present device.

    ``teacher``: the network to learn from besides labels, and its share in the loss.

    The checkpoint is named after the ``phase``. Epochs hold the accuracy on the test images, as a share.
    """
    batch = settings.train_batch
    steps_per_epoch = data.steps_per_epoch(batch)
    total_steps = max(1, round(epochs * steps_per_epoch))
    decayed = [p for p in network.parameters() if p.dim() > 1]
    plain = [p for p in network.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return TrainingLoop(
        network,
        torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True),
        batches=lambda _, seed: data.epoch(batch, seed, fitted.channels, fitted.size),
        loss=lambda outputs, labels: F.cross_entropy(outputs.float(), labels, label_smoothing=_SMOOTHING),
        rate=lambda step: lr * _one_cycle(step, total_steps),
        evaluate=lambda _: {"accuracy": accuracy(network, fitted, data)},
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        checkpoint=checkpoint_of(settings, phase),
        seed=seed,
        device=device_of(network),
        teacher=teacher[0],
        taught=teacher[1],
        mixed=settings.amp,
        advice=f"Try a smaller learning rate than {lr} (--lr)",
    )


def checkpoint_of(settings: CompileSettings, phase: str) -> Path:
    """Return the path of a phase's checkpoint."""
    return settings.folder / "state" / f"{phase}.safetensors"


def _one_cycle(step: int, total: int) -> float:
    """Return the learning rate after ``step`` steps, as a share of its peak: a line up, a cosine down."""
    warm = max(1, round(_RISE * total))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


@torch.no_grad()
def accuracy(network: nn.Module, fitted: FittedModel, data: ImageData) -> float:
    """Return the share of test images that a network gets right in eval mode. Its mode is kept."""
    training, device = network.training, device_of(network)
    network.eval()
    right, total = 0.0, 0
    for images, labels in data.tests(256, fitted.channels, fitted.size):
        right += data.right(network(*(value.to(device) for value in as_tuple(images))), labels)
        total += len(as_tuple(images)[0])
    network.train(training)
    return right / total


def is_guessing(accuracy: float, classes: int) -> bool:
    """Whether an accuracy is hardly better than guessing among the classes; never without classes."""
    return classes > 0 and accuracy < min(1.5 / classes, 1 / classes + 0.05)


def usable_device(name: str | None) -> torch.device:
    """Return the device to train on: ``name``, or a GPU if there is one. Raises `InputError`."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except Exception as error:  # a bad name, or the driver's
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"--device {name}: {first}") from error
    return device
