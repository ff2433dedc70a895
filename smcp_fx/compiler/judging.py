"""The reference for networks: labels, or the dense network's outputs; warnings about accuracies."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from smcp_fx.calibration.batches import Batch, device_of, each_batch, run_batch
from smcp_fx.calibration.objective import Objective
from smcp_fx.compiler.telling import Teller
from smcp_fx.compiler.training import accuracy, is_guessing
from smcp_fx.outcomes import in_mode
from smcp_fx.output_kinds import Kinds, spread, told
from smcp_fx.zoo.answers import Answers
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel

#: Weights that fall short of their published accuracy by more than this get a note. Chosen, not measured.
_BELOW = 0.03

#: Test samples that go through a network at a time. Chosen, not measured.
_AT_ONCE = 64


def held_against_dense(data: ImageData, fitted: FittedModel, kinds: Kinds | None, tell: Teller) -> ImageData:
    """Return unlabelled data with the dense network's outputs beside its test samples, and their kinds.

    ``kinds``: given by the user; otherwise read from the outputs, or from the model's own description. Raises
    `InputError` if kinds do not fit the outputs.
    """
    with tell.stage("running the dense network on the test samples"):
        data = data.beside(fitted.model, fitted.channels, fitted.size)
    every = [labels for _, labels in data.tests(_AT_ONCE, fitted.channels, fitted.size)]
    names = {name: fitted.output_names[int(name or 0)] if fitted.output_names else name for name in every[0]}
    outputs = {title: torch.cat([some[name] for some in every]) for name, title in names.items()}
    whole = Batch(1, (next(iter(outputs.values())),), {}, None)
    kinds_read = Objective(fitted.model, outputs=kinds, quiet=True).read(outputs, whole)
    if kinds is None:
        tell.note(f"{told(kinds_read, outputs)}. If that is wrong, say what it is, with --outputs")
    readings = {name: kinds_read[title] for name, title in names.items() if title in kinds_read}
    variances = {name: max(float(spread(outputs[names[name]].float())), 1e-30) for name in readings}
    answers = Answers(readings, variances)
    return replace(data, answers=answers, classes=answers.classes)


def held_out_divergence(network: nn.Module, data: ImageData, fitted: FittedModel) -> float:
    """Return the `Objective.distance` of a network's outputs from the outputs beside the test samples."""
    assert data.answers is not None
    objective, device = Objective(network, outputs=data.answers.kinds, quiet=True), device_of(network)
    total, count = 0.0, 0
    with torch.no_grad(), in_mode(network, False):
        for batch in each_batch(data.tests(_AT_ONCE, fitted.channels, fitted.size)):
            batch = batch.to(device)
            total += objective.distance(run_batch(network, batch), batch.labels, batch) * batch.images
            count += batch.images
    return total / count


def dense_accuracy(fitted: FittedModel, data: ImageData, tell: Teller) -> float:
    """Return the accuracy of given weights; print it beside their published accuracy."""
    with tell.stage("testing the dense model"):
        share = accuracy(fitted.model, fitted, data)
    said = "" if fitted.accuracy is None else f"; its weights are said to reach {fitted.accuracy:.2%}"
    tell.say(f"dense test accuracy {share:.2%}{said}")
    if is_guessing(share, data.classes):
        tell.note(
            f"the weights as they are do no better than guessing ({share:.2%}): are they for these "
            f"{data.classes} classes, in this order?"
        )
    elif fitted.accuracy is not None and share < fitted.accuracy - _BELOW:
        tell.note(
            f"the weights reach {share:.2%} here and {fitted.accuracy:.2%} where they come from: are the images "
            "prepared as for those (--input-size; size, crop and normalisation of a data set of your own), and "
            "the classes the same, in their order?"
        )
    return share


def note_guesses(data: ImageData, dense: float, pruned: float, rate: float, tell: Teller) -> None:
    """Note if the pruned network only guesses; ``rate``: the learning rate it was trained with."""
    if is_guessing(pruned, data.classes) and not is_guessing(dense, data.classes):
        tell.note(
            f"the pruned network does no better than guessing ({pruned:.2%}, dense {dense:.2%}): train for more "
            f"--epochs, at a smaller --lr than {rate:g}, or ask for less (--target)"
        )
