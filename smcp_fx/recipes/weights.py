"""Where a recipe's network starts: torchvision's weights, a file, or chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision import models

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.recipes.recipe import Recipe
from smcp_fx.zoo import SSDResNet50
from smcp_fx.zoo.models import build_model, load_weights


def starting_network(recipe: Recipe, classes: int, given: str | None, dense: bool) -> nn.Module:
    """Build a recipe's network with the weights it starts from.

    ``given``: a file, or "none" for random weights; None for what the recipe says. ``dense``: the unpruned network
    is to be trained. Raises `InputError` where a file must be given or torchvision's weights cannot be had,
    `CheckpointError` where weights do not fit.
    """
    check_given(recipe, given, dense)
    source = given or (recipe.dense_weights if dense else recipe.weights)
    network = build_model(recipe.network, num_classes=classes)
    if source.startswith("torchvision:"):
        _load_torchvision(network, recipe, source.partition(":")[2])
    elif source != "none":
        load_weights(network, source)
    return network


def check_given(recipe: Recipe, given: str | None, dense: bool) -> None:
    """Raise `InputError` where a recipe needs a file of weights and none is given."""
    if given is None and not dense and recipe.weights == "file":
        raise InputError(
            f"recipe {recipe.name} starts from weights that must be given: --weights FILE ({recipe.weights_note}). "
            "--weights none starts from random ones, for a trial"
        )


def _load_torchvision(network: nn.Module, recipe: Recipe, name: str) -> None:
    """Load ImageNet weights into a classifier, or into the ResNet-50 stages of a detector."""
    detector = isinstance(network, SSDResNet50)
    architecture = "resnet50" if detector else recipe.network.partition(":")[2]
    try:
        weights: Any = models.get_model_weights(architecture)[name]
    except (KeyError, ValueError) as error:
        raise InputError(f"torchvision has no weights {name!r} for {architecture}") from error
    try:
        state: dict[str, torch.Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"torchvision's weights {name} of {architecture} could not be fetched ({error}). On a machine with a "
            f"network, fetch {weights.url}, and put it into {torch.hub.get_dir()}/checkpoints/ here or give it by "
            "--weights"
        ) from error
    if isinstance(network, SSDResNet50):
        own = network.backbone.state_dict()
        network.backbone.load_state_dict({key: value for key, value in state.items() if key in own})
        return
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"torchvision's weights {name} do not fit {architecture} with the classes of the data: "
            f"{str(error).splitlines()[-1].strip()} Give weights of your own (--weights FILE), or start from random "
            "ones (--weights none)"
        ) from error
