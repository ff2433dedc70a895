"""Warnings about accuracies that are not what they should be."""

from __future__ import annotations

from smcp_fx.compiler.telling import Teller
from smcp_fx.compiler.training import accuracy, is_guessing
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel

#: Weights that fall short of their published accuracy by more than this get a note. Chosen, not measured.
_BELOW = 0.03


def dense_accuracy(fitted: FittedModel, data: ImageData, tell: Teller) -> float:
    """Return the accuracy of given weights; print it, beside the one they should have."""
    with tell.stage("testing the dense model"):
        found = accuracy(fitted.model, fitted, data)
    said = "" if fitted.accuracy is None else f"; its weights are said to reach {fitted.accuracy:.2%}"
    tell.say(f"dense test accuracy {found:.2%}{said}")
    if is_guessing(found, data.classes):
        tell.note(
            f"the weights as they are do no better than guessing ({found:.2%}): are they for these "
            f"{data.classes} classes, in this order?"
        )
    elif fitted.accuracy is not None and found < fitted.accuracy - _BELOW:
        tell.note(
            f"the weights reach {found:.2%} here and {fitted.accuracy:.2%} where they come from: are the images "
            "prepared as for those (--input-size; size, crop and normalisation of a data set of your own), and "
            "the classes the same, in their order?"
        )
    return found


def note_guesses(data: ImageData, dense: float, pruned: float, rate: float, tell: Teller) -> None:
    """Note if the pruned network only guesses; ``rate``: the learning rate it was trained with."""
    if is_guessing(pruned, data.classes) and not is_guessing(dense, data.classes):
        tell.note(
            f"the pruned network does no better than guessing ({pruned:.2%}, dense {dense:.2%}): train for more "
            f"--epochs, at a smaller --lr than {rate:g}, or ask for less (--target)"
        )
