"""The recipes' networks that torchvision lacks, by name: `NETWORKS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from smcp_fx.errors import InputError
from smcp_fx.zoo.mobilenet_v1 import MobileNetV1
from smcp_fx.zoo.ssd import ssd300_resnet50, ssd512_resnet50

#: name: builder, with random weights, for ``num_classes`` classes (a detector's include background)
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mobilenet_v1": MobileNetV1,
    "ssd300_resnet50": ssd300_resnet50,
    "ssd512_resnet50": ssd512_resnet50,
}


def build_network(name: str, **options: Any) -> nn.Module:
    """Build one of `NETWORKS`; `InputError` for other names."""
    if name not in NETWORKS:
        raise InputError(f"there is no network smcp:{name}; there are {', '.join(sorted(NETWORKS))}")
    return NETWORKS[name](**options)
