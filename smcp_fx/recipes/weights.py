"""The initial weights of a recipe's network: torchvision's, a file's, or random ones."""

from __future__ import annotations

from torch import nn

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.recipes.recipe import Recipe
from smcp_fx.zoo.models import build_model
from smcp_fx.zoo.pretrained import pretrained_weights
from smcp_fx.zoo.ssd import SSDResNet50
from smcp_fx.zoo.weights import load_weights, read_weights


def starting_network(recipe: Recipe, classes: int, file: str | None, dense: bool) -> nn.Module:
    """Build a recipe's network with its initial weights.

    ``file``: a file, or "none" for random weights; None for the recipe's own. ``dense``: train the unpruned
    network. Raises `InputError` if a file is required or torchvision's weights are not available,
    `CheckpointError` if weights do not fit.
    """
    check_given(recipe, file, dense)
    source = file or (recipe.dense_weights if dense else recipe.weights)
    network = build_model(recipe.network, num_classes=classes)
    if source.startswith("torchvision:"):
        _load_torchvision(network, recipe, source.partition(":")[2])
    elif source != "none":
        load_weights(network, read_weights(source))
    return network


def check_given(recipe: Recipe, file: str | None, dense: bool) -> None:
    """Raise `InputError` if a recipe needs a file of weights and none is given."""
    if file is None and not dense and recipe.weights == "file":
        raise InputError(
            f"recipe {recipe.name} starts from weights that must be given: --weights FILE ({recipe.weights_note}). "
            "--weights none starts from random ones, for a trial"
        )


def _load_torchvision(network: nn.Module, recipe: Recipe, name: str) -> None:
    """Load ImageNet weights into a classifier, or into the ResNet-50 stages of a detector."""
    detector = isinstance(network, SSDResNet50)
    architecture = "resnet50" if detector else recipe.network.partition(":")[2]
    weights = pretrained_weights(f"torchvision:{architecture}", name)
    if isinstance(network, SSDResNet50):
        own = network.backbone.state_dict()
        network.backbone.load_state_dict({key: value for key, value in weights.state.items() if key in own})
        return
    try:
        load_weights(network, weights)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Give weights of your own (--weights FILE), or start from random ones (--weights none)"
        ) from error
