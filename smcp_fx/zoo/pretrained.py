"""Model libraries' published weights: tensors, preprocessing, accuracy."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import torch

from smcp_fx.errors import InputError, first_line
from smcp_fx.zoo.weights import Weights

#: ONNX's metadata for images (onnx: docs/MetadataProps.md): mean and deviation of values in [0, 1]; channels.
_RANGES = {
    "NominalRange_0_255": (0.0, 1 / 255),
    "Normalized_0_1": (0.0, 1.0),
    "Normalized_1_1": (0.5, 0.5),
}
_FORMATS = {"Rgb8": "rgb", "Bgr8": "bgr"}
#: Entries that all ultralytics exports have; their networks take values in [0, 1].
_ULTRALYTICS = {"stride", "names", "task"}


@dataclass(frozen=True)
class Preprocessing:
    """The steps from images to inputs: ``size`` of a side, centre ``crop`` as a share of it, normalisation.

    ``order``: the order of the channels, "rgb" or "bgr".
    """

    size: int = 224
    crop: float = 0.875
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    order: str = "rgb"

    def normalisation(self) -> str:
        """Return the order of the channels, the mean and the deviation in words."""
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"{self.order}, values in [0, 1] less {mean}, over {std}"


def preprocessing_of(spec: str) -> Preprocessing:
    """Return the preprocessing of a named network's published weights; ImageNet's usual one if unknown."""
    kind, _, name = spec.partition(":")
    if kind == "torchvision":
        weights = _torchvision_weights(name)
        if weights is None:
            return Preprocessing()
        made = weights.transforms()
        size = int(made.crop_size[0])
        way = made.interpolation.value
        return Preprocessing(size, size / int(made.resize_size[0]), tuple(made.mean), tuple(made.std), way)
    if kind == "timm":
        try:
            import timm
        except ModuleNotFoundError:
            return Preprocessing()  # building the network reports the error
        cfg = timm.get_pretrained_cfg(name)
        if cfg is None:
            return Preprocessing()
        size = int(cfg.input_size[-1])
        return Preprocessing(size, cfg.crop_pct, tuple(cfg.mean), tuple(cfg.std), cfg.interpolation)
    return Preprocessing()


def numbers_of(text: str) -> tuple[float, ...]:
    """Return the numbers in a text like "0.5, 0.5, 0.5" or "[640, 640]"; none for any other text."""
    try:
        return tuple(float(part) for part in text.strip().strip("[]()").split(","))
    except ValueError:
        return ()


def preprocessing_by(metadata: Mapping[str, str]) -> tuple[Preprocessing, str]:
    """Return the preprocessing in an ONNX file's metadata, and the names of the entries used ("": none)."""
    images, names = Preprocessing(), list[str]()
    spans = {"Image.NominalPixelRange": _RANGES.get(metadata.get("Image.NominalPixelRange", ""))}
    if metadata.keys() >= _ULTRALYTICS:
        spans["names, stride, task"] = (0.0, 1.0)
    for name, span in spans.items():
        if span is not None:
            images, names = replace(images, mean=(span[0],) * 3, std=(span[1],) * 3), [*names, name]
    for name in ("mean", "std"):
        numbers = numbers_of(metadata.get(name, ""))
        if len(numbers) in (1, 3) and (name == "mean" or min(numbers) > 0):
            values: dict[str, Any] = {name: numbers * (3 // len(numbers))}
            images, names = replace(images, **values), [*names, name]
    if (order := _FORMATS.get(metadata.get("Image.BitmapPixelFormat", ""))) is not None:
        images, names = replace(images, order=order), [*names, "Image.BitmapPixelFormat"]
    return images, ", ".join(names)


def pretrained_weights(spec: str, version: str = "DEFAULT") -> Weights:
    """Return the published ImageNet weights of ``torchvision:NAME`` or ``timm:NAME``, from the cache or the internet.

    ``version``: of torchvision's weights. Raises `InputError` if there are none, or they cannot be fetched.
    """
    kind, _, name = spec.partition(":")
    if kind == "torchvision":
        return _of_torchvision(name, version)
    if kind == "timm":
        return _of_timm(name)
    raise InputError(
        f"--pretrained knows the weights of torchvision:NAME and timm:NAME; for {spec!r} give a file by --weights"
    )


def _of_torchvision(name: str, version: str) -> Weights:
    weights = _torchvision_weights(name, version)
    if weights is None:
        raise InputError(f"torchvision has no weights {version!r} for {name}")
    try:
        state: dict[str, torch.Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"torchvision's weights {version} of {name} could not be fetched ({error}). On a machine with a network, "
            f"fetch {weights.url}, and put it into {torch.hub.get_dir()}/checkpoints/ here or give it by --weights"
        ) from error
    scores = weights.meta.get("_metrics", {}).get("ImageNet-1K", {})
    accuracy = scores["acc@1"] / 100 if "acc@1" in scores else None
    return Weights(state, f"torchvision's {weights}", accuracy)


def _torchvision_weights(name: str, version: str = "DEFAULT") -> Any:
    from torchvision import models

    try:
        return models.get_model_weights(name)[version]
    except (KeyError, ValueError):
        return None


def _of_timm(name: str) -> Weights:
    try:
        import timm
    except ModuleNotFoundError as error:
        raise InputError("--model timm:NAME needs timm: pip install timm") from error
    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not (cfg.hf_hub_id or cfg.url):
        raise InputError(f"timm has no weights for {name!r}")
    _check_reachable(cfg.hf_hub_id or "", f"timm's weights of {name}")
    try:
        state = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # timm's, the hub client's, or the network's
        raise InputError(
            f"timm's weights of {name} could not be fetched ({first_line(error).rstrip('.')}); fetch them where "
            "there is a network and give the file by --weights"
        ) from error
    return Weights(state, f"timm's {name}")


def _check_reachable(repository: str, content: str) -> None:
    """Raise `InputError` at once if the hub cannot be resolved; its client would retry for a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    if not repository or urllib.request.getproxies():
        return
    if any(
        isinstance(try_to_load_from_cache(repository, file), str)
        for file in ("model.safetensors", "pytorch_model.bin")
    ):
        return
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise InputError(
            f"{content} are not in the cache, and {host} cannot be reached ({error.strerror or error}): fetch "
            f"https://{host}/{repository} on a machine with internet access and give the file by --weights"
        ) from error
